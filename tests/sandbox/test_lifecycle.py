"""Boxes come in bursts, and die with whatever holds them, leaving nothing on the host."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

import rollmill
from rollmill.records import RunFailure
from rollmill.sandbox import SandboxSpec
from rollmill.sandbox.namespace import NamespaceBackend
from rollmill.sandbox.namespace import groups as cgroups
from tests.sandbox.conftest import descendants, settled

DEADLINE_S = 60.0
REPOSITORY = Path(rollmill.__file__).resolve().parent.parent

OWNER = """
import asyncio, sys
from rollmill.sandbox import SandboxSpec
from rollmill.sandbox.namespace import NamespaceBackend

async def main():
    backend = NamespaceBackend()
    boxes = await asyncio.gather(*(backend.create(SandboxSpec()) for _ in range(5)))
    for box in boxes:
        await box.exec(["bash", "-c", "setsid sleep 1000 & sleep 1000 &"], timeout_s=60)
    asyncio.ensure_future(boxes[0].exec(["yes"], timeout_s=1000))
    print(backend.zygote_pid, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


def _watch(pids: list[int]) -> list[int]:
    """A descriptor of each that still lives: those that prepare boxes come and go."""
    found = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            found.append(os.pidfd_open(pid))
    return found


def _await_end(pidfds: list[int]) -> None:
    """Each becomes readable when its process has ended, whoever its parent is by then."""
    deadline = time.monotonic() + DEADLINE_S
    for fd in pidfds:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        assert poll.poll(max(0.0, deadline - time.monotonic()) * 1000), "a process outlived its owner"
        os.close(fd)


def _mounts() -> list[str]:
    """This host's mounts, but for those of container engines, which come and go by themselves."""
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if "containers/" not in line and "docker/" not in line]


def _groups() -> set[str]:
    """Control groups of zygotes that are there now, whoever's they are."""
    parents = [parent for _, found in cgroups._candidates() for parent in found.values()]
    return {f"{parent}/{name}" for parent in parents for name in os.listdir(parent) if name.startswith("rollmill-")}


def _owner() -> tuple[subprocess.Popen[bytes], int]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, env=environment)
    assert owner.stdout is not None
    return owner, int(owner.stdout.readline())


def test_boxes_die_with_an_owner_killed_with_9(machine):
    owner, zygote = _owner()
    processes = [zygote, *descendants(zygote)]
    assert len(processes) >= 1 + 5 * 3
    pidfds = _watch(processes)
    mounts = _mounts()
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    _await_end(pidfds)
    assert _mounts() == mounts
    assert not [group for group in _groups() if f"rollmill-{owner.pid}-" in group]


def test_boxes_die_when_owner_and_zygote_are_killed_together(machine):
    owner, zygote = _owner()
    pidfds = _watch([zygote, *descendants(zygote)])
    os.kill(zygote, signal.SIGSTOP)
    owner.send_signal(signal.SIGKILL)
    os.kill(zygote, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    _await_end(pidfds)
    deadline = time.monotonic() + DEADLINE_S
    while any(f"rollmill-{owner.pid}-" in group for group in _groups()):
        assert time.monotonic() < deadline, "the sweep of a later owner left a control group behind"
        assert NamespaceBackend.probe() is None


def test_zygote_killed_with_9_takes_its_boxes_and_the_next_box_gets_a_new_one(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec())
        zygote = backend.zygote_pid
        pidfds = _watch(descendants(zygote))
        running = asyncio.create_task(box.exec(["sleep", "1000"], timeout_s=1000))
        os.kill(zygote, signal.SIGKILL)
        with pytest.raises(RunFailure, match="zygote"):
            await running
        await asyncio.to_thread(_await_end, pidfds)
        await box.close()
        again = await backend.create(SandboxSpec())
        assert (await again.exec(["true"], timeout_s=60)).exit_code == 0
        assert backend.zygote_pid != zygote

    play(scene)


def test_burst_of_200_creates_waits_and_never_fails(play):
    async def scene(backend):
        boxes = await asyncio.gather(*(backend.create(SandboxSpec(files={"n": str(n)})) for n in range(200)))
        assert [await box.read("n") for box in boxes] == [str(n).encode() for n in range(200)]
        await asyncio.gather(*(box.close() for box in boxes))

    play(scene)


def test_50_boxes_work_at_once_and_keep_apart(play):
    async def scene(backend):
        async def life(n: int) -> None:
            box = await backend.create(SandboxSpec())
            await box.write("mine", str(n).encode())
            result = await box.exec(["bash", "-c", "sleep 0.2; cat mine; ls"], timeout_s=100)
            assert result.stdout == f"{n}mine\n".encode()
            await box.close()

        await asyncio.gather(*(life(n) for n in range(50)))

    play(scene)


def test_cancelled_create_leaves_no_box(play):
    async def scene(backend):
        await backend.start()
        creating = [asyncio.create_task(backend.create(SandboxSpec())) for _ in range(20)]
        await creating[0]
        for task in creating:
            task.cancel()
        done = await asyncio.gather(*creating, return_exceptions=True)
        await asyncio.gather(*(box.close() for box in done if not isinstance(box, BaseException)))
        await settled(backend, num_boxes=0)
        assert (await (await backend.create(SandboxSpec())).exec(["true"], timeout_s=60)).exit_code == 0

    play(scene)


def test_closed_backend_leaves_nothing(play):
    mounts = _mounts()
    pids: list[int] = []

    async def scene(backend):
        for _ in range(3):
            await backend.create(SandboxSpec())
        zygote = backend.zygote_pid
        pids.extend([zygote, *descendants(zygote)])

    play(scene)
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    assert _mounts() == mounts
    assert not [group for group in _groups() if f"rollmill-{os.getpid()}-" in group]


def test_failing_world_is_reported_and_leaves_no_box(play):
    async def scene(backend):
        with pytest.raises(RunFailure, match="could not be made"):
            await backend.create(SandboxSpec(files={"big": "x" * (2 << 20)}, disk_bytes=1 << 20))
        await settled(backend, num_boxes=0)

    play(scene)


CONFINED = """
import platform
from rollmill.sandbox.namespace import NamespaceBackend
from rollmill.sandbox.agent.plain import kernel
from rollmill.sandbox.namespace import filter as seccomp
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1, "no_new_privs")
kernel.install_seccomp(seccomp.program(platform.machine()))
print(NamespaceBackend.probe())

import asyncio
from rollmill.records import RunFailure
from rollmill.sandbox import SandboxSpec
try:
    asyncio.run(NamespaceBackend().create(SandboxSpec()))
except RunFailure as failure:
    print(failure.message)
"""


def test_machine_that_forbids_namespaces_is_told_in_one_sentence(machine):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    owner = subprocess.run([sys.executable, "-c", CONFINED], env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    probed, created = owner.stdout.splitlines()
    assert "does not work here" in probed and "Operation not permitted" in probed and ("container" in probed or "sysctl" in probed)
    assert created == probed


def test_close_fails_creates_in_flight_and_leaves_none(play):
    async def scene(backend):
        await backend.start()
        zygote = os.pidfd_open(backend.zygote_pid)
        creating = [asyncio.create_task(backend.create(SandboxSpec())) for _ in range(20)]
        await asyncio.wait(creating, return_when=asyncio.FIRST_COMPLETED)
        await backend.close()
        outcomes = await asyncio.gather(*creating, return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        assert failures and all(isinstance(failure, RunFailure) for failure in failures)
        await asyncio.to_thread(_await_end, [zygote])

    play(scene)


ROOTLESS = """
import asyncio
from rollmill.sandbox import SandboxSpec
from rollmill.sandbox.namespace import NamespaceBackend
reason = NamespaceBackend.probe()
if reason:
    print("SKIP", reason)
    raise SystemExit

async def main():
    backend = NamespaceBackend()
    assert (await backend.capabilities()).facts["privilege"] == "rootless"
    box = await backend.create(SandboxSpec(files={"a": "1"}))
    line = "whoami; cat a; ls /etc/shadow; ls /proc | grep -c '^[0-9]'; mount -t tmpfs x /tmp || echo refused"
    result = await box.exec(["bash", "-c", line], timeout_s=60)
    print(result.stdout.decode(), await backend.capabilities())
    assert (await box.exec(["sleep", "1000"], timeout_s=0.3)).timed_out
    await box.close()
    await backend.close()

asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes an ordinary user, which only root can")
def test_ordinary_user_without_any_right_on_the_host_gets_boxes(machine):
    nobody = {"user": 65534, "group": 65534, "extra_groups": [], "cwd": "/"}
    packages = os.path.dirname(os.path.dirname(msgspec.__file__))
    environment = {"PYTHONPATH": f"{REPOSITORY}:{packages}", "PATH": os.environ["PATH"]}
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, f"/usr/bin/python{version}"):
        try:
            owner = subprocess.run([python, "-c", ROOTLESS], env=environment, capture_output=True, text=True, timeout=DEADLINE_S, **nobody)
        except OSError:
            continue  # this interpreter lies where only root may look
        if "ModuleNotFoundError" not in owner.stderr:
            break
    else:
        pytest.skip("no interpreter that an ordinary user may run")
    if owner.stdout.startswith("SKIP"):
        pytest.skip(owner.stdout)
    assert owner.returncode == 0, owner.stderr
    lines = owner.stdout.split("\n")
    assert lines[0] == "dev" and lines[1].startswith("1") and "refused" in owner.stdout, owner.stdout
