"""The Firecracker driver sends what the interface's documentation asks for, in its order; a fake of it is all that was ever tried."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rollmill.records import RunFailure
from rollmill.sandbox.agent.native.build import binary
from rollmill.sandbox.microvm.box import MicrovmBox, MicrovmSnapshot
from rollmill.sandbox.microvm.firecracker import FirecrackerVmm
from rollmill.sandbox.microvm.machine import MachineConfig, Saved
from rollmill.sandbox.microvm.stored import Standing
from rollmill.sandbox.records import SandboxSpec

DEADLINE_S = 60.0
FAKE = (sys.executable, str(Path(__file__).parent / "fake_firecracker.py"))


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[FirecrackerVmm, MachineConfig], Awaitable[None]]], None]:
    agent = binary()
    if agent is None or shutil.which("setpriv") is None:
        pytest.skip("needs the agent's binary and setpriv")
    monkeypatch.setenv("ROLLMILL_FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("ROLLMILL_FAKE_AGENT", f"{agent} serve {tmp_path}")
    for name in ("vmlinux", "disk"):
        (tmp_path / name).touch()
    config = MachineConfig(name="m", kernel=str(tmp_path / "vmlinux"), initrd=b"i", disk=str(tmp_path / "disk"), memory_bytes=256 << 20)

    def run(scene: Callable[[FirecrackerVmm, MachineConfig], Awaitable[None]]) -> None:
        async def whole() -> None:
            async with asyncio.timeout(DEADLINE_S):
                await scene(FirecrackerVmm(FAKE), config)

        asyncio.run(whole())

    return run


def box_on(vmm: FirecrackerVmm, machine: object) -> MicrovmBox:
    def keep(box: MicrovmBox, saved: Saved, standing: Standing) -> MicrovmSnapshot:
        async def wake(snapshot: MicrovmSnapshot, spec: SandboxSpec) -> MicrovmBox:
            fork = box_on(vmm, await vmm.restore(snapshot.saved, "fork"))
            fork.join(Standing(begun=b"", num_requests=standing.num_requests, hostname="fork", shell="/bin/sh"))
            await fork.renew()
            return fork

        return MicrovmSnapshot(box.spec, saved, standing, maker=vmm.maker, wake=wake)

    return MicrovmBox("b", SandboxSpec(), machine, "h", keep)  # type: ignore[arg-type]


def test_machine_is_configured_before_it_is_started(play: Callable[..., None], tmp_path: Path) -> None:
    async def scene(vmm: FirecrackerVmm, config: MachineConfig) -> None:
        await vmm.prepare()
        assert vmm.maker == "firecracker v1.99.0 kvm"
        machine = await vmm.boot(config)
        box = box_on(vmm, machine)
        box.join()
        await box.ready(DEADLINE_S)
        assert (await box.exec(["echo", "hello"], timeout_s=DEADLINE_S)).stdout == b"hello\n"
        assert "booted" in machine.console()
        await box.close()
        assert machine.ended.result().by_guest is False

    play(scene)
    requests = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [path for _, path, _ in requests] == ["/machine-config", "/boot-source", "/drives/root", "/vsock", "/actions"]
    assert requests[0][2] == {"vcpu_count": 1, "mem_size_mib": 256}
    assert requests[2][2]["is_read_only"] is True


def test_snapshot_is_loaded_by_forks_and_the_parent_is_met_again(play: Callable[..., None], tmp_path: Path) -> None:
    async def scene(vmm: FirecrackerVmm, config: MachineConfig) -> None:
        box = box_on(vmm, await vmm.boot(config))
        box.join()
        await box.ready(DEADLINE_S)
        snapshot = await box.snapshot()
        fork, other = await snapshot.fork(2)
        for each in (box, fork, other):
            assert (await each.exec(["echo", "hello"], timeout_s=DEADLINE_S)).stdout == b"hello\n"
        await snapshot.close()
        await asyncio.gather(*(each.close() for each in (box, fork, other)))

    play(scene)
    requests = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    paths = [(method, path) for method, path, _ in requests[5:]]
    assert paths[:3] == [("PATCH", "/vm"), ("PUT", "/snapshot/create"), ("PATCH", "/vm")]
    assert paths[3:] == [("PUT", "/snapshot/load")] * 2


def test_refusal_carries_the_words_of_the_interface(play: Callable[..., None], tmp_path: Path) -> None:
    async def scene(vmm: FirecrackerVmm, config: MachineConfig) -> None:
        (tmp_path / "vmlinux").unlink()
        with pytest.raises(RunFailure, match="kernel_image_path does not exist"):
            await vmm.boot(config)

    play(scene)


def test_program_that_is_not_there_is_named() -> None:
    with pytest.raises(RunFailure, match="no program 'no-such-firecracker'"):
        asyncio.run(FirecrackerVmm(("no-such-firecracker",)).prepare())
