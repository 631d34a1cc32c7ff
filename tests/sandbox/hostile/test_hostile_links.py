"""Links, names and folders made to mislead whoever reads, writes, lists or compares files through the API."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from rollmill.sandbox import ChangeKind, FileKind, SandboxSpec
from tests.sandbox.hostile.conftest import attack, works

RACE_S = 1.0


def test_links_to_everywhere_lead_to_places_in_the_box(perform, tmp_path):
    host = tmp_path / "host" / "canary"
    targets = [
        str(host),
        f"/proc/1/root{host}",
        f"/proc/self/root{host}",
        f"/proc/self/cwd{host}",
        f"{'../' * 40}{host}",
        f"/dev/fd/../..{host}",
    ]

    async def act(stage):
        box = await stage.box()
        for number, target in enumerate(targets):
            await box.exec(["ln", "-s", target, f"link{number}"], timeout_s=60)
            for path in (f"link{number}", target):
                with pytest.raises(OSError):
                    await box.read(path)
                with pytest.raises(OSError):
                    await box.list(path)
            assert (await box.stat(f"link{number}")).kind is FileKind.LINK
            with pytest.raises(OSError):
                await box.stat(target)
        # Through its own /proc the agent sees no more than the box's root, if it looks there at all.
        with contextlib.suppress(OSError):
            assert await box.read("/proc/self/root/etc/hostname") == await box.read("/etc/hostname")
        assert await box.list() == []

    perform(act)


@pytest.mark.parametrize("root", [False, True])
def test_agent_lends_nothing_of_its_own_through_the_api(perform, root):
    async def act(stage):
        box = await stage.box(root=root)
        for path in ("mem", "environ", "auxv", "pagemap", "syscall", "fd/0", "fd/1", "fd/3", "task/1/mem"):
            with pytest.raises(OSError):
                assert await box.read(f"/proc/self/{path}") == b"", path
        for path in ("mem", "oom_score_adj", "comm", "clear_refs", "sched", "uid_map", "setgroups", "attr/current", "exe", "fd/3"):
            with pytest.raises(OSError):
                await box.write(f"/proc/self/{path}", b"1")
        await works(box)

    perform(act)


@pytest.mark.parametrize("root", [False, True])
def test_bare_layer_below_the_overlay_cannot_be_entered(perform, root):
    async def act(stage):
        box = await stage.box(root=root)
        entered = []
        for fd in range(3, 64):
            result = await box.exec(["ls", "-A", "."], timeout_s=60, cwd=f"/proc/self/fd/{fd}")
            if result.exit_code == 0:
                entered.append(fd)
        assert entered == []

    perform(act)


def test_path_swapped_during_writes_and_reads_never_leaves_the_box(perform, tmp_path):
    """Whoever wins a race gets a file of the box: the agent has the rights of its programs and no others."""
    host = tmp_path / "host" / "canary"

    async def act(stage):
        box = await stage.box()
        targets = (str(host), "/etc/passwd", "/proc/self/mem", "/proc/1/root/etc/passwd")
        passwd = await box.read("/etc/passwd")
        for target in targets:
            await attack(box, "swap", f"/home/dev/work/race{targets.index(target)}", target)
        until, num = time.monotonic() + RACE_S, 0
        while time.monotonic() < until:
            num += 1
            for number in range(len(targets)):
                try:
                    await box.write(f"race{number}", b"attack")
                    assert await box.read(f"race{number}") in (b"attack", b"", passwd)
                    await box.stat(f"race{number}")
                except (FileNotFoundError, PermissionError, IsADirectoryError):
                    pass
                except OSError as error:
                    assert error.errno in (5, 22, 40), error  # EIO of /proc/self/mem, no regular file, too many links
        assert num > 3 and await box.read("/etc/passwd") == passwd
        await box.exec(["pkill", "-9", "attacks"], timeout_s=60)
        await works(box)

    perform(act)


def test_hard_links_reach_nothing_of_the_host(perform):
    async def act(stage):
        box = await stage.box()
        for target in ("/usr/bin/env", "/etc/passwd", "/dev/null", "/proc/1/exe", "/proc/self/exe"):
            assert (await box.exec(["ln", target, "hard"], timeout_s=60)).exit_code != 0, target
        await box.exec("echo mine > a; ln a b", timeout_s=60)
        await box.write("b", b"both")
        assert await box.read("a") == b"both"

    perform(act)


def test_special_files_hold_nobody_up(perform):
    async def act(stage):
        box = await stage.box()
        await box.exec("mkfifo pipe; python3 -c \"import socket; socket.socket(1).bind('sock')\"; ln -s loop loop; mkdir dir", timeout_s=60)
        for path in ("pipe", "sock", "loop", "dir", "/dev/zero", "/dev/random", "/dev/tty", "/dev/ptmx", "/dev/full"):
            with pytest.raises(OSError):
                await box.read(path)
            with pytest.raises(OSError):
                await box.write(path, b"x")
        assert {(await box.stat(path)).kind for path in ("pipe", "sock")} == {FileKind.OTHER}
        assert await box.list() == []
        await works(box)

    perform(act)


def test_file_under_a_lease_is_an_error_and_not_a_wait(perform):
    async def act(stage):
        box = await stage.box()
        await box.write("leased", b"x")
        assert (await attack(box, "lease", "leased")).stdout == b"lease OK\n"
        with pytest.raises(BlockingIOError):
            await box.read("leased")
        with pytest.raises(BlockingIOError):
            await box.write("leased", b"y")
        assert (await box.stat("leased")).num_bytes == 1
        await works(box)

    perform(act)


EVERY_BYTE = r"""
import os
odd = [b"\377\376", b"new\nline", b"[... 9 bytes left out ...]", b"-rf", b" ", b"...", b".wh.removed", b".wh..wh..opq", b"n" * 255]
for name in odd + [b"x" + bytes([byte]) + b"y" for byte in range(1, 256) if byte != 47]:
    os.close(os.open(name, os.O_CREAT | os.O_WRONLY))
"""


def test_names_of_every_byte_are_listed_compared_and_carried_on(perform):
    async def act(stage):
        box = await stage.box()
        await box.exec(["python3", "-c", EVERY_BYTE], timeout_s=60)
        names = await box.list()
        assert len(names) == 254 + 9 and all(f"x{chr(byte)}y" in names for byte in range(1, 128) if byte != 47)
        assert len(names) == len(set(names))
        for name in names:
            await box.stat(name)
        # Python sorts what cannot be decoded differently from bytes.
        assert {change.path.rpartition("/work/")[2] for change in await box.diff() if change.kind is ChangeKind.WRITTEN} >= set(names)
        (child,) = await box.fork(1)
        assert await child.list() == names

    perform(act)


@pytest.mark.parametrize("levels", [900, 3000])
def test_very_deep_tree_is_listed_compared_snapshotted_and_closed(perform, levels):
    async def act(stage):
        box = await stage.box()
        assert (await attack(box, "deep", str(levels))).stdout == f"{levels}\n".encode()
        found = await box.list()
        assert [name.rpartition("/")[2] for name in found] == (["bottom"] if levels < 2000 else [])
        assert len(await box.diff()) >= min(levels, 900)
        await works(box)
        (child,) = await box.fork(1)
        await works(child)
        assert (await child.exec("rm -rf d", timeout_s=60)).exit_code == 0
        await asyncio.gather(box.close(), child.close())

    perform(act)


def test_folder_closed_by_its_user_is_still_a_change(perform):
    async def act(stage):
        box = await stage.box()
        await box.exec("mkdir hidden; touch hidden/file; chmod 0 hidden", timeout_s=60)
        assert "/home/dev/work/hidden" in [change.path for change in await box.diff()]

    perform(act)


def test_huge_folder_is_listed_in_part_and_compared_whole(perform):
    async def act(stage):
        box = await stage.box(disk_bytes=64 << 20)
        assert (await box.exec("seq -f f%g 1 12000 | xargs touch", timeout_s=60)).exit_code == 0
        assert len(await box.list()) == 10_000
        assert len(await box.diff()) >= 12_000
        await works(box)

    perform(act)


LONG_NAMES = """
import os
for _ in range(14):
    os.mkdir("d" * 250)
    os.chdir("d" * 250)
for n in range(20_000):
    os.close(os.open(f"{n:0250}", os.O_CREAT | os.O_WRONLY))
"""


def test_long_names_do_not_make_an_answer_too_long(perform):
    async def act(stage):
        box = await stage.backend.create(SandboxSpec(memory_bytes=1 << 30, disk_bytes=160 << 20))
        assert (await box.exec(["python3", "-c", LONG_NAMES], timeout_s=60)).exit_code == 0
        assert await box.list()
        assert await box.diff()
        await works(box)

    perform(act)
