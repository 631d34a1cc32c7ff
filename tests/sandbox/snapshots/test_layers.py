"""Layers: both notations say the same, equal states give equal bytes, and a merged chain does what the chain did."""

from __future__ import annotations

import io
import os
import random
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from layer_worlds import apply_archive, body_of, bytes_of, layers, view

from rollmill.sandbox.snapshots.layers import PACK, UNPACK, Layer, Node, normal, read_portable, read_raw, write_portable, write_raw
from rollmill.sandbox.snapshots.merge import merge
from rollmill.sandbox.snapshots.tar import Body, Extent, Kind, read_members

bounded = settings(max_examples=120, deadline=None, derandomize=True)


def portable(layer: Layer) -> bytes:
    return b"".join(write_portable(layer))


def raw(layer: Layer) -> bytes:
    return b"".join(write_raw(layer))


def a_layer(**entries: Node | None) -> Layer:
    folder = Node(kind=Kind.FOLDER, mode=0o755)
    return normal({b"": folder} | {name.replace("__", "/").encode(): node for name, node in entries.items()}, set())


def a_file(data: bytes = b"x", **fields: object) -> Node:
    return Node(kind=Kind.FILE, body=body_of(data), **fields)  # type: ignore[arg-type]


FOLDER = Node(kind=Kind.FOLDER, mode=0o755)


@bounded
@given(layers())
def test_each_notation_reads_back_to_the_same_layer(layer: Layer) -> None:
    assert portable(read_portable(io.BytesIO(portable(layer)))) == portable(layer)
    assert portable(read_raw(io.BytesIO(raw(layer)))) == portable(layer)
    assert raw(read_portable(io.BytesIO(portable(layer)))) == raw(layer)


@bounded
@given(layers(), st.integers(0, 2**32))
def test_equal_states_give_equal_bytes_in_whatever_order_they_were_found(layer: Layer, seed: int) -> None:
    paths = [*layer.nodes]
    random.Random(seed).shuffle(paths)
    assert portable(normal({path: layer.nodes[path] for path in paths}, layer.opaque)) == portable(layer)


def apply_all(archives: list[bytes], root: Path) -> dict[str, tuple]:
    root.mkdir()
    for archive in archives:
        apply_archive(archive, root)
    return view(root)


@bounded
@given(st.lists(layers(), min_size=2, max_size=4), st.integers(1, 3))
def test_merged_layers_do_what_the_chain_did_on_any_base(chain: list[Layer], num_base: int) -> None:
    base, rest = chain[:num_base], chain[num_base:] or chain[-1:]
    with tempfile.TemporaryDirectory() as folder:
        one_by_one = apply_all([portable(layer) for layer in [*base, *rest]], Path(folder) / "one")
        at_once = apply_all([portable(layer) for layer in [*base, merge(rest)]], Path(folder) / "two")
    assert at_once == one_by_one


@bounded
@given(layers(), layers(), layers())
def test_merging_is_associative(low: Layer, middle: Layer, top: Layer) -> None:
    assert (
        portable(merge([merge([low, middle]), top])) == portable(merge([low, merge([middle, top])])) == portable(merge([low, middle, top]))
    )


def test_folder_made_again_over_a_removal_hides_what_lay_below() -> None:
    merged = merge([a_layer(d=None), a_layer(d=FOLDER, d__new=a_file())])
    assert merged.opaque == {b"d"}
    merged = merge([a_layer(d=a_file()), a_layer(d=FOLDER)])
    assert merged.opaque == {b"d"}


def test_removal_stays_in_a_merged_layer_because_others_may_lie_below() -> None:
    assert merge([a_layer(f=a_file()), a_layer(f=None)]).nodes[b"f"] is None


def test_a_name_of_a_file_with_two_names_can_be_replaced_alone() -> None:
    twice = a_file(b"old")
    merged = merge([a_layer(f=twice, g=twice, h=twice), a_layer(f=a_file(b"new"))])
    assert bytes_of(merged.nodes[b"f"]) == b"new"
    assert merged.nodes[b"g"] is merged.nodes[b"h"] is twice
    again = read_portable(io.BytesIO(portable(merged)))
    assert again.nodes[b"g"] is again.nodes[b"h"] and bytes_of(again.nodes[b"g"]) == b"old"


def test_file_that_looks_like_a_removal_stays_a_file() -> None:
    layer = a_layer(**{".wh.x": a_file(b"mine"), ".wh..wh..opq": a_file(b"too")})
    again = read_portable(io.BytesIO(portable(layer)))
    assert bytes_of(again.nodes[b".wh.x"]) == b"mine" and bytes_of(again.nodes[b".wh..wh..opq"]) == b"too" and not again.opaque


def test_times_ids_and_attributes_survive_to_the_last_bit() -> None:
    key = b"SCHILY.xattr.user.note"
    node = a_file(b"", mtime_ns=-1_500_000_001, uid=3_000_000, gid=2_097_152, mode=0o4755, extra=((key, b"\0\xff=\n"),))
    layer = a_layer(**{"n" * 150: node})
    for again in (read_portable(io.BytesIO(portable(layer))), read_raw(io.BytesIO(raw(layer)))):
        found = again.nodes[b"n" * 150]
        assert found is not None
        assert (found.mtime_ns, found.uid, found.gid, found.mode, found.extra) == (node.mtime_ns, node.uid, node.gid, node.mode, node.extra)


@bounded
@given(st.lists(st.tuples(st.integers(0, 70), st.integers(1, 3)), max_size=4), st.integers(0, 5000))
@example(runs=[], tail=0)
def test_holes_are_what_the_bytes_say_and_not_how_they_were_written(runs: list[tuple[int, int]], tail: int) -> None:
    page = 4096
    data = bytearray(73 * page + tail)
    for start, length in runs:
        data[start * page : (start + length) * page] = b"z" * (length * page)
    pages = sorted({at for start, length in runs for at in range(start, start + length)})
    holed = Body(io.BytesIO(bytes(data)), len(data), tuple(Extent(at * page, at * page, page) for at in pages))
    sparse, dense = a_layer(f=Node(kind=Kind.FILE, body=holed)), a_layer(f=a_file(bytes(data)))
    assert portable(sparse) == portable(dense)
    assert bytes_of(read_portable(io.BytesIO(portable(dense))).nodes[b"f"]) == data
    with tarfile.open(fileobj=io.BytesIO(portable(dense))) as archive:
        found = archive.extractfile("f")
        assert found is not None and found.read() == data


def test_file_of_many_islands_survives() -> None:
    page, num = 4096, 20_000
    runs = tuple(Extent(2 * at * page, at * page, page) for at in range(num))
    layer = a_layer(f=Node(kind=Kind.FILE, body=Body(io.BytesIO(b"i" * (num * page)), 2 * num * page + 5, runs)))
    data = portable(layer)
    assert portable(read_portable(io.BytesIO(data))) == data and len(data) < 1.1 * num * page


def test_huge_empty_file_costs_a_header() -> None:
    layer = a_layer(f=Node(kind=Kind.FILE, body=Body(io.BytesIO(), 1 << 40, ())))
    assert len(portable(layer)) < 8192
    found = read_portable(io.BytesIO(portable(layer))).nodes[b"f"]
    assert found is not None and found.body is not None and found.body.num_bytes == 1 << 40


@pytest.mark.parametrize("keep", [0, 511, 512, 1024, 1600])
def test_archive_that_was_cut_short_is_refused(keep: int) -> None:
    whole = raw(a_layer(f=a_file(b"x" * 700)))
    with pytest.raises(ValueError, match=r"cut short|short; pack"):
        bytes_of(read_raw(io.BytesIO(whole[:keep])).nodes[b"f"])


def test_damaged_header_is_refused() -> None:
    whole = bytearray(raw(a_layer(f=a_file())))
    whole[600] ^= 1
    with pytest.raises(ValueError, match="damaged"):
        read_raw(io.BytesIO(bytes(whole)))


@pytest.mark.parametrize("size", [b"-512", b"-1"])
def test_size_that_leads_backwards_is_refused(size: bytes) -> None:
    member = a_file(b"x", extra=((b"SCHILY.xattr.user.pad", b"0" * 7),))
    record = b"33 SCHILY.xattr.user.pad=0000000\n"
    whole = raw(a_layer(f=member))
    assert record in whole
    lie = b"%d size=%s\n" % (len(b"00 size=\n") + len(size), size)
    filler = record[len(lie) :]
    lie += b"%02d k=%s\n" % (len(filler), b"0" * (len(filler) - 6))
    with pytest.raises(ValueError, match="damaged"):
        read_raw(io.BytesIO(whole.replace(record, lie)))


@pytest.mark.parametrize("name", ["../f", "/etc/passwd", "a/../../f"])
def test_names_that_leave_the_layer_are_refused(name: str) -> None:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        archive.addfile(tarfile.TarInfo(name))
    with pytest.raises(ValueError, match="leaves the packed folder"):
        [*read_members(held)]


def test_layer_that_refers_to_the_one_below_is_refused() -> None:
    key = b"SCHILY.xattr.user.overlay.redirect"
    with pytest.raises(ValueError, match="redirect"):
        read_raw(io.BytesIO(raw(a_layer(d=Node(kind=Kind.FOLDER, extra=((key, b"/old"),))))))


def test_gnu_tar_reads_what_is_written_and_writes_what_is_read(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    (one / "d" / "é").mkdir(parents=True)
    (one / "d" / ("long" * 40)).write_text("1")
    os.link(one / "d" / ("long" * 40), one / "again")
    (one / "link").symlink_to("d/" + "far" * 40)
    (one / os.fsdecode(b"\xff\xfe")).write_bytes(b"bytes")
    with (one / "holes").open("wb") as file:
        file.truncate(1 << 20)
        file.seek(1 << 19)
        file.write(b"island")
    os.mkfifo(one / "pipe")
    two.mkdir()
    packed = subprocess.run([word.format(folder=one) for word in PACK], stdout=subprocess.PIPE, check=True, timeout=30).stdout
    layer = read_raw(io.BytesIO(packed))
    subprocess.run([word.format(folder=two) for word in UNPACK], input=raw(layer), check=True, timeout=30)
    assert view(two) == view(one)
    assert (two / "holes").stat().st_blocks * 512 < 1 << 19
    repacked = subprocess.run([word.format(folder=two) for word in PACK], stdout=subprocess.PIPE, check=True, timeout=30).stdout
    assert portable(read_raw(io.BytesIO(repacked))) == portable(layer)
