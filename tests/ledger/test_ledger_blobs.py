"""A blob reads back bit for bit or says what is wrong with it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.ledger import BlobStore, CorruptBlob
from rollmill.ledger.blobs import TEMP_PREFIX
from rollmill.records import BlobRef


@given(content=st.one_of(st.binary(max_size=3000), st.binary(min_size=1, max_size=4).map(lambda b: b * 5000)))
@settings(max_examples=60, deadline=None)
def test_blob_reads_back_bit_for_bit(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = BlobStore(folder, fsync=False)
        ref = store.put(content)
        assert ref.num_bytes == len(content)
        assert store.get(ref) == content
        assert store.path(ref) == Path(folder) / ref.digest[:2] / ref.digest


def test_putting_twice_keeps_one_file_untouched(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    ref = store.put(b"same")
    before = store.path(ref).stat()
    assert store.put(b"same") == ref
    after = store.path(ref).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [store.path(ref)]


def test_missing_blob_is_named(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    ref = BlobRef(digest="ab" * 32, num_bytes=3)
    with pytest.raises(CorruptBlob, match="no file") as error:
        store.get(ref)
    assert str(store.path(ref)) in str(error.value)


@given(position=st.integers(0, 10**6), bit=st.integers(0, 7))
@settings(max_examples=150, deadline=None)
def test_flipping_any_bit_never_yields_other_content(position: int, bit: int) -> None:
    content = os.urandom(100) + b"abc" * 50
    with tempfile.TemporaryDirectory() as folder:
        store = BlobStore(folder, fsync=False)
        ref = store.put(content)
        data = bytearray(store.path(ref).read_bytes())
        data[position % len(data)] ^= 1 << bit
        store.path(ref).write_bytes(bytes(data))
        try:
            found = store.get(ref)
        except CorruptBlob as error:
            assert ref.digest in error.expected and str(error.path) in str(error)
        else:
            assert found == content  # a bit of the frame header that carries no meaning


@pytest.mark.parametrize("keep", [0, 1, 5, 20, -1])
def test_torn_blob_is_refused(tmp_path: Path, keep: int) -> None:
    store = BlobStore(tmp_path)
    ref = store.put(os.urandom(200))
    data = store.path(ref).read_bytes()
    store.path(ref).write_bytes(data[:keep])
    with pytest.raises(CorruptBlob):
        store.get(ref)


def test_another_blobs_bytes_under_this_address_are_refused(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    one, two = store.put(b"one"), store.put(b"two")
    store.path(one).write_bytes(store.path(two).read_bytes())
    with pytest.raises(CorruptBlob, match=two.digest):
        store.get(one)
    with pytest.raises(CorruptBlob, match="a frame of 3 bytes"):
        store.get(BlobRef(digest=two.digest, num_bytes=4))


def test_putting_again_heals_a_damaged_file(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    ref = store.put(b"content")
    store.path(ref).write_bytes(b"rubbish")
    store.put(b"content")
    assert store.get(ref) == b"content"


def test_collect_removes_only_what_nobody_refers_to(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    kept, lost = store.put(b"kept"), store.put(b"lost")
    abandoned = store.path(kept).parent / f"{TEMP_PREFIX}abc"
    abandoned.write_bytes(b"half")
    freed = store.path(lost).stat().st_size + 4
    young = store.path(lost).stat().st_mtime - 1
    assert store.collect({kept.digest}, before=young) == 0
    assert store.collect({kept.digest}) == freed
    assert store.get(kept) == b"kept"
    assert not store.has(lost) and not abandoned.exists()
    assert store.collect([kept.digest]) == 0
