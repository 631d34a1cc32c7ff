"""The owner's end of the zygote: starts it, hands it orders, hears of boxes that ended; knows no requests of boxes."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import platform
import re
import socket
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.agent import native, wire
from rollmill.sandbox.agent.native import build
from rollmill.sandbox.namespace import explain, filter, groups
from rollmill.sandbox.namespace.layers import Layer
from rollmill.sandbox.namespace.template import host_template

START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 60.0
OPEN_DEADLINE_S = 60.0
_MAX_MESSAGE = 1 << 16
_FIRST_ID = 1_879_048_192
"""Far above the ids that distributions, containers and directory services hand out."""
_NUM_IDS = 65_536
_NEEDED_CAPABILITIES = (0, 6, 7, 12, 21)
"""chown, setgid, setuid, net_admin, sys_admin."""
_BOOT = "import sys; sys.path.append(sys.argv[1]); from agent.plain.zygote import main; main()"
_DETACHED_LAYERS, _USER_ATTRIBUTES = (6, 15), (6, 6)
"""Since when overlays take detached mounts as layers, and tmpfs has user attributes."""
_READY, _BROKEN, _GONE = 1, 2, 3
_KILL, _POOL = 1, 2

Gone = Callable[[int, str, bool], None]


def is_rootless() -> bool:
    """Whether this process lacks the rights that boxes are made with, and must first become root of a user namespace of its own."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        held = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff:"))
    return not all(held >> bit & 1 for bit in _NEEDED_CAPABILITIES)


def _kernel() -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(found[1]), int(found[2])) if found else (0, 0)


def stacks_by_path() -> bool:
    """Whether this kernel stacks attached mounts only. `ROLLMILL_BOX_STACK=path` asks for what old kernels need."""
    return os.environ.get("ROLLMILL_BOX_STACK") == "path" or _kernel() < _DETACHED_LAYERS


def _num_ids() -> tuple[int, int]:
    """First id and number of ids for boxes; a container may own only a few."""
    with open("/proc/self/uid_map") as lines:
        top = max(int(first) + int(count) for first, _, count in (line.split() for line in lines))
    first = min(_FIRST_ID, top - _NUM_IDS)
    return (first, _NUM_IDS) if first > _NUM_IDS else (1000, 1)


def command_line(program: Path | None, control_fd: int) -> list[str]:
    """The plain zygote is isolated and without site packages: a bare interpreter, whatever the owner has imported."""
    if program is not None:
        return [str(program), "zygote", str(control_fd)]
    folder = str(Path(native.__file__).resolve().parents[2])
    return [sys.executable, "-I", "-S", "-B", "-c", _BOOT, folder, str(control_fd)]


def environment() -> dict[str, str]:
    """Nothing of the owner's, whose environment holds keys; only where its interpreter finds its libraries."""
    return {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}


class Order(NamedTuple):
    """On its way to whichever box is free."""

    message: bytes
    fds: tuple[int, ...]
    passed: socket.socket
    lent: tuple[int, ...]

    def close(self) -> None:
        self.passed.close()
        for fd in self.lent:
            os.close(fd)


class Zygote:
    """A running zygote. `on_gone(box id, why, ruined)` is called for each box that ended, `on_lost(why)` once when it ended itself."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket, orders: socket.socket, opener: socket.socket) -> None:
        self.process = process
        self.facts: dict[str, str] = {}
        self.is_rootless = False
        self.has_one_id = False
        self.first_id = 0
        """Who the root of a box is on this machine."""
        self.lost = False
        self._groups = groups.Groups(version=0)
        self._control, self._orders, self._opener = control, orders, opener
        self._unsent: deque[Order] = deque()
        self.can_save = _kernel() >= _USER_ATTRIBUTES
        """Older kernels note what a layer hides where only the host's root can read it."""
        self.by_path = False
        """Whether layers are kept by the opener, by number, and not here as descriptors."""
        self._opening = asyncio.Lock()
        self._dropping: set[asyncio.Future[tuple[int, list[int]]]] = set()
        self._on_gone: Gone = lambda box, why, ruined: None
        self._on_lost: Callable[[str], None] = lambda why: None

    @classmethod
    async def start(cls, *, pool: int, on_gone: Gone, on_lost: Callable[[str], None]) -> Zygote:
        program = await asyncio.to_thread(build.binary)
        by_path = stacks_by_path()
        plan_fd, rootless, made, first_id, num_ids = await asyncio.to_thread(_write_plan, pool, by_path)
        ours, theirs = zip(*(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)), strict=True)
        owner_fd = os.pidfd_open(os.getpid())
        try:
            line = command_line(program, theirs[0].fileno())
            process = await asyncio.create_subprocess_exec(
                # What a box sees as the command line of its first process; an interpreter would not find its library by it.
                *(["/sbin/init", *line[1:]] if program is not None else line), executable=line[0],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(theirs[0].fileno(),), start_new_session=True,
                env=environment(),
            )  # fmt: skip
            socket.send_fds(ours[0], [b"plan"], [theirs[1].fileno(), theirs[2].fileno(), owner_fd, plan_fd])
        finally:
            os.close(owner_fd)
            os.close(plan_fd)
            for end in theirs:
                end.close()
        for end in ours:
            end.setblocking(False)
        zygote = cls(process, *ours)
        zygote.is_rootless, zygote._groups = rootless, made
        zygote.has_one_id, zygote.by_path, zygote.first_id = num_ids == 1, by_path, first_id
        zygote._on_gone, zygote._on_lost = on_gone, on_lost
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                hello = await asyncio.get_running_loop().sock_recv(ours[0], _MAX_MESSAGE)
        except BaseException as error:
            zygote._hang_up()
            if isinstance(error, TimeoutError):
                process.kill()
                raise RunFailure(Boundary.SANDBOX, f"the zygote said nothing for {START_DEADLINE_S:g} s") from None
            raise
        zygote.facts = {
            "privilege": "rootless" if rootless else "root",
            "helper": "native" if program is not None else "plain",
            "memory": f"cgroup-v{made.version}" if made.version else "rlimit-as",
            "cpu": "cgroup" if made.cpu or made.version == 2 else "none",
            "stacking": "by path" if by_path else "by descriptor",
            "ids": _parse_hello(hello, rootless),
        }
        asyncio.get_running_loop().add_reader(ours[0], zygote._hear)
        return zygote

    def order(self, message: bytes, fds: Sequence[int], passed: socket.socket, *, lent: bool = False) -> None:
        """Order a box, now or as soon as the socket takes it; the passed socket is the first descriptor and is closed here once sent, as
        are the others when they were `lent` for this order."""
        self._unsent.append(Order(message, (passed.fileno(), *fds), passed, tuple(fds) if lent else ()))
        if self.lost:
            self._unsent.pop().close()
            return
        if len(self._unsent) == 1:
            self._flush()

    def kill(self, box: int) -> None:
        if not self.lost:
            with contextlib.suppress(BlockingIOError, ConnectionError):  # a zygote that takes no orders is lost soon, and its boxes with it
                self._control.send(struct.pack("<II", _KILL, box))

    def groups_of(self, box: int) -> tuple[str, ...]:
        """Files through which a process enters the control groups of a box."""
        return tuple(
            f"{parent}/{self._groups.own}/b{box >> 20}/cgroup.procs" for parent in (self._groups.memory, self._groups.cpu) if parent
        )

    def size_pool(self, num: int) -> None:
        """How many boxes are kept prepared."""
        if not self.lost:
            self._control.send(struct.pack("<II", _POOL, num))

    async def open_layer(self, path: str) -> Layer:
        """A folder of the host as a layer that boxes can be stacked on."""
        try:
            number, fds = await self._ask_opener(b"O" + os.fsencode(path))
        except OSError as error:
            raise RunFailure(Boundary.SANDBOX, f"the folder {path} cannot be a layer: {error.strerror}") from None
        return self._layer(number) if self.by_path else Layer(fds[0])

    async def keep(self, fd: int) -> Layer:
        """A layer from the descriptor that a frozen box gave; it is the layer's from now on."""
        if not self.by_path:
            return Layer(fd)
        try:
            number, _ = await self._ask_opener(b"A", fd)
        finally:
            os.close(fd)
        return self._layer(number)

    async def lend(self, stack: Sequence[Layer], folders: Sequence[str] = ()) -> tuple[list[int], bool]:
        """Descriptors to order a box with, and whether they are the order's own, to be closed once it was sent.

        `folders` of the host follow the stack, opened for this box alone: a mount is in one place only.
        """
        if not folders and (not self.by_path or not stack):
            return [layer.fd for layer in stack], False
        opened: list[Layer] = []
        try:
            for path in folders:
                opened.append(await self.open_layer(path))
            if not self.by_path:
                return [os.dup(layer.fd) for layer in (*stack, *opened)], True
            numbers = [layer.fd for layer in (*stack, *opened)]
            _, fds = await self._ask_opener(b"C" + struct.pack(f"<{len(numbers)}I", *numbers))
            return fds, True
        finally:
            for layer in opened:
                layer.let_go()

    def _layer(self, number: int) -> Layer:
        def drop(number: int) -> None:
            if not self.lost:
                self._dropping.add(task := asyncio.ensure_future(self._ask_opener(b"D" + struct.pack("<I", number))))
                task.add_done_callback(self._dropping.discard)
                task.add_done_callback(lambda done: done.cancelled() or done.exception())

        return Layer(number, drop)

    async def _ask_opener(self, request: bytes, *passed: int) -> tuple[int, list[int]]:
        """Its number and descriptors; OSError when it says no."""
        loop = asyncio.get_running_loop()
        async with self._opening, asyncio.timeout(OPEN_DEADLINE_S):
            if self.lost:
                raise RunFailure(Boundary.SANDBOX, "the zygote that opens layers died")
            socket.send_fds(self._opener, [request], passed)
            answer: asyncio.Future[tuple[bytes, list[int]]] = loop.create_future()
            loop.add_reader(self._opener, _receive, self._opener, answer)
            try:
                data, fds = await answer
            finally:
                loop.remove_reader(self._opener)
        if len(data) != 8:
            raise RunFailure(Boundary.SANDBOX, "the zygote that opens layers died")
        error, number = struct.unpack("<II", data)
        if error:
            raise OSError(error, os.strerror(error))
        return number, fds

    async def stop(self) -> None:
        """Hang up: the zygote kills every box, cleans up and ends; one that was killed is cleaned up after."""
        self._lose("the backend was closed")
        try:
            async with asyncio.timeout(STOP_DEADLINE_S):
                await self.process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            raise RunFailure(Boundary.SANDBOX, f"the zygote did not end within {STOP_DEADLINE_S:g} s") from None
        if self._groups.version:
            await asyncio.to_thread(self._groups.remove)

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        while self._unsent:
            order = self._unsent[0]
            try:
                socket.send_fds(self._orders, [order.message], order.fds)
            except BlockingIOError:
                loop.add_writer(self._orders, self._flush)
                return
            except OSError as error:
                self._lose(f"it takes no orders: {error}")
                return
            self._unsent.popleft().close()
        loop.remove_writer(self._orders)

    def _hear(self) -> None:
        while not self.lost:
            try:
                message = self._control.recv(_MAX_MESSAGE)
            except BlockingIOError:
                return
            except ConnectionError:
                message = b""
            if not message:
                self._lose("the zygote that made it died")
                return
            (kind,) = struct.unpack_from("<I", message)
            if kind == _BROKEN:
                self._lose(_broken(message, self.is_rootless))
            elif kind == _GONE:
                for box, status, ruined in struct.iter_unpack("<III", message[4:]):
                    why = "it used up its memory, its first process included" if ruined else ended_by(status)
                    self._on_gone(box, why, bool(ruined))

    def _lose(self, why: str) -> None:
        if not self.lost:
            self._hang_up()
            self._on_lost(why)

    def _hang_up(self) -> None:
        self.lost = True
        loop = asyncio.get_running_loop()
        for end in (self._control, self._orders, self._opener):
            loop.remove_reader(end)
            loop.remove_writer(end)
            end.close()
        while self._unsent:
            self._unsent.pop().close()


def _write_plan(pool: int, by_path: bool) -> tuple[int, bool, groups.Groups, int, int]:
    rootless = is_rootless()
    made = groups.open_groups()
    cores = os.cpu_count() or 1
    first_id, num_ids = (1000, 1) if rootless else _num_ids()
    program = filter.program(platform.machine()) or b""
    plan = (
        struct.pack("<IIIIIII", rootless, made.version, min(pool, 2 * cores), pool, 2 * cores, first_id, num_ids)
        + struct.pack("<II", by_path, _kernel() >= _USER_ATTRIBUTES or rootless)
        + wire.text(program)
        + wire.texts(os.fsencode(path) for path in (made.own, made.memory, made.cpu))
        + host_template().pack()
    )
    fd = os.memfd_create("plan", os.MFD_CLOEXEC)
    view = memoryview(plan)
    while view:
        view = view[os.write(fd, view) :]
    return fd, rootless, made, first_id, num_ids


def _parse_hello(message: bytes, rootless: bool) -> str:
    if not message:
        raise RunFailure(Boundary.SANDBOX, "the zygote ended while it started; its own words are on standard error")
    kind, value = struct.unpack_from("<II", message)
    if kind == _BROKEN:
        raise RunFailure(Boundary.SANDBOX, _broken(message, rootless))
    return "the image's own" if value else "one user; files of the host appear as nobody's"


def _broken(message: bytes, rootless: bool) -> str:
    _, number = struct.unpack_from("<II", message)
    step = wire.Body(message[8:]).text().decode(errors="replace")
    return explain.sentence(OSError(number, f"{step}: {os.strerror(number)}"), rootless=rootless)


def ended_by(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"signal {-code} ended its first process" if code < 0 else f"its first process ended with status {code}"


def _receive(sock: socket.socket, answer: asyncio.Future[tuple[bytes, list[int]]]) -> None:
    try:
        data, ancillary, _, _ = sock.recvmsg(64, socket.CMSG_SPACE(4 * 253), socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        return
    except OSError:
        data, ancillary = b"", []
    fds = array.array("i")
    for _, _, payload in ancillary:
        fds.frombytes(payload)
    if answer.done():
        for fd in fds:
            os.close(fd)
    else:
        answer.set_result((data, list(fds)))
