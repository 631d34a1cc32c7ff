"""Byte-wise delta directories: written, read and taken in bit for bit, and refused when base or bytes are wrong."""

from __future__ import annotations

import json
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import zstandard
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from interop_worlds import bytes_at, bytes_in, copy_of, model_at, publish_steps, same_bits
from safetensors import safe_open

from rollmill.weights.errors import CorruptSnapshot, UnknownFormat, WrongBase
from rollmill.weights.interop.hf import INDEX
from rollmill.weights.interop.tensor_file import Tensor, read_file, write_file
from rollmill.weights.interop.xor_dir import (
    Checksum,
    Encoding,
    Formats,
    apply,
    checksum_of,
    export_xor,
    import_xor,
    is_delta,
    read_xor_directory,
    write_xor_directory,
)
from rollmill.weights.store import WeightStore, open_store

FORMATS = [Formats(encoding=encoding, checksum=checksum) for encoding in Encoding for checksum in (Checksum.BLAKE3, Checksum.ADLER32)]
XOR = Formats()


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    found = open_store(tmp_path / "store")
    publish_steps(found, 0, 1, 2, 3)
    return found


@pytest.fixture
def chain(store: WeightStore, tmp_path: Path) -> Path:
    export_xor(store, tmp_path / "chain", first=0, last=3, formats=XOR)
    return tmp_path / "chain"


def other_applier(folder: Path, base: dict[str, bytes]) -> dict[str, bytes]:
    """A second implementation of the format, by the reference library and byte loops."""
    index = json.loads((folder / INDEX).read_text())
    new = dict(base)
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, framework="np") as opened:
            payload, promised = opened.get_tensor(name), opened.metadata()[name]
        assert payload.dtype == np.uint8 and payload.ndim == 1
        plain = zstandard.ZstdDecompressor().decompress(payload.tobytes(), max_output_size=1 << 20)
        if index["metadata"]["delta_encoding"] == "xor":
            new[name] = bytes(a ^ b for a, b in zip(base[name], plain, strict=True))
        else:
            count = int.from_bytes(plain[:4], "little")
            changed = bytearray(base[name])
            for at in range(count):
                changed[int.from_bytes(plain[4 + 4 * at : 8 + 4 * at], "little")] = plain[4 + 4 * count + at]
            new[name] = bytes(changed)
        kind = index["metadata"]["checksum_format"]
        assert promised == (blake3(new[name]).hexdigest() if kind == "blake3" else f"{zlib.adler32(new[name]):08x}")
    return new


def other_writer(folder: Path, old: int, new: int, *, overwrite: bool = False, **metadata: str) -> Path:
    """The format as a trainer writes it, through the reference library."""
    folder.mkdir(parents=True)
    payloads, checksums = {}, {}
    before, after = bytes_at(old), bytes_at(new)
    for name in before:
        if before[name] == after[name]:
            continue
        was, now = (np.frombuffer(part[name], np.uint8) for part in (before, after))
        at = np.flatnonzero(was != now)
        plain = np.uint32(at.size).tobytes() + at.astype("<u4").tobytes() + now[at].tobytes() if overwrite else (was ^ now).tobytes()
        payloads[name] = np.frombuffer(zstandard.ZstdCompressor(level=1).compress(plain), np.uint8)
        checksums[name] = f"{zlib.adler32(after[name]):08x}"
    file = "model-00000-of-00001.safetensors"
    (folder / file).write_bytes(safetensors.numpy.save(payloads, metadata=checksums))
    said = {
        "version": f"{new:06d}", "base_version": f"{old:06d}", "delta_encoding": "overwrite" if overwrite else "xor",
        "compression_format": "zstd", "checksum_format": "adler32", **metadata,
    }  # fmt: skip
    (folder / INDEX).write_text(json.dumps({"metadata": said, "weight_map": dict.fromkeys(payloads, file)}))
    return folder


@pytest.mark.parametrize("formats", FORMATS, ids=lambda f: f"{f.encoding}-{f.checksum}")
def test_exported_versions_are_applied_by_another_implementation(store: WeightStore, tmp_path: Path, formats: Formats) -> None:
    written = export_xor(store, tmp_path / "chain", first=0, last=3, formats=formats, max_file_bytes=60)
    assert [path.name for path, _ in written] == ["weight_v000001", "weight_v000002", "weight_v000003"]
    state = bytes_at(0)
    for step, (path, _) in enumerate(written, 1):
        state = other_applier(path, state)
        assert state == bytes_at(step)
        assert json.loads((path / INDEX).read_text())["metadata"]["base_version"] == f"{step - 1:06d}"
    files = sorted(path.name for path in written[0][0].glob("*.safetensors"))
    assert files == [f"model-{at:05d}-of-{len(files):05d}.safetensors" for at in range(len(files))] and len(files) > 1


@pytest.mark.parametrize("formats", FORMATS, ids=lambda f: f"{f.encoding}-{f.checksum}")
def test_chain_comes_back_as_versions_bit_for_bit(store: WeightStore, tmp_path: Path, formats: Formats) -> None:
    export_xor(store, tmp_path / "chain", first=0, last=3, formats=formats)
    other = open_store(tmp_path / "other")
    taken = [found for _, found in import_xor(other, tmp_path / "chain", base=model_at(0))]
    assert [found.record.version for found in taken] == [0, 1, 2, 3]
    assert [bytes_in(other, version) for version in range(4)] == [bytes_at(step) for step in range(4)]


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_another_writer_wrote_is_taken_in(tmp_path: Path, overwrite: bool) -> None:
    for step in (1, 2):
        other_writer(tmp_path / "chain" / f"weight_v{step:06d}", step - 1, step, overwrite=overwrite)
    store = open_store(tmp_path / "other")
    assert len(list(import_xor(store, tmp_path / "chain", base=model_at(0)))) == 3
    assert bytes_in(store, 2) == bytes_at(2)


def test_import_goes_on_where_it_ended(chain: Path, tmp_path: Path) -> None:
    other, part = open_store(tmp_path / "other"), tmp_path / "part"
    copy_of(chain / "weight_v000001", part / "weight_v000001")
    assert len(list(import_xor(other, part, base=model_at(0)))) == 2
    assert [found.record.version for _, found in import_xor(other, chain)] == [2, 3]
    # Applying a difference a second time would take it back.
    assert list(import_xor(other, chain, base=model_at(0))) == [] and bytes_in(other, 3) == bytes_at(3)


def test_chain_may_start_from_weights_that_the_store_has(chain: Path, tmp_path: Path) -> None:
    other = open_store(tmp_path / "other")
    publish_steps(other, 0)
    with pytest.raises(ValueError, match="--base"):
        list(import_xor(other, chain))
    assert [found.is_new for _, found in import_xor(other, chain, base=model_at(0))] == [False, True, True, True]
    assert bytes_in(other, 3) == bytes_at(3)


def test_wrong_base_is_refused_and_nothing_is_published(chain: Path, tmp_path: Path) -> None:
    other = open_store(tmp_path / "other")
    with pytest.raises(WrongBase, match="becomes blake3"):
        list(import_xor(other, chain, base=model_at(5)))
    assert other.versions() == [0]
    fewer = {name: tensor for name, tensor in model_at(0).items() if name != "norm"}
    with pytest.raises(WrongBase, match="norm"):
        apply(read_xor_directory(chain / "weight_v000001"), fewer)
    larger = model_at(0) | {"norm": Tensor(dtype="float32", shape=(10,), data=np.zeros(40, np.uint8))}
    with pytest.raises(WrongBase, match="36 bytes, the base has 40"):
        apply(read_xor_directory(chain / "weight_v000001"), larger)


def test_gap_in_a_chain_and_another_chain_are_refused(chain: Path, store: WeightStore, tmp_path: Path) -> None:
    other, part = open_store(tmp_path / "other"), tmp_path / "part"
    copy_of(chain / "weight_v000001", part / "weight_v000001")
    copy_of(chain / "weight_v000003", part / "weight_v000003")
    with pytest.raises(WrongBase, match="the store is at 1"):
        list(import_xor(other, part, base=model_at(0)))
    other_writer(tmp_path / "foreign" / "weight_v000001", 0, 7, version="000001")
    with pytest.raises(WrongBase, match="another chain"):
        list(import_xor(other, tmp_path / "foreign"))


@pytest.mark.parametrize("encoding", list(Encoding))
def test_every_flipped_bit_of_a_payload_is_caught(tmp_path: Path, encoding: Encoding) -> None:
    old = {"w": Tensor(dtype="uint8", shape=(40,), data=np.arange(40, dtype=np.uint8))}
    new = {"w": Tensor(dtype="uint8", shape=(40,), data=np.where(np.arange(40) % 7, old["w"].data, 9).astype(np.uint8))}
    folder = tmp_path / "weight_v000001"
    write_xor_directory(folder, version=1, base_version=0, old=old, new=new, formats=Formats(encoding=encoding))
    delta = read_xor_directory(folder)
    num_caught = 0
    for bit in range(8 * delta.payloads["w"].size):
        flipped = np.array(delta.payloads["w"])
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            # Some bits of a zstd header mean nothing; then the result must be right.
            assert same_bits(apply(replace(delta, payloads={"w": flipped}), old), new)
        except (CorruptSnapshot, WrongBase):
            num_caught += 1
    assert num_caught > 4 * delta.payloads["w"].size


def test_wrong_checksums_and_broken_indexes_are_refused(chain: Path) -> None:
    folder = chain / "weight_v000001"
    file, index = next(folder.glob("*.safetensors")), json.loads((folder / INDEX).read_text())
    tensors, metadata = read_file(file)
    file.unlink()
    write_file(file, tensors, metadata | {"norm": "00" * 32})
    with pytest.raises(WrongBase, match="promised is 0000"):
        apply(read_xor_directory(folder), model_at(0))
    file.unlink()
    write_file(file, tensors, {name: text for name, text in metadata.items() if name != "norm"})
    with pytest.raises(WrongBase, match="full snapshot"):
        read_xor_directory(folder)
    for key, value, error in (
        ("compression_format", "arc_v2", UnknownFormat),
        ("delta_encoding", "add", UnknownFormat),
        ("checksum_format", "md5", UnknownFormat),
        ("version", "seven", CorruptSnapshot),
    ):
        changed = index | {"metadata": index["metadata"] | {key: value}}
        (folder / INDEX).write_text(json.dumps(changed))
        file.unlink()
        write_file(file, tensors, metadata)
        with pytest.raises(error, match=value):
            read_xor_directory(folder)
    (folder / INDEX).write_text(json.dumps(index | {"weight_map": index["weight_map"] | {"x": file.name}}))
    with pytest.raises(CorruptSnapshot, match="do not agree on x"):
        read_xor_directory(folder)
    (folder / INDEX).write_text(json.dumps(index | {"weight_map": {"norm": "../other.safetensors"}}))
    with pytest.raises(CorruptSnapshot, match="not there"):
        read_xor_directory(folder)


def test_frame_that_unpacks_to_more_than_the_base_is_refused_before_it_fills_memory(chain: Path) -> None:
    folder = chain / "weight_v000001"
    file = next(folder.glob("*.safetensors"))
    tensors, metadata = read_file(file)
    bomb = np.frombuffer(zstandard.ZstdCompressor().compress(bytes(1 << 24)), np.uint8)
    file.unlink()
    write_file(file, tensors | {"norm": Tensor(dtype="uint8", shape=(bomb.size,), data=bomb)}, metadata)
    with pytest.raises(WrongBase, match="longer than the base"):
        apply(read_xor_directory(folder), model_at(0))


def test_xxh3_without_its_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ValueError, match=r"pip install 'rollmill\[interop\]'"):
        checksum_of(Checksum.XXH3)


def test_xxh3_round_trip(store: WeightStore, tmp_path: Path) -> None:
    pytest.importorskip("xxhash")
    assert checksum_of(Checksum.XXH3)(np.frombuffer(b"abcd", np.uint8)) == "8d6b60383dfa90c21be79eecd1b1353d"
    export_xor(store, tmp_path / "chain", first=0, last=1, formats=Formats(checksum=Checksum.XXH3))
    assert same_bits(apply(read_xor_directory(tmp_path / "chain" / "weight_v000001"), model_at(0)), model_at(1))


def test_deltas_and_weights_are_told_apart(chain: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    write_file(tmp_path / "full" / "model.safetensors", model_at(0), {"format": "pt"})
    assert is_delta(chain / "weight_v000001") and not is_delta(tmp_path / "full")
    (chain / "weight_v000001" / INDEX).unlink()
    assert is_delta(chain / "weight_v000001")


def test_equal_versions_and_other_tensors(tmp_path: Path) -> None:
    size = write_xor_directory(tmp_path / "weight_v000001", version=1, base_version=0, old=model_at(0), new=model_at(0), formats=XOR)
    assert size < 400 and same_bits(apply(read_xor_directory(tmp_path / "weight_v000001"), model_at(0)), model_at(0))
    with pytest.raises(ValueError, match="exists"):
        write_xor_directory(tmp_path / "weight_v000001", version=1, base_version=0, old=model_at(0), new=model_at(0), formats=XOR)
    with pytest.raises(ValueError, match="other tensors"):
        write_xor_directory(tmp_path / "w", version=1, base_version=0, old=model_at(0), new={}, formats=XOR)


@given(st.binary(max_size=200), st.binary(max_size=200), st.sampled_from(FORMATS))
@settings(max_examples=40, derandomize=True, deadline=None)
def test_any_bytes_survive(tmp_path_factory: pytest.TempPathFactory, old: bytes, new: bytes, formats: Formats) -> None:
    size = min(len(old), len(new))
    before, after = ({"w": Tensor(dtype="uint8", shape=(size,), data=np.frombuffer(part[:size], np.uint8))} for part in (old, new))
    folder = tmp_path_factory.mktemp("any") / "weight_v000001"
    write_xor_directory(folder, version=1, base_version=0, old=before, new=after, formats=formats)
    assert same_bits(apply(read_xor_directory(folder), before), after)
