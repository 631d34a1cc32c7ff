"""Memory and disk taken in every way a program has: the box is stopped at its limit, says why, and nobody else pays."""

from __future__ import annotations

import asyncio
import errno

import pytest

from tests.sandbox.hostile.conftest import attack, nothing_left, works, works_or_is_ruined

MEMORY_MIB, DISK_MIB = 48, 4


async def _bounded_by_a_group(stage) -> None:
    if not (await stage.backend.capabilities()).facts["memory"].startswith("cgroup"):
        pytest.skip("without control groups memory is bounded per process")


@pytest.mark.parametrize("how", ["heap", "procs", "memfd", "sysv", "pipes", "unix", "tables"])
def test_memory_taken_in_any_way_counts_against_the_bound(perform, how):
    async def act(stage):
        await _bounded_by_a_group(stage)
        box = await stage.box(memory_bytes=MEMORY_MIB << 20, disk_bytes=DISK_MIB << 20, num_processes=64)
        running = asyncio.create_task(attack(box, "memory", how, timeout_s=3.0))
        await stage.sibling_works()
        result = await running
        # Killed for its memory, or held by another bound until its time was over; what it had got by then is below the limit.
        assert result.exit_code == -9
        told = [int(line.split()[-1]) for line in result.stdout.splitlines() if line.split()[-1].isdigit()]
        assert b"used up its memory" in result.stdout or max(told, default=0) <= MEMORY_MIB + DISK_MIB
        await works_or_is_ruined(box)
        await nothing_left(stage, box)

    perform(act)


def test_kernel_short_of_memory_takes_the_command_and_not_the_agent(perform):
    async def act(stage):
        box = await stage.box()
        assert (await box.exec("cat /proc/$$/oom_score_adj", timeout_s=60)).stdout == b"1000\n"

    perform(act)


@pytest.mark.parametrize("how", ["shm", "tmp"])
def test_file_systems_in_memory_count_against_the_disk(perform, how):
    async def act(stage):
        box = await stage.box(memory_bytes=MEMORY_MIB << 20, disk_bytes=DISK_MIB << 20)
        result = await attack(box, "memory", how, timeout_s=0.7)
        lines = result.stdout.decode().split()
        # 28: no space; 27: beyond the largest file.
        assert "refused" in lines and lines[lines.index("refused") + 1] in ("28", "27")
        assert int(lines[-1]) <= DISK_MIB
        await works(box)

    perform(act)


FILL_WITH_NAMES = """
import os
os.chdir("/tmp")
open("a", "x")
n = 0
try:
    while True:
        os.link("a", f"f{n}") if n % 2 else os.mkdir(f"d{n}")
        n += 1
except OSError as error:
    print(n, error.errno)
"""


def test_disk_that_is_full_of_names_still_answers(perform):
    async def act(stage):
        box = await stage.box(disk_bytes=DISK_MIB << 20)
        result = await box.exec(["python3", "-c", FILL_WITH_NAMES], timeout_s=60)
        num, why = map(int, result.stdout.split())
        assert why == errno.ENOSPC and num <= max(1024, (DISK_MIB << 20) // 4096)
        with pytest.raises(OSError, match="No space"):
            await box.write("more", b"x")
        assert len(await box.list("/tmp")) == num // 2 + 2  # the first one and the program
        assert len(await box.diff()) >= num
        await works(box)

    perform(act)


def test_sparse_file_of_an_exbibyte_is_refused(perform):
    async def act(stage):
        box = await stage.box(disk_bytes=DISK_MIB << 20)
        for size in ("1E", "7E", "5M"):
            result = await box.exec(["truncate", "-s", size, "huge"], timeout_s=60)
            assert result.exit_code != 0, size
        # A kernel told to overcommit grants it: addresses are not memory.
        await box.exec(["python3", "-c", "import mmap; mmap.mmap(-1, 1 << 46)"], timeout_s=60)
        beyond = "import mmap; f = open('short', 'w+b'); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096); f.truncate(0); m[0]"
        assert (await box.exec(["python3", "-c", beyond], timeout_s=60)).exit_code == -7
        await works(box)

    perform(act)


def test_many_commands_that_print_for_ever_are_all_ended(perform):
    async def act(stage):
        box = await stage.box(memory_bytes=128 << 20)
        running = [asyncio.create_task(box.exec(["yes"], timeout_s=0.7, max_output_bytes=1 << 20)) for _ in range(12)]
        await stage.sibling_works()
        for result in await asyncio.gather(*running):
            assert result.timed_out and len(result.stdout) <= 1 << 20
        await works(box)

    perform(act)


def test_output_that_nobody_reads_holds_up_its_command_alone(perform):
    async def act(stage):
        box = await stage.box()
        floods = [await box.start("yes; yes >&2") for _ in range(8)]
        await works(box)
        assert (await box.exec("head -c 5000000 /dev/zero | wc -c", timeout_s=60)).stdout == b"5000000\n"
        for flood in floods:
            await flood.kill()
            assert (await flood.wait(timeout_s=60)).exit_code == -9
        await works(box)

    perform(act)


def test_output_that_looks_like_frames_is_output(perform):
    async def act(stage):
        box = await stage.box()
        frames = "import os, struct\nfor kind in (129, 131, 132, 133, 134, 135): os.write(1, struct.pack('<III', 4, 1, kind) + b'fake')"
        result = await box.exec(["python3", "-c", frames], timeout_s=60)
        assert result.exit_code == 0 and result.num_output_bytes == 6 * 16
        into = "import os\nfor fd in range(3, 1024):\n    try: os.write(fd, b'x' * 64); print(fd)\n    except OSError: pass"
        assert (await box.exec(["python3", "-c", into], timeout_s=60)).stdout == b""
        await works(box)

    perform(act)
