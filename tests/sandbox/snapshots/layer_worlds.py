"""Random layers, and a plain reference that applies portable archives to a real folder with Python's own tarfile."""

from __future__ import annotations

import io
import os
import shutil
import stat
import tarfile
from collections.abc import Iterable
from pathlib import Path

from hypothesis import strategies as st

from rollmill.sandbox.snapshots.layers import Layer, Node, normal
from rollmill.sandbox.snapshots.tar import Body, Extent, Kind

NAMES = (b"a", b"b", b".wh.a", b"\xff")
MTIMES = (0, 1_700_000_000_123_456_789, 1_600_000_000_000_000_000)


def body_of(data: bytes) -> Body:
    return Body(io.BytesIO(data), len(data), (Extent(0, 0, len(data)),) if data else ())


def bytes_of(node: Node | None) -> bytes:
    assert node is not None and node.body is not None
    return b"".join(node.body.read(0, node.body.num_bytes))


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    """Every shape a layer can have: any entry anywhere, folders above it filled in, some opaque, some files with two names."""
    paths = draw(st.lists(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map(b"/".join), max_size=7, unique=True))
    nodes: dict[bytes, Node | None] = {b"": Node(kind=Kind.FOLDER, mode=0o755)}
    files: list[Node] = []
    for path in sorted(paths, key=lambda p: (p.count(b"/"), p)):
        folders = [path.rsplit(b"/", depth)[0] for depth in range(1, path.count(b"/") + 1)]
        if any(folder in nodes and (nodes[folder] is None or nodes[folder].kind is not Kind.FOLDER) for folder in folders):
            continue
        for folder in folders:
            nodes.setdefault(folder, Node(kind=Kind.FOLDER, mode=0o700, mtime_ns=draw(st.sampled_from(MTIMES))))
        if path in nodes:
            continue
        kind = draw(st.sampled_from(("file", "folder", "link", "removed", "again")))
        mode, mtime_ns = draw(st.sampled_from((0o644, 0o755, 0o600))), draw(st.sampled_from(MTIMES))
        if kind == "removed":
            nodes[path] = None
        elif kind == "folder":
            nodes[path] = Node(kind=Kind.FOLDER, mode=mode, mtime_ns=mtime_ns)
        elif kind == "link":
            nodes[path] = Node(kind=Kind.LINK, mode=0o777, target=draw(st.sampled_from((b"a", b"../b", b"/nowhere"))), mtime_ns=mtime_ns)
        elif kind == "again" and files:
            nodes[path] = draw(st.sampled_from(files))
        else:
            data = draw(st.sampled_from((b"", b"x", b"text\n" * 300)))
            nodes[path] = Node(kind=Kind.FILE, mode=mode, mtime_ns=mtime_ns, body=body_of(data))
            files.append(nodes[path])
    folders = [path for path, node in nodes.items() if path and node is not None and node.kind is Kind.FOLDER]
    return normal(nodes, set(draw(st.lists(st.sampled_from(folders), unique=True))) if folders else set())


def apply_archive(data: bytes, root: Path) -> None:
    """What a container tool does with a layer: first what it takes away, then what it brings."""
    archive = tarfile.TarFile(fileobj=io.BytesIO(data), errors="surrogateescape")
    members = archive.getmembers()
    marks = [m for m in members if os.path.basename(m.name).startswith(".wh.") and "ROLLMILL.plain" not in m.pax_headers]
    for mark in marks:
        folder, name = root / os.path.dirname(mark.name), os.path.basename(mark.name)
        if not folder.is_dir() or folder.is_symlink():
            continue
        for gone in [*folder.iterdir()] if name == ".wh..wh..opq" else [folder / name.removeprefix(".wh.")]:
            remove(gone)
    folder_times = []
    for member in members:
        path = root / member.name
        if member in marks:
            continue
        if path != root and not (member.isdir() and path.is_dir() and not path.is_symlink()):
            remove(path)
        if member.isdir():
            path.mkdir(exist_ok=True)
            folder_times.append((path, member))
        elif member.issym():
            path.symlink_to(member.linkname)
        elif member.islnk():
            os.link(root / member.linkname, path, follow_symlinks=False)
        else:
            source = archive.extractfile(member)
            assert source is not None
            path.write_bytes(source.read())
        if not member.issym() and not member.islnk():
            path.chmod(member.mode)
        if not member.islnk():
            set_time(path, member)
    for path, member in folder_times:
        set_time(path, member)


def set_time(path: Path, member: tarfile.TarInfo) -> None:
    text = member.pax_headers.get("mtime", str(int(member.mtime)))
    seconds, _, fraction = text.partition(".")
    ns = int(seconds) * 10**9 + int(fraction.ljust(9, "0"))
    os.utime(path, ns=(ns, ns), follow_symlinks=False)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def view(root: Path, *, with_links: bool = True) -> dict[str, tuple]:
    """Everything a program can see below a folder."""
    found: dict[str, tuple] = {}
    names: dict[int, list[str]] = {}
    for path in walk(root):
        facts = path.lstat()
        what: object = None
        if stat.S_ISREG(facts.st_mode):
            what = path.read_bytes()
            names.setdefault(facts.st_ino, []).append(str(path.relative_to(root)))
        elif stat.S_ISLNK(facts.st_mode):
            what = os.readlink(path)
        xattrs = ()
        if not stat.S_ISLNK(facts.st_mode):
            xattrs = tuple((n, os.getxattr(path, n)) for n in sorted(os.listxattr(path)) if ".overlay." not in n)
        found[str(path.relative_to(root))] = (oct(facts.st_mode), facts.st_uid, facts.st_gid, facts.st_mtime_ns, what, xattrs)
    if with_links:
        found["\0links"] = tuple(sorted(tuple(sorted(group)) for group in names.values() if len(group) > 1))
    return found


def walk(root: Path) -> Iterable[Path]:
    yield root
    for path in sorted(root.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield from walk(path)
        else:
            yield path
