"""The folder that `scripts/setup_vm.sh` makes: monitor, kernel, modules and the base disk. Knows where each lies, runs none of them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec

from rollmill.sandbox.images.store import Image

INSTALL = "make setup-vm"
_VSOCK_ONLY = ("vsock.ko", "vmw_vsock_virtio_transport_common.ko", "vmw_vsock_virtio_transport.ko")
_SERIAL_ONLY = ("virtio_console.ko",)


def default_folder() -> Path:
    home = os.environ.get("ROLLMILL_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "rollmill") / "vm"


class Assets:
    """A folder that holds everything, or `missing` says in a sentence what to do."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or default_folder()

    @property
    def missing(self) -> str | None:
        lacking = [
            name for name in ("kernel/vmlinux", "kernel/modules.list", "base.erofs", "base.json") if not (self.folder / name).is_file()
        ]
        if lacking:
            return f"{self.folder} has no {', '.join(lacking)}; run `{INSTALL}`"
        if self.qemu is None:
            return f"there is no qemu-system-x86_64 in {self.folder}/bin or on the path; run `{INSTALL}`"
        return None

    @property
    def qemu(self) -> Path | None:
        return self._program("qemu-system-x86_64")

    @property
    def mkfs(self) -> Path | None:
        return self._program("mkfs.erofs")

    @property
    def kernel(self) -> Path:
        return self.folder / "kernel" / "vmlinux"

    @property
    def base_disk(self) -> Path:
        return self.folder / "base.erofs"

    def base_image(self) -> Image:
        return msgspec.json.decode((self.folder / "base.json").read_bytes(), type=Image)

    def data_folders(self) -> list[Path]:
        """Where QEMU finds its firmware when it was unpacked and not installed."""
        shares = [self.folder / "unpacked" / "usr" / "share" / name for name in ("qemu", "seabios")]
        return [path for path in shares if path.is_dir()]

    def environment(self) -> dict[str, str]:
        """For programs from this folder: their libraries lie beside them."""
        libraries = [self.folder / "unpacked" / top / "x86_64-linux-gnu" for top in ("usr/lib", "lib")]
        found = [str(path) for path in libraries if path.is_dir()]
        return {"LD_LIBRARY_PATH": ":".join(found), "PATH": "/usr/bin:/bin"} if found else {"PATH": "/usr/bin:/bin"}

    def modules(self, *, vsock: bool) -> dict[str, bytes]:
        """In load order; without those of the way to the agent that is not taken, each of which costs an emulated guest some time."""
        names = (self.folder / "kernel" / "modules.list").read_text().split()
        unused = _SERIAL_ONLY if vsock else _VSOCK_ONLY
        return {name: (self.folder / "kernel" / "modules" / name).read_bytes() for name in names if name not in unused}

    def _program(self, name: str) -> Path | None:
        own = self.folder / "bin" / name
        if os.access(own, os.X_OK):
            return own
        found = shutil.which(name)
        return Path(found) if found else None
