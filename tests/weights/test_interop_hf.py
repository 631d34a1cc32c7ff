"""Safetensors files and Hugging Face directories: into a store and out of it, bit for bit."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interop_worlds import bytes_at, bytes_in, flip, model_at, publish_steps, same_bits, write_model
from safetensors.torch import load_file, save_file

from rollmill.weights.errors import CorruptSnapshot, UnknownFormat
from rollmill.weights.interop.hf import export_directory, read_directory
from rollmill.weights.interop.intake import take_in
from rollmill.weights.interop.tensor_file import Tensor, cut_into_files, read_file, write_file
from rollmill.weights.manifest import Kind
from rollmill.weights.schema import make_schema
from rollmill.weights.store import open_store

TORCH = {
    "b": torch.bfloat16, "h": torch.float16, "f": torch.float32, "d": torch.float64, "e4": torch.float8_e4m3fn, "e5": torch.float8_e5m2,
    "u8": torch.uint8, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64, "bool": torch.bool,
    "c": torch.complex64,
}  # fmt: skip


def test_what_the_reference_library_writes_is_read_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {name: torch.randn(5, 3).to(dtype) for name, dtype in TORCH.items()} | {"empty": torch.empty(0, 2), "one": torch.tensor(1.5)}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    found, metadata = read_file(tmp_path / "a.safetensors")
    assert metadata == {"format": "pt"} and found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        assert found[name].data.tobytes() == tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else True


def test_what_is_written_here_is_read_by_the_reference_library(tmp_path: Path) -> None:
    write_file(tmp_path / "a.safetensors", model_at(3), {"format": "pt"})
    for name, tensor in load_file(tmp_path / "a.safetensors").items():
        ours = model_at(3)[name]
        assert (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) == (ours.dtype, ours.shape)
        assert not tensor.numel() or tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == ours.data.tobytes()


def test_half_byte_elements_keep_their_bytes(tmp_path: Path) -> None:
    tensors = {"w": Tensor(dtype="float4_e2m1fn_x2", shape=(2, 3), data=np.arange(6, dtype=np.uint8))}
    write_file(tmp_path / "a.safetensors", tensors, {})
    assert same_bits(read_file(tmp_path / "a.safetensors")[0], tensors)


@pytest.mark.parametrize("damage", ["short", "header_length", "header", "truncated", "longer", "gap"])
def test_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.safetensors"
    write_file(path, model_at(0), {})
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    path.write_bytes(
        {
            "short": data[:5],
            "header_length": struct.pack("<Q", 1 << 60) + data[8:],
            "header": data[:8] + b"x" * length + data[8 + length :],
            "truncated": data[:-1],
            "longer": data + b"\0",
            "gap": data[:8] + data[8 : 8 + length].replace(b"[0,40]", b"[1,40]") + data[8 + length :],
        }[damage]
    )
    assert damage in ("longer", "truncated") or path.read_bytes() != data
    with pytest.raises(CorruptSnapshot, match="make it again"):
        read_file(path)


def test_unknown_dtype_is_named(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F6_E2M3", "shape": [0], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(UnknownFormat, match="F6_E2M3"):
        read_file(tmp_path / "a.safetensors")


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 20))
@settings(max_examples=60, derandomize=True)
def test_files_hold_every_name_once_in_order_and_only_a_single_tensor_may_exceed_one(sizes: list[int], limit: int) -> None:
    files = cut_into_files([(str(at), size) for at, size in enumerate(sizes)], limit)
    assert [name for file in files for name in file] == [str(at) for at in range(len(sizes))]
    assert all(sum(sizes[int(name)] for name in file) <= limit or len([n for n in file if sizes[int(n)]]) == 1 for file in files)


def test_directory_becomes_a_version_and_the_next_one_a_small_delta(where: str, tmp_path: Path) -> None:
    store = open_store(where)
    first = take_in(store, read_directory(write_model(tmp_path / "m0", 0)), run_id="r")
    second = take_in(store, read_directory(write_model(tmp_path / "m1", 1)))
    again = take_in(store, read_directory(tmp_path / "m1"))
    assert (first.kind, second.kind) == (Kind.FULL, Kind.DELTA) and second.num_bytes < first.num_bytes
    assert (second.record.step, second.record.run_id) == (1, "r")
    assert not again.is_new and again.record == second.record
    assert [bytes_in(store, at.record.version) for at in (first, second)] == [bytes_at(0), bytes_at(1)]


def test_other_tensors_become_a_full_version(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    publish_steps(store, 0)
    fewer = {name: tensor for name, tensor in model_at(1).items() if name != "norm"}
    assert take_in(store, fewer).kind is Kind.FULL


def test_cuts_of_the_trainer_are_kept_so_that_a_delta_is_possible(tmp_path: Path) -> None:
    from rollmill.weights.encode import commit, write_part
    from rollmill.weights.shard import all_of

    store, model = open_store(tmp_path / "store"), model_at(0)
    schema = make_schema(((n, t.dtype, t.shape) for n, t in model.items()), row_cuts={"layers.0.wide": (8, 16)}, quantiser="none/1")
    held, new = all_of(schema), {n: t.data for n, t in model.items()}
    part = write_part(store, schema, kind=Kind.FULL, version=store.reserve(), base=None, held=held, new=new, old=None)
    commit(store, schema, [part], kind=Kind.FULL, version=0, base=None, expected=None, step=0, run_id="t", writer="w")
    taken = take_in(store, model_at(1))
    assert taken.kind is Kind.DELTA and taken.record.schema == schema.digest and bytes_in(store, 1) == bytes_at(1)


def test_version_that_cannot_be_rebuilt_is_followed_by_a_full_one(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    publish_steps(store, 0)
    for pack in (tmp_path / "store" / "packs").rglob("*.pack"):
        flip(pack)
    assert take_in(store, model_at(1)).kind is Kind.FULL and bytes_in(store, 1) == bytes_at(1)


@pytest.mark.parametrize("limit", [10_000, 300])
def test_exported_directory_is_what_loaders_expect(tmp_path: Path, limit: int) -> None:
    store = open_store(tmp_path / "store")
    publish_steps(store, 0, 1)
    done = export_directory(store, 1, tmp_path / "out", like=write_model(tmp_path / "like", 9), max_file_bytes=limit)
    assert same_bits(read_directory(tmp_path / "out"), model_at(1))
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    if limit == 10_000:
        assert names == ["config.json", "model.safetensors"]
    else:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == done.record.raw_bytes
        for name, file in index["weight_map"].items():
            assert name in load_file(tmp_path / "out" / file)
        assert set(index["weight_map"].values()) == set(done.files) and len(done.files) > 2
        assert done.files[0] == f"model-00001-of-{len(done.files):05d}.safetensors"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_export_leaves_nothing_behind_when_it_fails_and_never_writes_into_a_full_directory(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    publish_steps(store, 0)
    with pytest.raises(ValueError, match="not empty"):
        export_directory(store, 0, tmp_path / "store")
    for pack in (tmp_path / "store" / "packs").rglob("*.pack"):
        flip(pack)
    with pytest.raises(CorruptSnapshot):
        export_directory(store, 0, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_dtype_that_safetensors_lacks_is_refused_by_name(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    take_in(store, {"z": Tensor(dtype="complex128", shape=(2,), data=np.zeros(32, np.uint8))})
    with pytest.raises(ValueError, match="z is complex128"):
        export_directory(store, 0, tmp_path / "out")


def test_incomplete_directories_are_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    publish_steps(store, 0)
    done = export_directory(store, 0, tmp_path / "out", max_file_bytes=300)
    (tmp_path / "out" / done.files[1]).unlink()
    with pytest.raises(CorruptSnapshot, match="not there"):
        read_directory(tmp_path / "out")
    (tmp_path / "out" / "model.safetensors.index.json").unlink()
    write_file(tmp_path / "out" / "copy.safetensors", read_file(tmp_path / "out" / done.files[0])[0], {})
    with pytest.raises(ValueError, match="two files"):
        read_directory(tmp_path / "out")
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="no weights"):
        read_directory(tmp_path / "none")


def test_bytes_move_without_torch() -> None:
    code = (
        "import sys\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'safetensors', 'transformers'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        "import rollmill.weights.commands, rollmill.weights.interop.hf, rollmill.weights.interop.pull, rollmill.weights.interop.xor_dir\n"
        "import rollmill.weights.interop.hot_load, rollmill.weights.peer\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False).stderr == ""
