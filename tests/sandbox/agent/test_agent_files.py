"""What every agent does with files: bytes and modes kept, odd names understood, errors with their errno."""

from __future__ import annotations

import errno
import os

import pytest

from rollmill.sandbox.agent.client import PIECE_BYTES
from rollmill.sandbox.records import FileKind, SandboxSpec

ODD_NAMES = ["hé", "a b", "new\nline", "\udcff\udc80", "-rf", "日本", "x" * 255]


def test_owner_and_commands_see_the_same_files(play):
    async def scene(box):
        data = bytes(range(256)) * 4096
        await box.write("deep/er/blob", data)
        assert await box.read("deep/er/blob") == data
        seen = await box.exec("wc -c < deep/er/blob; echo new > deep/er/blob", timeout_s=30)
        assert seen.stdout.strip() == b"1048576"
        assert await box.read(f"{box.folder}/deep/er/blob") == b"new\n"
        await box.write("deep/er/blob", b"")
        assert await box.read("deep/er/blob") == b""
        assert await box.read("/proc/version")

    play(scene)


def test_long_file_travels_in_pieces_and_arrives_whole(play):
    async def scene(box):
        data = bytes(range(251)) * (3 * PIECE_BYTES // 251 + 1)
        await box.write("big", b"longer than nothing" * 100)
        await box.write("big", data, mode=0o640)
        assert await box.read("big", limit_bytes=len(data)) == data
        assert (await box.stat("big")).mode == 0o640

    play(scene)


def test_odd_names_are_names(play):
    async def scene(box):
        for name in ODD_NAMES:
            await box.write(f"d/{name}", name.encode(errors="surrogateescape"))
        assert await box.list() == sorted((f"d/{name}" for name in ODD_NAMES), key=os.fsencode)
        for name in ODD_NAMES:
            assert await box.read(f"d/{name}") == os.fsencode(name)
            assert (await box.stat(f"d/{name}")).path == f"d/{name}"
            assert (await box.exec(["cat", f"./{name}"], timeout_s=30, cwd="d")).stdout == os.fsencode(name)

    play(scene)


UNREADABLE = [
    ("missing", errno.ENOENT),
    (".", errno.EISDIR),
    ("", errno.EISDIR),
    ("a/b", errno.ENOTDIR),
    ("a\0b", errno.EINVAL),
    ("\ud800", errno.EINVAL),
    ("/dev/zero", errno.EINVAL),
    ("pipe", errno.EINVAL),
    ("loop", errno.ELOOP),
    ("x" * 256, errno.ENAMETOOLONG),
    ("d/" * 3000, errno.ENAMETOOLONG),
]


def test_reading_what_is_no_file_raises_its_errno(play):
    async def scene(box):
        await box.write("a", b"x")
        os.mkfifo(box.folder / "pipe")
        (box.folder / "loop").symlink_to("loop")
        for path, number in UNREADABLE:
            with pytest.raises(OSError) as error:
                await box.read(path)
            assert (error.value.errno, error.value.filename) == (number, path)

    play(scene)


def test_writing_where_no_file_can_be_raises_and_leaves_nothing(play):
    async def scene(box):
        await box.write("a", b"x")
        os.mkfifo(box.folder / "pipe")
        for path, number in (("a/b", errno.ENOTDIR), ("/tmp", errno.EISDIR), ("/dev/null", errno.EINVAL), ("pipe", errno.ENXIO)):
            with pytest.raises(OSError) as error:
                await box.write(path, b"y")
            assert error.value.errno == number, path
        assert await box.list() == ["a"]
        box.spec = SandboxSpec(disk_bytes=10)
        with pytest.raises(OSError) as full:
            await box.write("huge", bytes(11))
        assert full.value.errno == errno.ENOSPC

    play(scene)


def test_limit_is_exact(play):
    async def scene(box):
        await box.write("a", b"x" * 100)
        assert await box.read("a", limit_bytes=100) == b"x" * 100
        for limit in (99, 0):
            with pytest.raises(OSError) as error:
                await box.read("a", limit_bytes=limit)
            assert error.value.errno == errno.EFBIG
        await box.write("none", b"")
        assert await box.read("none", limit_bytes=0) == b""
        with pytest.raises(ValueError, match="limit_bytes"):
            await box.read("a", limit_bytes=1 << 30)

    play(scene)


def test_listing_is_sorted_bounded_and_follows_no_link(play):
    async def scene(box):
        for name in ("b/2", "b/1", "a", "c/d/e"):
            await box.write(name, b"")
        os.mkfifo(box.folder / "pipe")
        (box.folder / "link").symlink_to("/usr")
        (box.folder / "filelink").symlink_to("a")
        assert await box.list() == ["a", "b/1", "b/2", "c/d/e"]
        assert await box.list("b") == ["1", "2"]
        assert await box.list(f"{box.folder}/c") == ["d/e"]
        with pytest.raises(FileNotFoundError):
            await box.list("nowhere")
        with pytest.raises(NotADirectoryError):
            await box.list("a")
        await box.exec("mkdir many; cd many; seq -f f%05g 0 10499 | xargs touch", timeout_s=60)
        names = await box.list("many")
        assert names == [f"f{n:05}" for n in range(10_000)]

    play(scene)


def test_stat_tells_kinds_and_follows_no_link(play):
    async def scene(box):
        await box.write("file", b"12345", mode=0o751)
        os.utime(box.folder / "file", (1.5, 1234.25))
        (box.folder / "link").symlink_to("file")
        os.mkfifo(box.folder / "pipe")
        found = await box.stat("file")
        assert (found.kind, found.num_bytes, found.mode, found.mtime_s, found.target) == (FileKind.FILE, 5, 0o751, 1234.25, "")
        assert (await box.stat(".")).kind is FileKind.FOLDER
        assert ((await box.stat("link")).kind, (await box.stat("link")).target) == (FileKind.LINK, "file")
        assert (await box.stat("pipe")).kind is FileKind.OTHER
        with pytest.raises(FileNotFoundError):
            await box.stat("missing")

    play(scene)


def test_world_is_written_in_as_many_frames_as_it_needs(play):
    async def scene(box):
        world = {f"many/{n}": f"{n} é\n" * 9_000 for n in range(60)} | {"long": "x" * (PIECE_BYTES + 5), "d/empty": "", "odd": "\ud800"}
        await box.install(world)
        assert await box.list() == sorted(world)
        for path in ("many/0", "many/59", "long", "d/empty"):
            assert await box.read(path, limit_bytes=8 << 20) == world[path].encode()
        assert (await box.stat("many/0")).mode == 0o644
        await box.install({})

    play(scene)
