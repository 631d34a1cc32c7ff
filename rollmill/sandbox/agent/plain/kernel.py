"""The Linux calls that the standard library lacks, each raising OSError; knows no policy.

New calls go by number, which is the same on every machine type; no C library need know them.
"""

from __future__ import annotations

import array  # noqa: F401 - `socket` imports it late, when a box has no files of ours any more
import contextlib
import ctypes
import os
import signal
import socket
import struct
from collections.abc import Iterator

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE, MS_SLAVE = 1, 2, 4, 32, 4096, 16384, 1 << 18, 1 << 19
TREE_CLONE, TREE_EMPTY, TREE_RECURSIVE = 1, 0x1000, 0x8000
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC, ATTR_IDMAP = 1, 2, 4, 8, 0x00100000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS = 1, 4, 8, 38
HERE = -100
"""AT_FDCWD: paths start at the working directory."""
MAX_FDS = 253
"""The most that one message carries."""
MAX_MESSAGE_BYTES = 1 << 16

_MNT_DETACH = 2
_PR_SET_NAME, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 15, 22, 24
_LAST_CAPABILITY = 40
_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT, _FSPICK, _MOUNT_SETATTR = 428, 429, 430, 431, 432, 433, 442
_SET_FLAG, _SET_STRING, _SET_FD, _CREATE, _RECONFIGURE = 0, 1, 5, 6, 7
_CLOEXEC, _FSPICK_EMPTY, _MOVE_FROM_EMPTY = 1, 8, 4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_long, _bytes = ctypes.c_long, ctypes.c_char_p


class StepFailed(OSError):
    """What failed, in the words of who wanted it: `strerror` is the step."""


@contextlib.contextmanager
def step(words: str) -> Iterator[None]:
    """Names the errors of a block; an inner step keeps its own name."""
    try:
        yield
    except StepFailed:
        raise
    except OSError as error:
        raise StepFailed(error.errno, words) from None


def _check(result: int) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result)


def _call(number: int, *arguments: int | bytes | None) -> int:
    return _check(_libc.syscall(_long(number), *(_long(a) if isinstance(a, int) else _bytes(a) for a in arguments)))


class FileSystem:
    """A file system that is being made or changed; what is mounted of it stays when this is closed."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def new(cls, kind: bytes) -> FileSystem:
        return cls(_call(_FSOPEN, kind, _CLOEXEC))

    @classmethod
    def of_mount(cls, fd: int) -> FileSystem:
        return cls(_call(_FSPICK, fd, b"", _CLOEXEC | _FSPICK_EMPTY))

    def __enter__(self) -> FileSystem:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def set(self, key: bytes, value: bytes | int) -> None:
        _call(_FSCONFIG, self._fd, _SET_STRING, key, value if isinstance(value, bytes) else str(value).encode(), 0)

    def set_flag(self, key: bytes) -> None:
        _call(_FSCONFIG, self._fd, _SET_FLAG, key, None, 0)

    def set_fd(self, key: bytes, fd: int) -> None:
        _call(_FSCONFIG, self._fd, _SET_FD, key, None, fd)

    def create(self) -> None:
        _call(_FSCONFIG, self._fd, _CREATE, None, None, 0)

    def reconfigure(self) -> None:
        _call(_FSCONFIG, self._fd, _RECONFIGURE, None, None, 0)

    def mount(self, attributes: int) -> int:
        """Detached: seen by whoever holds the descriptor, and by nobody else."""
        return _call(_FSMOUNT, self._fd, _CLOEXEC, attributes)


def open_tree(folder: int, path: bytes, flags: int) -> int:
    return _call(_OPEN_TREE, folder, path, flags | os.O_CLOEXEC)


def attach(fd: int, path: bytes) -> None:
    _call(_MOVE_MOUNT, fd, b"", HERE, path, _MOVE_FROM_EMPTY)


def move(source: bytes, target: bytes) -> None:
    _call(_MOVE_MOUNT, HERE, source, HERE, target, 0)


def set_attributes(fd: int, attributes: int, *, userns: int = -1, recursive: bool = False) -> None:
    """`userns`: show the ids of files as that user namespace maps them."""
    if userns >= 0:
        attributes |= ATTR_IDMAP
    body = struct.pack("=QQQQ", attributes, 0, 0, max(userns, 0))
    _call(_MOUNT_SETATTR, fd, b"", TREE_EMPTY | (TREE_RECURSIVE if recursive else 0), body, len(body))


def mount(source: bytes | None, target: bytes, kind: bytes | None, flags: int, options: bytes | None = None) -> None:
    _check(_libc.mount(source, target, kind, ctypes.c_ulong(flags), options))


def unmount(target: bytes) -> None:
    _check(_libc.umount2(target, _MNT_DETACH))


def pivot_here() -> None:
    """Make the working directory the root of this mount namespace and let go of the old one."""
    _check(_libc.pivot_root(b".", b"."))
    unmount(b".")
    os.chdir("/")


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags))


def setns(fd: int, flags: int) -> None:
    _check(_libc.setns(fd, flags))


def prctl(option: int, value: int, words: str) -> None:
    zero = ctypes.c_ulong(0)
    with step(words):
        _check(_libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero))


def die_with_parent() -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL, "die with the parent")


def bound_capabilities(kept: int) -> None:
    for capability in range(_LAST_CAPABILITY + 1):
        if not kept >> capability & 1:
            with contextlib.suppress(OSError):  # one that this kernel does not know
                prctl(_PR_CAPBSET_DROP, capability, "bound the capabilities")


def set_capabilities(kept: int) -> None:
    """Effective, permitted and inheritable."""
    low, high = kept & 0xFFFFFFFF, kept >> 32
    _check(_libc.capset(struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", low, low, low, high, high, high)))


def install_seccomp(program: bytes) -> None:
    """A classic BPF program over the system calls of this process and its future children."""
    code = ctypes.create_string_buffer(program, len(program))
    head = ctypes.create_string_buffer(struct.pack("@HxxxxxxP", len(program) // 8, ctypes.addressof(code)))
    zero = ctypes.c_ulong(0)
    filter_mode = 2
    _check(_libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(filter_mode), head, zero, zero))


def rename_process(command_line: bytes, name: bytes) -> None:
    """Replace what this process and its forked children show of how they were started; it would tell the host's paths."""
    with open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end: the 48th and 49th of proc(5)
    room = end - start
    ctypes.memmove(start, command_line[: room - 1].ljust(room, b"\0"), room)
    zero = ctypes.c_ulong(0)
    _check(_libc.prctl(_PR_SET_NAME, _bytes(name), zero, zero, zero))


def keep_only(fds: set[int]) -> None:
    """Close every descriptor above 2 but these."""
    low = 3
    for fd in sorted(fd for fd in fds if fd >= low):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, (1 << 31) - 1)


def write_at(folder: int, path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def make_userns(proc_fd: int, *, first_inside: int, first_outside: int, num_ids: int) -> int:
    """A user namespace with these ids, held by a descriptor: its ids are written by us, who have the right, not from inside."""
    up, down = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            unshare(CLONE_NEWUSER)
            # Its number as the proc file system we hold counts: that one may belong to an outer pid namespace.
            os.write(up[1], os.readlink("self", dir_fd=proc_fd).encode())
            os.close(down[1])
            os.read(down[0], 1)
            status = 0
        except OSError as error:
            status = error.errno or 1
        finally:
            os._exit(status)
    os.close(up[1])
    os.close(down[0])
    name = ""
    try:
        name = os.read(up[0], 32).decode()
        if name:
            if num_ids == 1:
                with contextlib.suppress(OSError):  # denied already where the parent's is
                    write_at(proc_fd, f"{name}/setgroups", "deny")
            for kind in ("uid_map", "gid_map"):
                write_at(proc_fd, f"{name}/{kind}", f"{first_inside} {first_outside} {num_ids}")
            return os.open(f"{name}/ns/user", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc_fd)
    finally:
        os.close(up[0])
        os.close(down[1])
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    number = max(status, 1)
    raise OSError(number, os.strerror(number))


def receive(fd: int) -> tuple[bytes, list[int]]:
    """One message and its descriptors; empty when the other end hung up."""
    sock = socket.socket(fileno=fd)
    try:
        data, fds, _, _ = socket.recv_fds(sock, MAX_MESSAGE_BYTES, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return b"", []
    finally:
        sock.detach()
    return data, fds


def send(fd: int, data: bytes, fds: tuple[int, ...] = ()) -> bool:
    """Whether somebody is there to take it."""
    sock = socket.socket(fileno=fd)
    try:
        socket.send_fds(sock, [data], fds)
    except ConnectionError:
        return False
    finally:
        sock.detach()
    return True
