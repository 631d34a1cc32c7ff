"""The owner's rules of a machine, on a fake one whose agent is a real program of this host: no guest, no boot."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Awaitable, Callable

import pytest

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.agent.native.build import binary
from rollmill.sandbox.microvm.box import MicrovmBox, MicrovmSnapshot
from rollmill.sandbox.microvm.machine import Ending, MachineConfig, Saved, last_words
from rollmill.sandbox.microvm.stored import Standing
from rollmill.sandbox.records import SandboxSpec

DEADLINE_S = 30.0


class FakeMachine:
    """An agent on a socket pair. `pause` and `resume` only count; saving can be told to fail."""

    def __init__(self, *, saving_fails: bool = False) -> None:
        self.agent, theirs = socket.socketpair()
        self.warden, self.warden_inside = socket.socketpair()
        self.ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self.log: list[str] = []
        self._saving_fails = saving_fails
        self._process = subprocess.Popen([str(binary()), "serve", "/tmp"], stdin=theirs, stdout=theirs)
        theirs.close()

    async def pause(self) -> None:
        self.log.append("pause")

    async def resume(self) -> bool:
        self.log.append("resume")
        return False

    async def save(self) -> Saved:
        self.log.append("save")
        if self._saving_fails:
            raise RunFailure(Boundary.SANDBOX, "the disk is full")
        return Saved({"machine": os.open("/dev/null", os.O_RDONLY)}, MachineConfig(name="m", disk="", memory_bytes=1))

    def die(self, *, by_guest: bool, why: str = "it was killed") -> None:
        self._process.kill()
        self._process.wait()
        self.warden_inside.close()
        if not self.ended.done():
            self.ended.set_result(Ending(why=why, by_guest=by_guest))

    def kill(self) -> None:
        self.die(by_guest=False)

    def console(self) -> str:
        return ""


def play(
    scene: Callable[[FakeMachine, MicrovmBox], Awaitable[None]], *, spec: SandboxSpec | None = None, saving_fails: bool = False
) -> None:
    if binary() is None:
        pytest.skip("the agent's binary cannot be built here")

    async def wake(snapshot: MicrovmSnapshot, spec: SandboxSpec) -> MicrovmBox:
        raise RunFailure(Boundary.SANDBOX, "no room")

    def keep(box: MicrovmBox, saved: Saved, standing: Standing) -> MicrovmSnapshot:
        return MicrovmSnapshot(box.spec, saved, standing, maker="fake", wake=wake)

    async def whole() -> None:
        machine = FakeMachine(saving_fails=saving_fails)
        box = MicrovmBox("m", spec or SandboxSpec(), machine, "host", keep)  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(DEADLINE_S):
                box.join()
                await box.ready(DEADLINE_S)
                box.begin()
                await scene(machine, box)
        finally:
            await box.close()

    asyncio.run(whole())


def test_machine_goes_on_after_its_snapshot_and_after_one_that_failed() -> None:
    async def scene(machine: FakeMachine, box: MicrovmBox) -> None:
        snapshot = await box.snapshot()
        assert machine.log == ["pause", "save", "resume"]
        assert (await box.exec(["true"], timeout_s=DEADLINE_S)).exit_code == 0
        with pytest.raises(RunFailure, match="no room"):
            await snapshot.fork(2)
        await snapshot.close()
        with pytest.raises(ValueError, match="closed"):
            await snapshot.fork(1)

    async def failing(machine: FakeMachine, box: MicrovmBox) -> None:
        with pytest.raises(RunFailure, match="disk is full"):
            await box.snapshot()
        assert machine.log == ["pause", "save", "resume"]
        assert (await box.exec(["true"], timeout_s=DEADLINE_S)).exit_code == 0

    play(scene)
    play(failing, saving_fails=True)


def test_suspended_machine_takes_a_snapshot_without_waking_and_requests_wait() -> None:
    async def scene(machine: FakeMachine, box: MicrovmBox) -> None:
        await box.suspend()
        await box.suspend()
        waiting = asyncio.ensure_future(box.exec(["echo", "late"], timeout_s=DEADLINE_S))
        await (await box.snapshot()).close()
        assert machine.log == ["pause", "save"]
        assert not waiting.done()
        await box.resume()
        assert (await waiting).stdout == b"late\n"

    play(scene)


def test_lifetime_ends_a_machine_with_its_reason() -> None:
    async def scene(machine: FakeMachine, box: MicrovmBox) -> None:
        await machine.ended
        with pytest.raises(RunFailure, match="its lifetime of"):
            await box.exec(["true"], timeout_s=DEADLINE_S)

    play(scene, spec=SandboxSpec(lifetime_s=0.5))


def test_death_by_the_guests_own_doing_is_an_observation_and_any_other_a_failure() -> None:
    async def ruined(machine: FakeMachine, box: MicrovmBox) -> None:
        running = asyncio.ensure_future(box.exec(["sleep", "1000"], timeout_s=DEADLINE_S))
        await asyncio.sleep(0)
        machine.die(by_guest=True, why="the guest ended")
        assert (await running).exit_code == -9
        with pytest.raises(RunFailure, match="the guest ended"):
            await box.snapshot()

    async def lost(machine: FakeMachine, box: MicrovmBox) -> None:
        running = asyncio.ensure_future(box.exec(["sleep", "1000"], timeout_s=DEADLINE_S))
        await asyncio.sleep(0)
        machine.die(by_guest=False, why="QEMU ended with status -11")
        with pytest.raises(RunFailure, match="status -11"):
            await running

    play(ruined)
    play(lost)


def test_identity_is_asked_of_the_warden_and_its_refusal_told() -> None:
    async def scene(machine: FakeMachine, box: MicrovmBox) -> None:
        for answer, words in ((b"0\n", None), (b"22\n", "errno 22"), (b"", "ended before")):
            asked = asyncio.ensure_future(box.renew())
            line = await asyncio.to_thread(machine.warden_inside.recv, 256)
            word, ns, name, seed = line.decode().split()
            assert (word, name, len(seed)) == ("identity", "host", 64) and int(ns) > 10**18
            machine.warden_inside.sendall(answer) if answer else machine.warden_inside.close()
            if words is None:
                await asked
            else:
                with pytest.raises(RunFailure, match=words):
                    await asked

    play(scene)


def test_fork_cannot_have_what_was_decided_when_its_parent_was_made() -> None:
    async def scene(machine: FakeMachine, box: MicrovmBox) -> None:
        snapshot = await box.snapshot()
        for spec in (SandboxSpec(memory_bytes=1 << 30), SandboxSpec(root=True), SandboxSpec(image="other")):
            with pytest.raises(ValueError, match="needs a new box"):
                await snapshot.fork(1, spec)
        with pytest.raises(ValueError, match="at least one"):
            await snapshot.fork(0)
        await snapshot.close()

    play(scene)


def test_first_line_of_a_panic_is_kept_above_its_trace() -> None:
    console = "booted\n[1.0] Kernel panic - not syncing: why\n" + "trace\n" * 500
    assert last_words(console).startswith("[1.0] Kernel panic - not syncing: why")
    assert last_words("short") == "short"
