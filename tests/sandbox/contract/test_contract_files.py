"""What every backend promises of files: bytes as they are, errors with the errno a program would have seen."""

from __future__ import annotations

import errno

import pytest
from contract_scene import Scene

from rollmill.sandbox.records import ChangeKind, FileKind

WAIT_S = 60.0


def test_the_first_files_are_there(scene: Scene) -> None:
    async def play() -> None:
        assert await scene.box.read("first.txt") == "wörld\n".encode()
        assert (await scene.box.exec(["cat", "below/second.txt"], timeout_s=WAIT_S)).stdout == b"2"

    scene.play(play)


@pytest.mark.parametrize("data", [b"", b"\0\xff\n", bytes(range(256)) * 40000], ids=["empty", "binary", "10-MB"])
def test_bytes_come_back_as_they_were_written(scene: Scene, data: bytes) -> None:
    async def play() -> None:
        await scene.box.write("new/folder/file", data)
        assert await scene.box.read("new/folder/file", limit_bytes=32 << 20) == data

    scene.play(play)


def test_a_file_is_replaced_and_has_the_mode_asked_for(scene: Scene) -> None:
    async def play() -> None:
        await scene.box.write("script", b"long contents that must not show through")
        await scene.box.write("script", b"#!/bin/sh\necho ran\n", mode=0o755)
        assert (await scene.box.exec(["./script"], timeout_s=WAIT_S)).stdout == b"ran\n"
        assert (await scene.box.stat("script")).mode == 0o755

    scene.play(play)


def test_absolute_and_relative_paths_meet(scene: Scene) -> None:
    async def play() -> None:
        here = (await scene.box.exec(["pwd"], timeout_s=WAIT_S)).stdout.decode().strip()
        await scene.box.write(f"{here}/absolute", b"1")
        assert await scene.box.read("absolute") == b"1"

    scene.play(play)


def test_what_cannot_be_read_says_why_by_errno(scene: Scene) -> None:
    async def play() -> None:
        await scene.box.exec("mkdir -p folder && mkfifo pipe && echo 12345 > five", timeout_s=WAIT_S)
        for path, number in (("missing", errno.ENOENT), ("folder", errno.EISDIR), ("pipe", errno.EINVAL), ("five/x", errno.ENOTDIR)):
            with pytest.raises(OSError) as caught:
                await scene.box.read(path)
            assert caught.value.errno == number, path
        with pytest.raises(OSError) as caught:
            await scene.box.read("five", limit_bytes=3)
        assert caught.value.errno == errno.EFBIG
        with pytest.raises(IsADirectoryError):
            await scene.box.write("folder", b"")
        with pytest.raises(FileNotFoundError):
            await scene.box.stat("missing")

    scene.play(play)


def test_list_names_regular_files_below_a_folder_in_order(scene: Scene) -> None:
    async def play() -> None:
        await scene.box.exec("mkdir -p tree/b/c tree/a && cd tree && touch b/c/2 b/1 a/0 z && ln -s z link && mkfifo p", timeout_s=WAIT_S)
        assert await scene.box.list("tree") == ["a/0", "b/1", "b/c/2", "z"]
        assert "tree/z" in await scene.box.list()

    scene.play(play)


def test_stat_tells_kinds_apart_and_follows_no_link(scene: Scene) -> None:
    async def play() -> None:
        await scene.box.exec("mkdir -p kinds/d && cd kinds && printf 123 > f && chmod 640 f && ln -s f l && mkfifo p", timeout_s=WAIT_S)
        file, folder, link, pipe = [await scene.box.stat(f"kinds/{name}") for name in "fdlp"]
        assert (file.kind, file.num_bytes, file.mode) == (FileKind.FILE, 3, 0o640)
        assert (folder.kind, link.kind, pipe.kind) == (FileKind.FOLDER, FileKind.LINK, FileKind.OTHER)
        assert link.target == "f" and file.mtime_s > 1.5e9

    scene.play(play)


def test_diff_names_what_was_written_and_what_was_removed(scene: Scene) -> None:
    async def play() -> None:
        if not scene.capabilities.diff:
            with pytest.raises(ValueError, match="diff"):
                await scene.box.diff()
            return
        async with scene.fresh() as box:
            await box.exec("mkdir sub && echo 1 > sub/kept && echo 2 > changed && echo 3 > removed", timeout_s=WAIT_S)
            here = (await box.exec(["pwd"], timeout_s=WAIT_S)).stdout.decode().strip().rstrip("/")
            changes = {change.path: change.kind for change in await box.diff()}
            assert changes[f"{here}/sub/kept"] == changes[f"{here}/changed"] == changes[f"{here}/sub"] == ChangeKind.WRITTEN
            # A machine restored from memory goes on with its disk: there is nothing below it but what it booted from.
            if not scene.capabilities.fork or scene.capabilities.facts.get("diff") == "since the machine booted":
                return
            (child,) = await box.fork(1)
            try:
                assert {c.path for c in await child.diff() if c.path.startswith(here)} == set(), "made from that state, nothing differs"
                await child.exec("rm removed && echo more >> changed", timeout_s=WAIT_S)
                mine = {c.path: c.kind for c in await child.diff() if c.path.startswith(here + "/")}
                assert mine == {f"{here}/removed": ChangeKind.REMOVED, f"{here}/changed": ChangeKind.WRITTEN}
            finally:
                await child.close()

    scene.play(play)
