"""Makes boxes as pods through `kubectl`, admitting a bounded number at a time; owns the table of living pods.

A pod ends with its owner's connection, at its lifetime at the latest; the pod objects a dead owner left are swept by the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import socket
import subprocess
from collections.abc import Callable, Sequence
from typing import NoReturn

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.agent.native.build import binary
from rollmill.sandbox.container.held import HeldBox
from rollmill.sandbox.container.owner import LABEL, is_orphan, owner
from rollmill.sandbox.container.tool import Tool
from rollmill.sandbox.kubernetes import manifest
from rollmill.sandbox.records import Capabilities, Change, SandboxSpec

KUBECTL_DEADLINE_S = 60.0
READY_DEADLINE_S = 300.0
"""Scheduling and the image's way to the node."""
_NUM_CREATING = 16
_NO_AGENT = "the box agent could not be built, and a pod needs it; install a C compiler (Debian: `apt-get install gcc libc6-dev`)"
_LACKS = "pods offer no snapshot and no fork: a cluster does not keep a pod's state; use the namespace or the microvm backend"


class PodBox(HeldBox):
    """Made by `KubernetesBackend` only."""

    def __init__(self, name: str, spec: SandboxSpec, kubectl: Tool, *, shell: tuple[str, ...], on_end: Callable[[HeldBox], None]) -> None:
        super().__init__(name, spec, shell=shell, on_end=on_end)
        self._kubectl = kubectl

    async def diff(self) -> list[Change]:
        raise ValueError("pods offer no diff: a cluster does not show what changed in one")

    async def snapshot(self, *, live: bool = False) -> NoReturn:
        raise ValueError(_LACKS)

    async def fork(self, num: int) -> NoReturn:
        raise ValueError(_LACKS)

    async def destroy(self) -> None:
        await self._kubectl.run(
            "delete", "pod", self.name, "--ignore-not-found", "--grace-period=0", "--force", "--wait=false", deadline_s=KUBECTL_DEADLINE_S
        )  # fmt: skip


class KubernetesBackend:
    """`SandboxBackend` on a cluster.

    `image` stands for the spec's `host`; `options` come before every verb, e.g. `("--namespace", "boxes", "--context", "train")`;
    `runtime_class` names a stronger isolation that the cluster has, e.g. `gvisor` or `kata`.
    """

    def __init__(
        self,
        program: str = "kubectl",
        *,
        image: str = "docker.io/library/debian:stable-slim",
        options: Sequence[str] = (),
        runtime_class: str = "",
        shell: tuple[str, ...] = ("/bin/sh", "-c"),
        num_creating: int = _NUM_CREATING,
    ) -> None:
        self._kubectl = Tool((program, *options))
        self._image = image
        self._runtime_class = runtime_class
        self._shell = shell
        self._admission = asyncio.Semaphore(num_creating)
        self._starting = asyncio.Lock()
        self._is_started = False
        self._is_closed = False
        self._boxes: set[HeldBox] = set()
        self._numbers = itertools.count(1)

    @staticmethod
    def probe(program: str = "kubectl", *, options: Sequence[str] = ()) -> str | None:
        """None when pods may be made, else one sentence that says why not and what to change. Blocks briefly."""
        if shutil.which(program) is None:
            return f"`{program}` is not installed"
        if binary() is None:
            return _NO_AGENT
        command = [program, *options, "auth", "can-i", "create", "pods", "--quiet", "--request-timeout=10s"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=KUBECTL_DEADLINE_S, check=False)
        except subprocess.TimeoutExpired:
            return "the cluster did not answer `kubectl auth can-i create pods`; look at KUBECONFIG"
        words = done.stderr.strip()[-300:] or "it says no"
        return None if done.returncode == 0 else f"`kubectl auth can-i create pods`: {words}; set KUBECONFIG or ask for the right"

    async def capabilities(self) -> Capabilities:
        facts = {
            "network": "denied by a NetworkPolicy, where the cluster's network plug-in heeds it",
            "processes": "the node's limit",
            "runtime_class": self._runtime_class or "the cluster's own",
        }
        return Capabilities(backend="kubernetes", isolation="container", fork=False, diff=False, images=True, facts=facts)

    async def create(self, spec: SandboxSpec) -> PodBox:
        _check(spec)
        agent = binary()
        if agent is None:
            raise RunFailure(Boundary.SANDBOX, _NO_AGENT)
        await self._start()
        async with self._admission:
            name = f"rollmill-{owner().replace('.', '-')}-{next(self._numbers)}"
            box = PodBox(name, spec, self._kubectl, shell=self._shell, on_end=self._boxes.discard)
            self._boxes.add(box)
            try:
                image = self._image if spec.image == "host" else spec.image
                await self._apply("create", manifest.pod(name, owner(), spec, image, runtime_class=self._runtime_class))
                await self._until_ready(name)
                await self._kubectl.run(
                    "exec", "--stdin", name, "--", "/bin/sh", "-c", manifest.UPLOAD,
                    stdin=await asyncio.to_thread(agent.read_bytes), deadline_s=KUBECTL_DEADLINE_S,
                )  # fmt: skip
                await self._enter(box)
                await box.install(spec.files)
            except BaseException:
                await asyncio.shield(box.close())
                raise
        try:
            for service in spec.services:
                await box.serve(service)
        except BaseException:
            await asyncio.shield(box.close())
            raise
        return box

    async def restore(self, store: str, digest: str) -> NoReturn:
        raise ValueError(_LACKS)

    async def close(self) -> None:
        """Delete every pod; again is harmless."""
        self._is_closed = True
        await asyncio.gather(*(box.close() for box in list(self._boxes)))

    async def _enter(self, box: PodBox) -> None:
        holding = asyncio.ensure_future(self._kubectl.hold("exec", "--stdin", box.name, "--", "/bin/sh", "-c", manifest.SERVE))
        try:
            client, sock = await asyncio.shield(holding)
        except asyncio.CancelledError:
            holding.add_done_callback(_let_go)
            raise
        box.enter(client, sock)
        await box.ready(KUBECTL_DEADLINE_S)

    async def _until_ready(self, name: str) -> None:
        wait = ("wait", "--for=condition=Ready", f"pod/{name}", f"--timeout={READY_DEADLINE_S:.0f}s")
        try:
            await self._kubectl.run(*wait, deadline_s=READY_DEADLINE_S + KUBECTL_DEADLINE_S)
        except RunFailure as failure:
            found = json.loads(await self._kubectl.run("get", "pod", name, "--output=json", deadline_s=KUBECTL_DEADLINE_S))
            raise RunFailure(Boundary.SANDBOX, f"pod {name} did not start: {manifest.complaint(found)} ({failure.message})") from None

    async def _start(self) -> None:
        async with self._starting:
            if self._is_closed:
                raise RunFailure(Boundary.SANDBOX, "the backend is closed")
            if not self._is_started:
                await self._apply("apply", manifest.isolation())
                await self._sweep()
                self._is_started = True

    async def _sweep(self) -> None:
        """Delete the pods of owners that are certainly dead."""
        listed = json.loads(await self._kubectl.run("get", "pods", f"--selector={LABEL}", "--output=json", deadline_s=KUBECTL_DEADLINE_S))
        left = [pod["metadata"]["name"] for pod in listed["items"] if is_orphan(pod["metadata"]["labels"][LABEL])]
        if left:
            with contextlib.suppress(RunFailure):  # another owner sweeps too: what is gone is gone
                await self._kubectl.run("delete", "pod", *left, "--ignore-not-found", "--wait=false", deadline_s=KUBECTL_DEADLINE_S)

    async def _apply(self, verb: str, content: manifest.Json) -> None:
        await self._kubectl.run(verb, "--filename=-", stdin=json.dumps(content).encode(), deadline_s=KUBECTL_DEADLINE_S)


def _let_go(holding: asyncio.Future[tuple[asyncio.subprocess.Process, socket.socket]]) -> None:
    """A creation was given up while its client started: hanging up ends the agent as soon as it stands."""
    if not holding.cancelled() and holding.exception() is None:
        holding.result()[1].close()


def _check(spec: SandboxSpec) -> None:
    if spec.shares:
        raise ValueError("pods see no folders of this machine; put what it needs into the image, or use the namespace backend")
    if spec.egress is not None:
        raise ValueError("pods offer no egress by allow-list; leave `egress` out or use the namespace backend")
    if spec.lifetime_s <= 0:
        raise ValueError(f"lifetime_s {spec.lifetime_s} must be positive")
