"""Machines by Firecracker, over its HTTP interface on a unix socket. Tried against a fake of that interface only, never a real one.

A machine's sockets lie in a folder of its own, which is also its working directory: a restored machine finds its vsock at the relative
path it was saved with, so siblings do not meet. Saving cuts the connections into the guest; its agent listens for new ones.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.microvm.machine import VSOCK_PORT, Ending, MachineConfig, Saved, last_words

START_DEADLINE_S = 30.0
CONNECT_DEADLINE_S = 120.0
"""The agent listens once its guest has booted."""
ORDER_DEADLINE_S = 120.0
CONSOLE_BYTES = 1 << 14
_PAUSE_S = 0.01
_KERNEL_LINE = "console=ttyS0 panic=-1 reboot=k quiet loglevel=3 pci=off"
_GUEST_CID = 3
_MIB = 1 << 20


class FirecrackerMachine:
    """One Firecracker; made by `FirecrackerVmm` only."""

    def __init__(self, config: MachineConfig, name: str, process: asyncio.subprocess.Process, folder: Path) -> None:
        loop = asyncio.get_running_loop()
        self.config = config
        self.agent: socket.socket
        self.warden: socket.socket
        self.ended: asyncio.Future[Ending] = loop.create_future()
        self._name = name
        self._process = process
        self._folder = folder
        self._said = b""
        self._killed = False
        self._is_cut = False
        self._http = aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=str(folder / "api")))
        self._watching = loop.create_task(self._watch())

    async def order(self, method: str, path: str, body: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(ORDER_DEADLINE_S), self._http.request(method, f"http://localhost{path}", json=body) as answer:
                if answer.status >= 300:
                    raise RunFailure(Boundary.SANDBOX, f"machine {self._name}: {method} {path}: {await answer.text()}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RunFailure(Boundary.SANDBOX, f"machine {self._name}: {method} {path}: {error or 'no answer'}") from None

    async def standing(self) -> None:
        """Until the interface answers."""
        (await self._dial("api", "", START_DEADLINE_S)).close()

    async def connect(self) -> None:
        """Meet the two listeners inside the guest."""
        self.agent = await self._dial("vsock", f"CONNECT {VSOCK_PORT}\n", CONNECT_DEADLINE_S)
        self.warden = await self._dial("vsock", f"CONNECT {VSOCK_PORT + 1}\n", CONNECT_DEADLINE_S)

    async def pause(self) -> None:
        await self.order("PATCH", "/vm", {"state": "Paused"})

    async def resume(self) -> bool:
        await self.order("PATCH", "/vm", {"state": "Resumed"})
        was_cut, self._is_cut = self._is_cut, False
        if was_cut:
            await self.connect()
        return was_cut

    async def save(self) -> Saved:
        state, memory = self._folder / "state", self._folder / "memory"
        body = {"snapshot_type": "Full", "snapshot_path": str(state), "mem_file_path": str(memory)}
        self._is_cut = True
        await self.order("PUT", "/snapshot/create", body)
        files = {}
        for path in (state, memory):
            files[path.name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            path.unlink()
        return Saved(files, self.config)

    def kill(self) -> None:
        self._killed = True
        if self._process.returncode is None:
            self._process.kill()

    def console(self) -> str:
        return self._said.decode(errors="replace").strip()

    async def _dial(self, name: str, greeting: str, deadline_s: float) -> socket.socket:
        """A connection to a socket of the machine's, as soon as one is answered."""
        try:
            async with asyncio.timeout(deadline_s):
                while (sock := await _attempt(self._folder / name, greeting)) is None:
                    if self.ended.done():
                        raise RunFailure(Boundary.SANDBOX, f"machine {self._name} could not be started: {self.ended.result().why}")
                    await asyncio.sleep(_PAUSE_S)
        except TimeoutError:
            words = f"nobody answered at its {name} within {deadline_s:g} s; its console said last: {last_words(self.console())}"
            raise RunFailure(Boundary.SANDBOX, f"machine {self._name}: {words}") from None
        return sock

    async def _watch(self) -> None:
        assert self._process.stdout is not None
        while data := await self._process.stdout.read(1 << 12):
            self._said = (self._said + data)[-CONSOLE_BYTES:]
        status = await self._process.wait()
        await self._http.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._killed:
            ending = Ending(why="it was killed", by_guest=False)
        elif status == 0:
            ending = Ending(why=f"the guest ended; its console said last: {last_words(self.console())}", by_guest=True)
        else:
            ending = Ending(why=f"Firecracker ended with status {status}: {last_words(self.console())}", by_guest=False)
        self.ended.set_result(ending)


async def _attempt(path: Path, greeting: str) -> socket.socket | None:
    """None while nobody listens there, or behind it in the guest."""
    loop, sock = asyncio.get_running_loop(), socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    try:
        await loop.sock_connect(sock, str(path))
        await loop.sock_sendall(sock, greeting.encode())
        line = b""
        while greeting and not line.endswith(b"\n"):  # byte by byte: what follows belongs to the agent
            byte = await loop.sock_recv(sock, 1)
            line += byte or b"\n"
        if greeting and not line.startswith(b"OK "):
            sock.close()
            return None
    except OSError:
        sock.close()
        return None
    except BaseException:
        sock.close()
        raise
    return sock


class FirecrackerVmm:
    """Needs /dev/kvm and a `firecracker` program of version 1.8 or newer, whose guests find their devices by ACPI."""

    accelerator = "kvm"
    is_vsock = True

    def __init__(self, program: Sequence[str] = ("firecracker",)) -> None:
        self._program = tuple(program)
        self.maker = "firecracker kvm"

    async def prepare(self) -> None:
        try:
            process = await asyncio.create_subprocess_exec(
                *self._program, "--version", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
            )  # fmt: skip
        except FileNotFoundError:
            raise RunFailure(
                Boundary.SANDBOX, f"there is no program {self._program[0]!r}; install Firecracker, or leave the choice to the backend"
            ) from None
        async with asyncio.timeout(START_DEADLINE_S):
            said, _ = await process.communicate()
        words = said.decode(errors="replace").split()
        self.maker = f"firecracker {words[1] if len(words) > 1 else '?'} kvm"

    async def boot(self, config: MachineConfig) -> FirecrackerMachine:
        machine, folder = await self._start(config, config.name)
        try:
            await asyncio.to_thread((folder / "initrd").write_bytes, config.initrd)
            boot_source = {"kernel_image_path": config.kernel, "initrd_path": str(folder / "initrd"), "boot_args": _KERNEL_LINE}
            drive = {"drive_id": "root", "path_on_host": config.disk, "is_root_device": False, "is_read_only": True}
            await machine.order("PUT", "/machine-config", {"vcpu_count": 1, "mem_size_mib": config.memory_bytes // _MIB})
            await machine.order("PUT", "/boot-source", boot_source)
            await machine.order("PUT", "/drives/root", drive)
            await machine.order("PUT", "/vsock", {"guest_cid": _GUEST_CID, "uds_path": "vsock"})
            await machine.order("PUT", "/actions", {"action_type": "InstanceStart"})
            await asyncio.to_thread((folder / "initrd").unlink)
            await machine.connect()
        except BaseException:
            machine.kill()
            await machine.ended
            raise
        return machine

    async def restore(self, saved: Saved, name: str) -> FirecrackerMachine:
        machine, _ = await self._start(saved.config, name)
        paths = {use: f"/proc/{os.getpid()}/fd/{fd}" for use, fd in saved.files.items()}
        try:
            memory = {"backend_type": "File", "backend_path": paths["memory"]}
            await machine.order("PUT", "/snapshot/load", {"snapshot_path": paths["state"], "mem_backend": memory, "resume_vm": True})
            await machine.connect()
        except BaseException:
            machine.kill()
            await machine.ended
            raise
        return machine

    async def _start(self, config: MachineConfig, name: str) -> tuple[FirecrackerMachine, Path]:
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="rollmill-vm-"))
        try:
            process = await asyncio.create_subprocess_exec(
                "setpriv", "--pdeathsig", "KILL", "--", *self._program, "--api-sock", "api", "--id", name,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
                cwd=folder, start_new_session=True,
            )  # fmt: skip
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        machine = FirecrackerMachine(config, name, process, folder)
        try:
            await machine.standing()
        except BaseException:
            machine.kill()
            await machine.ended
            raise
        return machine, folder
