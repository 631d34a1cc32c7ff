"""The zygote: one small single-threaded process per owner that forks every box, enforces its lifetime and reaps it.

When the owner dies or hangs up, it kills every box, removes what it made and ends; when it dies itself, the kernel kills its
boxes. It knows nothing of what a box is used for.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any, NoReturn

from . import cage, cgroups, explain, init, root, wire
from . import kernel as k

_NEEDED = (k.CAP_CHOWN, k.CAP_SETGID, k.CAP_SETUID, k.CAP_NET_ADMIN, k.CAP_SYS_ADMIN)
_TRIAL = cage.Order(box="trial", memory_bytes=256 << 20, disk_bytes=1 << 20, num_processes=16, lifetime_s=10.0)
_NUM_IDS = 20_000
_FIRST_ID = 1_879_048_192
"""Far above the ids that distributions, containers and directory services hand out."""
_MAX_MESSAGE = 1 << 16


def main() -> NoReturn:
    """`zygote CONTROL_FD OWNER_PID`: serve the owner at the other end of the control socket, whose first message is the plan."""
    control = socket.socket(fileno=int(sys.argv[-2]))
    owner_fd = os.pidfd_open(int(sys.argv[-1]))
    plan = json.loads(control.recv(_MAX_MESSAGE))
    k.rename_process("/sbin/init", "init")
    capabilities = k.effective_capabilities()
    rootless = not all(capabilities >> bit & 1 for bit in _NEEDED)
    try:
        boxes = _prepare(control, owner_fd, plan, rootless)
        facts = boxes.try_one()
    except OSError as error:
        control.send(json.dumps({"broken": explain.sentence(error, rootless=rootless)}).encode())
        os._exit(1)
    control.send(json.dumps({"ready": facts}).encode())
    boxes.serve()
    os._exit(0)


def _prepare(control: socket.socket, owner_fd: int, plan: dict[str, Any], rootless: bool) -> Boxes:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    groups = cgroups.open_groups()
    if rootless:
        _become_own_root()
    else:
        k.unshare(k.CLONE_NEWNS, "mount namespace")
    first_id = _first_free_id()
    proc_fd = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    own_pids_fd = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    root.enter_template(plan, keep_proc=rootless)
    os.environ.clear()
    os.environ.update(init.ENVIRON)
    os.umask(0o022)
    zygote = cage.Zygote(proc_fd=proc_fd, groups=groups, rootless=rootless, first_id=first_id, program=cage.filter_program())
    # Children share these pages for as long as nobody's reference counts or collector touches them.
    gc.collect()
    gc.freeze()
    return Boxes(control, owner_fd, zygote, own_pids_fd)


def _become_own_root() -> None:
    """Without rights on the host: become the first process of an own user and pid namespace, where the boxes can be made."""
    user, group = os.geteuid(), os.getegid()
    k.unshare(k.CLONE_NEWUSER | k.CLONE_NEWNS | k.CLONE_NEWPID, "user, mount and pid namespaces")
    proc_fd = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    cage.map_self(proc_fd, inside=root.USER_ID, outside_user=user, outside_group=group)
    os.close(proc_fd)
    pid = os.fork()
    if pid:
        # The owner waits for this process; nothing else is left to do here but to end with its child.
        for fd in range(3, 64):
            with contextlib.suppress(OSError):
                os.close(fd)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
    k.prctl(k.PR_SET_PDEATHSIG, signal.SIGKILL, "pdeathsig")


def _first_free_id() -> int:
    """The start of a range of user ids that exists here; a container may own only a few."""
    with open("/proc/self/uid_map") as lines:
        top = max(int(first) + int(count) for first, _, count in (line.split() for line in lines))
    # Owners on one host keep apart, as long as their pids differ in the last four digits.
    return min(_FIRST_ID + os.getpid() % 10_000 * _NUM_IDS, top - _NUM_IDS)


class Boxes:
    """The zygote's table of living boxes: name -> pid, and back."""

    def __init__(self, control: socket.socket, owner_fd: int, zygote: cage.Zygote, own_pids_fd: int) -> None:
        self._control = control
        self._owner_fd = owner_fd
        self._zygote = zygote
        self._own_pids_fd = own_pids_fd
        self._pids: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._why: dict[str, str] = {}
        self._ends: list[tuple[float, str]] = []
        self._num_made = 0
        self._wake_fd = _wake_on_child()

    def try_one(self) -> dict[str, str]:
        """Make one box and throw it away: the proof that this machine can, and what it could not give."""
        ours, theirs = socket.socketpair()
        with ours:
            self._create(_TRIAL, theirs)
            ours.sendall(wire.pack({"id": 0, "op": "world", "files": {}}))
            frame = wire.receive(ours)
        os.waitpid(self._pids[_TRIAL.box], 0)
        self._forget(_TRIAL.box)
        if frame is None:
            raise OSError(0, "the first process of a box ended before it could answer")
        header, _ = frame
        if "errno" in header:
            raise OSError(header["errno"], header["message"])
        groups = self._zygote.groups
        return {
            "privilege": "rootless" if self._zygote.rootless else "root",
            "memory": groups.name if groups else "rlimit-as",
            "proc": "private" if header["has_proc"] else "none: this kernel refuses to mount /proc in an unprivileged user namespace",
            "seccomp": "deny-list" if self._zygote.program else "none: no table of system calls for this machine type",
        }

    def serve(self) -> None:
        poll = select.poll()
        for fd in (self._control.fileno(), self._owner_fd, self._wake_fd):
            poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(self._until_next_end())}
            if self._owner_fd in ready or (self._control.fileno() in ready and not self._obey()):
                break
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_fd, 4096)
            self._end_lifetimes()
            for news in self._reap():
                with contextlib.suppress(OSError):  # the owner hung up: the next turn sees it
                    self._control.send(json.dumps(news).encode())
        self._end_all()

    def _until_next_end(self) -> float | None:
        return max(0.0, self._ends[0][0] - time.monotonic()) * 1000 + 1 if self._ends else None

    def _end_lifetimes(self) -> None:
        now = time.monotonic()
        while self._ends and (self._ends[0][0] <= now or self._ends[0][1] not in self._pids):
            _, box = heapq.heappop(self._ends)
            self._kill(box, "its lifetime ended")

    def _obey(self) -> bool:
        """One order of the owner; False when it hung up."""
        try:
            message, passed, _, _ = socket.recv_fds(self._control, _MAX_MESSAGE, 1)
        except ConnectionError:
            return False
        if not message:
            return False
        order = json.loads(message)
        if "kill" in order:
            self._kill(order["kill"], "its owner closed it")
            return True
        box = cage.Order(**order["create"])
        try:
            self._create(box, socket.socket(fileno=passed[0]))
        except OSError as error:
            self._control.send(json.dumps({"gone": box.box, "why": f"the zygote cannot fork: {error}", "ruined": False}).encode())
            return True
        heapq.heappush(self._ends, (time.monotonic() + box.lifetime_s, box.box))
        return True

    def _create(self, order: cage.Order, sock: socket.socket) -> None:
        owner_id = root.USER_ID if self._zygote.rootless else self._zygote.first_id + self._num_made % _NUM_IDS
        self._num_made += 1
        with sock:
            k.unshare(k.CLONE_NEWPID, "pid namespace")
            pid = -1
            try:
                pid = os.fork()
                if pid == 0:
                    _be_a_box(sock, order, self._zygote, owner_id)
            finally:
                # Back to where this process lives, or the next box would be made inside this one.
                if pid != 0:
                    k.setns(self._own_pids_fd, k.CLONE_NEWPID, "own pid namespace")
        self._pids[order.box] = pid
        self._names[pid] = order.box

    def _kill(self, box: str, why: str) -> None:
        pid = self._pids.get(box)
        if pid is not None:
            self._why.setdefault(box, why)
            os.kill(pid, signal.SIGKILL)

    def _reap(self) -> list[dict[str, Any]]:
        """What the owner must hear of each box that ended since the last call."""
        news: list[dict[str, Any]] = []
        while self._pids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            box = self._names[pid]
            killed = box not in self._why and os.waitstatus_to_exitcode(status) == -signal.SIGKILL
            ruined = killed and self._zygote.groups is not None and self._zygote.groups.ran_out(box)
            why = "it used up its memory, its first process included" if ruined else self._why.pop(box, ended_by(status))
            news.append({"gone": box, "why": why, "ruined": ruined})
            self._forget(box)
        return news

    def _forget(self, box: str) -> None:
        del self._names[self._pids.pop(box)]
        if self._zygote.groups is not None:
            self._zygote.groups.remove(box)

    def _end_all(self) -> None:
        for pid in self._names:
            os.kill(pid, signal.SIGKILL)
        for box, pid in list(self._pids.items()):
            os.waitpid(pid, 0)
            self._forget(box)
        if self._zygote.groups is not None:
            self._zygote.groups.close()


def _wake_on_child() -> int:
    """A descriptor that becomes readable when a child ended."""
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return read


def ended_by(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"signal {-code} ended its first process" if code < 0 else f"its first process ended with status {code}"


def _be_a_box(sock: socket.socket, order: cage.Order, zygote: cage.Zygote, owner_id: int) -> NoReturn:
    """The life of PID 1; never returns into the zygote's frames."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the first process of a pid namespace ignores what it does not handle
        _keep_only({sock.fileno(), zygote.proc_fd, *([zygote.groups.fd] if zygote.groups else [])})
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.close(null)
        os.setsid()
        inside = cage.lock_in(order, zygote, owner_id)
        gc.enable()
        init.Init(sock=sock, inside=inside, wake_fd=_wake_on_child()).serve()
        status = 0
    except Exception as error:  # noqa: BLE001 - there is no caller above: what failed goes to the owner, and the box ends
        number, words = (error.errno, error.strerror) if isinstance(error, OSError) else (0, repr(error))
        with contextlib.suppress(OSError):  # the owner hung up
            sock.sendall(wire.pack({"id": wire.LAST_WORDS, "errno": number or 0, "message": words or str(error)}))
    finally:
        os._exit(status)


def _keep_only(kept: set[int]) -> None:
    low = 3
    for fd in sorted(kept):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, 1 << 20)
