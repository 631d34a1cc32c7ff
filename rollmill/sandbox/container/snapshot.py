"""A state as an image of the engine: children run from it, and it is removed once it is closed and the last of them has ended."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.container.tool import Tool
from rollmill.sandbox.group import all_or_none
from rollmill.sandbox.interface import Sandbox
from rollmill.sandbox.records import SandboxSpec, Service
from rollmill.sandbox.snapshots.store import open_store

if TYPE_CHECKING:
    from rollmill.sandbox.container.backend import ContainerBackend
    from rollmill.sandbox.container.box import ContainerBox

REPOSITORY = "localhost/rollmill-snapshot"
ENGINE_DEADLINE_S = 120.0
MOVE_DEADLINE_S = 900.0
_IMAGE_ID = re.compile(r"sha256:[0-9a-f]{64}")


class SavedContainer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="container-state", tag_field="kind"):
    """A state in a store, by its digest."""

    schema: int = 1
    archive: str
    """Digest of the blob that `docker load` and `podman load` take."""
    spec: SandboxSpec
    services: tuple[Service, ...] = ()


class ContainerSnapshot:
    """Made by `ContainerBackend` only."""

    def __init__(self, backend: ContainerBackend, reference: str, spec: SandboxSpec, services: Sequence[Service]) -> None:
        self.reference = reference
        self._backend = backend
        self._spec = spec
        self._services = tuple(services)
        self._num_users = 0
        self._is_closed = False
        self._removing: asyncio.Task[None] | None = None

    async def fork(self, num: int, spec: SandboxSpec | None = None) -> list[Sandbox]:
        """Boxes from this state; a spec changes their limits and variables, never their files or services."""
        if self._is_closed:
            raise RunFailure(Boundary.SANDBOX, f"snapshot {self.reference} was closed")
        if num < 1:
            raise ValueError(f"a fork of {num} boxes has none; ask for at least 1")
        self.hold()
        try:
            return list(await all_or_none([self._make(spec or self._spec) for _ in range(num)]))
        finally:
            self.release()

    async def _make(self, spec: SandboxSpec) -> ContainerBox:
        return await self._backend.make(spec, self.reference, self._services, self)

    async def save(self, store: str) -> str:
        """The engine's own archive of the image, whole with its base, so that it can be loaded where nothing of it is."""
        blobs, engine = open_store(store), self._backend.engine
        image = await engine.run("image", "inspect", "--format", "{{.Id}}", self.reference, deadline_s=ENGINE_DEADLINE_S)
        # By its id: an archive that carried our tag would put that tag back where it is loaded.
        blob = await blobs.put(engine.read("save", image.decode().strip(), deadline_s=MOVE_DEADLINE_S))
        state = SavedContainer(archive=blob.digest, spec=self._spec, services=self._services)
        return await blobs.put_manifest(msgspec.json.encode(state))

    async def close(self) -> None:
        """Again is harmless."""
        self._is_closed = True
        self._remove_when_unused()
        if self._removing is not None:
            await asyncio.shield(self._removing)

    def hold(self) -> None:
        """Somebody stands on it."""
        self._num_users += 1

    def release(self) -> None:
        """One of those ended."""
        self._num_users -= 1
        if self._is_closed:
            self._remove_when_unused()

    def _remove_when_unused(self) -> None:
        if self._num_users == 0 and self._removing is None:
            self._removing = asyncio.ensure_future(self._remove())

    async def _remove(self) -> None:
        self._backend.forget_snapshot(self)
        with contextlib.suppress(RunFailure):  # the engine may still count a container that has just ended: the next owner sweeps it
            await self._backend.engine.run("rmi", self.reference, deadline_s=ENGINE_DEADLINE_S)


async def load(engine: Tool, store: str, digest: str, reference: str) -> SavedContainer:
    """Have the engine hold a saved state under a name of ours."""
    blobs = open_store(store)
    try:
        state = msgspec.json.decode(await blobs.get_manifest(digest), type=SavedContainer)
    except msgspec.ValidationError as error:
        raise ValueError(f"{digest} in {store} is no state of a container ({error}); restore it with the backend that saved it") from None
    said = await engine.feed(blobs.get(state.archive), "load", deadline_s=MOVE_DEADLINE_S)
    found = _IMAGE_ID.findall(said.decode())
    if not found:
        raise RunFailure(
            Boundary.SANDBOX, f"`{engine.words[0]} load` did not name an image: {said.decode(errors='replace').strip()[-200:]}"
        )
    await engine.run("tag", found[-1], reference, deadline_s=ENGINE_DEADLINE_S)
    return state
