"""What every backend promises of `exec`: the command's own doing comes back as a result, never as an exception."""

from __future__ import annotations

import asyncio

import pytest
from contract_scene import Scene

WAIT_S = 60.0


def test_argv_reaches_the_program_word_for_word(scene: Scene) -> None:
    async def play() -> None:
        result = await scene.box.exec(["printf", "%s|%s", "a b", "$HOME;*"], timeout_s=WAIT_S)
        assert (result.exit_code, result.stdout, result.timed_out) == (0, b"a b|$HOME;*", False)
        assert result.num_output_bytes == len(result.stdout)

    scene.play(play)


def test_a_string_goes_to_the_shell(scene: Scene) -> None:
    async def play() -> None:
        result = await scene.box.exec("echo abc | tr a-c x-z; exit 3", timeout_s=WAIT_S)
        assert (result.exit_code, result.stdout) == (3, b"xyz\n")

    scene.play(play)


def test_standard_input_is_fed_then_closed(scene: Scene) -> None:
    async def play() -> None:
        data = bytes(range(256)) * 2000
        result = await scene.box.exec(["cat"], stdin=data, timeout_s=WAIT_S, max_output_bytes=1 << 20)
        assert result.stdout == data
        assert (await scene.box.exec(["cat"], timeout_s=WAIT_S)).stdout == b""

    scene.play(play)


def test_variables_of_a_request_are_added_to_those_of_the_box(scene: Scene) -> None:
    async def play() -> None:
        result = await scene.box.exec('echo "$OF_BOX/$OF_CALL"', env={"OF_CALL": "a b"}, timeout_s=WAIT_S)
        assert result.stdout == b"of the box/a b\n"
        result = await scene.box.exec('echo "$OF_BOX"', env={"OF_BOX": "replaced"}, timeout_s=WAIT_S)
        assert result.stdout == b"replaced\n"

    scene.play(play)


def test_folder_of_a_command_is_relative_to_the_working_directory(scene: Scene) -> None:
    async def play() -> None:
        await scene.box.write("deep/er/x", b"")
        here = (await scene.box.exec(["pwd"], timeout_s=WAIT_S)).stdout.strip()
        there = (await scene.box.exec(["pwd"], cwd="deep/er", timeout_s=WAIT_S)).stdout.strip()
        assert there == here.rstrip(b"/") + b"/deep/er"

    scene.play(play)


@pytest.mark.parametrize("status", [0, 1, 42, 255])
def test_exit_status_is_the_command_s_own(scene: Scene, status: int) -> None:
    async def play() -> None:
        assert (await scene.box.exec(f"exit {status}", timeout_s=WAIT_S)).exit_code == status

    scene.play(play)


def test_a_program_that_is_not_there_ends_with_127_and_says_so(scene: Scene) -> None:
    async def play() -> None:
        result = await scene.box.exec(["no-such-program"], timeout_s=WAIT_S)
        assert result.exit_code == 127
        assert b"no-such-program" in result.stdout

    scene.play(play)


def test_a_file_that_cannot_be_run_ends_with_126(scene: Scene) -> None:
    async def play() -> None:
        await scene.box.write("plain", b"text", mode=0o644)
        assert (await scene.box.exec(["./plain"], timeout_s=WAIT_S)).exit_code == 126

    scene.play(play)


@pytest.mark.parametrize("number", [9, 15])
def test_a_signal_is_a_negative_exit_status(scene: Scene, number: int) -> None:
    async def play() -> None:
        assert (await scene.box.exec(f"kill -{number} $$", timeout_s=WAIT_S)).exit_code == -number

    scene.play(play)


def test_a_command_past_its_time_is_killed_and_the_box_goes_on(scene: Scene) -> None:
    async def play() -> None:
        result = await scene.box.exec("echo begun; sleep 1000", timeout_s=0.5)
        assert (result.exit_code, result.timed_out, result.stdout) == (-9, True, b"begun\n")
        assert (await scene.box.exec(["true"], timeout_s=WAIT_S)).exit_code == 0

    scene.play(play)


def test_standard_error_comes_within_the_output_unless_asked_apart(scene: Scene) -> None:
    async def play() -> None:
        both = await scene.box.exec("echo out; echo err >&2", timeout_s=WAIT_S)
        assert (both.stdout, both.stderr) == (b"out\nerr\n", b"")
        apart = await scene.box.exec("echo out; echo err >&2", timeout_s=WAIT_S, stderr_apart=True)
        assert (apart.stdout, apart.stderr) == (b"out\n", b"err\n")

    scene.play(play)


def test_long_output_keeps_its_head_its_tail_and_its_count(scene: Scene) -> None:
    async def play() -> None:
        script = "echo first; head -c 3000000 /dev/zero | tr '\\0' x; echo; echo last"
        result = await scene.box.exec(script, timeout_s=WAIT_S, max_output_bytes=4096)
        assert result.num_output_bytes == 3000000 + len("first\n\nlast\n")
        assert result.stdout.startswith(b"first\nxxx") and result.stdout.endswith(b"xxx\nlast\n")
        assert b"bytes left out" in result.stdout and len(result.stdout) <= 4096 + 100  # the limit and one line that says what is missing

    scene.play(play)


def test_output_that_never_ends_is_bounded_by_the_time_out(scene: Scene) -> None:
    async def play() -> None:
        result = await scene.box.exec(["yes"], timeout_s=0.5, max_output_bytes=1024)
        assert result.timed_out and result.num_output_bytes > 1024 and result.stdout.startswith(b"y\ny\n")

    scene.play(play)


def test_usage_counts_the_command_and_its_children(scene: Scene) -> None:
    async def play() -> None:
        result = await scene.box.exec("head -c 30000000 /dev/zero | tr '\\0' x | wc -c", timeout_s=WAIT_S)
        assert result.stdout.split() == [b"30000000"]
        assert result.usage.user_s + result.usage.system_s > 0 and result.usage.max_rss_bytes > 0 and result.wall_s > 0

    scene.play(play)


def test_a_command_ends_when_it_ends_though_children_go_on(scene: Scene) -> None:
    async def play() -> None:
        result = await scene.box.exec("sleep 1000 & echo $!", timeout_s=WAIT_S)
        assert result.exit_code == 0 and not result.timed_out
        child = result.stdout.decode().strip()
        assert (await scene.box.exec(["kill", child], timeout_s=WAIT_S)).exit_code == 0, "it was still there"

    scene.play(play)


def test_commands_run_beside_one_another(scene: Scene) -> None:
    async def play() -> None:
        await scene.box.exec("mkfifo one two", timeout_s=WAIT_S)
        # Each waits for the other: run one after the other they would never end.
        first, second = await asyncio.gather(
            scene.box.exec("echo from-first > one; cat two", timeout_s=WAIT_S),
            scene.box.exec("cat one; echo from-second > two", timeout_s=WAIT_S),
        )
        assert (first.stdout, second.stdout) == (b"from-second\n", b"from-first\n")

    scene.play(play)


@pytest.mark.parametrize("argv", [[], ["a\0b"]], ids=["empty", "nul"])
def test_an_impossible_argv_is_refused_before_it_leaves(scene: Scene, argv: list[str]) -> None:
    async def play() -> None:
        with pytest.raises(ValueError, match="argv"):
            await scene.box.exec(argv, timeout_s=WAIT_S)

    scene.play(play)
