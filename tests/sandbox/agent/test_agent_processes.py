"""Commands that run beside their owner: output as it comes and held back when it is not read, input, terminals, signals, the end."""

from __future__ import annotations

import asyncio
import errno
import signal

import pytest

from rollmill.records import RunFailure
from rollmill.sandbox.agent import wire
from rollmill.sandbox.agent.process import KEPT_BYTES


async def read_until(process, wanted: bytes) -> bytes:
    seen = b""
    while wanted not in seen:
        seen += (await anext(process)).data
    return seen


def test_output_comes_as_it_is_printed_and_input_goes_in_between(play):
    async def scene(box):
        process = await box.start(["sh", "-c", "while read line; do echo got $line; done; echo over; exit 5"])
        await process.write(b"one\n")
        assert await read_until(process, b"\n") == b"got one\n"
        await process.write(b"two\n")
        assert await read_until(process, b"\n") == b"got two\n"
        await process.close_stdin()
        result = await process.wait(timeout_s=30)
        assert (result.exit_code, result.stdout, result.timed_out) == (5, b"over\n", False)
        assert result.num_output_bytes == len(b"got one\ngot two\nover\n")
        assert await process.wait(timeout_s=30) == result

    play(scene)


def test_both_streams_are_told_apart(play):
    async def scene(box):
        process = await box.start("echo out; echo err >&2")
        chunks = [chunk async for chunk in process]
        assert b"".join(c.data for c in chunks if not c.is_stderr) == b"out\n"
        assert b"".join(c.data for c in chunks if c.is_stderr) == b"err\n"
        again = await box.start("echo out; echo err >&2")
        result = await again.wait(timeout_s=30)
        assert (result.stdout, result.stderr) == (b"out\n", b"err\n")

    play(scene)


def test_unread_output_holds_the_command_up_and_nothing_is_lost(play):
    async def scene(box):
        num_bytes = 4_000_000
        process = await box.start(f"head -c {num_bytes} /dev/zero; echo done > mark")
        first = await anext(process)
        # Nothing more is taken: the command comes to rest in its write, with at most a window and one read waiting here.
        at_rest = f"until grep -q '^State:.S' /proc/$(pgrep -P {process.pid} head)/status; do sleep 0.01; done; ls"
        listed = await box.exec(at_rest, timeout_s=30)
        assert listed.exit_code == 0 and b"mark" not in listed.stdout
        held = sum(len(chunk.data) for chunk in process._chunks)
        assert held < wire.WINDOW_BYTES + (1 << 16) < num_bytes
        total = len(first.data)
        async for chunk in process:
            assert set(chunk.data) == {0}
            total += len(chunk.data)
        assert total == num_bytes
        assert (await process.wait(timeout_s=30)).num_output_bytes == num_bytes
        assert await box.read("mark") == b"done\n"

    play(scene)


def test_other_calls_are_answered_while_one_output_is_not_read(play):
    async def scene(box):
        processes = [await box.start(["yes"]) for _ in range(3)]
        for n in range(20):
            assert (await box.exec(["echo", str(n)], timeout_s=30)).stdout == f"{n}\n".encode()
        for process in processes:
            await process.kill()
            assert (await process.wait(timeout_s=30)).exit_code == -9

    play(scene)


def test_wait_takes_what_is_left_and_keeps_head_and_tail(play):
    async def scene(box):
        process = await box.start("echo first; head -c 10000000 /dev/zero; echo last")
        result = await process.wait(timeout_s=60)
        assert result.exit_code == 0 and result.num_output_bytes == 10_000_000 + len("first\nlast\n")
        assert len(result.stdout) <= KEPT_BYTES and result.stdout.startswith(b"first\n") and result.stdout.endswith(b"last\n")

    play(scene)


def test_wait_leaves_the_output_to_whoever_reads_it(play):
    async def scene(box):
        process = await box.start(["sh", "-c", "read line; head -c 3000000 /dev/zero"])

        async def count() -> int:
            return sum([len(chunk.data) async for chunk in process])

        reader = asyncio.create_task(count())
        await asyncio.sleep(0)
        waiter = asyncio.create_task(process.wait(timeout_s=30))
        await process.write(b"go\n")
        assert await reader == 3_000_000
        assert (await waiter).stdout == b""

    play(scene)


def test_second_reader_is_refused(play):
    async def scene(box):
        process = await box.start(["cat"])
        reader = asyncio.create_task(anext(process))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="one reader"):
            await anext(process)
        await process.write(b"x")
        assert (await reader).data == b"x"

    play(scene)


def test_wait_that_runs_out_of_time_kills_and_says_so(play):
    async def scene(box):
        process = await box.start("trap '' TERM; echo up; while :; do sleep 0.05; done")
        await read_until(process, b"up\n")
        result = await process.wait(timeout_s=0.1)
        assert result.timed_out and result.exit_code == -9
        stuck = await box.start(["yes"])
        await anext(stuck)
        assert (await stuck.wait(timeout_s=0.1)).timed_out

    play(scene)


def test_signals_reach_the_command(play):
    async def scene(box):
        process = await box.start("trap 'echo caught; exit 7' USR1; echo up; while :; do sleep 0.02; done")
        await read_until(process, b"up\n")
        await process.kill(signal.SIGUSR1)
        result = await process.wait(timeout_s=30)
        assert (result.exit_code, result.stdout, result.timed_out) == (7, b"caught\n", False)
        await process.kill()
        ended = await box.start(["sleep", "1000"])
        await ended.kill(signal.SIGTERM)
        assert (await ended.wait(timeout_s=30)).exit_code == -15

    play(scene)


def test_large_input_arrives_whole_and_waits_for_its_reader(play):
    async def scene(box):
        data = bytes(range(251)) * 20_000
        process = await box.start("until [ -e go ]; do sleep 0.01; done; sha256sum")
        writing = asyncio.create_task(process.write(data))
        expected = await box.exec(["sha256sum"], timeout_s=30, stdin=data)
        assert not writing.done()
        await box.write("go", b"")
        await writing
        await process.close_stdin()
        assert (await process.wait(timeout_s=30)).stdout == expected.stdout

    play(scene)


def test_writing_to_a_command_that_does_not_read_is_a_broken_pipe(play):
    async def scene(box):
        deaf = await box.start("exec <&-; echo closed; until [ -e go ]; do sleep 0.01; done")
        await read_until(deaf, b"closed\n")
        with pytest.raises(BrokenPipeError):
            await deaf.write(bytes(1 << 20))
        with pytest.raises(BrokenPipeError):
            await deaf.write(b"x")
        await box.write("go", b"")
        assert (await deaf.wait(timeout_s=30)).exit_code == 0
        with pytest.raises(BrokenPipeError):
            await deaf.write(b"x")
        dying = await box.start(["sleep", "1000"])
        writing = asyncio.create_task(dying.write(bytes(1 << 20)))
        await asyncio.sleep(0)
        await dying.kill()
        with pytest.raises(BrokenPipeError):
            await writing

    play(scene)


def test_writing_nothing_does_not_end_the_input(play):
    async def scene(box):
        process = await box.start(["cat"])
        await process.write(b"")
        await process.write(b"still open")
        await process.close_stdin()
        assert (await process.wait(timeout_s=30)).stdout == b"still open"
        with pytest.raises(BrokenPipeError):
            await process.close_stdin()

    play(scene)


def test_program_that_cannot_be_started_raises_its_errno(play):
    async def scene(box):
        with pytest.raises(FileNotFoundError, match="no-such-program"):
            await box.start(["no-such-program"])
        with pytest.raises(PermissionError):
            await box.start(["/etc/passwd"])
        with pytest.raises(FileNotFoundError, match="nowhere"):
            await box.start(["true"], cwd="nowhere")
        with pytest.raises(OSError) as odd:
            await box.start(["\ud800"])
        assert odd.value.errno == errno.EINVAL

    play(scene)


def test_terminal_is_one_with_a_size_job_control_and_an_end(play):
    async def scene(box):
        process = await box.start(["sh", "-c", "tty; stty size; read line; stty size; cat; echo over >&2"], pty=True)
        seen = await read_until(process, b"24 80\r\n")
        assert b"/dev/pts/" in seen
        await process.resize(50, 132)
        await process.write(b"go\n")
        await read_until(process, b"50 132\r\n")
        await process.write(b"text\n")
        await read_until(process, b"text\r\ntext\r\n")
        await process.close_stdin()
        result = await process.wait(timeout_s=30)
        assert result.exit_code == 0 and result.stdout.endswith(b"over\r\n") and result.stderr == b""

    play(scene)


def test_terminal_sends_interrupts_to_the_foreground(play):
    async def scene(box):
        process = await box.start(["bash", "--norc", "-i"], pty=True, env={"PS1": "ready> "})
        await read_until(process, b"ready> ")
        await process.write(b"sleep 1000\n")
        await read_until(process, b"sleep 1000\r\n")
        until_it_sleeps = "until pgrep -x sleep -a | grep -q 1000; do sleep 0.01; done"
        assert (await box.exec(until_it_sleeps, timeout_s=30)).exit_code == 0
        await process.write(b"\x03")
        await read_until(process, b"ready> ")
        await process.write(b"echo $TERM $((6 * 7))\n")
        await read_until(process, b"xterm-256color 42\r\n")
        await process.write(b"exit 3\n")
        assert (await process.wait(timeout_s=30)).exit_code == 3

    play(scene)


def test_all_output_of_a_terminal_is_read_before_the_end_is_told(play):
    async def scene(box):
        for _ in range(10):
            process = await box.start(["sh", "-c", "seq 1 2000"], pty=True)
            seen = b"".join([chunk.data async for chunk in process])
            assert seen.split() == [str(n).encode() for n in range(1, 2001)]

    play(scene)


def test_reader_hears_of_the_box_that_died_under_it(play):
    async def scene(box):
        process = await box.start("echo up; sleep 1000")
        await read_until(process, b"up\n")
        waiting = asyncio.create_task(process.wait(timeout_s=1000))
        await asyncio.sleep(0)
        await box.end("the test ended it")
        with pytest.raises(RunFailure, match="the test ended it"):
            await waiting
        with pytest.raises(RunFailure, match="the test ended it"):
            await anext(process)
        with pytest.raises(BrokenPipeError):
            await process.write(b"x")
        await process.kill()

    play(scene)
