"""What every backend promises of `start`: a command that runs beside others, fed and read as it goes."""

from __future__ import annotations

import asyncio

import pytest
from contract_scene import Scene

from rollmill.sandbox.interface import Process

WAIT_S = 60.0


async def _until(process: Process, wanted: bytes) -> bytes:
    """The output up to the first time it holds what is wanted."""
    seen = b""
    async with asyncio.timeout(WAIT_S):
        async for chunk in process:
            seen += chunk.data
            if wanted in seen:
                return seen
    raise AssertionError(f"ended after {seen!r} without {wanted!r}")


def test_a_shell_answers_line_by_line(scene: Scene) -> None:
    async def play() -> None:
        shell = await scene.box.start(["sh"])
        await shell.write(b"X=41\n")
        await shell.write(b"echo $((X + 1))\n")
        assert await _until(shell, b"\n") == b"42\n"
        await shell.write(b"exit 5\n")
        assert (await shell.wait(timeout_s=WAIT_S)).exit_code == 5

    scene.play(play)


def test_closing_its_input_ends_a_reader(scene: Scene) -> None:
    async def play() -> None:
        cat = await scene.box.start(["cat"])
        await cat.write(b"all of it")
        await cat.close_stdin()
        async with asyncio.timeout(WAIT_S):
            assert b"".join([chunk.data async for chunk in cat]) == b"all of it"
        assert (await cat.wait(timeout_s=WAIT_S)).exit_code == 0

    scene.play(play)


def test_both_outputs_come_told_apart(scene: Scene) -> None:
    async def play() -> None:
        process = await scene.box.start("echo out; echo err >&2")
        async with asyncio.timeout(WAIT_S):
            chunks = [chunk async for chunk in process]
        assert b"".join(c.data for c in chunks if not c.is_stderr) == b"out\n"
        assert b"".join(c.data for c in chunks if c.is_stderr) == b"err\n"

    scene.play(play)


@pytest.mark.parametrize("number", [9, 15])
def test_kill_ends_it_with_that_signal(scene: Scene, number: int) -> None:
    async def play() -> None:
        process = await scene.box.start(["sleep", "1000"])
        await process.kill(number)
        result = await process.wait(timeout_s=WAIT_S)
        assert (result.exit_code, result.timed_out) == (-number, False)

    scene.play(play)


def test_waiting_past_the_deadline_kills_it(scene: Scene) -> None:
    async def play() -> None:
        process = await scene.box.start(["sleep", "1000"])
        result = await process.wait(timeout_s=0.3)
        assert (result.exit_code, result.timed_out) == (-9, True)

    scene.play(play)


def test_input_for_a_command_that_ended_is_a_broken_pipe(scene: Scene) -> None:
    async def play() -> None:
        process = await scene.box.start(["true"])
        await process.wait(timeout_s=WAIT_S)
        with pytest.raises(BrokenPipeError):
            await process.write(b"late")

    scene.play(play)


def test_a_terminal_is_one(scene: Scene) -> None:
    async def play() -> None:
        process = await scene.box.start("test -t 0 && test -t 1 && echo terminal", pty=True)
        assert b"terminal" in await _until(process, b"terminal")
        assert (await process.wait(timeout_s=WAIT_S)).exit_code == 0

    scene.play(play)


def test_folder_and_variables_hold_for_started_commands_too(scene: Scene) -> None:
    async def play() -> None:
        await scene.box.write("started/x", b"")
        process = await scene.box.start('echo "$(basename "$(pwd)") $OF_BOX $OF_CALL"', cwd="started", env={"OF_CALL": "1"})
        assert await _until(process, b"\n") == b"started of the box 1\n"

    scene.play(play)
