"""The device writes the bytes that the host writes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from rollmill.weights import proof
from rollmill.weights.chunk import Codec, elements_of, encode, reference
from rollmill.weights.cuda.cells import CellEncoder
from rollmill.weights.cuda.live import CudaWeights
from rollmill.weights.encode import cell_bytes
from rollmill.weights.schema import TensorSpec
from rollmill.weights.shard import Held, columns_of, whole

DEVICE = torch.device("cuda", 0)
TORCH = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "int16": torch.int16,
}


def pair(count: int, dtype: str, share: float, *, wild: bool, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Old and new codes; a tenth of the steps, or all of them, are larger than one."""
    rng = np.random.default_rng(seed)
    elements, size = elements_of(dtype), TORCH[dtype].itemsize
    if elements.is_float:
        values = torch.from_numpy(rng.normal(0, 0.02, count).astype(np.float32)).to(TORCH[dtype])
        old = values.view(torch.uint8).numpy().copy().view(f"u{size}")
    else:
        old = rng.integers(0, 256, count * size, dtype=np.uint8).view(f"u{size}")
    new, where = old.copy(), np.flatnonzero(rng.random(count) < share)
    high = (1 << (elements.bits - 1)) + 1 if wild else 6
    steps = np.where(rng.random(len(where)) < (1.0 if wild else 0.1), rng.integers(1, high, len(where)), 1) * rng.choice(
        [-1, 1], len(where)
    )
    new[where] = reference.unordered((reference.ordered(old[where], elements) + steps) & ((1 << elements.bits) - 1), elements)
    return old, new


def on_device(codes: np.ndarray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(codes.view(np.uint8).copy()).to(DEVICE).view(TORCH[dtype]).reshape(shape)


def check(held: Held, shape: tuple[int, ...], old: np.ndarray, new: np.ndarray, *, chunk: int) -> None:
    spec = held.spec
    before, after = on_device(old, spec.dtype, shape), on_device(new, spec.dtype, shape)
    found = {coded.cell: coded for coded in CellEncoder({"w": before}, {"w": after}, held={"w": held}, chunk_elements=chunk).encode()}
    for cell in spec.cells(chunk):
        if (local := held.local(cell)) is None:
            continue
        was, now = (cell_bytes(data.view(np.uint8), local, spec.item_bytes) for data in (old, new))
        want = encode(now, was, spec.dtype, codec=Codec.CGR)
        if want.num_changed:
            assert found[cell].num_changed == want.num_changed
            assert bytes(found.pop(cell).payload) == want.data
    assert not found


@pytest.mark.parametrize("dtype", list(TORCH))
@pytest.mark.parametrize(("share", "wild"), [(0.0005, False), (0.012, False), (0.2, False), (0.3, True), (1.0, True)])
def test_every_dtype_and_density_gives_the_bytes_of_the_host(dtype: str, share: float, wild: bool) -> None:
    shape = (48, 1250)
    check(whole(TensorSpec(name="w", dtype=dtype, shape=shape)), shape, *pair(60000, dtype, share, wild=wild), chunk=1 << 15)


@pytest.mark.parametrize("count", [1, 7, 127, 129, 2047, 2049, 65537])
def test_awkward_sizes_give_the_bytes_of_the_host(count: int) -> None:
    for seed, share in enumerate((0.01, 0.5, 1.0)):
        held = whole(TensorSpec(name="w", dtype="bfloat16", shape=(count,)))
        check(held, (count,), *pair(count, "bfloat16", share, wild=False, seed=seed), chunk=1 << 14)


def test_a_full_sized_chunk_gives_the_bytes_of_the_host() -> None:
    held = whole(TensorSpec(name="w", dtype="bfloat16", shape=(1024, 1025)))
    check(held, (1024, 1025), *pair(1024 * 1025, "bfloat16", 0.012, wild=False), chunk=1 << 20)


def test_a_column_shard_gives_the_bytes_of_its_cells() -> None:
    spec = TensorSpec(name="w", dtype="bfloat16", shape=(96, 3000), col_cuts=(1001,))
    check(columns_of(spec, 1001, 3000), (96, 1999), *pair(96 * 1999, "bfloat16", 0.02, wild=False), chunk=1 << 14)


def test_what_the_device_encodes_the_device_decodes() -> None:
    old, new = pair(300000, "bfloat16", 0.05, wild=False)
    before, after = on_device(old, "bfloat16", (300, 1000)), on_device(new, "bfloat16", (300, 1000))
    weights = CudaWeights({"w": before.clone()})
    weights.apply(weights.stage_cells(CellEncoder({"w": before}, {"w": after}, chunk_elements=1 << 16).encode()))
    assert (weights.read("w") == new.view(np.uint8)).all()
    assert weights.lanes() == CudaWeights({"w": after}).lanes()


def test_lanes_of_cells_are_those_of_the_host_and_add_up_to_the_shard() -> None:
    spec = TensorSpec(name="w", dtype="bfloat16", shape=(96, 3000), col_cuts=(1001,))
    held = columns_of(spec, 1001, 3000)
    old, new = pair(96 * 1999, "bfloat16", 0.02, wild=False)
    before, after = on_device(old, "bfloat16", (96, 1999)), on_device(new, "bfloat16", (96, 1999))
    total, seeds = (0, 0), proof.seeds_of("w", "bfloat16", (96, 3000))
    for name, cell, lanes in CellEncoder({"w": before}, {"w": after}, held={"w": held}, chunk_elements=1 << 14).lanes():
        local = held.local(cell)
        assert name == "w" and local is not None
        assert lanes == proof.cell_part(cell_bytes(new.view(np.uint8), local, 2).view(np.uint16), cell, seeds)
        total = proof.add(total, lanes)
    assert total == held.lanes(new.view(np.uint8))


def test_equal_weights_have_no_cells() -> None:
    tensor = torch.randn(1000, device=DEVICE).bfloat16()
    assert CellEncoder({"w": tensor}, {"w": tensor.clone()}).encode() == []


def test_dtypes_without_cgr_are_refused() -> None:
    tensor = torch.zeros(10, device=DEVICE)
    with pytest.raises(ValueError, match="float32 is not coded on the device"):
        CellEncoder({"w": tensor}, {"w": tensor})
