"""Makes boxes at a provider that speaks the E2B protocol: our agent is put into the sandbox and serves there as it does everywhere.

What a template fixes (memory, disk, processes, users) is the provider's; the lifetime is given with the request, so that a box of an owner
that died ends by itself.
"""

from __future__ import annotations

import asyncio
import base64
import math
import os
from collections.abc import Sequence

import aiohttp

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.agent.native.build import binary
from rollmill.sandbox.hosted.api import BUSY, REQUEST_DEADLINE_S, Client, Json
from rollmill.sandbox.hosted.box import AGENT, HostedBox, HostedSnapshot
from rollmill.sandbox.records import Capabilities, SandboxSpec, Service

CREATE_DEADLINE_S = 600.0
"""Providers admit a few creations per second; a burst of hundreds waits here."""
DAEMON_PORT = 49983
_NUM_CREATING = 16
_NO_AGENT = (
    "the box agent could not be built, and a hosted sandbox needs it; install a C compiler (Debian: `apt-get install gcc libc6-dev`)"
)


class HostedBackend:
    """`SandboxBackend` at a provider.

    `template` stands for the spec's `host`. `sandbox_url` is for providers that route by header; else each sandbox has a host name.
    """

    def __init__(
        self,
        *,
        api_key: str = "",
        domain: str = "",
        api_url: str = "",
        sandbox_url: str = "",
        template: str = "base",
        shell: tuple[str, ...] = ("/bin/sh", "-c"),
        num_creating: int = _NUM_CREATING,
    ) -> None:
        self._key = api_key or os.environ.get("E2B_API_KEY", "")
        self._domain = domain or os.environ.get("E2B_DOMAIN", "e2b.app")
        self._api_url = api_url or os.environ.get("E2B_API_URL", "") or f"https://api.{self._domain}"
        self._sandbox_url = sandbox_url or os.environ.get("E2B_SANDBOX_URL", "")
        self._template = template
        self._shell = shell
        self._admission = asyncio.Semaphore(num_creating)
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False
        self._boxes: set[HostedBox] = set()
        self._abandoned: set[asyncio.Future[Json]] = set()
        self._snapshots: set[HostedSnapshot] = set()

    @staticmethod
    def probe(*, api_key: str = "") -> str | None:
        """None when boxes may be asked for, else one sentence that says what is missing. Asks no provider."""
        if not (api_key or os.environ.get("E2B_API_KEY")):
            return "there is no key for a sandbox provider: set E2B_API_KEY"
        return _NO_AGENT if binary() is None else None

    async def capabilities(self) -> Capabilities:
        facts = {"provider": self._api_url, "network": "the provider's", "limits": "the template's"}
        return Capabilities(backend="hosted", isolation="microvm", fork=True, suspend=True, diff=False, images=True, facts=facts)

    async def create(self, spec: SandboxSpec) -> HostedBox:
        return await self.make(spec, self._template if spec.image == "host" else spec.image, spec.services, is_copy=False)

    async def restore(self, store: str, digest: str) -> HostedSnapshot:
        raise ValueError("hosted boxes offer no save and no restore: their states stay at the provider; use the namespace backend")

    async def close(self) -> None:
        """End every box, forget every snapshot; again is harmless."""
        self._is_closed = True
        if self._abandoned:  # a provider that is still at work would make what nobody holds
            await asyncio.wait(self._abandoned, timeout=REQUEST_DEADLINE_S)
        await asyncio.gather(*(box.close() for box in list(self._boxes)))
        await asyncio.gather(*(snapshot.close() for snapshot in list(self._snapshots)))
        if self._session is not None:
            await self._session.close()

    # For boxes and snapshots

    @property
    def control(self) -> Client:
        return Client(self._sessions(), self._api_url, {"X-API-KEY": self._key}, busy=BUSY)

    def keep(self, snapshot: HostedSnapshot) -> HostedSnapshot:
        self._snapshots.add(snapshot)
        return snapshot

    def forget(self, thing: HostedBox | HostedSnapshot) -> None:
        self._boxes.discard(thing)
        self._snapshots.discard(thing)

    async def make(self, spec: SandboxSpec, template: str, services: Sequence[Service], *, is_copy: bool) -> HostedBox:
        """A box from a template, or from a snapshot: then files and agent are there already."""
        _check(spec)
        if self._is_closed:
            raise RunFailure(Boundary.SANDBOX, "the backend is closed")
        agent = binary()
        if agent is None:
            raise RunFailure(Boundary.SANDBOX, _NO_AGENT)
        async with self._admission:
            asked = {
                "templateID": template,
                "timeout": math.ceil(spec.lifetime_s),
                "metadata": {"made-by": "rollmill"},
                "envVars": {},
                "allow_internet_access": False,
            }
            making = asyncio.ensure_future(self.control.call("POST", "/v2/sandboxes", asked, deadline_s=CREATE_DEADLINE_S))
            try:
                made = await asyncio.shield(making)
            except asyncio.CancelledError:
                self._abandoned.add(making)
                making.add_done_callback(self._abandon)
                raise
            daemon = self._daemon(made, user="root" if spec.root else "")
            box = HostedBox(made["sandboxID"], spec, self, daemon, self._shell)
            self._boxes.add(box)
            try:
                if not is_copy:
                    await daemon.upload(AGENT, await asyncio.to_thread(agent.read_bytes), user="root" if spec.root else "")
                await box.enter()
                if not is_copy:
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

    def _sessions(self) -> aiohttp.ClientSession:
        if self._session is None:
            # One connection per living box, for its stream: no bound here, the admission is the bound.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session

    def _daemon(self, made: Json, *, user: str = "") -> Client:
        """The daemon of a sandbox just made; it runs programs as the template's own user unless told another."""
        sandbox, domain = made["sandboxID"], made.get("domain") or self._domain
        headers = {"E2b-Sandbox-Id": sandbox, "E2b-Sandbox-Port": str(DAEMON_PORT)}
        if token := made.get("envdAccessToken"):
            headers["X-Access-Token"] = token
        if user:
            headers["Authorization"] = "Basic " + base64.b64encode(f"{user}:".encode()).decode()
        return Client(self._sessions(), self._sandbox_url or f"https://{DAEMON_PORT}-{sandbox}.{domain}", headers)

    def _abandon(self, making: asyncio.Future[Json]) -> None:
        """A creation was given up while the provider worked on it: end what came of it."""
        self._abandoned.discard(making)
        if not making.cancelled() and making.exception() is None:
            self._boxes.add(box := HostedBox(making.result()["sandboxID"], SandboxSpec(), self, self._daemon(making.result()), self._shell))
            box.begin_end()


def _check(spec: SandboxSpec) -> None:
    if spec.shares:
        raise ValueError("hosted boxes see no folders; put what it needs into the image, or use the namespace backend")
    if spec.egress is not None:
        raise ValueError("hosted boxes offer no egress by allow-list; leave `egress` out or use the namespace backend")
    if spec.lifetime_s <= 0:
        raise ValueError(f"lifetime_s {spec.lifetime_s} must be positive")
