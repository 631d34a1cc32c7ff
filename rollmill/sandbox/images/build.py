"""Builds an image from a project directory: stages in order, each kept by the hash of what went into it, so a second build does nothing.

For the command line:

    async def build(project: Path, *, store: ImageStore, backend: SandboxBackend, name: str = "", fresh: bool = False,
                    on_progress: Callable[[str], None] = ...) -> Image
    def import_archive(archive: Path, name: str, *, store: ImageStore) -> Image        (rollmill.sandbox.images.oci)
    ImageStore() opens $ROLLMILL_HOME/images or ~/.cache/rollmill/images; .images() -> list[Image]; .get(name) -> Image;
    .rootfs(image) -> Path; .remove(name); .prune() -> list[str]
"""

from __future__ import annotations

import asyncio
import re
import tarfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import blake3
import msgspec

from rollmill.records import RunFailure
from rollmill.sandbox.images import bases, packages
from rollmill.sandbox.images.archive import Bounds, Forward
from rollmill.sandbox.images.capture import pour, take_changes
from rollmill.sandbox.images.layers import apply
from rollmill.sandbox.images.machine import Account, furnish
from rollmill.sandbox.images.project import lay_files, lay_repository
from rollmill.sandbox.images.recipe import Recipe, Run, read_recipe
from rollmill.sandbox.images.store import Image, ImageStore, tree_digest
from rollmill.sandbox.images.tree import Tree, copy_tree
from rollmill.sandbox.interface import Sandbox, SandboxBackend
from rollmill.sandbox.records import Argv, SandboxSpec, Service

_BUILD_SCHEMA = 1
"""Grows when a stage does something else than before with the same recipe."""
_TAIL_BYTES = 2000
_WORK = "/var/tmp/.fetched"
Inside = Callable[[Sandbox], Awaitable[None]]


async def build(
    project: Path, *, store: ImageStore, backend: SandboxBackend, name: str = "", fresh: bool = False,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Image:  # fmt: skip
    """The image of a recipe, under its name. `fresh`: stages that were kept are made again, e.g. to get newer packages."""
    recipe = read_recipe(project)
    wanted = name or recipe.name or _folder_name(project)
    store.check_name(wanted)
    line = _Line(store, backend, recipe, fresh, on_progress)
    await line.follow(project)
    return store.name(wanted, line.image)


def _folder_name(project: Path) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", project.resolve().name.lower())


class _Line:
    """The stages of one build; `image` is what the last one gave."""

    def __init__(self, store: ImageStore, backend: SandboxBackend, recipe: Recipe, fresh: bool, on_progress: Callable[[str], None]) -> None:
        self._store, self._backend, self._recipe, self._fresh, self._say = store, backend, recipe, fresh, on_progress
        self.image = Image()

    async def follow(self, folder: Path) -> None:
        recipe, store = self._recipe, self._store
        signature = await asyncio.to_thread(bases.signature, recipe, folder, store)

        async def base() -> Image:
            return await asyncio.to_thread(bases.make_base, recipe, folder, store)

        await self._stage(f"base {recipe.base}", signature, base)
        if bases.needs_set_up(recipe):
            await self._in_box("set up the base", packages.INSTALL_DEBS, self._set_up)
        account = Account(user=recipe.user, uid=recipe.uid, home=recipe.home_path, shell=recipe.shell, hostname=recipe.hostname)
        # Services of the base would run, and write, in every box of the build.
        inherited, still = self.image.services, msgspec.structs.replace(self.image, services=())
        await self._on_host(f"machine {recipe.hostname} of {recipe.user}", account, lambda tree: furnish(tree, account), record=still)
        if recipe.packages.apt:
            await self._in_box(f"packages {' '.join(recipe.packages.apt)}", recipe.mirror, self._install_debs)
        if recipe.packages.pip:
            await self._in_box(f"Python packages {' '.join(recipe.packages.pip)}", None, self._install_wheels)
        files = folder / recipe.files
        if recipe.repository is not None:
            await self._on_host(f"repository {recipe.repository_path}", recipe.repository, lambda t: lay_repository(t, recipe, folder))
        material = await asyncio.to_thread(tree_digest, files) if files.is_dir() else ""
        await self._on_host("files", (material, recipe.workdir_path), lambda tree: lay_files(tree, recipe, files))
        for step in recipe.run:
            surroundings = (step, recipe.env, recipe.workdir_path, recipe.shell)
            await self._in_box(f"run {step.command}", surroundings, partial(self._run, step=step))
        own = {service.name for service in recipe.services}
        await self._finish((*(service for service in inherited if service.name not in own), *recipe.services))

    async def _finish(self, services: tuple[Service, ...]) -> None:
        """The record of the image, and a proof that its services come up: in a box of the image as it will be used."""
        recipe = self._recipe
        plain = msgspec.structs.replace(
            self.image, env={**self.image.env, **recipe.env}, workdir=recipe.workdir_path, home=recipe.home_path, user=recipe.user,
            uid=recipe.uid, gid=recipe.uid, shell=recipe.shell, hostname=recipe.hostname, services=(),
        )  # fmt: skip
        await self._on_host("image", plain, lambda _: None, record=plain)
        if services:
            whole = msgspec.structs.replace(self.image, services=services)

            async def proven() -> Image:
                await self._prove(services)
                return await self._copy(lambda _: None, whole)

            await self._stage(f"services {' '.join(service.name for service in services)}", services, proven)

    async def _prove(self, services: tuple[Service, ...]) -> None:
        box = await self._backend.create(self._spec(root=False))
        try:
            for service in services:
                try:
                    await box.serve(service)
                except RunFailure as failure:
                    raise ValueError(f"service {service.name!r} does not come up in the image: {failure}") from failure
        finally:
            await box.close()

    # The kinds of stages

    async def _stage(self, label: str, material: object, make: Callable[[], Awaitable[Image]]) -> None:
        parts = (_BUILD_SCHEMA, self.image.digest, label, material)
        key = blake3.blake3(msgspec.json.encode(parts, order="sorted")).hexdigest()
        kept = None if self._fresh else self._store.step(key)
        self._say(f"{label}: kept" if kept else label)
        self.image = kept or await make()
        if kept is None:
            self._store.keep_step(key, self.image)

    async def _on_host(self, label: str, material: object, change: Callable[[Tree], object], *, record: Image | None = None) -> None:
        await self._stage(label, material, lambda: self._copy(change, record or self.image))

    async def _copy(self, change: Callable[[Tree], object], record: Image) -> Image:
        """A copy of the last tree, changed."""
        base = self._store.rootfs(self.image)

        def make() -> Image:
            with self._store.stage() as stage:
                copy_tree(base, stage / "rootfs", apart=record.home)
                with Tree(stage / "rootfs") as tree:
                    change(tree)
                return self._store.commit(stage, record)

        return await asyncio.to_thread(make)

    async def _in_box(self, label: str, material: object, inside: Inside) -> None:
        await self._stage(label, material, lambda: self._changed_by(inside))

    async def _changed_by(self, inside: Inside) -> Image:
        """A copy of the last tree with what happened in a box of it."""
        store, image, limits = self._store, self.image, self._recipe.limits
        base = store.rootfs(image)
        with store.stage() as stage:
            changes = stage / "changes.tar"
            box = await self._backend.create(self._spec(root=True))
            try:
                await inside(box)
                gone = await take_changes(box, base, changes, timeout_s=limits.timeout_s)
            finally:
                await box.close()

            def make() -> Image:
                copy_tree(base, stage / "rootfs")
                with Tree(stage / "rootfs") as tree, changes.open("rb") as file:
                    for path in gone:
                        tree.remove(path)
                    apply(tree, Forward(file, Bounds()), name="changes", whiteouts=False)
                return store.commit(stage, image)

            return await asyncio.to_thread(make)

    def _spec(self, *, root: bool) -> SandboxSpec:
        limits = self._recipe.limits
        return SandboxSpec(
            image=self.image.digest, root=root, memory_bytes=limits.memory_bytes, disk_bytes=limits.disk_bytes,
            num_processes=limits.num_processes, lifetime_s=4 * limits.timeout_s,
        )  # fmt: skip

    # What happens in boxes

    async def _set_up(self, box: Sandbox) -> None:
        folder = f"/{bases.DEBS}"
        await self._must(box, packages.INSTALL_DEBS.format(folder=folder, first=" ".join(packages.FIRST)), "setting up the base")
        await self._must(box, f"rm -f {folder}/*.deb", "removing packages")

    async def _install_debs(self, box: Sandbox) -> None:
        recipe, base = self._recipe, self._store.rootfs(self.image)
        with Tree(base) as tree:
            status = tree.read("var/lib/dpkg/status", limit_bytes=64 << 20)
            release = (tree.read("etc/os-release") or b"").decode(errors="replace")
        suite = re.search(r"^VERSION_CODENAME=(\w+)", release, re.MULTILINE)
        if not status or suite is None:
            raise ValueError(f"packages.apt needs a Debian base with its package database, which {recipe.base!r} lacks; use 'debian:SUITE'")
        with self._store.stage() as stage:
            sources = packages.sources_for(suite[1], recipe.mirror)
            debs = await asyncio.to_thread(packages.fetch_debs, recipe.packages.apt, stage, status=status, sources=sources)
            if not debs:
                return
            await self._carry(box, stage / "archives", stage)
        await self._must(box, packages.INSTALL_DEBS.format(folder=_WORK, first=""), f"installing {' '.join(recipe.packages.apt)}")
        await self._must(box, f"rm -rf {_WORK}", "removing packages")

    async def _install_wheels(self, box: Sandbox) -> None:
        ask = ["python3", "-c", "import sys, platform; print('%d.%d' % sys.version_info[:2], platform.libc_ver()[1])"]
        found = await box.exec(ask, timeout_s=60)
        if found.exit_code != 0 or len(words := found.stdout.decode().split()) != 2:
            raise ValueError("packages.pip needs a python3 with glibc in the image; add it, e.g. packages.apt = ['python3']")
        with self._store.stage() as stage:
            wheels = stage / "wheels"
            await asyncio.to_thread(packages.fetch_wheels, self._recipe.packages.pip, wheels, python=words[0], glibc=words[1])
            await self._carry(box, wheels, stage)
        await self._must(box, packages.INSTALL_WHEELS.format(folder=_WORK), f"installing {' '.join(self._recipe.packages.pip)}")
        await self._must(box, f"rm -rf {_WORK}", "removing wheels")

    async def _carry(self, box: Sandbox, folder: Path, stage: Path) -> None:
        def pack() -> None:
            with tarfile.open(stage / "carry.tar", "w") as tar:
                for path in sorted(folder.iterdir()):
                    if path.is_file():
                        tar.add(path, arcname=path.name)

        await asyncio.to_thread(pack)
        await self._must(box, f"mkdir -p {_WORK}", "making a folder")
        await pour(box, stage / "carry.tar", _WORK, timeout_s=self._recipe.limits.timeout_s)

    async def _run(self, box: Sandbox, step: Run) -> None:
        recipe = self._recipe
        who: Argv = ["/bin/sh", "-c", step.command]
        env = {"HOME": "/root", "USER": "root", "LOGNAME": "root"}
        if step.user != "root":
            who = ["setpriv", f"--reuid={recipe.uid}", f"--regid={recipe.uid}", "--init-groups", "--", *who]
            env = {"HOME": recipe.home_path, "USER": recipe.user, "LOGNAME": recipe.user}
        env = {**self.image.env, **recipe.env, **env, "SHELL": recipe.shell}
        result = await box.exec(who, timeout_s=step.timeout_s, cwd=recipe.workdir_path, env=env)
        _check(result.exit_code, result.timed_out, result.stdout, f"run step `{step.command}`")

    async def _must(self, box: Sandbox, script: str, what: str) -> None:
        env = {**self.image.env, "HOME": "/root"}
        result = await box.exec(["/bin/sh", "-c", script], timeout_s=self._recipe.limits.timeout_s, cwd="/", env=env)
        _check(result.exit_code, result.timed_out, result.stdout, what)


def _check(exit_code: int, timed_out: bool, output: bytes, what: str) -> None:
    if exit_code or timed_out:
        how = "took too long" if timed_out else f"ended with status {exit_code}"
        raise ValueError(f"{what} {how}:\n{output[-_TAIL_BYTES:].decode(errors='replace').strip()}")
