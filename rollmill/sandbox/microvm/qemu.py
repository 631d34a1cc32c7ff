"""Machines by QEMU: one process each, reached by sockets it inherits, so nothing lies on disk and it dies when its owner does."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections import deque
from typing import Any

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.microvm.assets import Assets
from rollmill.sandbox.microvm.clock import counter_khz
from rollmill.sandbox.microvm.detect import Accelerator
from rollmill.sandbox.microvm.machine import Ending, MachineConfig, Saved, last_words
from rollmill.sandbox.microvm.qmp import Qmp, QmpError

START_DEADLINE_S = 30.0
ORDER_DEADLINE_S = 30.0
MOVE_DEADLINE_S = 120.0
"""For the memory of a machine to be written or read."""
CONSOLE_BYTES = 1 << 14
_SETTLE_S = 0.002
_MIB = 1 << 20
_UNLIMITED = 1 << 40
"""Bytes per second of a saved memory; the default is meant for networks."""


class QemuMachine:
    """One QEMU; made by `QemuVmm` only."""

    def __init__(self, config: MachineConfig, name: str, process: asyncio.subprocess.Process, ours: dict[str, socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        self.config = config
        self.name = name
        self.process = process
        self.agent, self.warden = ours["agent"], ours["warden"]
        self.ended: asyncio.Future[Ending] = loop.create_future()
        self.qmp: Qmp | None = None
        self._console_sock = ours["console"]
        self._console: deque[bytes] = deque()
        self._console_bytes = 0
        self._killed = False
        self._shutdown: dict[str, Any] = {}
        self._moves: asyncio.Queue[str] = asyncio.Queue()
        self._console_sock.setblocking(False)
        loop.add_reader(self._console_sock, self._read_console)
        self._watching = loop.create_task(self._watch())

    def heard(self, event: str, data: dict[str, Any]) -> None:
        if event == "SHUTDOWN":
            self._shutdown = data
        elif event == "MIGRATION":
            self._moves.put_nowait(str(data.get("status")))

    async def pause(self) -> None:
        await self._order("stop")

    async def resume(self) -> bool:
        await self._order("cont")
        return False

    async def save(self) -> Saved:
        file = _nameless()
        try:
            await self._order("getfd", {"fdname": "saved"}, fd=file)
            await self.move("migrate", "fd:saved")
            # QEMU tells of the end a moment before it can go on.
            async with asyncio.timeout(ORDER_DEADLINE_S):
                while True:
                    if (await self._order("query-status"))["status"] != "finish-migrate":
                        break
                    await asyncio.sleep(_SETTLE_S)
        except TimeoutError:
            os.close(file)
            raise RunFailure(
                Boundary.SANDBOX, f"machine {self.name} was saved and then did not settle within {ORDER_DEADLINE_S:g} s"
            ) from None
        except BaseException:
            os.close(file)
            raise
        return Saved({"machine": file}, self.config)

    async def move(self, command: str, uri: str) -> None:
        """Memory and devices out or in; whole when this returns."""
        while not self._moves.empty():
            self._moves.get_nowait()
        await self._order(command, {"uri": uri})
        try:
            async with asyncio.timeout(MOVE_DEADLINE_S):
                while (status := await self._moves.get()) not in ("completed", "failed", "cancelled"):
                    pass
        except TimeoutError:
            status = f"not done within {MOVE_DEADLINE_S:g} s"
        if status != "completed":
            detail = (await self._order("query-migrate")).get("error-desc", "") if not self.ended.done() else self.ended.result().why
            raise RunFailure(Boundary.SANDBOX, f"machine {self.name}: {command} {status}. {detail}")

    def kill(self) -> None:
        self._killed = True
        if self.process.returncode is None:
            self.process.kill()

    def console(self) -> str:
        return b"".join(self._console).decode(errors="replace")[-CONSOLE_BYTES:].strip()

    async def _order(self, command: str, arguments: dict[str, Any] | None = None, *, fd: int | None = None) -> Any:
        assert self.qmp is not None
        try:
            return await self.qmp.call(command, arguments, deadline_s=ORDER_DEADLINE_S, fd=fd)
        except QmpError as error:
            raise RunFailure(Boundary.SANDBOX, f"machine {self.name}: {error}") from None

    def _read_console(self) -> bool:
        """Whether there was anything."""
        try:
            data = self._console_sock.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._console_sock)
            return False
        self._console.append(data)
        self._console_bytes += len(data)
        while self._console_bytes - len(self._console[0]) > CONSOLE_BYTES:
            self._console_bytes -= len(self._console.popleft())
        return True

    async def _watch(self) -> None:
        assert self.process.stderr is not None
        said = b""
        while data := await self.process.stderr.read(1 << 12):
            said = (said + data)[-CONSOLE_BYTES:]
        status = await self.process.wait()
        while self._read_console():  # what it said last waits behind its death
            pass
        asyncio.get_running_loop().remove_reader(self._console_sock)
        self._console_sock.close()
        if self.qmp is not None:
            self.qmp.close()
        reason = str(self._shutdown.get("reason", ""))
        if self._killed:
            ending = Ending(why="it was killed", by_guest=False)
        elif status == 0 and reason.startswith("guest"):
            ending = Ending(why=f"the guest ended ({reason}); its console said last: {last_words(self.console())}", by_guest=True)
        else:
            words = said.decode(errors="replace").strip()[-1000:]
            ending = Ending(why=f"QEMU ended with status {status}: {words or reason or 'it said nothing'}", by_guest=False)
        if not self.ended.done():
            self.ended.set_result(ending)


class QemuVmm:
    """Starts and restores machines; keeps nothing of them."""

    is_vsock = False

    def __init__(self, assets: Assets, accelerator: Accelerator) -> None:
        self._assets = assets
        self.accelerator = accelerator.name
        self.maker = f"qemu {self.accelerator}"
        self._kernel_line = ""

    async def prepare(self) -> None:
        assert self._assets.qemu is not None, "detect.obstacle was not asked"
        process = await asyncio.create_subprocess_exec(
            str(self._assets.qemu), "--version",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=self._assets.environment(),
        )  # fmt: skip
        async with asyncio.timeout(START_DEADLINE_S):
            said, _ = await process.communicate()
        if process.returncode:
            raise RunFailure(Boundary.SANDBOX, f"{self._assets.qemu} does not run: {said.decode(errors='replace').strip()[-500:]}")
        self.maker = f"qemu {said.split(b'version ')[-1].split()[0].decode()} {self.accelerator}"
        words = ["console=ttyS0", "panic=-1", "quiet", "loglevel=3", "no_timer_check", "tsc=reliable", "random.trust_cpu=on"]
        if self.accelerator == "tcg" and (khz := await asyncio.to_thread(counter_khz)) is not None:
            words.append(f"tsc_early_khz={khz}")
        self._kernel_line = " ".join(words)

    async def boot(self, config: MachineConfig) -> QemuMachine:
        machine = await self._start(config, config.name)
        try:
            await machine.resume()
        except BaseException:
            machine.kill()
            raise
        return machine

    async def restore(self, saved: Saved, name: str) -> QemuMachine:
        # A file of its own: the children read it at the same time, each from the start.
        file = os.open(f"/proc/self/fd/{saved.files['machine']}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            machine = await self._start(saved.config, name, incoming=file)
            try:
                await machine.move("migrate-incoming", f"fd:{file}")
                await machine.resume()
            except BaseException:
                machine.kill()
                raise
        finally:
            os.close(file)
        return machine

    async def _start(self, config: MachineConfig, name: str, *, incoming: int | None = None) -> QemuMachine:
        pairs = {use: socket.socketpair() for use in ("agent", "warden", "console", "qmp")}
        ours = {use: pair[0] for use, pair in pairs.items()}
        theirs = {use: pair[1] for use, pair in pairs.items()}
        initrd = _nameless(config.initrd)
        fds = [sock.fileno() for sock in theirs.values()] + [initrd] + ([incoming] if incoming is not None else [])
        try:
            process = await asyncio.create_subprocess_exec(
                *self.command_line(config, name, {use: sock.fileno() for use, sock in theirs.items()}, initrd, incoming is not None),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=fds,
                env=self._assets.environment(),
                start_new_session=True,
            )
        except BaseException:
            for sock in ours.values():
                sock.close()
            raise
        finally:
            os.close(initrd)
            for sock in theirs.values():
                sock.close()
        machine = QemuMachine(config, name, process, ours)
        try:
            machine.qmp = await Qmp.open(ours["qmp"], machine.heard, deadline_s=START_DEADLINE_S)
            capabilities = [{"capability": "events", "state": True}]
            await machine.qmp.call("migrate-set-capabilities", {"capabilities": capabilities}, deadline_s=START_DEADLINE_S)
            await machine.qmp.call("migrate-set-parameters", {"max-bandwidth": _UNLIMITED}, deadline_s=START_DEADLINE_S)
        except QmpError as error:
            machine.kill()
            ending = await machine.ended
            raise RunFailure(Boundary.SANDBOX, f"machine {name} could not be started: {error}; {ending.why}") from None
        except BaseException:
            machine.kill()
            raise
        return machine

    def command_line(self, config: MachineConfig, name: str, fds: dict[str, int], initrd: int, incoming: bool) -> list[str]:
        program = self._assets.qemu
        assert program is not None, "detect.obstacle was not asked"
        # Without a timer chip the emulated guest has nothing to count its ticks by.
        tcg = self.accelerator == "tcg"
        machine = "microvm,accel=tcg,pit=on,pic=on,rtc=on" if tcg else "microvm,accel=kvm,rtc=on"
        command = ["setpriv", "--pdeathsig", "KILL", "--", str(program), "-name", name, "-M", machine, "-cpu", "max" if tcg else "host"]
        command += ["-m", f"size={max(1, config.memory_bytes // _MIB)}M", "-smp", "1", "-nodefaults", "-no-user-config", "-display", "none"]
        command += ["-no-reboot", "-S", "-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"]
        for folder in self._assets.data_folders():
            command += ["-L", str(folder)]
        if not incoming:  # a restored guest has its kernel in its memory; to load it again would take most of the time
            command += ["-kernel", config.kernel, "-initrd", f"/proc/self/fd/{initrd}", "-append", self._kernel_line]
        for use, fd in fds.items():
            command += ["-chardev", f"socket,id={use},fd={fd}"]
        command += ["-mon", "chardev=qmp,mode=control", "-serial", "chardev:console", "-device", "virtio-serial-device"]
        for use in ("agent", "warden"):
            command += ["-device", f"virtserialport,chardev={use},name=rollmill.{use}"]
        command += ["-drive", f"id=root,file={config.disk.replace(',', ',,')},format=raw,if=none,readonly=on,file.locking=off"]
        command += ["-device", "virtio-blk-device,drive=root"]
        return [*command, "-incoming", "defer"] if incoming else command


def _nameless(data: bytes = b"") -> int:
    """A file that is gone when its last holder is."""
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        return os.dup(file.fileno())
