"""A courier whose layers are plain folders, packed and unpacked by GNU tar."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

from rollmill.sandbox.snapshots.layers import PACK, UNPACK

TAR_DEADLINE_S = 30.0


class FolderCourier:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._num = 0
        self.num_packed = 0

    def fresh(self) -> Path:
        self._num += 1
        path = self._root / f"layer{self._num}"
        path.mkdir(parents=True)
        return path

    async def pack(self, layer: Path) -> AsyncGenerator[bytes, None]:
        self.num_packed += 1
        tar = await asyncio.create_subprocess_exec(*(word.format(folder=layer) for word in PACK), stdout=asyncio.subprocess.PIPE)
        assert tar.stdout is not None
        async with asyncio.timeout(TAR_DEADLINE_S):
            while chunk := await tar.stdout.read(1 << 16):
                yield chunk
            if await tar.wait():
                raise OSError(f"tar ended with {tar.returncode}")

    async def unpack(self, chunks: AsyncIterator[bytes]) -> Path:
        layer = self.fresh()
        tar = await asyncio.create_subprocess_exec(*(word.format(folder=layer) for word in UNPACK), stdin=asyncio.subprocess.PIPE)
        assert tar.stdin is not None
        try:
            async with asyncio.timeout(TAR_DEADLINE_S):
                async for chunk in chunks:
                    tar.stdin.write(chunk)
                    await tar.stdin.drain()
                tar.stdin.close()
                if await tar.wait():
                    raise OSError(f"tar ended with {tar.returncode}")
        except BaseException:
            if tar.returncode is None:
                tar.kill()
                await tar.wait()
            shutil.rmtree(layer)
            raise
        return layer

    async def discard(self, layer: Path) -> None:
        shutil.rmtree(layer)

    def left(self) -> list[str]:
        return sorted(path.name for path in self._root.iterdir()) if self._root.exists() else []
