"""An ordinary user, without any right on the host, gets the same boxes; from the native zygote and from the plain one."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

import rollmill
from rollmill.sandbox.agent.native import build
from tests.sandbox.conftest import descendants

DEADLINE_S = 60.0
USER = 12345
REPOSITORY = Path(rollmill.__file__).resolve().parent.parent
ENVIRONMENT = {
    "PYTHONPATH": f"{REPOSITORY}:{Path(msgspec.__file__).parents[1]}",
    "PATH": os.environ["PATH"],
    "PYTHONDONTWRITEBYTECODE": "1",
}

OWNER = """
import asyncio, json, sys, tempfile
from rollmill.records import RunFailure
from rollmill.sandbox import SandboxSpec
from rollmill.sandbox.namespace import NamespaceBackend
from rollmill.sandbox.records import Egress

reason = NamespaceBackend.probe()
if reason:
    print(json.dumps({"skip": reason}))
    raise SystemExit

async def said(box, line):
    return (await box.exec(line, timeout_s=30)).stdout.decode()

async def refusal(making):
    try:
        await making
    except (RunFailure, ValueError) as error:
        return str(error)

async def main():
    backend = NamespaceBackend(num_prepared=2)
    try:
        found = {"facts": (await backend.capabilities()).facts}
        box = await backend.create(SandboxSpec(files={"a": "1"}))
        found["inside"] = await said(box, "whoami; pwd; cat a; tr -d '\\\\0' < /proc/1/cmdline; stat -c %U /home/dev/work /etc/passwd")
        found["caps"] = await said(box, "grep -E 'Cap(Prm|Eff|Bnd)' /proc/self/status")
        found["refused"] = await said(box, "mount -t tmpfs x /tmp || echo no; unshare -r true || echo no; ls /proc/1/fd || echo no")
        found["timed_out"] = (await box.exec(["sleep", "1000"], timeout_s=0.2)).timed_out
        await said(box, "rm a; mkdir d; echo 2 > d/f")
        snapshot = await box.snapshot()
        children = await snapshot.fork(2)
        found["forks"] = [await said(child, f"cat d/f; ls; echo {n} > d/f; cat d/f") for n, child in enumerate(children)]
        with tempfile.TemporaryDirectory() as store:
            restored = await backend.restore(store, await snapshot.save(store))
            (again,) = await restored.fork(1)
            found["restored"] = await said(again, "cat d/f; ls")
        shut = await backend.create(SandboxSpec(egress=Egress()))
        found["ports"] = await said(shut, "awk '$4 == \\"0A\\" {print $2}' /proc/net/tcp | sort; cat /etc/resolv.conf")
        small = await backend.create(SandboxSpec(memory_bytes=32 << 20))
        found["small"] = await said(small, "echo on")
        found["hog"] = (await small.exec(["python3", "-c", "bytearray(300 << 20)"], timeout_s=30)).exit_code
        found["root"] = await refusal(backend.create(SandboxSpec(root=True)))
        short = await backend.create(SandboxSpec(lifetime_s=0.3))
        found["lifetime"] = await refusal(short.exec(["sleep", "1000"], timeout_s=30))
        print(json.dumps(found), flush=True)
    finally:
        await backend.close()

asyncio.run(main())
"""

WAITING = """
import asyncio
from rollmill.sandbox import SandboxSpec
from rollmill.sandbox.namespace import NamespaceBackend

async def main():
    reason = NamespaceBackend.probe()
    if reason is None:
        backend = NamespaceBackend(num_prepared=2)
        box = await backend.create(SandboxSpec())
        await box.exec("setsid sleep 1000 & sleep 1000 &", timeout_s=60)
    print(reason or backend.zygote_pid, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


@lru_cache(maxsize=1)
def interpreter() -> str | None:
    """One that an ordinary user may run: ours may lie where only root may look."""
    for python in (sys.executable, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"):
        try:
            done = subprocess.run([python, "-c", "import rollmill.sandbox.namespace"], **as_user(), capture_output=True, timeout=DEADLINE_S)
        except OSError:
            continue
        if done.returncode == 0:
            return python
    return None


def as_user() -> dict[str, Any]:
    if os.geteuid() != 0:
        return {"env": ENVIRONMENT, "cwd": "/"}
    return {"user": USER, "group": USER, "extra_groups": [], "env": ENVIRONMENT, "cwd": "/"}


@pytest.fixture(params=["native", "plain"])
def twin(request, machine) -> str:
    if request.param == "native" and build.binary() is None:
        pytest.skip("there is no native agent on this machine")
    return request.param


def start(program: str, twin: str, stacking: str = "descriptor") -> subprocess.Popen[str]:
    python = interpreter()
    if python is None:
        pytest.skip("no interpreter that an ordinary user may run")
    ordinary = as_user() | {"env": {**ENVIRONMENT, "ROLLMILL_BOX_AGENT": twin, "ROLLMILL_BOX_STACK": stacking}}
    return subprocess.Popen([python, "-c", program], **ordinary, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("stacking", ["descriptor", "path"])
def test_ordinary_user_gets_boxes_that_run_fork_and_hold(twin, stacking):
    """`stacking`: as new kernels can, and as old ones need it."""
    owner = start(OWNER, twin, stacking)
    stdout, stderr = owner.communicate(timeout=2 * DEADLINE_S)
    assert owner.returncode == 0, stderr
    found = json.loads(stdout)
    if "skip" in found:
        pytest.skip(found["skip"])
    assert (found["facts"]["privilege"], found["facts"]["helper"]) == ("rootless", twin)
    assert found["inside"] == "dev\n/home/dev/work\n1/sbin/initdev\ndev\n"
    assert [int(line.split()[1], 16) for line in found["caps"].splitlines()] == [0, 0, 0]
    assert found["refused"].count("no\n") == 3 and found["timed_out"]
    assert found["forks"] == [f"2\nd\n{n}\n" for n in range(2)]
    assert found["restored"] == "2\nd\n"
    assert found["ports"].split()[:3] == ["00000000:0035", "00000000:0050", "00000000:01BB"] and "nameserver" in found["ports"]
    assert found["small"] == "on\n" and found["hog"] != 0
    assert "root=True needs" in found["root"] and "lifetime ended" in found["lifetime"]


@pytest.mark.parametrize("victim", ["owner", "zygote"])
def test_death_with_9_of_owner_or_zygote_leaves_no_process(twin, victim):
    owner = start(WAITING, twin)
    try:
        assert owner.stdout is not None
        words = owner.stdout.readline()
        if not words.strip().isdigit():
            pytest.skip(words)
        zygote = int(words)
        ends = []
        for pid in (zygote, *descendants(zygote)):
            with contextlib.suppress(ProcessLookupError):  # those that help to prepare a box come and go
                ends.append(os.pidfd_open(pid))
        assert len(ends) >= 5
        os.kill(owner.pid if victim == "owner" else zygote, signal.SIGKILL)
        deadline = time.monotonic() + DEADLINE_S
        for fd in ends:
            assert select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0], "a process outlived what held it"
            os.close(fd)
    finally:
        owner.kill()
        owner.communicate(timeout=DEADLINE_S)
