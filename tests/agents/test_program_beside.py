"""A program beside the box: told where its model is, kept in its own folder, and gone with all its children when its time is up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmill.harness.beside import MARK, Scratch, run_beside, scratch
from rollmill.harness.program import KEPT_BYTES, Endpoint, Program, ProgramRun, check_exit, check_in_time, task_facts
from rollmill.records import Boundary, RunFailure, Task

TASK = Task(
    task_id="t/1", family="t", kind="k", level=1, seed=4711, split="train", instruction="say {model} é", files={"a/b.txt": "1\n", "c": "2"}
)
WHERE = Endpoint(openai_url="http://127.0.0.1:1/e/x/v1", anthropic_url="http://127.0.0.1:1/e/x", key="k-1", model="policy")
DEADLINE_S = 30.0


def play(
    code: str, *, within_s: float = DEADLINE_S, look: Callable[[Scratch], object] | None = None, **facts: object
) -> tuple[ProgramRun, object]:
    program = Program(command=(sys.executable, "-c", code), **facts)  # type: ignore[arg-type]

    async def scene() -> tuple[ProgramRun, object]:
        async with asyncio.timeout(2 * DEADLINE_S), scratch(TASK) as folders:
            run = await run_beside(program, TASK, WHERE, folders, deadline=time.monotonic() + within_s)
            return run, look(folders) if look else folders.root

    return asyncio.run(scene())


def test_program_finds_its_model_its_task_and_its_files_and_nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_OWNER", "s")
    code = "import os, json; print(json.dumps([dict(os.environ), sorted(os.listdir('.')), json.load(open(os.environ['ROLLMILL_TASK']))]))"
    run, root = play(code, env={"EXTRA": "1"})
    env, files, task = json.loads(run.output)
    assert (run.exit_code, run.timed_out, files) == (0, False, ["a", "c"])
    assert (env["OPENAI_BASE_URL"], env["OPENAI_API_BASE"], env["OPENAI_API_KEY"]) == (WHERE.openai_url, WHERE.openai_url, "k-1")
    assert (env["ANTHROPIC_BASE_URL"], env["ANTHROPIC_API_KEY"], env["EXTRA"]) == (WHERE.anthropic_url, "k-1", "1")
    assert (env["OPENAI_MODEL"], env["ANTHROPIC_MODEL"], env["OPENAI_DEFAULT_MODEL"]) == ("policy",) * 3
    assert "SECRET_OF_THE_OWNER" not in env and env["HOME"].startswith(str(root)) and env["TMPDIR"].startswith(str(root))
    assert (task["instruction"], task["task_id"]) == (TASK.instruction, "t/1") and "4711" not in json.dumps(task["metadata"])
    assert not Path(str(root)).exists(), "nothing is left"


def test_instruction_is_filled_in_once_and_given_on_standard_input() -> None:
    program = Program(command=("x", "{instruction}", "--m={model}:{task}", "{other}"), stdin=True)
    assert program.argv(TASK, task_file="/t", model="policy") == ["x", "say {model} é", "--m=policy:/t", "{other}"]
    run, _ = play("import sys; print(sys.stdin.buffer.read().decode().upper())", stdin=True)
    assert run.output == "SAY {MODEL} É\n"
    assert play("pass", stdin=True)[0].exit_code == 0, "a program need not read its input"


def test_files_that_it_leaves_are_collected_and_traps_are_not() -> None:
    code = (
        "import os; open('a/new.txt','w').write('n'); os.remove('c'); os.symlink('/etc/passwd','leak'); os.mkfifo('pipe');"
        "open('big','w').write('x'*2000); os.mkdir('locked'); open('locked/f','w').write('1'); os.chmod('locked', 0o555)"
    )
    _, files = play(code, look=lambda folders: folders.files(most=10, limit_bytes=1000))
    assert files == {"a/b.txt": "1\n", "a/new.txt": "n", "locked/f": "1"}


def alive(mark: str) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and f"{MARK}={mark}".encode() in Path("/proc", name, "environ").read_bytes():
                found.append(int(name))
    return found


LEAVES_CHILDREN = """
import os, subprocess, sys
print(os.environ["ROLLMILL_PROCESS"], flush=True)
subprocess.Popen(["sleep", "1000"])
subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
@pytest.mark.parametrize("stays", [False, True])
def test_children_die_with_it_also_those_in_a_session_of_their_own(stays: bool) -> None:
    run, left = play(LEAVES_CHILDREN + ("import time; time.sleep(1000)" if stays else ""), within_s=1.0 if stays else DEADLINE_S)
    assert run.timed_out is stays and alive(run.output.split()[0]) == [], left


def test_program_that_is_cancelled_leaves_no_process_behind(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    program = Program(
        command=(sys.executable, "-c", f"import os,time; open({str(mark)!r},'w').write(os.environ['{MARK}']); time.sleep(1000)")
    )

    async def scene() -> None:
        async with asyncio.timeout(DEADLINE_S), scratch(TASK) as folders:
            running = asyncio.create_task(run_beside(program, TASK, WHERE, folders, deadline=time.monotonic() + 1000))
            while not (mark.exists() and mark.read_text()):  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(0.01)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert alive(mark.read_text()) == []

    asyncio.run(scene())


def test_only_the_end_of_a_flood_is_kept() -> None:
    run, _ = play("for i in range(200000): print('line', i)")
    assert len(run.output) == KEPT_BYTES and run.output.endswith("line 199999\n")


def test_program_that_cannot_be_started_is_a_failure_of_the_harness() -> None:
    async def scene() -> None:
        async with scratch(TASK) as folders:
            await run_beside(Program(command=("/no/such/program",)), TASK, WHERE, folders, deadline=time.monotonic() + 9)

    with pytest.raises(RunFailure, match=r"cannot be started.*agent\.command") as caught:
        asyncio.run(scene())
    assert caught.value.boundary is Boundary.HARNESS


def test_task_whose_file_would_lie_outside_is_the_tasks_failure() -> None:
    async def scene(path: str) -> None:
        task = Task(task_id="t/2", family="t", kind="k", level=1, seed=0, split="train", instruction="x", files={path: ""})
        async with scratch(task):
            pass

    for path in ("../x", "/x", "a/../../x"):
        with pytest.raises(RunFailure) as caught:
            asyncio.run(scene(path))
        assert caught.value.boundary is Boundary.TASK


def test_exit_code_decides_whether_there_is_anything_to_grade() -> None:
    def ended(code: int, *graded: int, late: bool = False) -> None:
        run = ProgramRun(exit_code=code, output="Traceback\n  no key", timed_out=late, wall_s=1.0)
        check_in_time(run)
        check_exit(Program(command=("agent",), graded_exit_codes=graded), run)

    ended(0, 0)
    ended(3, 0, 3)
    ended(-9)
    with pytest.raises(RunFailure, match=r"ended with 1, graded are 0, 3 .*Traceback no key") as caught:
        ended(1, 0, 3)
    assert caught.value.boundary is Boundary.HARNESS
    with pytest.raises(TimeoutError):
        ended(0, 0, late=True)


def test_facts_of_a_task_do_not_hold_its_seed() -> None:
    assert b"4711" not in task_facts(TASK)
