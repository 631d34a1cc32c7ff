"""The zygote: one small single-threaded process per owner that keeps boxes prepared, kills and reaps them, and tells the owner of each end.

It is not on the way of an order: prepared boxes take orders themselves from a socket they share. When the owner dies or hangs up
it kills every box, removes its control groups and ends; when it dies itself, the kernel kills its boxes.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import select
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from typing import NoReturn

from .. import wire
from . import kernel as k
from .cage import live
from .opener import open_layers
from .settings import News, Settings, parse_news
from .template import enter_template

_MAX_LATE = 4096
_MAX_FAILED = 20
"""Boxes that failed to become ready in a row, after which no more are tried."""
_AGAIN_S = 0.1
"""After a box could not be prepared."""
_LATE_MS = 50
_GONE_PER_MESSAGE = 1024
_NUM_NEWS = 256
_SLOT_BITS = 20
_U32 = struct.Struct("<I")
_ENDED = struct.Struct("<III")


class Told(IntEnum):
    READY = 1
    BROKEN = 2
    GONE = 3


class Asked(IntEnum):
    KILL = 1
    POOL = 2


class State(Enum):
    """PREPARING -> IDLE -> TAKEN."""

    PREPARING = auto()
    IDLE = auto()
    TAKEN = auto()


@dataclass(kw_only=True)
class Slot:
    id: int
    """The slot's number in the low 20 bits, a count of boxes above, so that news of an old box is never taken for a new one's."""
    serial: int
    pid: int
    state: State = State.PREPARING
    is_killed: bool = False


def main() -> NoReturn:
    """`zygote FOLDER CONTROL_FD`: serve the owner at the other end of the control socket; its first message brings four descriptors."""
    control_fd = int(sys.argv[-1])
    k.rename_process(b"/sbin/init", b"init")
    os.set_inheritable(control_fd, False)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o022)
    _, fds = k.receive(control_fd)
    if len(fds) != 4:
        os._exit(1)
    orders_fd, opener_fd, owner_fd, plan_fd = fds
    try:
        with open(plan_fd, "rb") as file:
            file.seek(0)
            plan = wire.Body(file.read())
        settings = Settings.parse(plan)
        settings.orders_fd = orders_fd
        boxes = _begin(settings, plan, control_fd, opener_fd, owner_fd)
    except (OSError, ValueError, struct.error) as error:
        _broken(control_fd, error)
    k.send(control_fd, struct.pack("<II", Told.READY, settings.has_idmap))
    boxes.serve()
    os._exit(0)


def _begin(settings: Settings, plan: wire.Body, control_fd: int, opener_fd: int, owner_fd: int) -> Boxes:
    memory_parent, settings.memory_fd = _open_group(settings.memory, settings.own)
    cpu_parent, settings.cpu_fd = _open_group(settings.cpu, settings.own)
    settings.proc_fd = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if settings.is_rootless:
        _become_own_root(settings.proc_fd)
    own_pids_fd = os.open("self/ns/pid", os.O_RDONLY | os.O_CLOEXEC, dir_fd=settings.proc_fd)
    with k.step("fork"):
        opener = os.fork()
    if opener == 0:
        open_layers(settings, opener_fd)
    os.close(opener_fd)
    # Not before the opener's fork: a change of the root takes along every process of the mount namespace.
    with k.step("unshare the mount namespace"):
        k.unshare(k.CLONE_NEWNS)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    settings.news_fd = theirs.detach()
    enter_template(settings, plan)
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for fd in (0, 1, 2):
        os.dup2(null, fd)  # a box must hold nothing of its owner's terminal
    os.close(null)
    os.environ.clear()
    boxes = Boxes(settings, control_fd, owner_fd, ours.detach(), own_pids_fd, opener, (memory_parent, cpu_parent))
    # Children share these pages for as long as neither reference counts nor the collector touch them.
    gc.disable()
    gc.collect()
    gc.freeze()
    return boxes


def _open_group(parent: str, own: str) -> tuple[int, int]:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    if not parent:
        return -1, -1
    try:
        return os.open(parent, flags), os.open(f"{parent}/{own}", flags)
    except OSError:
        return -1, -1


def _become_own_root(proc_fd: int) -> None:
    """Without rights on the host: the first process of an own user and pid namespace, where the boxes can be made."""
    user, group = os.geteuid(), os.getegid()
    with k.step("unshare user, mount and pid namespaces"):
        k.unshare(k.CLONE_NEWUSER | k.CLONE_NEWNS | k.CLONE_NEWPID)
    with k.step("map the user"):
        k.write_at(proc_fd, "self/setgroups", "deny")
        k.write_at(proc_fd, "self/uid_map", f"1000 {user} 1")
        k.write_at(proc_fd, "self/gid_map", f"1000 {group} 1")
    with k.step("fork into the pid namespace"):
        pid = os.fork()
    if pid:
        # The owner waits for this process; nothing else is left to do here but to end with its child.
        k.keep_only(set())
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
    k.die_with_parent()


def _broken(control_fd: int, error: Exception) -> NoReturn:
    number = error.errno if isinstance(error, OSError) else errno.EINVAL
    words = str(error.strerror) if isinstance(error, OSError) else f"read the plan ({error})"
    k.send(control_fd, struct.pack("<II", Told.BROKEN, number or errno.EINVAL) + wire.text(words.encode()))
    os._exit(1)


class Boxes:
    """The zygote's table of boxes, from their fork to their end."""

    def __init__(
        self, settings: Settings, control_fd: int, owner_fd: int, news_fd: int, own_pids_fd: int, opener: int, parents: tuple[int, int]
    ) -> None:  # fmt: skip
        self._settings = settings
        self._control_fd, self._owner_fd, self._news_fd, self._own_pids_fd = control_fd, owner_fd, news_fd, own_pids_fd
        self._opener, self._parents = {opener}, parents
        self._wake_fd = _wake_on_child()
        self._most = settings.pool
        self._by_pid: dict[int, Slot] = {}
        self._by_id: dict[int, Slot] = {}
        self._num = dict.fromkeys(State, 0)
        self._free: list[int] = []
        self._num_numbers = self._next_serial = self._num_failed = 0
        self._has_prepared = False
        """Until one was, a failure means that this machine cannot; later ones pass, when what ran short is there again."""
        self._not_before = 0.0
        self._late: list[int] = []
        """Boxes whose control groups the kernel still holds."""
        self._gone: list[bytes] = []

    def serve(self) -> None:
        """Until the owner is gone."""
        poll = select.poll()
        for fd in (self._control_fd, self._owner_fd, self._wake_fd, self._news_fd):
            poll.register(fd, select.POLLIN)
        while True:
            while self._wants_more():
                self._prepare_one()
            ready = {fd for fd, _ in poll.poll(self._patience_ms())}
            if self._owner_fd in ready or (self._control_fd in ready and not self._obey()):
                break
            if self._news_fd in ready:
                self._hear_boxes()
            if self._wake_fd in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_fd, 4096)
                self._reap()
            self._remove_late()
        self._end_all()

    def _is_short(self) -> bool:
        preparing = self._num[State.PREPARING]
        return preparing + self._num[State.IDLE] < self._most and preparing < self._settings.num_preparing

    def _wants_more(self) -> bool:
        return self._is_short() and time.monotonic() >= self._not_before

    def _patience_ms(self) -> float | None:
        if self._is_short():
            return max(0.0, self._not_before - time.monotonic()) * 1000 + 1
        return _LATE_MS if self._late else None

    def _prepare_one(self) -> None:
        if not self._free:
            self._free.append(self._num_numbers)
            self._num_numbers += 1
        number, serial = self._free.pop(), self._next_serial
        self._next_serial += 1
        slot = Slot(id=(serial << _SLOT_BITS | number) & 0xFFFFFFFF, serial=serial, pid=-1)
        try:
            slot.pid = self._fork(slot)
        except OSError as error:
            self._free.append(number)
            self._failed(error.errno or errno.EIO, "fork a box with its pid namespace")
            return
        self._by_pid[slot.pid] = self._by_id[slot.id] = slot
        self._num[slot.state] += 1

    def _fork(self, slot: Slot) -> int:
        k.unshare(k.CLONE_NEWPID)
        pid = -1
        try:
            pid = os.fork()
            if pid == 0:
                _begin_box(self._settings, slot)
        finally:
            # Back to where this process lives, or the next box would be made inside this one.
            if pid != 0:
                k.setns(self._own_pids_fd, k.CLONE_NEWPID)
        return pid

    def _move(self, slot: Slot, state: State) -> None:
        self._num[slot.state] -= 1
        self._num[state] += 1
        slot.state = state

    def _failed(self, number: int, words: str) -> None:
        self._not_before = time.monotonic() + _AGAIN_S
        self._num_failed += 1
        if not self._has_prepared or (self._num_failed > _MAX_FAILED and not self._num[State.IDLE]):
            _broken(self._control_fd, k.StepFailed(number, words))

    def _hear_boxes(self) -> None:
        poll = select.poll()
        poll.register(self._news_fd, select.POLLIN)
        for _ in range(_NUM_NEWS):
            if not poll.poll(0):
                return
            box, what, number, words = parse_news(k.receive(self._news_fd)[0])
            slot = self._by_id.get(box)
            if slot is None:
                continue
            if what == News.PREPARED and slot.state is State.PREPARING:
                self._move(slot, State.IDLE)
                self._num_failed = 0
                self._has_prepared = True
            elif what == News.TAKEN and slot.state is State.IDLE:
                self._move(slot, State.TAKEN)
            elif what == News.FAILED:
                self._failed(number, words)

    def _obey(self) -> bool:
        """One order of the owner; False when it hung up."""
        message, _ = k.receive(self._control_fd)
        if not message:
            return False
        what, *values = struct.unpack(f"<{len(message) // 4}I", message[: len(message) // 4 * 4])
        if what == Asked.POOL and values:
            self._most = min(self._settings.pool, values[0])
        elif what == Asked.KILL:
            for box in values:
                slot = self._by_id.get(box)
                if slot is not None and slot.state is not State.TAKEN:
                    self._hear_boxes()
                if slot is not None and slot.state is State.TAKEN:
                    slot.is_killed = True
                    os.kill(slot.pid, signal.SIGKILL)
        return True

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            self._opener.discard(pid)
            if pid in self._by_pid:
                self._forget(self._by_pid[pid], status)
        for at in range(0, len(self._gone), _GONE_PER_MESSAGE):
            k.send(self._control_fd, _U32.pack(Told.GONE) + b"".join(self._gone[at : at + _GONE_PER_MESSAGE]))
        self._gone.clear()

    def _forget(self, slot: Slot, status: int) -> None:
        if slot.state is not State.TAKEN:
            self._hear_boxes()  # what a box said before it died must be believed first
        if slot.state is State.TAKEN:
            is_hit = not slot.is_killed and os.waitstatus_to_exitcode(status) == -signal.SIGKILL
            self._gone.append(_ENDED.pack(slot.id, status, is_hit and self._ran_out(slot.serial)))
        self._num[slot.state] -= 1
        del self._by_pid[slot.pid], self._by_id[slot.id]
        self._free.append(slot.id & (1 << _SLOT_BITS) - 1)
        self._remove_group(slot.serial)

    def _ran_out(self, serial: int) -> bool:
        """Whether the kernel killed a process of the group because its memory was used up."""
        name = "memory.events" if self._settings.group_version == 2 else "memory.oom_control"
        if self._settings.memory_fd < 0:
            return False
        try:
            fd = os.open(f"b{serial}/{name}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._settings.memory_fd)
        except OSError:
            return False
        with open(fd, "rb") as file:
            return any(line.startswith(b"oom_kill ") and int(line.split()[1]) > 0 for line in file)

    def _remove_group(self, serial: int) -> None:
        for fd in (self._settings.cpu_fd, self._settings.memory_fd):
            if fd >= 0:
                try:
                    os.rmdir(f"b{serial}", dir_fd=fd)
                except FileNotFoundError:
                    pass
                except OSError:
                    if fd == self._settings.memory_fd and len(self._late) < _MAX_LATE:
                        self._late.append(serial)

    def _remove_late(self) -> None:
        late, self._late = self._late, []
        for serial in late:
            self._remove_group(serial)

    def _end_all(self) -> None:
        for pid in (*self._by_pid, *self._opener):
            os.kill(pid, signal.SIGKILL)
        for pid, slot in self._by_pid.items():
            os.waitpid(pid, 0)
            self._remove_group(slot.serial)
        for pid in self._opener:
            os.waitpid(pid, 0)
        for _ in range(200):
            if not self._late:
                break
            time.sleep(0.01)
            self._remove_late()
        for parent in self._parents:
            if parent >= 0:
                with contextlib.suppress(OSError):  # what the kernel still holds is swept by the next owner
                    os.rmdir(self._settings.own, dir_fd=parent)


def _begin_box(settings: Settings, slot: Slot) -> NoReturn:
    signal.set_wakeup_fd(-1)
    # The first process of a pid namespace is out of reach of every signal that it does not handle; its commands must not inherit more.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    live(settings, slot.id, slot.serial)


def _wake_on_child() -> int:
    """A descriptor that becomes readable when a child ended."""
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return read
