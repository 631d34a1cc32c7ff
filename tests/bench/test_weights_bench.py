"""The benchmark of weights: every codec gives the bits back, counts are those of the pair, and inputs are read from files and stores."""

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
from safetensors.torch import save_file

from rollmill.bench.weight_codecs import codecs
from rollmill.bench.weight_entropy import bits_of_change
from rollmill.bench.weight_states import Tensor, read_state
from rollmill.bench.weights import bench_command, run, run_chain
from rollmill.weights import Publisher, open_store

ROOT = Path(__file__).parents[2]
DTYPES = {"bfloat16": 2, "float32": 4, "float8_e4m3fn": 1, "float4_e2m1fn_x2": 1, "complex128": 16, "int64": 8}


def pair(dtype: str, shape: tuple[int, ...], density: float, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    rng = np.random.default_rng(seed)
    size = DTYPES[dtype]
    old = rng.integers(0, 256, int(np.prod(shape)) * size, dtype=np.uint8)
    new = old.copy()
    hit = rng.random(old.size) < density
    new[hit] += rng.integers(1, 256, int(hit.sum()), dtype=np.uint8)
    return {"w": Tensor(dtype=dtype, shape=shape, data=old)}, {"w": Tensor(dtype=dtype, shape=shape, data=new)}


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Five consecutive snapshots of a small model, made by the script in bench/."""
    out = tmp_path_factory.mktemp("pairs")
    arguments = [str(out), "--num-params", "3e5", "--density", "0.02", "--num-steps", "4"]
    subprocess.run([sys.executable, str(ROOT / "bench" / "make_weight_pairs.py"), *arguments], check=True, capture_output=True, timeout=120)
    return sorted(out.glob("*.safetensors"))


@settings(max_examples=30, derandomize=True, deadline=None)
@given(
    dtype=st.sampled_from(sorted(DTYPES)),
    shape=st.sampled_from([(0,), (1,), (7,), (3, 5), (40, 300), (2, 70000), (2, 3, 4), (0, 4), ()]),
    density=st.sampled_from([0.0, 0.001, 0.1, 1.0]),
    seed=st.integers(0, 1000),
)
def test_every_codec_gives_back_every_bit(dtype: str, shape: tuple[int, ...], density: float, seed: int) -> None:
    old, new = pair(dtype, shape, density, seed)
    for codec in codecs():
        if codec.why_not(new):
            continue
        for workers in (1, 2):
            blobs = codec.encode(old, new, workers=workers)
            target = {"w": old["w"].data.copy()}
            codec.decode(blobs, new, target, workers=workers)
            assert np.array_equal(target["w"], new["w"].data), codec.name


def test_no_codec_writes_into_what_it_is_given() -> None:
    old, new = pair("bfloat16", (64, 64), 0.1, 3)
    before = [state["w"].data.copy() for state in (old, new)]
    for codec in codecs():
        codec.encode(old, new, workers=1)
        assert np.array_equal(old["w"].data, before[0]) and np.array_equal(new["w"].data, before[1]), codec.name


def test_result_counts_the_pair_and_says_how_it_was_measured(chain: list[Path]) -> None:
    found = json.loads(bench_command(str(chain[0]), str(chain[1]), as_json=True, repeats=1))
    old, new = read_state(str(chain[0])), read_state(str(chain[1]))
    assert found["raw_bytes"] == sum(tensor.data.size for tensor in new.values()) == 2 * found["num_elements"]
    changed = sum(int((old[n].data.view(np.uint16) != new[n].data.view(np.uint16)).sum()) for n in new)
    assert found["num_changed"] == changed and found["changed_fraction"] == pytest.approx(0.02, rel=0.1)
    rows = {row["name"]: row for row in found["codecs"]}
    assert {"cgr", "sparse", "full", "raw", "xor+zstd-1", "pulse layout", "trl layout", "zstd-1 full", "zipnn full"} <= rows.keys()
    assert all(row["note"] or row["lossless"] for row in rows.values())
    assert rows["trl layout"]["bytes"] == 6 * changed and rows["raw"]["bytes"] == found["raw_bytes"]
    assert rows["raw"]["bits_per_change"] is None
    assert found["pack_bytes"] > rows["cgr"]["bytes"]
    assert set(found["threads"]) == {"cgr", "xor+zstd-1"} and set(found["threads"]["cgr"]) == {"1", "2"}
    assert found["versions"]["numpy"] == np.__version__ and found["hardware"]["num_cores"] and str(chain[0]) in found["command"]
    assert 3 * rows["cgr"]["bytes"] < rows["xor+zstd-1"]["bytes"] * 1.2 < rows["pulse layout"]["bytes"] * 1.3
    # No coder of this kind does much better than the entropy; small tensors pay for their headers.
    assert found["entropy_bits_per_change"] < rows["cgr"]["bits_per_change"] < 1.4 * found["entropy_bits_per_change"]


def test_a_codec_that_cannot_be_measured_says_why() -> None:
    old, new = pair("float8_e4m3fn", (64, 64), 0.1, 1)
    row = next(row for row in run(old, new, repeats=1)["codecs"] if row["name"] == "zipnn full")
    assert row["bytes"] is None and row["lossless"] is None and row["note"]


def test_a_pair_without_a_change_is_measured_too() -> None:
    old, _ = pair("bfloat16", (32, 32), 0.0, 1)
    found = run(old, old, repeats=1)
    assert found["num_changed"] == 0 and found["entropy_bits_per_change"] is None
    assert all(row["bits_per_change"] is None and (row["note"] or row["lossless"]) for row in found["codecs"])


def test_entropy_is_that_of_places_signs_and_sizes() -> None:
    # 1024 weights of one exponent, 256 of them one step up and 256 one step down: H(1/2) a place, one bit a sign, nothing a size.
    old = np.full(1024, 0x3F80 + 64, np.uint16)
    new = old.copy()
    new[:256] += 1
    new[256:512] -= 1
    states = [{"w": Tensor(dtype="bfloat16", shape=(1024,), data=codes.view(np.uint8))} for codes in (old, new)]
    assert bits_of_change(*states) == pytest.approx(1024 + 512)
    wide = [{"w": Tensor(dtype="float32", shape=(512,), data=codes.view(np.uint8))} for codes in (old, new)]
    assert bits_of_change(*wide) is None


def test_a_fold_is_smaller_than_its_steps(chain: list[Path]) -> None:
    rows = run_chain([read_state(str(path)) for path in chain])
    assert [row["num_steps"] for row in rows] == [1, 4]
    one, four = (row["cgr"] for row in rows)
    assert one["fold_bytes"] == one["chain_bytes"] and four["fold_bytes"] < 0.8 * four["chain_bytes"]
    assert all(row[name]["lossless"] for row in rows for name in ("cgr", "xor+zstd-1"))
    text = bench_command(str(chain[0]), str(chain[-1]), repeats=1, between=[str(path) for path in chain[1:-1]])
    assert "4 steps in one" in text and "xor+zstd-1" in text and "yes" in text


def test_states_are_read_from_files_folders_and_stores(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.randn(8, 6).bfloat16(),
        "b": torch.arange(5),
        "c": torch.zeros(3, 4).to(torch.float8_e4m3fn),
        "d": torch.tensor(2.0),
    }
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a.weight": tensors["a.weight"]}, folder / "model-00001-of-00002.safetensors")
    save_file({name: t for name, t in tensors.items() if name != "a.weight"}, folder / "model-00002-of-00002.safetensors", {"format": "pt"})
    store = open_store(tmp_path / "store")
    with Publisher(store, run_id="states") as publisher:
        publisher.resume(tensors, step=0)
        publisher.submit(tensors | {"d": torch.tensor(3.0)}, step=1)
    from_folder, from_store = read_state(str(folder)), read_state(f"{tmp_path / 'store'}@0")
    assert from_folder.keys() == from_store.keys() == tensors.keys()
    for name, tensor in from_folder.items():
        other = from_store[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape) and np.array_equal(tensor.data, other.data)
    assert read_state(f"{tmp_path / 'store'}@latest")["d"].data.view(np.float32)[0] == 3.0
    found = json.loads(bench_command(str(folder), f"{tmp_path / 'store'}@latest", as_json=True, repeats=1))
    assert found["num_changed"] == 1 and found["entropy_bits_per_change"] is None


def test_what_cannot_be_compared_or_read_is_refused(tmp_path: Path, chain: list[Path]) -> None:
    old, _ = pair("bfloat16", (4, 4), 0.0, 1)
    other, _ = pair("bfloat16", (2, 8), 0.0, 1)
    with pytest.raises(ValueError, match="in one snapshot and"):
        run(old, other)
    with pytest.raises(ValueError, match="in one snapshot only"):
        run(old, {"v": old["w"]})
    with pytest.raises(ValueError, match="STORE@VERSION"):
        read_state(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="nothing is published"):
        read_state(f"{tmp_path}@latest")
    bad = tmp_path / "bad.safetensors"
    for content, reason in (
        (b"", "is no safetensors file"),
        (b"\xff" * 20, "is no safetensors file"),
        (struct.pack("<Q", 2) + b"{[", "cannot be read"),
        (chain[0].read_bytes()[:-1], "bytes of tensors where its header promises"),
        (struct.pack("<Q", 55) + b'{"w":{"dtype":"Q3","shape":[1],"data_offsets":[0,1]}}  ', "Q3"),
    ):
        bad.write_bytes(content)
        with pytest.raises(ValueError, match=reason):
            read_state(str(bad))


def test_the_same_arguments_make_the_same_snapshots(chain: list[Path], tmp_path: Path) -> None:
    arguments = [str(tmp_path), "--num-params", "3e5", "--density", "0.02", "--num-steps", "2"]
    subprocess.run([sys.executable, str(ROOT / "bench" / "make_weight_pairs.py"), *arguments], check=True, capture_output=True, timeout=120)
    assert [path.read_bytes() for path in sorted(tmp_path.glob("*.safetensors"))] == [path.read_bytes() for path in chain[:3]]
