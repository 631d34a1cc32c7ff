"""Archives from strangers: layers merge as OCI says, and nothing in one reaches outside its tree."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import stat
import tarfile
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollmill.sandbox.images.archive import Bounds, Forward, plain
from rollmill.sandbox.images.layers import Applied, apply
from rollmill.sandbox.images.tree import Tree, copy_tree


def pack(*members: tuple[str, object], form: int = tarfile.PAX_FORMAT) -> bytes:
    """(path, bytes) a file, (path, None) a folder, (path, "->x") a link, (path, "=x") a hard link, (path, b"c") by TarInfo."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for path, what in members:
            item = what if isinstance(what, tarfile.TarInfo) else tarfile.TarInfo(path)
            item.name = path
            data = b""
            if isinstance(what, bytes):
                data, item.size = what, len(what)
            elif what is None:
                item.type, item.mode = tarfile.DIRTYPE, 0o755
            elif isinstance(what, str) and what.startswith("->"):
                item.type, item.linkname = tarfile.SYMTYPE, what[2:]
            elif isinstance(what, str):
                item.type, item.linkname = tarfile.LNKTYPE, what[1:]
            tar.addfile(item, io.BytesIO(data))
    return out.getvalue()


def lay(root: Path, *archives: bytes, bounds: Bounds = Bounds()) -> Applied:
    root.mkdir(exist_ok=True)
    with Tree(root) as tree:
        for data in archives:
            done = apply(tree, Forward(plain(io.BytesIO(data)), bounds), name="test", bounds=bounds)
    return done


def seen(root: Path) -> dict[str, str]:
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        found[name] = f"->{path.readlink()}" if path.is_symlink() else "folder" if path.is_dir() else path.read_text()
    return found


def test_later_layer_replaces_hides_and_adds(tmp_path: Path) -> None:
    base = pack(("etc", None), ("etc/a", b"1"), ("etc/b", b"2"), ("var/log/x", b"3"), ("lib", "->usr/lib"), ("usr/lib/z", b"z"))
    top = pack(("etc/a", b"new"), ("etc/.wh.b", b""), ("var/log/.wh..wh..opq", b""), ("var/log/y", b"4"))
    lay(tmp_path / "t", base, top)
    assert seen(tmp_path / "t") == {
        "etc": "folder", "etc/a": "new", "lib": "->usr/lib", "usr": "folder", "usr/lib": "folder", "usr/lib/z": "z", "var": "folder",
        "var/log": "folder", "var/log/y": "4",
    }  # fmt: skip


def test_whiteout_spares_what_its_own_layer_brings_whatever_the_order(tmp_path: Path) -> None:
    base = pack(("d/old", b"1"), ("d/sub/old", b"1"), ("f", b"1"))
    top = pack(("d/sub/new", b"2"), ("f", b"2"), ("d/.wh..wh..opq", b""), (".wh.f", b""), (".wh.d", b""))
    lay(tmp_path / "t", base, top)
    assert seen(tmp_path / "t") == {"d": "folder", "d/sub": "folder", "d/sub/new": "2", "f": "2"}


def test_kinds_replace_each_other(tmp_path: Path) -> None:
    base = pack(("a/in", b"1"), ("b", b"1"), ("c", "->a"), ("d", None))
    top = pack(("a", b"file now"), ("b", None), ("b/in", b"2"), ("c", None), ("c/in", b"3"), ("d", "->b"))
    lay(tmp_path / "t", base, top)
    assert seen(tmp_path / "t") == {"a": "file now", "b": "folder", "b/in": "2", "c": "folder", "c/in": "3", "d": "->b"}


def test_modes_owners_and_times_are_those_of_the_archive(tmp_path: Path) -> None:
    item = tarfile.TarInfo()
    item.mode, item.uid, item.gid, item.mtime, item.size = 0o4750, 1000, 70_000, 1_700_000_000, 0
    folder = tarfile.TarInfo()
    folder.type, folder.mode, folder.mtime = tarfile.DIRTYPE, 0o1777, 1_600_000_000
    lay(tmp_path / "t", pack(("tmp", folder), ("tmp/p", item)))
    found, above = (tmp_path / "t/tmp/p").stat(), (tmp_path / "t/tmp").stat()
    assert found.st_mtime == 1_700_000_000 and above.st_mtime == 1_600_000_000
    if os.geteuid() == 0:
        assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o4750, 1000, 65534)
        assert stat.S_IMODE(above.st_mode) == 0o1777


@pytest.mark.parametrize("squeeze", [gzip.compress, lambda d: zstandard.compress(d[:700]) + zstandard.compress(d[700:])])
def test_compressed_layers_are_read_and_hashed_without_compression(tmp_path: Path, squeeze: object) -> None:
    data = pack(("a", b"x" * 5000))
    assert lay(tmp_path / "t", squeeze(data)).digest == lay(tmp_path / "u", data).digest  # type: ignore[operator]
    assert seen(tmp_path / "t") == {"a": "x" * 5000}


def test_layer_never_writes_into_a_file_that_another_tree_shares(tmp_path: Path) -> None:
    lay(tmp_path / "base", pack(("a", b"old"), ("d/b", b"old")))
    copy_tree(tmp_path / "base", tmp_path / "copy")
    assert os.path.samefile(tmp_path / "base/a", tmp_path / "copy/a")
    lay(tmp_path / "copy", pack(("a", b"new"), ("d/c", "=d/b"), ("d/b", b"new")))
    assert seen(tmp_path / "base") == {"a": "old", "d": "folder", "d/b": "old"}
    assert seen(tmp_path / "copy") == {"a": "new", "d": "folder", "d/b": "new", "d/c": "old"}


def sized(size: int) -> tarfile.TarInfo:
    item = tarfile.TarInfo("x")
    item.size = size
    return item


def liar() -> bytes:
    """A header that promises far more bytes than follow."""
    return sized(1 << 40).tobuf(tarfile.GNU_FORMAT) + b"x" * 512


def long_header() -> bytes:
    item = tarfile.TarInfo("././@LongLink")
    item.type, item.size = tarfile.GNUTYPE_LONGNAME, 1 << 33
    return item.tobuf(tarfile.GNU_FORMAT) + b"a" * 4096


def many_headers() -> bytes:
    item = tarfile.TarInfo("g")
    item.type, item.size = tarfile.XGLTYPE, 512
    return (item.tobuf(tarfile.GNU_FORMAT) + b"8 a=bcd\n".ljust(512, b"\0")) * 5000


def pax(**headers: str) -> tarfile.TarInfo:
    item = tarfile.TarInfo("x")
    item.pax_headers = headers
    return item


REFUSED = {
    "upwards": pack(("../out/x", b"1")),
    "upwards in the middle": pack(("a/../../out/x", b"1")),
    "hard link upwards": pack(("x", "=../out/secret")),
    "hard link through a link": pack(("l", "->/"), ("x", "=l/etc/shadow")),
    "hard link to a folder": pack(("d", None), ("x", "=d")),
    "hard link to nothing": pack(("x", "=nowhere")),
    "link loop as folder": pack(("a", "->b"), ("b", "->a"), ("a/x", b"1")),
    "whiteout of the folder above": pack(("a/.wh...", b"")),
    "empty whiteout": pack(("a/.wh.", b"")),
    "deep": pack(("d/" * 300 + "x", b"1")),
    "deep by links": pack(("a", "->" + "d/" * 200 + "e"), ("d/" * 200 + "e/b", "->" + "d/" * 200 + "e"), ("a/b/c", b"1")),
    "long name": pack(("n" * 300, b"1")),
    "promises more than it has": liar(),
    "huge header": long_header(),
    "a chain of headers": many_headers(),
    "not a tar": b"hello" * 400,
    "cut gzip": gzip.compress(pack(("a", os.urandom(9000))))[:-3000],
    "long target": pack(("x", "->" + "t" * 5000)),
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED.keys())
def test_hostile_archive_is_refused_with_words(tmp_path: Path, data: bytes) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "secret").write_text("kept")
    with pytest.raises(ValueError, match=r"archive test"):
        lay(tmp_path / "t", data, bounds=Bounds(num_bytes=1 << 30, num_entries=10_000))
    assert seen(out) == {"secret": "kept"}


HARMLESS = {
    "absolute": (pack(("/etc/x", b"1")), {"etc": "folder", "etc/x": "1"}),
    "absolute link then write": (pack(("l", "->/OUT"), ("l/x", b"1")), None),
    "link upwards then write": (pack(("l", "->../../../../OUT"), ("l/x", b"1")), None),
    "link to the file itself": (pack(("l", "->OUT/secret"), ("l", b"mine")), {"l": "mine"}),
    "twice the same name": (pack(("a", b"1"), ("a", b"2")), {"a": "2"}),
    "hard link to itself": (pack(("a", b"1"), ("a", "=a")), {"a": "1"}),
    "the root itself": (pack((".", None), ("./a", b"1")), {"a": "1"}),
    "folder replaced by a link, then written": (pack(("d/a", b"1"), ("d", "->OUT"), ("d/b", b"2")), None),
    "odd time": (pack(("a", pax(mtime="nan"))), {"a": ""}),
    "odd size of the number": (pack(("a", pax(mtime="1e300", uid="99999999999999999999"))), {"a": ""}),
}


@pytest.mark.parametrize("case", HARMLESS.values(), ids=HARMLESS.keys())
def test_hostile_archive_stays_inside_its_tree(tmp_path: Path, case: tuple[bytes, dict[str, str] | None]) -> None:
    out = Path("/OUT")
    assert not out.exists()
    lay(tmp_path / "t", case[0])
    assert not out.exists() and [p.name for p in tmp_path.iterdir()] == ["t"]
    if case[1] is not None:
        assert seen(tmp_path / "t") == case[1]


def test_devices_are_left_out_and_counted(tmp_path: Path) -> None:
    device = tarfile.TarInfo()
    device.type, device.devmajor, device.devminor = tarfile.BLKTYPE, 8, 0
    done = lay(tmp_path / "t", pack(("dev/sda", device), ("a", b"1")))
    assert (done.num_entries, done.num_left_out) == (2, 1) and seen(tmp_path / "t") == {"a": "1"}


def test_sparse_giant_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    item = pax(**{"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 50), "GNU.sparse.name": "big"})
    item.size = 512
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(item, io.BytesIO(b"1\n0\n1\n".ljust(512, b"\0")))
    with pytest.raises(ValueError, match="more than"):
        lay(tmp_path / "t", out.getvalue())
    assert seen(tmp_path / "t") == {}


NAMES = st.sampled_from(
    ["a", "b", "c", "a/b", "a/c", "b/a", "l/a", "l/../x", "../out", "/a", ".wh.a", "a/.wh..wh..opq", "./a", "a//b", "l", ""]
)
TARGETS = st.sampled_from(["a", "b", "../..", "/", "/tmp", "..", "l", "../out/secret", ".", "a/b"])
MEMBERS = st.lists(
    st.one_of(
        st.tuples(NAMES, st.binary(max_size=3)),
        st.tuples(NAMES, st.none()),
        st.tuples(NAMES, TARGETS.map(lambda t: f"->{t}")),
        st.tuples(NAMES, TARGETS.map(lambda t: f"={t}")),
    ),
    max_size=8,
)


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(members=MEMBERS)
def test_no_sequence_of_entries_changes_anything_outside(
    tmp_path_factory: pytest.TempPathFactory, members: list[tuple[str, object]]
) -> None:
    top = tmp_path_factory.mktemp("h")
    (top / "out").mkdir()
    (top / "out/secret").write_text("kept")
    before = os.lstat(top / "out/secret")
    with contextlib.suppress(ValueError):
        lay(top / "t", pack(*members))
    after = os.lstat(top / "out/secret")
    assert sorted(p.name for p in top.iterdir()) == ["out", "t"] and [p.name for p in (top / "out").iterdir()] == ["secret"]
    assert (before.st_nlink, before.st_mtime_ns, before.st_ctime_ns, before.st_size) == (
        after.st_nlink, after.st_mtime_ns, after.st_ctime_ns, after.st_size,
    )  # fmt: skip


@settings(max_examples=150, deadline=None, derandomize=True)
@given(where=st.integers(0, 2047), what=st.integers(0, 255))
def test_damaged_archive_unpacks_or_is_refused_with_words(tmp_path_factory: pytest.TempPathFactory, where: int, what: int) -> None:
    data = bytearray(pack(("a/b", b"1"), ("l", "->a"), ("l/c", b"2"), form=tarfile.GNU_FORMAT))
    data[where] = what
    top = tmp_path_factory.mktemp("h")
    with contextlib.suppress(ValueError):
        lay(top / "t", bytes(data))
    assert [p.name for p in top.iterdir()] == ["t"]
