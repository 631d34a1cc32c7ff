"""One layer of a box's file system as an index of what changed, read from and written as tar in the kernel's or in the portable notation.

*Raw* is how overlayfs keeps a writable layer: a removed name is a character device 0:0, a folder that hides what lies below it carries
the attribute `user.overlay.opaque`. *Portable* is how container images write it: `.wh.NAME`, and `.wh..wh..opq` in the folder. Both are
written sorted and without noise, so layers that mean the same have the same bytes. File contents stay in the source archive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from typing import BinaryIO

import msgspec

from rollmill.sandbox.snapshots.tar import Body, Kind, Member, is_xattr, read_members, write_members, xattr

PACK = (
    "tar", "--create", "--format=posix", "--sparse", "--sparse-version=1.0", "--numeric-owner", "--xattrs", "--xattrs-include=user.*",
    "--pax-option=delete=atime,delete=ctime", "--directory={folder}", ".",
)  # fmt: skip
"""Writes the raw archive of the layer at `{folder}`."""
UNPACK = (
    "tar", "--extract", "--numeric-owner", "--same-owner", "--same-permissions", "--delay-directory-restore", "--xattrs",
    "--xattrs-include=user.*", "--directory={folder}",
)  # fmt: skip
"""Fills the empty layer at `{folder}` from a raw archive."""

_MARK = b".wh."
_OPAQUE_MARK = b".wh..wh..opq"
_PLAIN = (b"ROLLMILL.plain", b"1")
"""Set on a file that a program really called `.wh.NAME`: without it, it would read as a removal."""
_OPAQUE = (xattr("user.overlay.opaque"), b"y")
_ORIGIN = (xattr("user.overlay.origin"), b"")
"""Tells the kernel to look for removals when it lists a folder that has none below it; else it lists the removed names themselves."""
_OVERLAY = (xattr("user.overlay."), xattr("trusted.overlay."))
_ESCAPED = (xattr("user.overlay.overlay."), xattr("trusted.overlay.overlay."))
"""How the kernel keeps an attribute of the overlay's name that a program set through the overlay: it marks nothing."""
_UNPORTABLE = ("redirect", "metacopy")
"""Attributes by which a layer refers to the one below; boxes are mounted so that the kernel never makes them."""


class Node(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A file, folder, link or device; the same object under two paths is one file with two names."""

    kind: Kind
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    target: bytes = b""
    device: tuple[int, int] = (0, 0)
    extra: tuple[tuple[bytes, bytes], ...] = ()
    """Extended attributes, but those of the overlay itself."""
    body: Body | None = None


class Layer(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What one layer does to the layers below it.

    Every folder on the way to an entry is an entry itself. Nothing below an opaque folder is opaque or a removal: there is nothing to hide.
    """

    nodes: dict[bytes, Node | None]
    """Path -> what lies there; None: what lay there is removed."""
    opaque: frozenset[bytes]
    """Folders that hide what lies below them."""
    with_removals: frozenset[bytes]
    """Folders that hold a removal."""


def read_raw(source: BinaryIO) -> Layer:
    """From an archive of overlayfs's own notation."""
    nodes: dict[bytes, Node | None] = {}
    opaque: set[bytes] = set()
    for member in read_members(source):
        if member.kind is Kind.HARD_LINK:
            nodes[member.path] = _linked(nodes, member)
            continue
        names = {key.rpartition(b".")[2].decode(errors="replace"): value for key, value in member.extra if _is_mark(key)}
        if unportable := [name for name in _UNPORTABLE if name in names]:
            raise ValueError(f"{member.path!r} carries overlay.{unportable[0]}; mount the overlay with userxattr, which never makes it")
        is_removal = member.kind is Kind.CHAR and member.device == (0, 0)
        if is_removal or (member.kind is Kind.FILE and "whiteout" in names):
            nodes[member.path] = None
            continue
        nodes[member.path] = _node(member)
        if names.get("opaque") == b"y":
            opaque.add(member.path)
    return normal(nodes, opaque)


def read_portable(source: BinaryIO) -> Layer:
    """From an archive in the notation of container images."""
    nodes: dict[bytes, Node | None] = {}
    opaque: set[bytes] = set()
    removed: set[bytes] = set()
    for member in read_members(source):
        folder, slash, name = member.path.rpartition(b"/")
        if name.startswith(_MARK) and _PLAIN not in member.extra:
            if name == _OPAQUE_MARK:
                opaque.add(folder)
            else:
                removed.add(folder + slash + name.removeprefix(_MARK))
        elif member.kind is Kind.HARD_LINK:
            nodes[member.path] = _linked(nodes, member)
        else:
            nodes[member.path] = _node(member)
    for path in removed:
        node = nodes.setdefault(path, None)
        if node is not None and node.kind is Kind.FOLDER:
            opaque.add(path)  # a removal concerns the layers below, never its own
    return normal(nodes, opaque)


def write_raw(layer: Layer) -> Iterator[bytes]:
    return write_members(_members(layer, _raw))


def write_portable(layer: Layer) -> Iterator[bytes]:
    return write_members(_members(layer, _portable))


def normal(nodes: dict[bytes, Node | None], opaque: AbstractSet[bytes]) -> Layer:
    """The layer, without what is said twice. Raises ValueError for an entry that hangs in the air."""
    hidden: set[bytes] = set()
    kept: dict[bytes, Node | None] = {}
    for path in sorted(nodes, key=order):
        node = nodes[path]
        folder = parent(path)
        if folder is not None and folder != b"":
            above = nodes.get(folder)
            if above is None or above.kind is not Kind.FOLDER:
                raise ValueError(f"{path!r} lies in {folder!r}, which is no folder of the layer; pack folders with what they hold")
        if folder is not None and (folder in opaque or folder in hidden):
            hidden.add(path)
            if node is None:
                continue
        kept[path] = node
    return Layer(
        nodes=kept,
        opaque=frozenset(path for path in opaque if path not in hidden and _is_folder(kept.get(path))),
        with_removals=frozenset(path.rpartition(b"/")[0] for path, node in kept.items() if node is None),
    )


def order(path: bytes) -> list[bytes]:
    """A folder directly before what it holds."""
    return path.split(b"/") if path else []


def parent(path: bytes) -> bytes | None:
    """The folder an entry lies in; None for the root."""
    return path.rpartition(b"/")[0] if path else None


def _is_folder(node: Node | None) -> bool:
    return node is not None and node.kind is Kind.FOLDER


def _is_mark(key: bytes) -> bool:
    return key.startswith(_OVERLAY) and not key.startswith(_ESCAPED)


def _node(member: Member) -> Node:
    return Node(
        kind=member.kind,
        mode=member.mode,
        uid=member.uid,
        gid=member.gid,
        mtime_ns=member.mtime_ns,
        target=member.target,
        device=member.device,
        extra=tuple((key, value) for key, value in member.extra if is_xattr(key) and not _is_mark(key)),
        body=member.body,
    )


def _linked(nodes: dict[bytes, Node | None], member: Member) -> Node | None:
    if member.target not in nodes:
        raise ValueError(f"{member.path!r} is a further name of {member.target!r}, which the archive does not hold before it")
    return nodes[member.target]


def _members(layer: Layer, notation: Callable[[Layer, bytes, Node | None], Iterator[Member]]) -> Iterator[Member]:
    first: dict[int, bytes] = {}
    for path in sorted(layer.nodes, key=order):
        node = layer.nodes[path]
        earlier = path if node is None else first.setdefault(id(node), path)
        if node is not None and earlier != path:
            node = Node(kind=Kind.HARD_LINK, mode=node.mode, uid=node.uid, gid=node.gid, mtime_ns=node.mtime_ns, target=earlier)
        yield from notation(layer, path, node)


def _raw(layer: Layer, path: bytes, node: Node | None) -> Iterator[Member]:
    if node is None:
        yield Member(path=path, kind=Kind.CHAR, mode=0)
    else:
        yield _member(path, node, _OPAQUE if path in layer.opaque else _ORIGIN if path in layer.with_removals else None)


def _portable(layer: Layer, path: bytes, node: Node | None) -> Iterator[Member]:
    folder, slash, name = path.rpartition(b"/")
    if node is None:
        yield Member(path=folder + slash + _MARK + name, kind=Kind.FILE, mode=0)
        return
    yield _member(path, node, _PLAIN if name.startswith(_MARK) else None)
    if path in layer.opaque:
        yield Member(path=path + b"/" + _OPAQUE_MARK if path else _OPAQUE_MARK, kind=Kind.FILE, mode=0)


def _member(path: bytes, node: Node, record: tuple[bytes, bytes] | None) -> Member:
    return Member(
        path=path,
        kind=node.kind,
        mode=node.mode,
        uid=node.uid,
        gid=node.gid,
        mtime_ns=node.mtime_ns,
        target=node.target,
        device=node.device,
        extra=node.extra if record is None else tuple(sorted((*node.extra, record))),
        body=node.body,
    )
