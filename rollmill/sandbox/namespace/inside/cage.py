"""Turns a freshly forked child of the zygote into PID 1 of a box; after `lock_in` it owns nothing outside the box and can gain nothing."""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import signal
import socket
import struct
from dataclasses import dataclass

from . import cgroups, root, seccomp
from . import kernel as k

_OTHER_NAMESPACES = k.CLONE_NEWNS | k.CLONE_NEWNET | k.CLONE_NEWIPC | k.CLONE_NEWUTS | k.CLONE_NEWCGROUP
_NUM_RESERVED = 4
"""Processes beyond the box's bound that PID 1 may start, so that a full process table still lets one `kill` run."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """One box as the zygote was asked for it."""

    box: str
    memory_bytes: int
    disk_bytes: int
    num_processes: int
    lifetime_s: float


@dataclass(frozen=True, kw_only=True)
class Zygote:
    """What a child needs from the zygote it was forked from."""

    proc_fd: int
    """The host's /proc, for the child's own entries only."""
    groups: cgroups.MemoryGroups | None
    rootless: bool
    first_id: int
    """Host user id of the first box; each has its own, so that limits counted per user are per box."""
    program: bytes | None
    """The system-call filter, where this machine type has one."""


@dataclass(frozen=True, kw_only=True)
class Inside:
    """What PID 1 is left with."""

    has_proc: bool
    oom_fd: int
    """Its own OOM score, writable."""
    num_processes: int


def lock_in(order: Order, zygote: Zygote, owner_id: int) -> Inside:
    """Make the namespaces and the root, then give up every right. Order matters: mounts first, user namespace last, so
    that even all capabilities inside the box hold no power over its mount and network namespaces."""
    if zygote.groups is not None:
        # tmpfs pages count as memory; without this allowance a full disk would look like a memory bomb.
        zygote.groups.enter(order.box, order.memory_bytes + order.disk_bytes)
    k.unshare(_OTHER_NAMESPACES, "mount, net, ipc, uts and cgroup namespaces")
    socket.sethostname(f"dev-{os.urandom(4).hex()}")
    _loopback_up()
    root.mount_private(disk_bytes=order.disk_bytes, owner_id=owner_id)
    has_proc = root.mount_proc(kept=zygote.rootless)
    _enter_user_namespace(owner_id, zygote)
    oom_fd = os.open("self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC, dir_fd=zygote.proc_fd)
    os.close(zygote.proc_fd)
    if zygote.groups is not None:
        os.close(zygote.groups.fd)
    _limit(order, address_space=zygote.groups is None)
    k.drop_bounding_set()
    k.set_capabilities(0, 0)
    k.prctl(k.PR_SET_NO_NEW_PRIVS, 1, "no_new_privs")
    # Not dumpable: a program of the box, same user as PID 1, can neither trace it nor reach its descriptors.
    k.prctl(k.PR_SET_DUMPABLE, 0, "dumpable")
    k.prctl(k.PR_SET_PDEATHSIG, signal.SIGKILL, "pdeathsig")
    if zygote.program is not None:
        k.install_seccomp(zygote.program)
    return Inside(has_proc=has_proc, oom_fd=oom_fd, num_processes=order.num_processes)


def _enter_user_namespace(owner_id: int, zygote: Zygote) -> None:
    if not zygote.rootless:
        k.prctl(k.PR_SET_KEEPCAPS, 1, "keepcaps")
        os.setgroups([])
        os.setresgid(owner_id, owner_id, owner_id)
        os.setresuid(owner_id, owner_id, owner_id)
        # Held for one call more: some kernels let only a capable process make a user namespace.
        k.set_capabilities(1 << k.CAP_SYS_ADMIN, 1 << k.CAP_SYS_ADMIN)
    k.prctl(k.PR_SET_DUMPABLE, 1, "dumpable")
    k.unshare(k.CLONE_NEWUSER, "user namespace")
    map_self(zygote.proc_fd, inside=root.USER_ID, outside_user=owner_id, outside_group=owner_id)


def map_self(proc_fd: int, *, inside: int, outside_user: int, outside_group: int) -> None:
    """Give the one id of this process a name in its new user namespace."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{inside} {outside_user} 1"), ("gid_map", f"{inside} {outside_group} 1")):
        fd = os.open(f"self/{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc_fd)
        try:
            os.write(fd, text.encode())
        except OSError as error:
            raise OSError(error.errno, f"write {text!r} to {name}: {error.strerror}") from None
        finally:
            os.close(fd)


def _loopback_up() -> None:
    get_flags, set_flags, up = 0x8913, 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = bytearray(struct.pack("16sH22x", b"lo", 0))
        fcntl.ioctl(probe, get_flags, request)
        (flags,) = struct.unpack_from("H", request, 16)
        fcntl.ioctl(probe, set_flags, struct.pack("16sH22x", b"lo", flags | up))


def _limit(order: Order, *, address_space: bool) -> None:
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: order.disk_bytes,
        resource.RLIMIT_NOFILE: 1024,
        resource.RLIMIT_NPROC: order.num_processes + _NUM_RESERVED,
    }
    if address_space:
        wanted[resource.RLIMIT_AS] = order.memory_bytes
    for which, value in wanted.items():
        hard = resource.getrlimit(which)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (bound, bound))


def filter_program() -> bytes | None:
    return seccomp.program(platform.machine())
