"""The Linux calls that the standard library lacks, each raising OSError with the step that failed; knows no policy."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
CAP_CHOWN, CAP_SETGID, CAP_SETUID, CAP_NET_ADMIN, CAP_SYS_ADMIN = 0, 6, 7, 12, 21
CAP_LAST = 40
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_NAME, PR_SET_SECCOMP = 1, 4, 8, 15, 22
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38

_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(platform.machine(), -1)
_SYS_MOUNT_SETATTR = 442
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4

_libc = ctypes.CDLL(None, use_errno=True)
_ulong = ctypes.c_ulong


def _check(result: int, step: str) -> None:
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{step}: {os.strerror(code)}")


def unshare(flags: int, step: str) -> None:
    _check(_libc.unshare(flags), f"unshare {step}")


def setns(fd: int, flags: int, step: str) -> None:
    _check(_libc.setns(fd, flags), f"setns {step}")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    src, fs, opt = (None if text is None else os.fsencode(text) for text in (source, kind, options or None))
    _check(_libc.mount(src, os.fsencode(target), fs, _ulong(flags), opt), f"mount {kind or source} on {target}")


def umount(target: str) -> None:
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def make_read_only(target: str) -> None:
    """Make a bind mount and all mounts below it read-only, without set-uid programs and devices."""
    attr = struct.pack("<QQQQ", _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, 0, 0, 0)
    path = os.fsencode(target)
    result = _libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, path, _AT_RECURSIVE, attr, ctypes.c_size_t(len(attr)))
    _check(result, f"mount_setattr read-only on {target}")


def pivot_into(new_root: str) -> None:
    """Make `new_root` the root of this mount namespace and let go of the old one."""
    os.chdir(new_root)
    _check(_libc.syscall(_SYS_PIVOT_ROOT, b".", b"."), f"pivot_root {new_root}")
    umount(".")
    os.chdir("/")


def prctl(option: int, value: int, step: str) -> None:
    _check(_libc.prctl(option, _ulong(value), _ulong(0), _ulong(0), _ulong(0)), f"prctl {step}")


def drop_bounding_set() -> None:
    for capability in range(CAP_LAST + 1):
        _libc.prctl(PR_CAPBSET_DROP, _ulong(capability), _ulong(0), _ulong(0), _ulong(0))


def set_capabilities(effective: int, permitted: int) -> None:
    header = struct.pack("<Ii", 0x20080522, 0)
    low, high = 0xFFFFFFFF, 32
    body = struct.pack("<6I", effective & low, permitted & low, 0, effective >> high, permitted >> high, 0)
    _check(_libc.capset(header, body), "capset")


def effective_capabilities() -> int:
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        return next(int(line.split()[1], 16) for line in status if line.startswith("CapEff:"))


def rename_process(command_line: str, name: str) -> None:
    """Replace what this process and its forked children show of how they were started; it would tell the host's paths."""
    with open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end: the 48th and 49th of proc(5)
    room = end - start
    ctypes.memmove(start, os.fsencode(command_line)[: room - 1].ljust(room, b"\0"), room)
    _check(_libc.prctl(PR_SET_NAME, os.fsencode(name), _ulong(0), _ulong(0), _ulong(0)), "prctl name")


def install_seccomp(program: bytes) -> None:
    """Install a classic BPF program on this process and all its future children."""
    code = ctypes.create_string_buffer(program, len(program))
    head = ctypes.create_string_buffer(struct.pack("@HxxxxxxP", len(program) // 8, ctypes.addressof(code)))
    filter_mode = 2
    _check(_libc.prctl(PR_SET_SECCOMP, _ulong(filter_mode), head, _ulong(0), _ulong(0)), "prctl seccomp")
