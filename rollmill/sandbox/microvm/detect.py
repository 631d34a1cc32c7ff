"""What can run a virtual machine here, and in words why not better: reads a few files, starts nothing, never hangs."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from rollmill.sandbox.microvm.assets import INSTALL, Assets

_HARDWARE = ("kvm_intel", "kvm_amd")


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of this machine."""

    system: str
    machine: str
    has_kvm: bool
    may_open_kvm: bool
    modules: frozenset[str]
    """Those of the kernel's that begin with `kvm`."""
    has_setpriv: bool
    lacking: str = ""
    """What the folder of kernel, disk and QEMU lacks."""


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """How guests' instructions are run: `kvm` by the processor, `tcg` translated by QEMU."""

    name: str
    why: str
    """For `tcg`: why not by the processor."""


def look(assets: Assets, *, root: Path = Path("/"), may_open: Callable[[Path], bool] | None = None) -> Host:
    kvm, modules = root / "dev" / "kvm", root / "sys" / "module"
    may_open = may_open or (lambda path: os.access(path, os.R_OK | os.W_OK))
    return Host(
        system=sys.platform,
        machine=platform.machine(),
        has_kvm=kvm.exists(),
        may_open_kvm=kvm.exists() and may_open(kvm),
        modules=frozenset(path.name for path in modules.iterdir() if path.name.startswith("kvm")) if modules.is_dir() else frozenset(),
        has_setpriv=shutil.which("setpriv") is not None,
        lacking=assets.missing or "",
    )


def accelerator(host: Host) -> Accelerator:
    if not host.has_kvm:
        why = "there is no /dev/kvm; a cloud machine needs nested virtualisation switched on, a container `--device /dev/kvm`"
    elif "kvm_pvm" in host.modules:
        why = "/dev/kvm is kvm_pvm, virtualisation in software that boots no stock guest kernel"
    elif not any(name in host.modules for name in _HARDWARE):
        why = "/dev/kvm is there, but neither kvm_intel nor kvm_amd is loaded behind it"
    elif not host.may_open_kvm:
        why = "/dev/kvm may not be opened by this user; add it to the group that owns it (`usermod -aG kvm USER`)"
    else:
        return Accelerator(name="kvm", why="")
    return Accelerator(name="tcg", why=why)


def obstacle(host: Host) -> str | None:
    """Why no machine can be started at all, with what to do; None when one can."""
    if host.system != "linux" or host.machine not in ("x86_64", "AMD64"):
        return f"the microvm sandbox needs Linux on x86_64, this is {host.system} on {host.machine}"
    if not host.has_setpriv:
        return "there is no `setpriv`, with which machines die when their owner does; install util-linux"
    if host.lacking:
        return host.lacking
    return None


def probe(folder: Path | None = None) -> str | None:
    """None when boxes can be made on this machine, else one sentence that says why not and what to change."""
    return obstacle(look(Assets(folder)))


__all__ = ["INSTALL", "Accelerator", "Host", "accelerator", "look", "obstacle", "probe"]
