"""The command log: what it says can be done again to the same state, it opens after any death, and a difference is found where it arose."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from folder_box import FolderBox
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.namespace import NamespaceBackend
from rollmill.sandbox.records import Argv, ExecResult, SandboxSpec, Service
from rollmill.sandbox.snapshots.events import Began, Ended, Exec, Head, Output, Refused, Write
from rollmill.sandbox.snapshots.history import read_history
from rollmill.sandbox.snapshots.journal import Journal
from rollmill.sandbox.snapshots.log import EventLog, read_events
from rollmill.sandbox.snapshots.payloads import INLINE_BYTES
from rollmill.sandbox.snapshots.replay import everything, replay, up_to

DEADLINE_S = 60.0
SPEC = SandboxSpec()


def run(scene: Awaitable[None]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scene

    asyncio.run(whole())


async def begun(folder: Path) -> tuple[Journal, FolderBox]:
    box = FolderBox(folder / "box")
    return await Journal.create(box, folder / "logs" / "one.jsonl", spec=SPEC), box


def test_replay_makes_the_same_state_on_a_fresh_box(tmp_path: Path) -> None:
    async def scene() -> None:
        journal, box = await begun(tmp_path)
        await journal.write("a.sh", b"echo $1 $N >> out; cat >> out; exit 3\n", mode=0o755)
        await journal.write("large", os.urandom(INLINE_BYTES + 1))
        result = await journal.exec(["sh", "a.sh", "one"], timeout_s=10, stdin=b"in\n", env={"N": "7"})
        assert result.exit_code == 3
        await journal.exec("mkdir d; cd d; echo \udcff > f; pwd > /dev/null", timeout_s=10, stderr_apart=True)
        await journal.exec(["touch", os.fsdecode(b"\xff")], timeout_s=10, cwd="d")
        await journal.serve(Service(name="db", argv=("db",)))
        await journal.suspend()
        await journal.resume()
        with pytest.raises(IsADirectoryError):
            await journal.write("d", b"")
        await journal.close()

        fresh = FolderBox(tmp_path / "fresh")
        done = await replay(read_history(journal.path), fresh)
        assert done.difference is None and done.skipped == ()
        assert fresh.files() == box.files() and fresh.served == box.served == ["db", "suspended", "resumed"]
        assert isinstance(done.answers[-1].result, Refused)

    run(scene())


STEPS = st.one_of(
    st.tuples(st.just("write"), st.sampled_from("abc"), st.binary(max_size=6)),
    st.tuples(st.just("exec"), st.sampled_from(("cat a b >> c", "rm a", "mv b a", "echo x > b", "ls", "exit 4")), st.just(b"")),
)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.lists(STEPS, min_size=1, max_size=6), st.integers(0, 5))
def test_any_log_replays_to_any_of_its_forks(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple], cut: int) -> None:
    tmp_path = tmp_path_factory.mktemp("any")

    async def act(box: Journal, steps: list[tuple]) -> None:
        for kind, what, data in steps:
            await (box.write(what, data) if kind == "write" else box.exec(what, timeout_s=10))

    async def scene() -> None:
        journal, _ = await begun(tmp_path)
        await act(journal, steps[:cut])
        one, two = await journal.fork(2)
        assert isinstance(one, Journal) and isinstance(two, Journal)
        await act(two, steps[cut:])
        await act(journal, [("write", "parent", b"must not show in a fork")])
        for box in (journal, one, two):
            fresh = FolderBox(tmp_path / f"fresh-{box.path.stem}")
            done = await replay(read_history(box.path), fresh)
            inner = box.box
            assert isinstance(inner, FolderBox)
            assert done.difference is None and fresh.files() == inner.files()
            await box.close()

    run(scene())


@pytest.mark.parametrize(
    ("command", "disturb", "field"),
    [("cat f", "echo other > f", "stdout"), ("test ! -e g", "touch g", "exit_code"), ("cat f >&2", "echo other > f", "stderr")],
)
def test_first_result_that_differs_is_named_and_nothing_after_it_runs(tmp_path: Path, command: str, disturb: str, field: str) -> None:
    async def scene() -> None:
        journal, _ = await begun(tmp_path)
        await journal.exec("test -e f || echo first > f", timeout_s=10)
        await journal.exec(command, timeout_s=10, stderr_apart=True)
        await journal.exec("touch later", timeout_s=10)
        await journal.close()
        fresh = FolderBox(tmp_path / "fresh")
        await fresh.exec(disturb, timeout_s=10)
        done = await replay(read_history(journal.path), fresh)
        assert done.difference is not None and done.difference.field == field
        assert isinstance(done.difference.op, Exec) and done.difference.op.argv == command
        assert done.difference.was != done.difference.now
        assert "later" not in fresh.files() and len(done.answers) == 1

    run(scene())


def test_trusted_calls_give_their_recorded_results_and_do_not_run(tmp_path: Path) -> None:
    async def scene() -> None:
        journal, _ = await begun(tmp_path)
        first = await journal.exec("date +%N; echo x >> f", timeout_s=10)
        large = await journal.exec(f"head -c {INLINE_BYTES + 9} /dev/zero", timeout_s=10, max_output_bytes=1 << 20)
        place = journal.position - 1  # the head is no step
        await journal.exec("echo y >> f; cat f", timeout_s=10)
        await journal.close()
        history = read_history(journal.path)

        idle = FolderBox(tmp_path / "idle")
        done = await replay(history, idle, trust=everything)
        assert idle.num_execs == 0 and [answer.is_trusted for answer in done.answers] == [True] * 3
        assert done.answers[0].result == first and done.answers[1].result == large

        restored = FolderBox(tmp_path / "restored")
        await restored.write("f", b"x\n")
        done = await replay(history, restored, trust=up_to(place))
        assert done.difference is None and restored.num_execs == 1 and restored.files() == {"f": b"x\ny\n"}
        assert (await replay(history, FolderBox(tmp_path / "again"))).difference is not None, "the clock moved on"

    run(scene())


def test_calls_that_overlapped_overlap_again(tmp_path: Path) -> None:
    async def scene() -> None:
        journal, box = await begun(tmp_path)
        await journal.exec("mkfifo p", timeout_s=10)
        reader, writer = journal.exec("cat p > got", timeout_s=10), journal.exec("echo through > p", timeout_s=10)
        await asyncio.gather(reader, writer)
        await journal.close()
        fresh = FolderBox(tmp_path / "fresh")
        assert (await replay(read_history(journal.path), fresh)).difference is None
        assert fresh.root.joinpath("got").read_text() == box.root.joinpath("got").read_text() == "through\n"

    run(scene())


async def read_until(process: object, mark: bytes) -> bytes:
    seen = b""
    async for chunk in process:  # type: ignore[attr-defined]
        seen += chunk.data
        if mark in seen:
            return seen
    return seen


def test_shell_is_fed_again_only_after_it_said_what_it_said(tmp_path: Path) -> None:
    async def scene() -> None:
        journal, box = await begun(tmp_path)
        shell = await journal.start(["sh"])
        await shell.write(b"echo one > f; echo ready-1\n")
        await read_until(shell, b"ready-1\n")
        await journal.exec("cat f > g", timeout_s=10)
        await shell.write(b"echo two > f; echo ready-2; read x; echo $x >> f; exit 5\n")
        await read_until(shell, b"ready-2\n")
        await journal.exec("cat f >> g", timeout_s=10)
        open_history = read_history(journal.path)
        await shell.write(b"three\n")
        await shell.close_stdin()
        assert (await shell.wait(timeout_s=10)).exit_code == 5
        await journal.close()
        assert sum(isinstance(event, Output) for event in read_events(journal.path)) == 2

        fresh = FolderBox(tmp_path / "fresh")
        done = await replay(read_history(journal.path), fresh)
        assert done.difference is None and done.processes == {}
        assert fresh.files() == box.files() == {"f": b"two\nthree\n", "g": b"one\ntwo\n"}

        other = FolderBox(tmp_path / "other")
        done = await replay(open_history, other)
        (again,) = done.processes.values()
        await again.write(b"three\n")
        assert (await again.wait(timeout_s=10)).exit_code == 5 and other.files() == box.files()

    run(scene())


def test_shell_that_says_something_else_is_a_difference(tmp_path: Path) -> None:
    async def scene() -> None:
        journal, _ = await begun(tmp_path)
        shell = await journal.start("cat word 2>&1; cat")
        await read_until(shell, b"\n")
        await shell.kill()
        await shell.wait(timeout_s=10)
        await journal.close()
        fresh = FolderBox(tmp_path / "fresh")
        await fresh.write("word", b"cat: other words of just the same length\n")
        done = await replay(read_history(journal.path), fresh, patience_s=5)
        assert done.difference is not None and done.difference.field == "stdout"
        await fresh.close()

    run(scene())


def test_program_that_could_not_be_started_before_and_can_be_now_is_a_difference(tmp_path: Path) -> None:
    async def scene() -> None:
        journal, _ = await begun(tmp_path)
        with pytest.raises(FileNotFoundError):
            await journal.start(["./tool"])
        await journal.close()
        fresh = FolderBox(tmp_path / "fresh")
        await fresh.write("tool", b"#!/bin/sh\n", mode=0o755)
        done = await replay(read_history(journal.path), fresh)
        assert done.difference is not None and (done.difference.field, done.difference.was, done.difference.now) == ("errno", "2", "0")
        await fresh.close()

    run(scene())


class LostBox(FolderBox):
    async def exec(self, argv: Argv, **options: object) -> ExecResult:  # type: ignore[override]
        if argv == "lose":
            raise RunFailure(Boundary.SANDBOX, "box 7 is gone")
        return await super().exec(argv, **options)  # type: ignore[arg-type]


def test_call_that_was_cut_off_is_left_out_and_said(tmp_path: Path) -> None:
    async def scene() -> None:
        journal = await Journal.create(LostBox(tmp_path / "box"), tmp_path / "one.jsonl", spec=SPEC)
        await journal.exec("echo before > f", timeout_s=10)
        with pytest.raises(RunFailure):
            await journal.exec("lose", timeout_s=10)
        await journal.close()
        fresh = FolderBox(tmp_path / "fresh")
        done = await replay(read_history(journal.path), fresh)
        assert [op.argv for op in done.skipped if isinstance(op, Exec)] == ["lose"] and done.difference is None

        again = await Journal.open(fresh, journal.path)
        await again.exec("echo after >> f", timeout_s=10)
        await again.close()
        third = FolderBox(tmp_path / "third")
        assert (await replay(read_history(journal.path), third)).difference is None
        assert third.files() == {"f": b"before\nafter\n"}

    run(scene())


def test_history_begins_at_the_last_saved_snapshot(tmp_path: Path) -> None:
    async def scene() -> None:
        journal, _ = await begun(tmp_path)
        await journal.exec("echo 1 > f", timeout_s=10)
        early = await journal.snapshot()
        await journal.exec("echo 2 >> f", timeout_s=10)
        late = await journal.snapshot()
        (child,) = await late.fork(1)
        assert isinstance(child, Journal)
        await child.exec("echo 3 >> f", timeout_s=10)
        await journal.close()
        assert read_history(child.path).snapshot == ""

        await early.save(str(tmp_path / "saved-early"))
        history = read_history(child.path)
        assert (history.snapshot, history.store) == ("d" * 64, str(tmp_path / "saved-early"))
        restored = FolderBox(tmp_path / "saved-early")
        assert (await replay(history, restored)).difference is None and restored.files() == {"f": b"1\n2\n3\n"}

        await late.save(str(tmp_path / "saved-late"))
        restored = FolderBox(tmp_path / "saved-late")
        history = read_history(child.path)
        assert history.store == str(tmp_path / "saved-late")
        assert (await replay(history, restored)).difference is None and restored.files() == {"f": b"1\n2\n3\n"}
        for snapshot in (early, late):
            await snapshot.close()
        await child.close()

    run(scene())


def some_log(path: Path) -> list[object]:
    log = EventLog(path, is_new=True)
    log.append(Head(spec=SPEC))
    for number in range(5):
        log.append(Head(spec=SPEC, position=number))
    asyncio.run(log.close())
    return read_events(path)  # type: ignore[return-value]


def test_log_cut_anywhere_opens_with_its_whole_lines_and_goes_on(tmp_path: Path) -> None:
    events = some_log(tmp_path / "log")
    data = (tmp_path / "log").read_bytes()
    for cut in range(len(data.split(b"\n", 1)[0]) + 1, len(data), 37):
        path = tmp_path / f"cut{cut}"
        path.write_bytes(data[:cut])
        num_whole = data[:cut].count(b"\n")
        log = EventLog(path, is_new=False)
        assert log.events == events[:num_whole]
        log.append(Head(spec=SPEC, position=99))
        asyncio.run(log.close())
        assert read_events(path) == [*events[:num_whole], Head(spec=SPEC, position=99)]


@pytest.mark.parametrize(
    "change", [lambda lines: lines[:2] + lines[3:], lambda lines: [*lines[:2], lines[2].replace(b"}", b"]", 1), *lines[3:]]]
)
def test_log_with_a_line_lost_or_changed_within_is_refused(tmp_path: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    some_log(tmp_path / "log")
    lines = (tmp_path / "log").read_bytes().splitlines(keepends=True)
    (tmp_path / "log").write_bytes(b"".join(change(lines)))
    with pytest.raises(ValueError, match=r"line 3 .* is damaged"):
        read_events(tmp_path / "log")


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "log", is_new=True)
    with pytest.raises(ValueError, match="another process"):
        EventLog(tmp_path / "log", is_new=False)
    with pytest.raises(ValueError, match="exists already"):
        EventLog(tmp_path / "log", is_new=True)
    asyncio.run(log.close())


KILLED = """
import asyncio, sys
from pathlib import Path
from folder_box import FolderBox
from rollmill.sandbox.records import SandboxSpec
from rollmill.sandbox.snapshots.journal import Journal

async def main():
    root = Path(sys.argv[1])
    journal = await Journal.create(FolderBox(root / "box"), root / "one.jsonl", spec=SandboxSpec())
    number = 0
    while True:
        await journal.write(f"f{number % 3}", b"%d" % number)
        await journal.exec(f"cat f* >> all; echo {number}", timeout_s=10)
        print(number, flush=True)
        number += 1

asyncio.run(main())
"""


def test_log_of_an_owner_that_was_killed_replays_all_it_was_told(tmp_path: Path) -> None:
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": f"{here}:{here.parents[2]}"}
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, env=env) as owner:
        assert owner.stdout is not None
        while int(owner.stdout.readline()) < 4:
            pass
        owner.send_signal(signal.SIGKILL)
        owner.wait(timeout=30)

    async def scene() -> None:
        history = read_history(tmp_path / "one.jsonl")
        fresh = FolderBox(tmp_path / "fresh")
        done = await replay(history, fresh)
        assert done.difference is None and len(done.skipped) <= 1
        assert sum(isinstance(answer.op, Exec) for answer in done.answers) >= 5

    run(scene())


class NamespaceSandbox:
    """The part of the interface that every state of the namespace backend has; options are passed on when they say something."""

    def __init__(self, box: object) -> None:
        self._box = box

    async def exec(self, argv: Argv, *, timeout_s: float, **options: object) -> ExecResult:
        return await self._box.exec(argv, timeout_s=timeout_s, **{name: value for name, value in options.items() if value})  # type: ignore[attr-defined, no-any-return]

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self._box.write(path, data)  # type: ignore[attr-defined]

    async def read(self, path: str, *, limit_bytes: int = 1 << 20) -> bytes:
        return await self._box.read(path, limit_bytes=limit_bytes)  # type: ignore[attr-defined, no-any-return]

    async def close(self) -> None:
        await self._box.close()  # type: ignore[attr-defined]


def test_lost_namespace_box_is_made_again(play: Callable[[Callable[[NamespaceBackend], Awaitable[None]]], None], tmp_path: Path) -> None:
    async def scene(backend: NamespaceBackend) -> None:
        spec = SandboxSpec(files={"calc.py": "def add(a, b):\n    return a - b\n"})
        journal = await Journal.create(NamespaceSandbox(await backend.create(spec)), tmp_path / "one.jsonl", spec=spec)  # type: ignore[arg-type]
        await journal.exec(["sed", "-i", "s/a - b/a + b/", "calc.py"], timeout_s=10)
        await journal.write("test.py", b"import calc; print(calc.add(1, 2))\n")
        first = await journal.exec(["python3", "test.py"], timeout_s=20)
        assert first.stdout == b"3\n"
        await journal.close()

        history = read_history(journal.path)
        fresh = NamespaceSandbox(await backend.create(history.spec))
        done = await replay(history, fresh)  # type: ignore[arg-type]
        assert done.difference is None
        assert await fresh.read("calc.py") == b"def add(a, b):\n    return a + b\n"
        await fresh.close()

    play(scene)


def test_lines_stand_in_the_order_of_the_calls(tmp_path: Path) -> None:
    async def scene() -> None:
        journal, _ = await begun(tmp_path)
        await asyncio.gather(*(journal.write(f"f{number}", b"") for number in range(5)))
        await journal.close()
        events = read_events(journal.path)
        assert [event.op.path for event in events if isinstance(event, Began) and isinstance(event.op, Write)] == [
            f"f{n}" for n in range(5)
        ]
        assert sorted(event.call for event in events if isinstance(event, Ended)) == [*range(5)]

    run(scene())
