"""Our side of a container engine: what a box is asked for, whose leftovers are swept, and whose words a failure carries."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from contract_stages import IMAGE, STAGES
from hypothesis import given, settings
from hypothesis import strategies as st

import rollmill
from rollmill.records import Boundary, RunFailure
from rollmill.sandbox import SandboxSpec
from rollmill.sandbox.container import ContainerBackend
from rollmill.sandbox.container.backend import run_arguments
from rollmill.sandbox.container.owner import is_orphan, machine, owner
from rollmill.sandbox.container.tool import Tool
from rollmill.sandbox.group import all_or_none
from rollmill.sandbox.records import Egress

DEADLINE_S = 120.0
REPOSITORY = Path(rollmill.__file__).resolve().parent.parent

OWNER = """
import asyncio, sys
from rollmill.sandbox import SandboxSpec
from rollmill.sandbox.container import DockerBackend, PodmanBackend

async def main():
    backend = (PodmanBackend if sys.argv[1] == "podman" else DockerBackend)(image=sys.argv[2], options=sys.argv[3:])
    box = await backend.create(SandboxSpec())
    await box.exec("setsid sleep 1000 & sleep 1000 &", timeout_s=60)
    snapshot = await box.snapshot()
    print(box.name, snapshot.reference, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


def _program(folder: Path, script: str) -> str:
    path = folder / "engine"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def _stand_in(path: str) -> type[ContainerBackend]:
    class StandIn(ContainerBackend):
        program = path

    return StandIn


def test_a_box_is_asked_for_with_every_limit_and_no_rights() -> None:
    spec = SandboxSpec(memory_bytes=1 << 28, num_processes=7, disk_bytes=1 << 20, cpus=1.5, hostname="dev")
    words = run_arguments("name", spec, "image", Path("/agent"))
    line = " ".join(words)
    for wanted in (
        "run --rm --interactive --pull never --name name",
        "--network none", f"--memory {1 << 28} --memory-swap {1 << 28}", "--pids-limit 8",
        f"--ulimit fsize={1 << 20}:{1 << 20}", "--cap-drop ALL", "--security-opt no-new-privileges", "--cpus 1.5", "--hostname dev",
    ):  # fmt: skip
        assert wanted in line
    assert "--cap-add" not in words and "--privileged" not in words
    assert words[-4:] == ["image", "serve", "--contained", "."]


def test_root_of_a_box_gets_rights_over_files_and_users_only() -> None:
    words = run_arguments("name", SandboxSpec(root=True), "image", Path("/agent"))
    added = {words[at + 1] for at, word in enumerate(words) if word == "--cap-add"}
    assert added == {"CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID"}


def test_an_owner_is_an_orphanage_only_once_it_is_dead() -> None:
    assert not is_orphan(owner())
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    name = f"{machine()}.{child.pid}.1"
    assert is_orphan(name), "a process of that number began at another time"
    child.communicate()
    assert is_orphan(f"{machine()}.{child.pid}.{owner().rpartition('.')[2]}")


@settings(max_examples=50, derandomize=True, deadline=None)
@given(st.text(max_size=40))
def test_what_is_not_named_by_us_is_never_swept(name: str) -> None:
    assert not is_orphan(name)
    assert not is_orphan(f"another-machine.1.{name}")


class NamedBox:
    """Knows whether it was closed."""

    def __init__(self) -> None:
        self.is_closed = False

    async def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("is_given_up", [False, True], ids=["one-fails", "given-up"])
def test_a_group_is_made_whole_or_not_at_all(is_given_up: bool) -> None:
    made: list[NamedBox] = []

    async def quick() -> NamedBox:
        made.append(NamedBox())
        return made[-1]

    async def slow(are_made: asyncio.Event) -> NamedBox:
        are_made.set()
        if not is_given_up:
            raise RunFailure(Boundary.SANDBOX, "no room")
        await asyncio.Event().wait()
        raise AssertionError

    async def play() -> None:
        are_made = asyncio.Event()
        group = asyncio.ensure_future(all_or_none([quick(), quick(), slow(are_made)]))
        await are_made.wait()
        if is_given_up:
            group.cancel()
        with pytest.raises(asyncio.CancelledError if is_given_up else RunFailure):
            await group

    asyncio.run(asyncio.wait_for(play(), DEADLINE_S))
    assert [box.is_closed for box in made] == [True, True]


def test_a_failure_carries_the_engine_s_own_words(tmp_path: Path) -> None:
    async def play() -> None:
        tool = Tool((_program(tmp_path, "echo no space left on device >&2; exit 125"),))
        with pytest.raises(RunFailure, match=r"`.*engine commit` failed with status 125: no space left on device") as caught:
            await tool.run("commit", "x", deadline_s=DEADLINE_S)
        assert caught.value.boundary == Boundary.SANDBOX
        with pytest.raises(RunFailure, match="no space left"):
            async for _ in tool.read("save", deadline_s=DEADLINE_S):
                pass

        async def chunks():
            for _ in range(100):
                yield bytes(1 << 20)

        with pytest.raises(RunFailure, match="no space left"):
            await tool.feed(chunks(), "load", deadline_s=DEADLINE_S)

    asyncio.run(play())


def test_an_engine_that_hangs_is_left_at_the_deadline(tmp_path: Path) -> None:
    async def play() -> None:
        tool = Tool((_program(tmp_path, "exec sleep 1000"),))
        with pytest.raises(RunFailure, match=r"took longer than 0.2 s"):
            await tool.run("ps", deadline_s=0.2)
        with pytest.raises(RunFailure, match=r"took longer than 0.2 s"):
            async for _ in tool.read("save", deadline_s=0.2):
                pass

    asyncio.run(play())


def test_a_container_that_cannot_start_says_why(tmp_path: Path) -> None:
    script = 'case "$1" in run) echo "no such runtime" >&2; exit 126;; *) exit 0;; esac'

    async def play() -> None:
        backend = _stand_in(_program(tmp_path, script))()
        with pytest.raises(RunFailure, match="no such runtime"):
            await backend.create(SandboxSpec())
        await backend.close()

    asyncio.run(play())


def test_an_engine_that_is_missing_is_said_before_anything_is_tried() -> None:
    kind = _stand_in("no-such-engine")
    assert "not installed" in (kind.probe() or "")

    async def play() -> None:
        with pytest.raises(RunFailure, match="could not be started"):
            await kind().create(SandboxSpec())
        with pytest.raises(ValueError, match="egress"):
            await kind().create(SandboxSpec(egress=Egress()))

    asyncio.run(play())


@pytest.mark.parametrize("program", ["docker", "podman"])
def test_a_box_ends_with_an_owner_killed_with_9_and_its_snapshot_is_swept_by_the_next(program: str, tmp_path: Path) -> None:
    with asyncio.Runner() as runner, STAGES[program].opened(runner, tmp_path) as backend:
        if isinstance(backend, str):
            pytest.skip(backend)
        engine = list(backend.engine.words)
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        command = [sys.executable, "-c", OWNER, program, IMAGE, *engine[1:]]
        dead = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert dead.stdout is not None
        name, reference = dead.stdout.readline().split()
        dead.send_signal(signal.SIGKILL)
        dead.communicate(timeout=DEADLINE_S)
        # `wait` ends with the container; one that is gone already it does not know.
        subprocess.run([*engine, "wait", name], capture_output=True, timeout=DEADLINE_S, check=False)

        async def sweep() -> None:
            await (await backend.create(SandboxSpec())).close()
            await backend.close()

        runner.run(sweep())
        left = subprocess.run([*engine, "ps", "--all", "--format", "{{.Names}}"], capture_output=True, text=True, timeout=60, check=True)
        assert name not in left.stdout.split()
        images = [*engine, "image", "inspect", reference]
        assert subprocess.run(images, capture_output=True, timeout=60, check=False).returncode != 0
