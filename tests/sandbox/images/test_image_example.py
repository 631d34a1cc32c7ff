"""The example project, through the default backend: built offline, its service answers in a box, forks of it migrate apart."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from rollmill.sandbox.images import Image, ImageStore
from rollmill.sandbox.images.build import build
from rollmill.sandbox.images.hostcopy import copy_host
from rollmill.sandbox.images.tree import Tree
from rollmill.sandbox.namespace import NamespaceBackend
from rollmill.sandbox.records import SandboxSpec

PROJECT = Path(__file__).parents[3] / "examples" / "image"
DEADLINE_S = 200.0
PROGRAMS = "sh bash cat env find hostname id pwd python3 setpriv tar".split()
"""Of `host-copy`, what the example needs: a whole copy takes seconds and tells no more."""
DATABASE = """
base = "debian:bookworm"
[packages]
apt = ["postgresql-15"]
[env]
PATH = "/usr/lib/postgresql/15/bin:/usr/local/bin:/usr/bin:/bin"
PGDATA = "/home/dev/data"
PGHOST = "/tmp"
PGDATABASE = "shop"
[[run]]
command = "initdb --auth=trust --username=dev && pg_ctl -o '-k /tmp' -l /tmp/log -w start && createdb shop && pg_ctl -w stop"
user = "dev"
[[services]]
name = "postgres"
argv = ["postgres", "-k", "/tmp"]
ready_argv = ["pg_isready"]
"""


@pytest.fixture(scope="module")
def machine() -> None:
    if (reason := NamespaceBackend.probe()) is not None:
        pytest.skip(reason)


def test_example_is_built_and_its_service_answers_in_every_fork(machine: None, tmp_path: Path) -> None:
    async def scene() -> None:
        store, backend = ImageStore(tmp_path / "images"), NamespaceBackend(images=tmp_path / "images")
        try:
            with store.stage() as stage:
                (stage / "rootfs").mkdir()
                with Tree(stage / "rootfs") as tree:
                    copy_host(tree, PROGRAMS, common=())
                store.name("few", store.commit(stage, Image(env={"PATH": "/usr/local/bin:/usr/bin:/bin"})))
            project = tmp_path / "project"
            await asyncio.to_thread(shutil.copytree, PROJECT, project)
            recipe = (PROJECT / "sandbox.toml").read_text()
            (project / "sandbox.toml").write_text(recipe.replace('"host-copy"', '"few"'))
            image = await build(project, store=store, backend=backend)
            assert (image.name, image.hostname, [s.name for s in image.services]) == ("shop", "atlas", ["shop"])
            box = await backend.create(SandboxSpec(image="shop"))
            ask = "python3 shop.py ask 8080 /health"
            assert (await box.exec(ask, timeout_s=30)).stdout == b"[100]\n"
            one, two = await box.fork(2)
            await one.exec("python3 shop.py fill 5", timeout_s=30)
            assert [(await b.exec(ask, timeout_s=30)).stdout for b in (one, two)] == [b"[105]\n", b"[100]\n"]
            look = await two.exec("hostname; id -un; pwd; env; cat /etc/passwd", timeout_s=30)
            assert look.stdout.startswith(b"atlas\ndev\n/home/dev/shop\n")
            assert b"rollmill" not in look.stdout.lower() and b"sandbox" not in look.stdout.lower()
        finally:
            await backend.close()

    asyncio.run(asyncio.wait_for(scene(), DEADLINE_S))


@pytest.mark.slow
def test_example_is_built_as_it_lies_here(machine: None, tmp_path: Path) -> None:
    async def scene() -> None:
        backend = NamespaceBackend(images=tmp_path)
        try:
            await build(PROJECT, store=ImageStore(tmp_path), backend=backend)
            box = await backend.create(SandboxSpec(image="shop"))
            done = await box.exec("git --version && curl -s localhost:8080/health && ls -la /dev/null", timeout_s=30)
            assert done.exit_code == 0 and b"[100]\n" in done.stdout
        finally:
            await backend.close()

    asyncio.run(asyncio.wait_for(scene(), DEADLINE_S))


@pytest.mark.slow
def test_postgres_from_debian_packages_is_migrated_in_a_fork(machine: None, tmp_path: Path) -> None:
    """Needs a network: about 100 packages are fetched."""

    async def scene() -> None:
        project, images = tmp_path / "shop-db", tmp_path / "images"
        project.mkdir()
        (project / "sandbox.toml").write_text(DATABASE)
        backend = NamespaceBackend(images=images)
        try:
            await build(project, store=ImageStore(images), backend=backend)
            spec = SandboxSpec(image="shop-db", memory_bytes=1 << 30, disk_bytes=512 << 20)
            box = await backend.create(spec)
            done = await box.exec("psql -qc 'create table orders (cents int)' -c 'insert into orders values (5)'", timeout_s=60)
            assert done.exit_code == 0, done.stdout
            one, two = await box.fork(2)
            assert (await one.exec("psql -qc 'alter table orders add column customer text'", timeout_s=60)).exit_code == 0
            count = "psql -Atc \"select count(*) from information_schema.columns where table_name = 'orders'\""
            assert [(await b.exec(count, timeout_s=60)).stdout for b in (one, two)] == [b"2\n", b"1\n"]
        finally:
            await backend.close()

    asyncio.run(asyncio.wait_for(scene(), 1200.0))
