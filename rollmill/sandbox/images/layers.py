"""Lays one archive over a tree, with the whiteouts of OCI layers: what a layer hides is gone, what it brings itself stays.

`.wh.NAME` takes NAME away, `.wh..wh..opq` all that lay in the folder before. Devices are left out: a box makes its own.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator

import msgspec

from rollmill.sandbox.images.archive import Bounds, Entry, Forward, entries
from rollmill.sandbox.images.tree import Tree, parts_of

_HIDDEN = ".wh."
_OPAQUE = ".wh..wh..opq"


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """What laying an archive over a tree did."""

    num_entries: int
    num_left_out: int
    """Devices and entries of unknown kinds."""
    digest: str
    """SHA-256 of the archive without its compression: the `diff_id` of a layer."""


def apply(
    tree: Tree, stream: Forward, *, name: str, bounds: Bounds = Bounds(), whiteouts: bool = True, keep_links: bool = False
) -> Applied:
    """`whiteouts=False`: names that begin with `.wh.` are names like any other. `keep_links`: a folder of the archive goes where a link
    of that name leads, as packages expect of /bin; layers of an image replace the link."""
    brought: set[str] = set()
    num_entries = num_left_out = 0
    for entry, content in entries(stream, bounds, name=name):
        num_entries += 1
        try:
            parts = parts_of(entry.path)
            if not parts:
                continue
            if whiteouts and parts[-1].startswith(_HIDDEN):
                _hide(tree, parts, brought)
                continue
            if keep_links and entry.kind == "folder" and (at := tree.stat(entry.path)) is not None and stat.S_ISDIR(at.st_mode):
                continue
            path = _put(tree, entry, content)
        except (OSError, ValueError) as error:
            raise ValueError(f"archive {name}: entry {entry.path[:200]!r} cannot be unpacked: {error}") from error
        if path is None:
            num_left_out += 1
        elif whiteouts:
            while path and path not in brought:
                brought.add(path)
                path = path.rpartition("/")[0]
    return Applied(num_entries=num_entries, num_left_out=num_left_out, digest=stream.rest())


def _put(tree: Tree, entry: Entry, content: Iterator[bytes]) -> str | None:
    match entry.kind:
        case "file":
            return tree.put_file(entry.path, content, mode=entry.mode, uid=entry.uid, gid=entry.gid, mtime_ns=entry.mtime_ns)
        case "folder":
            return tree.put_folder(entry.path, mode=entry.mode, uid=entry.uid, gid=entry.gid, mtime_ns=entry.mtime_ns)
        case "link":
            return tree.put_link(entry.path, entry.target, uid=entry.uid, gid=entry.gid, mtime_ns=entry.mtime_ns)
        case "hard":
            return tree.put_hard_link(entry.path, entry.target)
        case "pipe":
            return tree.put_pipe(entry.path, mode=entry.mode, uid=entry.uid, gid=entry.gid)
    return None


def _hide(tree: Tree, parts: list[str], brought: set[str]) -> None:
    *folder, name = parts
    if name == _OPAQUE:
        tree.remove_below("/".join(folder), keep=brought)
    elif not name.startswith(_HIDDEN * 2):
        hidden = name.removeprefix(_HIDDEN)
        if hidden in ("", ".", ".."):
            raise ValueError("a whiteout must name a file")
        tree.remove("/".join([*folder, hidden]), keep=brought)
