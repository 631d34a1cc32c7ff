"""What every agent does with a command: status, output, input, surroundings, time."""

from __future__ import annotations

import asyncio

import pytest

SAY_BOTH = "echo one; echo two >&2; echo three"


def test_string_goes_to_the_shell_and_streams_are_merged_in_order(play):
    async def scene(box):
        result = await box.exec(SAY_BOTH, timeout_s=30)
        assert (result.exit_code, result.stdout, result.stderr, result.timed_out) == (0, b"one\ntwo\nthree\n", b"", False)
        assert result.num_output_bytes == len(result.stdout)

    play(scene)


def test_standard_error_comes_apart_when_asked(play):
    async def scene(box):
        result = await box.exec(["sh", "-c", SAY_BOTH], timeout_s=30, stderr_apart=True)
        assert (result.stdout, result.stderr, result.num_output_bytes) == (b"one\nthree\n", b"two\n", 14)
        loud = await box.exec(
            ["sh", "-c", "yes | head -c 100000; yes | head -c 50000 >&2"], timeout_s=30, stderr_apart=True, max_output_bytes=1000
        )
        assert len(loud.stdout) <= 1000 and b"bytes left out" in loud.stdout
        assert len(loud.stderr) <= 1000 and b"bytes left out" in loud.stderr
        assert loud.num_output_bytes == 150_000

    play(scene)


STATUSES = [
    (["false"], 1, b""),
    (["sh", "-c", "exit 42"], 42, b""),
    (["sh", "-c", "kill -SEGV $$"], -11, b""),
    (["no-such-program"], 127, b"no-such-program: No such file or directory\n"),
    (["./missing"], 127, b"./missing: No such file or directory\n"),
    (["/etc/passwd"], 126, b"/etc/passwd: Permission denied\n"),
    (["/"], 126, b"/: Permission denied\n"),
    (["\ud800"], 126, b"'\\ud800': not text that a program can be given\n"),
]


def test_exit_status_is_an_observation(play):
    async def scene(box):
        for argv, exit_code, words in STATUSES:
            result = await box.exec(argv, timeout_s=30)
            assert (result.exit_code, result.stdout) == (exit_code, words), argv
        apart = await box.exec(["no-such-program"], timeout_s=30, stderr_apart=True)
        assert (apart.exit_code, apart.stdout, apart.stderr) == (127, b"", STATUSES[3][2])

    play(scene)


def test_environment_of_the_box_is_added_to_and_replaced_by_the_request(play):
    async def scene(box):
        line = 'echo "$WHO $MORE"'
        assert (await box.exec(line, timeout_s=30)).stdout == b"base \n"
        assert (await box.exec(line, timeout_s=30, env={"WHO": "me=you", "MORE": "\udcff"})).stdout == b"me=you \xff\n"
        assert (await box.exec(line, timeout_s=30)).stdout == b"base \n"
        assert (await box.exec(["mine"], timeout_s=30)).exit_code == 127
        await box.write("bin/mine", b"#!/bin/sh\necho found\n", mode=0o755)
        assert (await box.exec(["mine"], timeout_s=30, env={"PATH": f"{box.folder}/bin"})).stdout == b"found\n"

    play(scene)


def test_command_starts_in_the_folder_it_is_given(play):
    async def scene(box):
        await box.write("a/b/c", b"")
        here = str(box.folder)
        for cwd, seen in (("", here), ("a/b", f"{here}/a/b"), ("/usr", "/usr"), ("", here)):
            assert (await box.exec(["pwd"], timeout_s=30, cwd=cwd)).stdout.decode() == f"{seen}\n"
        lost = await box.exec(["pwd"], timeout_s=30, cwd="nowhere")
        assert lost.exit_code == 127 and b"nowhere: No such file or directory" in lost.stdout

    play(scene)


def test_input_is_fed_then_closed_and_is_empty_without_one(play):
    async def scene(box):
        assert (await box.exec(["cat"], timeout_s=30)).stdout == b""
        assert (await box.exec(["cat"], timeout_s=30, stdin=b"three\n")).stdout == b"three\n"
        big = bytes(range(256)) * 50_000
        assert (await box.exec(["sha256sum"], timeout_s=30, stdin=big)).exit_code == 0
        assert (await box.exec(["wc", "-c"], timeout_s=30, stdin=big)).stdout.split() == [b"12800000"]
        assert (await box.exec(["true"], timeout_s=30, stdin=big)).exit_code == 0
        echoed = await box.exec(["cat"], timeout_s=30, stdin=big, max_output_bytes=len(big))
        assert echoed.stdout == big

    play(scene)


def test_hundred_megabytes_of_output_leave_head_and_tail_and_a_count(play):
    async def scene(box):
        line = "echo first; head -c 100000000 /dev/zero | tr '\\0' x; echo; echo last"
        result = await box.exec(line, timeout_s=60, max_output_bytes=10_000)
        assert result.num_output_bytes == 100_000_000 + len("first\n\nlast\n")
        assert len(result.stdout) <= 10_000 and result.stdout.startswith(b"first\nxxx") and result.stdout.endswith(b"xxx\nlast\n")
        left_out = int(result.stdout.split(b"\n[... ")[1].split(b" bytes")[0])
        assert len(result.stdout) - len(f"\n[... {left_out} bytes left out ...]\n") + left_out == result.num_output_bytes

    play(scene)


def test_small_limits_hold(play):
    async def scene(box):
        for limit in (0, 1, 255, 256, 1000):
            result = await box.exec("printf '%01000d' 7", timeout_s=30, max_output_bytes=limit)
            assert len(result.stdout) <= limit and result.num_output_bytes == 1000

    play(scene)


def test_never_ending_output_ends_at_its_time_out(play):
    async def scene(box):
        result = await box.exec(["yes"], timeout_s=0.3, max_output_bytes=4096)
        assert result.timed_out and result.exit_code == -9 and result.num_output_bytes > 4096 and len(result.stdout) <= 4096
        assert (await box.exec(["echo", "fine"], timeout_s=30)).stdout == b"fine\n"

    play(scene)


def test_time_out_takes_the_whole_process_group_however_stubborn(play):
    async def scene(box):
        line = "trap '' TERM INT HUP; sleep 1000 & echo $!; echo up; wait"
        result = await box.exec(line, timeout_s=0.3)
        assert result.timed_out and result.exit_code == -9 and result.stdout.endswith(b"up\n")
        sleeper = result.stdout.split()[0].decode()
        # Killed, though whoever adopted it may not have reaped it yet.
        state = await box.exec(f"while grep -q '^State:.[^ZX]' /proc/{sleeper}/status 2>/dev/null; do :; done; echo ended", timeout_s=30)
        assert state.stdout == b"ended\n"

    play(scene)


def test_commands_that_leave_children_behind_answer_at_once_and_the_children_go_on(play):
    async def scene(box):
        result = await box.exec("(until [ -e go ]; do sleep 0.01; done; echo late; echo went > proof) & echo early", timeout_s=30)
        assert result.stdout == b"early\n"
        await box.write("go", b"")
        assert (await box.exec("until [ -s proof ]; do sleep 0.01; done; cat proof", timeout_s=30)).stdout == b"went\n"

    play(scene)


def test_children_left_behind_that_print_for_ever_do_not_hold_up_their_command(play):
    async def scene(box):
        result = await box.exec("setsid yes & echo $!; exit 3", timeout_s=30, max_output_bytes=1000)
        assert result.exit_code == 3
        assert (await box.exec(["kill", "-9", result.stdout.split()[0].decode()], timeout_s=30)).exit_code == 0

    play(scene)


def test_more_pipes_left_behind_than_the_agent_keeps_open(play):
    async def scene(box):
        for _ in range(13):
            done = await asyncio.gather(*(box.exec(["sh", "-c", "sleep 1000 &"], timeout_s=60) for _ in range(20)))
            assert [result.exit_code for result in done] == [0] * 20
        assert (await box.exec(["echo", "fine"], timeout_s=30)).stdout == b"fine\n"

    play(scene)


def test_commands_run_beside_each_other(play):
    async def scene(box):
        waiting = asyncio.create_task(box.exec("until [ -e go ]; do sleep 0.01; done; echo went", timeout_s=30))
        await box.write("go", b"")
        assert (await waiting).stdout == b"went\n"
        results = await asyncio.gather(*(box.exec(["sh", "-c", f"echo {n}; exit {n}"], timeout_s=30) for n in range(40)))
        assert [(r.exit_code, r.stdout) for r in results] == [(n, f"{n}\n".encode()) for n in range(40)]

    play(scene)


def test_usage_is_the_commands_own(play):
    async def scene(box):
        busy = await box.exec(["python3", "-c", "x = bytearray(64 << 20)\nfor i in range(300000): x[i] = 1"], timeout_s=60)
        idle = await box.exec(["true"], timeout_s=30)
        assert busy.exit_code == 0, busy.stdout
        assert busy.usage.max_rss_bytes > 64 << 20 > idle.usage.max_rss_bytes > 0
        assert busy.usage.user_s + busy.usage.system_s > 0.0 and busy.wall_s > 0.0

    play(scene)


def test_cancelled_call_kills_its_command(play):
    async def scene(box):
        call = asyncio.create_task(box.exec("echo $$ > pid; exec sleep 1000", timeout_s=1000))
        pid = (await box.exec("until [ -s pid ]; do sleep 0.01; done; cat pid", timeout_s=30)).stdout.decode().strip()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await box.exec(f"while [ -e /proc/{pid} ]; do sleep 0.01; done", timeout_s=30)).exit_code == 0

    play(scene)
