"""Root disks: the base disk of the set-up folder for `host`, else an image's tree packed once as EROFS and shared by every machine."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import msgspec

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.images.store import Image, ImageStore
from rollmill.sandbox.microvm.assets import INSTALL, Assets

PACK_DEADLINE_S = 600.0
_BASE = "host"
_SAFE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Disks:
    def __init__(self, assets: Assets, store: Path | None = None) -> None:
        self._assets = assets
        self._store = store
        self._packing: dict[str, asyncio.Lock] = {}

    async def get(self, name: str) -> tuple[Image, Path]:
        """The image of that name and its disk. A virtual machine cannot look at this machine's folders, so `host` is the base disk."""
        if name == _BASE:
            return self._assets.base_image(), self._assets.base_disk
        store = ImageStore(self._store)
        image = store.get(name)
        disk = self._assets.folder.parent / "vm-disks" / f"{image.digest}.erofs"
        async with self._packing.setdefault(image.digest, asyncio.Lock()):
            if not disk.is_file():
                await self._pack(store.rootfs(image), disk)
        env = {"PATH": _SAFE_PATH, "HOME": image.home, "USER": image.user, "LOGNAME": image.user, "SHELL": image.shell, **image.env}
        return msgspec.structs.replace(image, env=env), disk

    async def _pack(self, tree: Path, disk: Path) -> None:
        program = self._assets.mkfs
        if program is None:
            raise ValueError(f"there is no mkfs.erofs to pack {tree} with; run `{INSTALL}` or install erofs-utils")
        disk.parent.mkdir(parents=True, exist_ok=True)
        # A user that is not root owns every file of the trees it unpacks; in the machine they are root's.
        owner = [] if os.geteuid() == 0 else ["--all-root"]
        with tempfile.TemporaryDirectory(dir=disk.parent) as folder:
            made = Path(folder) / "disk"
            process = await asyncio.create_subprocess_exec(
                str(program), *owner, str(made), str(tree),
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
                env=self._assets.environment(),
            )  # fmt: skip
            try:
                async with asyncio.timeout(PACK_DEADLINE_S):
                    said, _ = await process.communicate()
            except BaseException:
                process.kill()
                await process.wait()
                raise
            if process.returncode:
                raise RunFailure(Boundary.SANDBOX, f"mkfs.erofs failed on {tree}: {said.decode(errors='replace')[-500:]}")
            os.replace(made, disk)
