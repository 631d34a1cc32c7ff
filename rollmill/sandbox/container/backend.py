"""Makes boxes through a container engine's command line, admitting a bounded number at a time; owns the tables of what it made.

What an owner that died left with the engine (containers of a client killed before it could connect, images of snapshots) is swept by
the next one on the same machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.agent.native.build import binary
from rollmill.sandbox.container.box import AGENT, ENGINE_DEADLINE_S, ContainerBox
from rollmill.sandbox.container.held import HeldBox
from rollmill.sandbox.container.owner import LABEL, is_orphan, owner
from rollmill.sandbox.container.snapshot import REPOSITORY, ContainerSnapshot, load
from rollmill.sandbox.container.tool import Tool
from rollmill.sandbox.records import Capabilities, SandboxSpec, Service

CREATE_DEADLINE_S = 120.0
PULL_DEADLINE_S = 900.0
PROBE_S = 60.0
DEFAULT_IMAGE = "docker.io/library/debian:stable-slim"
NO_AGENT = "the box agent could not be built, and a container needs it; install a C compiler (Debian: `apt-get install gcc libc6-dev`)"
_PREFIX = "rollmill"
_MAX_NPROC = 1 << 15
"""Counted per user over all containers, so it bounds none of them; engines whose own default is beyond their rights need one given."""
_ROOT_RIGHTS = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")
"""What root of a box may do: to its own files, users and processes; nothing to mounts, network or devices."""


class ContainerBackend:
    """`SandboxBackend` on the engine whose `program` a subclass names.

    `image` stands for the spec's `host`, which an engine does not have; `options` come before every verb, e.g. `("--runtime", "runc")`.
    """

    program: str

    def __init__(
        self,
        *,
        image: str = DEFAULT_IMAGE,
        options: Sequence[str] = (),
        shell: tuple[str, ...] = ("/bin/sh", "-c"),
        num_creating: int | None = None,
    ) -> None:
        self.engine = Tool((self.program, *options))
        self._image = image
        self._shell = shell
        self._admission = asyncio.Semaphore(num_creating or 2 * (os.cpu_count() or 1))
        self._starting = asyncio.Lock()
        self._is_started = False
        self._is_closed = False
        self._workdirs: dict[str, str] = {}
        """Of the images that are here, by name."""
        self._boxes: dict[HeldBox, ContainerSnapshot | None] = {}
        self._snapshots: set[ContainerSnapshot] = set()
        self._numbers = itertools.count(1)

    @classmethod
    def probe(cls, *, image: str = DEFAULT_IMAGE, options: Sequence[str] = ()) -> str | None:
        """None when boxes can be made here, else one sentence that says why not and what to change. Blocks while it makes one.

        An image that is not here yet is not fetched for this; then the engine's answer to a question has to do."""
        if shutil.which(cls.program) is None:
            return f"`{cls.program}` is not installed; docs/backends.md says how"
        agent = binary()
        if agent is None:
            return NO_AGENT
        words = [cls.program, *options]
        trials = [["ps"], ["image", "inspect", image], run_arguments(f"{_PREFIX}-{owner()}-probe", SandboxSpec(), image, agent)]
        for trial in trials:
            try:
                done = subprocess.run([*words, *trial], stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_S, check=False)
            except subprocess.TimeoutExpired:
                return f"`{cls.program} {trial[0]}` did not end within {PROBE_S:g} s; look at the engine's own log"
            if done.returncode:
                said = done.stderr.decode(errors="replace").strip()[-500:]
                return None if trial[0] == "image" else f"`{cls.program} {trial[0]}` says: {said}"
        return None

    async def capabilities(self) -> Capabilities:
        facts = {"disk": "not bounded, one file at most disk_bytes", "owner": owner()}
        return Capabilities(
            backend=self.program, isolation="container", fork=True, save=True, suspend=True, egress=False, images=True, facts=facts
        )

    async def create(self, spec: SandboxSpec) -> ContainerBox:
        image = self._image if spec.image == "host" else spec.image
        return await self.make(spec, image, spec.services, None)

    async def restore(self, store: str, digest: str) -> ContainerSnapshot:
        await self._start()
        reference = self.new_reference()
        state = await load(self.engine, store, digest, reference)
        return self._keep(ContainerSnapshot(self, reference, state.spec, state.services))

    async def close(self) -> None:
        """End every box and remove every snapshot; again is harmless."""
        self._is_closed = True
        await asyncio.gather(*(box.close() for box in list(self._boxes)))
        await asyncio.gather(*(snapshot.close() for snapshot in list(self._snapshots)))
        if self._is_started:
            self._is_started = False
            await self._sweep()

    # For snapshots

    def new_reference(self) -> str:
        return f"{REPOSITORY}:{owner()}-{next(self._numbers)}"

    async def make(self, spec: SandboxSpec, image: str, services: Sequence[Service], snapshot: ContainerSnapshot | None) -> ContainerBox:
        """A box from an image, or from a snapshot's: then its files are there already."""
        _check(spec)
        agent = binary()
        if agent is None:
            raise RunFailure(Boundary.SANDBOX, NO_AGENT)
        await self._start()
        async with self._admission:
            workdir = await self._fetch(image) if snapshot is None else "."
            name = f"{_PREFIX}-{owner()}-{next(self._numbers)}"
            box = ContainerBox(name, spec, self.engine, self._commit, workdir=workdir, shell=self._shell, on_end=self._forget)
            holding = asyncio.ensure_future(self.engine.hold(*run_arguments(name, spec, image, agent, workdir)))
            try:
                client, sock = await asyncio.shield(holding)
            except asyncio.CancelledError:
                holding.add_done_callback(_let_go)
                raise
            box.enter(client, sock)
            self._boxes[box] = snapshot
            if snapshot is not None:
                snapshot.hold()
            try:
                await box.ready(CREATE_DEADLINE_S)
                if snapshot is None:
                    await box.install(spec.files)
            except BaseException:
                await asyncio.shield(box.close())
                raise
        try:
            for service in services:
                await box.serve(service)
        except BaseException:
            await asyncio.shield(box.close())
            raise
        return box

    # Inside

    async def _start(self) -> None:
        async with self._starting:
            if self._is_closed:
                raise RunFailure(Boundary.SANDBOX, "the backend is closed")
            if not self._is_started:
                await self._sweep()
                self._is_started = True

    async def _sweep(self) -> None:
        """Remove what dead owners left."""
        listed = await self.engine.run("ps", "--all", "--filter", f"label={LABEL}", "--format", "{{.Names}}", deadline_s=ENGINE_DEADLINE_S)
        left = [name for name in listed.decode().split() if is_orphan(name.removeprefix(f"{_PREFIX}-").rpartition("-")[0])]
        if left:
            with contextlib.suppress(RunFailure):  # another owner sweeps too: what is gone is gone
                await self.engine.run("rm", "--force", *left, deadline_s=ENGINE_DEADLINE_S)
        listed = await self.engine.run("images", "--format", "{{.Repository}}:{{.Tag}}", REPOSITORY, deadline_s=ENGINE_DEADLINE_S)
        left = [name for name in listed.decode().split() if is_orphan(name.rpartition(":")[2].rpartition("-")[0])]
        if left:
            with contextlib.suppress(RunFailure):
                await self.engine.run("rmi", *left, deadline_s=ENGINE_DEADLINE_S)

    async def _fetch(self, image: str) -> str:
        """Have the image here, pulled once however many boxes wait for it; the working directory of its boxes."""
        async with self._starting:
            if image not in self._workdirs:
                inspect = ("image", "inspect", "--format", "{{.Config.User}}|{{.Config.WorkingDir}}", image)
                try:
                    found = await self.engine.run(*inspect, deadline_s=ENGINE_DEADLINE_S)
                except RunFailure:
                    await self.engine.run("pull", image, deadline_s=PULL_DEADLINE_S)
                    found = await self.engine.run(*inspect, deadline_s=ENGINE_DEADLINE_S)
                user, _, workdir = found.decode().strip().partition("|")
                # Where an image names no folder, the whole file system would be the box's working directory.
                self._workdirs[image] = "/root" if user in ("", "root", "0", "0:0") and workdir in ("", "/") else "."
            return self._workdirs[image]

    async def _commit(self, box: ContainerBox, services: tuple[Service, ...]) -> ContainerSnapshot:
        reference = self.new_reference()
        changes = () if box.workdir == "." else ("--change", f"WORKDIR {box.workdir}")
        await self.engine.run("commit", "--pause=false", *changes, box.name, reference, deadline_s=ENGINE_DEADLINE_S)
        return self._keep(ContainerSnapshot(self, reference, box.spec, services))

    def _keep(self, snapshot: ContainerSnapshot) -> ContainerSnapshot:
        self._snapshots.add(snapshot)
        return snapshot

    def forget_snapshot(self, snapshot: ContainerSnapshot) -> None:
        self._snapshots.discard(snapshot)

    def _forget(self, box: HeldBox) -> None:
        snapshot = self._boxes.pop(box, None)
        if snapshot is not None:
            snapshot.release()


class DockerBackend(ContainerBackend):
    program = "docker"


class PodmanBackend(ContainerBackend):
    program = "podman"


def run_arguments(name: str, spec: SandboxSpec, image: str, agent: Path, workdir: str = ".") -> list[str]:
    """How the engine is asked for a box: every limit, no rights, no network; the agent is its first process."""
    most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    num_processes = _MAX_NPROC if most == resource.RLIM_INFINITY else min(most, _MAX_NPROC)
    arguments = [
        "run", "--rm", "--interactive", "--pull", "never", "--name", name, "--label", f"{LABEL}={owner()}", "--network", "none",
        "--memory", str(spec.memory_bytes), "--memory-swap", str(spec.memory_bytes),
        # One more for the agent. Limits beyond our own would need rights that an engine may not have.
        "--pids-limit", str(spec.num_processes + 1), "--ulimit", f"nproc={num_processes}:{num_processes}",
        "--ulimit", "nofile=1024:1024", "--ulimit", f"fsize={spec.disk_bytes}:{spec.disk_bytes}", "--ulimit", "core=0:0",
        "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--volume", f"{agent}:{AGENT}:ro", "--entrypoint", AGENT,
    ]  # fmt: skip
    if spec.cpus:
        arguments += ["--cpus", str(spec.cpus)]
    if spec.hostname:
        arguments += ["--hostname", spec.hostname]
    if spec.root:
        arguments += ["--user", "0:0", *itertools.chain.from_iterable(("--cap-add", right) for right in _ROOT_RIGHTS)]
    return [*arguments, image, "serve", "--contained", workdir]


def _let_go(holding: asyncio.Future[tuple[asyncio.subprocess.Process, socket.socket]]) -> None:
    """A creation was given up while its client started: hanging up ends the container as soon as it stands."""
    if not holding.cancelled() and holding.exception() is None:
        holding.result()[1].close()


def _check(spec: SandboxSpec) -> None:
    if spec.shares:
        raise ValueError("containers see no folders; put what it needs into the image, or use the namespace backend")
    if spec.egress is not None:
        raise ValueError("containers offer no egress: their network is none; leave `egress` out or use the namespace backend")
    if spec.num_processes < 1 or spec.lifetime_s <= 0:
        raise ValueError(f"num_processes {spec.num_processes} and lifetime_s {spec.lifetime_s} must be positive")
