"""Tar archives, read by index from a file and written as one canonical byte stream; knows nothing of layers or boxes.

Read: POSIX pax as GNU tar writes it (long names, holes, nanoseconds, extended attributes), refused unless whole. Written: a member is
a function of its fields alone, so equal members give equal bytes on every machine and under every version of Python.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from decimal import Decimal, InvalidOperation
from enum import Enum
from typing import BinaryIO

import msgspec

BLOCK_BYTES = 512
_ZERO_BLOCK = bytes(BLOCK_BYTES)
END = bytes(2 * BLOCK_BYTES)
"""Two empty blocks: an archive without them was cut short."""
_MAX_EXTENDED_BYTES = 16 << 20
"""Of one extended header; a name has at most 4 KiB, the attributes of a file 64 KiB each."""
_PIECE_BYTES = 1 << 20
_PAGE_BYTES = 4096
_ZERO_PAGE = bytes(_PAGE_BYTES)
_MIN_HOLE_BYTES = 64 << 10
"""A file with fewer zero bytes in whole pages than this is written out in full, which every reader understands."""
_XATTR = b"SCHILY.xattr."


class Kind(Enum):
    FILE = b"0"
    HARD_LINK = b"1"
    LINK = b"2"
    CHAR = b"3"
    BLOCK = b"4"
    FOLDER = b"5"
    FIFO = b"6"


class Extent(msgspec.Struct, frozen=True):
    """A run of a file's bytes that is not a hole."""

    start: int
    """In the file."""
    at: int
    """In the archive."""
    num_bytes: int


class Body(msgspec.Struct, frozen=True, eq=False):
    """What a file holds: runs that lie in a seekable source, zeros between them."""

    source: BinaryIO
    num_bytes: int
    extents: tuple[Extent, ...]

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        """The bytes from `start` to `stop`, in pieces."""
        at = start
        first = max(0, bisect_right(self.extents, start, key=lambda run: run.start) - 1)
        for index in range(first, len(self.extents)):
            run = self.extents[index]
            low, high = max(run.start, at), min(run.start + run.num_bytes, stop)
            if run.start >= stop:
                break
            if low >= high:
                continue
            yield from _zeros(low - at)
            for begin in range(low, high, _PIECE_BYTES):
                self.source.seek(run.at + begin - run.start)
                size = min(_PIECE_BYTES, high - begin)
                data = self.source.read(size)
                if len(data) != size:
                    raise ValueError(f"the archive ends within a file, {size - len(data)} bytes short; pack the layer again")
                yield data
            at = high
        yield from _zeros(stop - at)

    def runs(self) -> list[tuple[int, int]]:
        """The pages that are not all zero, as (start, stop): what a file holds decides, not how it was written."""
        found: list[tuple[int, int]] = []
        for run in self.extents:
            low = run.start - run.start % _PAGE_BYTES
            high = min(-(-(run.start + run.num_bytes) // _PAGE_BYTES) * _PAGE_BYTES, self.num_bytes)
            low = max(low, found[-1][1] if found else 0)
            for begin in range(low, high, _PIECE_BYTES):
                piece = b"".join(self.read(begin, min(begin + _PIECE_BYTES, high)))
                for page in range(0, len(piece), _PAGE_BYTES):
                    stop = min(page + _PAGE_BYTES, len(piece))
                    if piece[page:stop] == _ZERO_PAGE[: stop - page]:
                        continue
                    if found and found[-1][1] == begin + page:
                        found[-1] = (found[-1][0], begin + stop)
                    else:
                        found.append((begin + page, begin + stop))
        return found


class Member(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One name in an archive."""

    path: bytes
    """Names joined by `/`; empty for the folder that was packed."""
    kind: Kind
    mode: int
    """Permission bits."""
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    target: bytes = b""
    """Where a link leads; for a hard link the path of the same file."""
    device: tuple[int, int] = (0, 0)
    extra: tuple[tuple[bytes, bytes], ...] = ()
    """Further pax records, such as `SCHILY.xattr.NAME`, sorted."""
    body: Body | None = None


def xattr(name: str) -> bytes:
    """The pax key of an extended attribute."""
    return _XATTR + name.encode()


def is_xattr(key: bytes) -> bool:
    return key.startswith(_XATTR)


def clean_path(name: bytes) -> bytes:
    """`./a/b/` as `a/b`. Raises ValueError for a path that leaves the packed folder."""
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if name.startswith(b"/") or b".." in parts or b"\0" in name:
        raise ValueError(f"member {name!r} leaves the packed folder; pack with `tar -C FOLDER .`")
    return b"/".join(parts)


def read_members(source: BinaryIO) -> Iterator[Member]:
    """Every member in the order of the archive, whose bodies stay in `source`. Raises ValueError for what is not a whole archive."""
    at = 0
    extended: dict[bytes, bytes] = {}
    while True:
        head = _read_at(source, at, BLOCK_BYTES)
        if head == _ZERO_BLOCK:
            if extended:
                raise ValueError(f"an extended header before byte {at} belongs to no member; pack the layer again")
            return
        if sum(head[:148]) + 8 * 32 + sum(head[156:]) != _number(head[148:156]):
            raise ValueError(f"no member begins at byte {at}: the archive is damaged; pack the layer again")
        at += BLOCK_BYTES
        flag = head[156:157]
        size = _number(head[124:136])
        if flag in (b"x", b"L", b"K"):
            if not 0 <= size <= _MAX_EXTENDED_BYTES:
                raise ValueError(f"an extended header of {size} bytes at {at}; at most {_MAX_EXTENDED_BYTES} are read")
            data = _read_at(source, at, size)
            extended |= _records(data) if flag == b"x" else {b"path" if flag == b"L" else b"linkpath": data.rstrip(b"\0")}
        else:
            if b"size" in extended:
                size = int(extended[b"size"])
            if size < 0:
                raise ValueError(f"a member of {size} bytes before byte {at}: the archive is damaged; pack the layer again")
            yield _member(source, head, extended, at, size)
            extended = {}
        at += -(-size // BLOCK_BYTES) * BLOCK_BYTES


def _member(source: BinaryIO, head: bytes, extended: dict[bytes, bytes], at: int, size: int) -> Member:
    name, prefix = head[:100].rstrip(b"\0"), head[345:500].rstrip(b"\0")
    if prefix and head[257:263] == b"ustar\0":
        name = prefix + b"/" + name
    name = extended.get(b"path", name)
    flag = head[156:157] if head[156:157] not in (b"\0", b"7") else b"0"
    try:
        kind = Kind(flag)
    except ValueError:
        raise ValueError(f"member {name!r} is of kind {flag!r}, which is not known here; pack with `tar --format=posix`") from None
    body = None
    if kind is Kind.FILE:
        body = Body(source, size, (Extent(0, at, size),) if size else ())
        if extended.get(b"GNU.sparse.major") == b"1":
            name = extended[b"GNU.sparse.name"]
            body = _with_holes(source, at, size, int(extended[b"GNU.sparse.realsize"]))
        elif any(key.startswith(b"GNU.sparse") for key in extended):
            raise ValueError(f"member {name!r} has holes in an old format; pack with `tar --sparse-version=1.0`")
    target = extended.get(b"linkpath", head[157:257].rstrip(b"\0"))
    return Member(
        path=clean_path(name),
        kind=kind,
        mode=_number(head[100:108]) & 0o7777,
        uid=int(extended.get(b"uid", b"") or _number(head[108:116])),
        gid=int(extended.get(b"gid", b"") or _number(head[116:124])),
        mtime_ns=_nanoseconds(extended[b"mtime"]) if b"mtime" in extended else _number(head[136:148]) * 10**9,
        target=(clean_path(target) if kind is Kind.HARD_LINK else target) if kind in (Kind.LINK, Kind.HARD_LINK) else b"",
        device=(_number(head[329:337]), _number(head[337:345])) if kind in (Kind.CHAR, Kind.BLOCK) else (0, 0),
        extra=tuple(sorted((key, value) for key, value in extended.items() if key.startswith((_XATTR, b"ROLLMILL.")))),
        body=body,
    )


def _with_holes(source: BinaryIO, at: int, size: int, num_bytes: int) -> Body:
    """GNU sparse format 1.0: decimal lines (how many runs; start and length of each) up to a block border, then the runs."""
    text = bytearray()
    num_lines, wanted = 0, 1
    while num_lines < wanted:
        piece = _read_at(source, at + len(text), min(_PIECE_BYTES, size - len(text)))
        if not piece:
            raise ValueError("the map of a file with holes is cut short; pack the layer again")
        num_lines += piece.count(b"\n")
        text += piece
        if wanted == 1 and num_lines:
            wanted += 2 * int(text[: text.index(b"\n")])
    numbers = [int(line) for line in text.split(b"\n", wanted)[1:wanted]]
    map_bytes = len(b"\n".join(text.split(b"\n", wanted)[:wanted])) + 1
    place, end = at + -(-map_bytes // BLOCK_BYTES) * BLOCK_BYTES, 0
    extents = []
    for start, length in zip(numbers[::2], numbers[1::2], strict=True):
        if start < end or length < 0 or start + length > num_bytes:
            raise ValueError("the map of a file with holes contradicts itself; pack the layer again")
        if length:
            extents.append(Extent(start, place, length))
        place, end = place + length, start + length
    if place > at + size:
        raise ValueError("a file with holes is shorter than its map says; pack the layer again")
    return Body(source, num_bytes, tuple(extents))


def write_members(members: Iterable[Member]) -> Iterator[bytes]:
    """The archive, in pieces."""
    for member in members:
        yield from _write(member)
    yield END


def _write(member: Member) -> Iterator[bytes]:
    records = dict(member.extra)
    path = (b"./" if not member.path else member.path + b"/") if member.kind is Kind.FOLDER else member.path
    size = member.body.num_bytes if member.body is not None else 0
    runs, sparse_map = [(0, size)], b""
    if member.body is not None and size >= _MIN_HOLE_BYTES:
        pages = member.body.runs()
        if size - sum(stop - start for start, stop in pages) >= _MIN_HOLE_BYTES:
            runs = pages if pages and pages[-1][1] == size else [*pages, (size, size)]
            lines = [str(len(runs)), *(f"{start}\n{stop - start}" for start, stop in runs)]
            sparse_map = _padded("".join(f"{line}\n" for line in lines).encode())
            records |= {
                b"GNU.sparse.major": b"1",
                b"GNU.sparse.minor": b"0",
                b"GNU.sparse.name": path,
                b"GNU.sparse.realsize": str(size).encode(),
            }
    stored = len(sparse_map) + sum(stop - start for start, stop in runs)
    seconds, fraction = divmod(member.mtime_ns, 10**9)
    if fraction or not 0 <= seconds < 8**11:
        records[b"mtime"] = _decimal(member.mtime_ns)
    for key, value, bound in ((b"uid", member.uid, 8**7), (b"gid", member.gid, 8**7), (b"size", stored, 8**11)):
        if value >= bound:
            records[key] = str(value).encode()
    for key, text in ((b"path", path), (b"linkpath", member.target)):
        if (len(text) > 100 or not text.isascii()) and not (key == b"path" and sparse_map):
            records[key] = text
    if records:
        data = b"".join(_record(key, records[key]) for key in sorted(records))
        yield _header(b"././@PaxHeader", b"x", size=len(data)) + _padded(data)
    short = path if path.isascii() else b"".join(b"_" if byte > 127 else bytes((byte,)) for byte in path)
    yield _header(
        short[:100],
        member.kind.value,
        mode=member.mode,
        uid=member.uid,
        gid=member.gid,
        size=stored,
        mtime=seconds,
        target=member.target if member.target.isascii() else b"",
        device=member.device,
    )
    if member.body is None or not stored:
        return
    yield sparse_map
    for start, stop in runs:
        yield from member.body.read(start, stop)
    yield bytes(-stored % BLOCK_BYTES)


def _header(
    name: bytes, flag: bytes, *, mode: int = 0o644, uid: int = 0, gid: int = 0, size: int = 0, mtime: int = 0,
    target: bytes = b"", device: tuple[int, int] = (0, 0),
) -> bytes:  # fmt: skip
    def octal(value: int, digits: int) -> bytes:
        return b"%0*o\0" % (digits, value if 0 <= value < 8**digits else 0)

    front = name.ljust(100, b"\0") + octal(mode, 7) + octal(uid, 7) + octal(gid, 7) + octal(size, 11) + octal(mtime, 11)
    back = flag + target[:100].ljust(100, b"\0") + b"ustar\x0000" + bytes(64) + octal(device[0], 7) + octal(device[1], 7)
    back = back.ljust(BLOCK_BYTES - len(front) - 8, b"\0")
    return front + b"%06o\0 " % (sum(front) + 8 * 32 + sum(back)) + back


def _record(key: bytes, value: bytes) -> bytes:
    """`LENGTH KEY=VALUE\\n`, where LENGTH counts its own digits."""
    rest = len(key) + len(value) + 3
    length = rest + len(str(rest))
    length = rest + len(str(length))
    return b"%d %s=%s\n" % (length, key, value)


def _records(data: bytes) -> dict[bytes, bytes]:
    found, at = {}, 0
    while at < len(data):
        digits, space, _ = data[at : at + 20].partition(b" ")
        length = int(digits) if space and digits.isdigit() else 0
        key, equals, value = data[at + len(digits) + 1 : at + length].partition(b"=")
        if not equals or at + length > len(data) or not value.endswith(b"\n"):
            raise ValueError("an extended header is damaged; pack the layer again")
        found[key] = value[:-1]
        at += length
    return found


def _number(field: bytes) -> int:
    """Octal digits, or GNU's base 256 for what does not fit."""
    if field[0] & 0x80:
        value = int.from_bytes(field, "big")
        return value - (1 << 8 * len(field)) if field[0] == 0xFF else value - (0x80 << 8 * (len(field) - 1))
    text = field.strip(b" \0")
    try:
        return int(text, 8) if text else 0
    except ValueError:
        raise ValueError(f"{field!r} in a header is no number: the archive is damaged; pack the layer again") from None


def _nanoseconds(text: bytes) -> int:
    try:
        return int((Decimal(text.decode()) * 10**9).to_integral_value(rounding="ROUND_FLOOR"))
    except (InvalidOperation, ValueError):
        raise ValueError(f"{text!r} is no time; pack the layer again") from None


def _decimal(nanoseconds: int) -> bytes:
    seconds, fraction = divmod(abs(nanoseconds), 10**9)
    sign = "-" if nanoseconds < 0 else ""
    return f"{sign}{seconds}.{fraction:09d}".rstrip("0").rstrip(".").encode()


def _read_at(source: BinaryIO, at: int, size: int) -> bytes:
    source.seek(at)
    data = source.read(size)
    if len(data) != size:
        raise ValueError(f"the archive ends at byte {at + len(data)}, before its end mark; whoever packed it was cut short")
    return data


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK_BYTES)


def _zeros(count: int) -> Iterator[bytes]:
    for begin in range(0, count, _PIECE_BYTES):
        yield bytes(min(_PIECE_BYTES, count - begin))
