"""Carries layers between this machine's mounts and archives: boxes of the host's image that see a layer from outside and run `tar`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.namespace.layers import Layer, Machine
from rollmill.sandbox.records import SandboxSpec
from rollmill.sandbox.snapshots.layers import PACK, UNPACK

if TYPE_CHECKING:
    from rollmill.sandbox.namespace.backend import NamespaceBackend

END_DEADLINE_S = 60.0
LIFETIME_S = 3600.0


class NamespaceCourier:
    """`snapshots.saved.Courier` for layers of one backend."""

    def __init__(self, backend: NamespaceBackend, *, disk_bytes: int, root: bool) -> None:
        self._backend = backend
        # Memory counts the pages of the disk as well as those of tar.
        self._spec = SandboxSpec(root=root, disk_bytes=disk_bytes, lifetime_s=LIFETIME_S, memory_bytes=256 << 20)

    async def pack(self, layer: Layer) -> AsyncGenerator[bytes, None]:
        box = await self._backend.stand(self._spec, Machine(), (), (), views=(layer,))
        try:
            program = await box.start([word.format(folder="/mnt/view/0") for word in PACK])
            words = b""
            async for chunk in program:
                if chunk.is_stderr:
                    words = (words + chunk.data)[-2000:]
                else:
                    yield chunk.data
            result = await program.wait(timeout_s=END_DEADLINE_S)
            if result.exit_code != 0:
                raise _failed("packing", result.exit_code, words + result.stderr)
        finally:
            await box.close()

    async def unpack(self, chunks: AsyncIterator[bytes]) -> Layer:
        box = await self._backend.stand(self._spec, Machine(), (), (), bare=True)
        try:
            program = await box.start([word.format(folder="/mnt/layer") for word in UNPACK])
            try:
                async for piece in chunks:
                    await program.write(piece)
                await program.close_stdin()
            except BrokenPipeError:
                pass  # it ended early, and says why
            result = await program.wait(timeout_s=END_DEADLINE_S)
            if result.exit_code != 0:
                raise _failed("unpacking", result.exit_code, result.stdout + result.stderr)
            return await self._backend.freeze(box)
        finally:
            await box.close()

    async def discard(self, layer: Layer) -> None:
        layer.let_go()


def _failed(what: str, status: int, words: bytes) -> RunFailure:
    return RunFailure(Boundary.SANDBOX, f"{what} a layer failed with status {status}: {words.decode(errors='replace').strip()}")
