"""Carries files between a box and the host by streaming `tar`: what a step changed comes out, what it needs goes in.

Works with any backend; asks of the image only `find` and `tar` (GNU). Links and owners are those seen inside the box.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import msgspec

from rollmill.sandbox.interface import Sandbox
from rollmill.sandbox.records import ChangeKind, ExecResult

APART = ("proc", "sys", "dev", "run", "tmp")
"""Folders that a box has of its own: what lies in them is never part of an image."""
_PIECE = 1 << 16
_LIST = [
    "find", "/", "-xdev", "-mindepth", "1", "(", *" -o ".join(f"-path /{name}" for name in APART).split(), ")", "-prune", "-o",
    "-printf", r"%y\0%m\0%U\0%G\0%s\0%T@\0%l\0%P\0",
]  # fmt: skip
_PACK = (
    "tar --create --file=- --format=pax --numeric-owner --no-recursion --directory=/ --null --verbatim-files-from --files-from=-".split()
)


class Fact(msgspec.Struct, frozen=True):
    """What is compared of one path: what it is, and for a file whether it can be the same bytes."""

    kind: str
    mode: int
    uid: int
    gid: int
    num_bytes: int
    mtime_ns: int
    target: str


async def take_changes(box: Sandbox, base: Path, archive: Path, *, timeout_s: float) -> list[str]:
    """Write an archive of what differs in a box from the tree it was made from; the paths that are gone."""
    written = {change.path.lstrip("/") for change in await box.diff() if change.kind is ChangeKind.WRITTEN}
    printed = bytearray()
    await stream(box, _LIST, [], printed.extend, timeout_s=timeout_s)
    now = _parse(bytes(printed))
    before = await asyncio.to_thread(facts, base)
    paths = sorted(path for path, fact in now.items() if before.get(path) != fact or path in written)
    with archive.open("wb") as out:
        await stream(box, _PACK, _pieces(os.fsencode(f"./{path}\0") for path in paths), out.write, timeout_s=timeout_s)
    return sorted(path for path in before if path not in now)


async def pour(box: Sandbox, archive: Path, folder: str, *, timeout_s: float) -> None:
    """Unpack an archive in a folder of the box."""

    def chunks() -> Iterable[bytes]:
        with archive.open("rb") as file:
            while chunk := file.read(_PIECE):
                yield chunk

    await stream(box, ["tar", "--extract", "--file=-", f"--directory={folder}"], chunks(), lambda _: None, timeout_s=timeout_s)


async def stream(
    box: Sandbox, argv: list[str], stdin: Iterable[bytes], sink: Callable[[bytes], object], *, timeout_s: float
) -> ExecResult:  # fmt: skip
    """Run a command whose input and output are too large to hold; its failure is ours."""
    words = bytearray()
    async with asyncio.timeout(timeout_s):
        process = await box.start(argv)

        async def feed() -> None:
            with contextlib.suppress(OSError):  # The command has ended before its input: its status says why.
                for piece in stdin:
                    await process.write(piece)
                await process.close_stdin()

        feeder = asyncio.create_task(feed())
        try:
            async for chunk in _chunks(process):
                if chunk[1]:
                    words += chunk[0][: 4096 - len(words)]
                else:
                    sink(chunk[0])
            await feeder
            result = await process.wait(timeout_s=timeout_s)
        except BaseException:
            feeder.cancel()
            await process.kill()
            raise
    if result.exit_code != 0:
        need = f"; the image must have GNU {argv[0]}" if result.exit_code in (126, 127) or b"unrecognized" in words else ""
        raise ValueError(f"`{argv[0]}` failed in the box with {result.exit_code}: {words.decode(errors='replace').strip()[-300:]}{need}")
    return result


async def _chunks(process: object) -> AsyncIterator[tuple[bytes, bool]]:
    async for chunk in process:  # type: ignore[attr-defined]
        yield chunk.data, chunk.is_stderr


def _pieces(names: Iterable[bytes]) -> Iterable[bytes]:
    piece = bytearray()
    for name in names:
        piece += name
        if len(piece) >= _PIECE:
            yield bytes(piece)
            piece.clear()
    if piece:
        yield bytes(piece)


def _parse(printed: bytes) -> dict[str, Fact]:
    fields = os.fsdecode(printed).split("\0")
    assert len(fields) % 8 == 1, "find prints eight fields for each path"
    found = {}
    for i in range(0, len(fields) - 1, 8):
        kind, mode, uid, gid, size, mtime, target, path = fields[i : i + 8]
        if kind in "fdlp":
            seconds, _, fraction = mtime.partition(".")
            mtime_ns = int(seconds) * 10**9 + int(fraction[:9].ljust(9, "0") or 0)
            found[path] = _fact(kind, int(mode, 8), int(uid), int(gid), int(size), mtime_ns, target)
    return found


def _fact(kind: str, mode: int, uid: int, gid: int, size: int, mtime_ns: int, target: str) -> Fact:
    is_file = kind == "f"
    return Fact(kind, mode if kind != "l" else 0, uid, gid, size if is_file else 0, mtime_ns if is_file else 0, target)


def facts(root: Path) -> dict[str, Fact]:
    """The same listing of a tree on the host."""
    found = {}
    kinds = {stat.S_IFREG: "f", stat.S_IFDIR: "d", stat.S_IFLNK: "l", stat.S_IFIFO: "p"}
    for top, folders, files in os.walk(root):
        here = os.path.relpath(top, root)
        if here == ".":
            folders[:] = [name for name in folders if name not in APART]
        for name in [*folders, *files]:
            path = name if here == "." else f"{here}/{name}"
            s = os.lstat(os.path.join(top, name))
            target = os.readlink(os.path.join(top, name)) if stat.S_ISLNK(s.st_mode) else ""
            kind = kinds[stat.S_IFMT(s.st_mode)]
            found[path] = _fact(kind, stat.S_IMODE(s.st_mode), s.st_uid, s.st_gid, s.st_size, s.st_mtime_ns, target)
    return found
