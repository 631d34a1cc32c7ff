"""Forks with running processes: takes the programs of a box out of it into an image, and lets them go on in others. Stacks no layers."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.agent.native import build
from rollmill.sandbox.namespace.criu import INSTALL, Criu, Place
from rollmill.sandbox.records import Service

if TYPE_CHECKING:
    from rollmill.sandbox.namespace.box import NamespaceBox
    from rollmill.sandbox.namespace.zygote import Zygote

COPY_DEADLINE_S = 60.0
_PREFIX = "rollmill-live-"
_MEMORY = "/dev/shm"
"""Images of processes are written to memory where the machine offers a file system there."""


class Running(msgspec.Struct, frozen=True, kw_only=True):
    service: Service
    pid: int
    """As the box counts."""


class LiveImage:
    """The processes of a box as files, until nobody uses them."""

    def __init__(self, folder: Path, name: bytes, services: tuple[Running, ...]) -> None:
        self.folder, self.name, self.services = folder, name, services
        self._num_users = 1

    @property
    def images(self) -> Path:
        return self.folder / "images"

    @property
    def memory(self) -> Path:
        """What lay in the box's /dev/shm, which is no layer's."""
        return self.folder / "memory"

    def use(self) -> LiveImage:
        assert self._num_users > 0, "a live image was used after it was let go"
        self._num_users += 1
        return self

    def let_go(self) -> None:
        self._num_users -= 1
        if self._num_users == 0:
            shutil.rmtree(self.folder, ignore_errors=True)


class Live:
    """Live forks of one backend's boxes."""

    def __init__(self, criu: Criu, scratch: Path) -> None:
        self._criu, self._scratch = criu, scratch

    @classmethod
    def open(cls, zygote: Zygote) -> Live:
        """ValueError says why this machine cannot, and what to change."""
        program, join = shutil.which("criu"), build.binary()
        if zygote.is_rootless or zygote.has_one_id:
            raise ValueError("live forks of namespace boxes need root on this machine; run as root, or use the microvm backend")
        if join is None or zygote.by_path:
            raise ValueError(
                "live forks of namespace boxes need Linux 6.15 and the native agent (a C compiler); or use the microvm backend"
            )
        if program is None:
            raise ValueError(f"live forks of namespace boxes need the program `criu`: {INSTALL}; or use the microvm backend")
        parent = _MEMORY if os.path.ismount(_MEMORY) and os.access(_MEMORY, os.W_OK) else tempfile.gettempdir()
        sweep(Path(parent))
        scratch = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))
        return cls(Criu(program, join, zygote.first_id, scratch), scratch)

    def close(self) -> None:
        self._criu.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    async def take(self, box: NamespaceBox, place: Place) -> LiveImage | None:
        """End the box's programs and keep them; None: it has none. When that fails they go on."""
        services = tuple(Running(service=service, pid=process.pid) for service, process in box.services.running())
        left = await box.leave_programs()
        if left is None:
            return None
        root, name = left
        image = LiveImage(Path(tempfile.mkdtemp(prefix="image-", dir=self._scratch)), name, services)
        try:
            image.images.mkdir(mode=0o755)
            await self._criu.dump(place, root, image.images)
            await _copy(Path(f"/proc/{place.pid}/root/dev/shm"), image.memory)
        except BaseException:
            image.let_go()
            await asyncio.shield(box.join_programs(name))
            raise
        return image

    async def put(self, box: NamespaceBox, place: Place, image: LiveImage) -> None:
        """Let the programs go on in this box, which has none."""
        if image.memory.exists():
            await _copy(image.memory, Path(f"/proc/{place.pid}/root/dev/shm"))
        await self._criu.restore(place, image.images)
        await box.join_programs(image.name)


def sweep(parent: Path) -> None:
    """Remove what killed owners left: nobody else would free the memory."""
    for folder in parent.glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
            shutil.rmtree(folder, ignore_errors=True)


async def _copy(source: Path, target: Path) -> None:
    """With owners, times, holes and links. Nothing runs that could change it meanwhile."""
    if not await asyncio.to_thread(os.listdir, source):
        return
    process = await asyncio.create_subprocess_exec(
        "cp", "-a", "-T", str(source), str(target), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(COPY_DEADLINE_S):
            _, said = await process.communicate()
    except TimeoutError:
        process.kill()
        raise RunFailure(Boundary.SANDBOX, f"copying the shared memory of a box took longer than {COPY_DEADLINE_S:g} s") from None
    if process.returncode:
        raise RunFailure(Boundary.SANDBOX, f"the shared memory of a box could not be copied: {said.decode(errors='replace').strip()}")
