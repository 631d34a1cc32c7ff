"""Deltas are decoded on the CUDA device to the bits that the host decodes them to, and damaged ones are refused before they are applied."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from rollmill.weights.chunk import Codec, elements_of, encode, reference
from rollmill.weights.cuda.live import CudaWeights
from rollmill.weights.encode import cell_bytes
from rollmill.weights.errors import CorruptSnapshot
from rollmill.weights.live import CodedCell
from rollmill.weights.schema import Cell, TensorSpec
from rollmill.weights.shard import Held, columns_of, rows_of, whole

DEVICE = torch.device("cuda", 0)
TORCH = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "uint8": torch.uint8,
    "float32": torch.float32,
}


def old_codes(count: int, dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Plausible weights; the last few are any bits at all."""
    values = torch.from_numpy(rng.normal(0, 0.02, count).astype(np.float32))
    size = TORCH[dtype].itemsize
    codes = (values * 1e4).to(torch.int16).to(torch.uint8) if dtype == "uint8" else values.to(TORCH[dtype])
    flat = codes.view(torch.uint8).numpy().copy().view(f"u{size}")
    flat[-7:] = rng.integers(0, 256, len(flat[-7:]) * size, dtype=np.uint8).view(flat.dtype)
    return flat


def changed(old: np.ndarray, dtype: str, share: float, *, wild: bool, rng: np.random.Generator) -> np.ndarray:
    elements = elements_of(dtype)
    new, where = old.copy(), np.flatnonzero(rng.random(len(old)) < share)
    if elements.bits == 32:
        new[where] ^= np.uint32(1)
        return new
    high = 1 << (elements.bits - 1) if wild else 5
    steps = np.where(rng.random(len(where)) < (1.0 if wild else 0.1), rng.integers(1, high, len(where)), 1) * rng.choice(
        [-1, 1], len(where)
    )
    ordered = (reference.ordered(old[where], elements) + steps) & ((1 << elements.bits) - 1)
    new[where] = reference.unordered(ordered, elements)
    return new


def coded(held: Held, old: np.ndarray, new: np.ndarray, *, chunk: int, codec: Codec | None = None) -> list[CodedCell]:
    """The cells of the whole tensor's grid that lie in the held box."""
    spec, cells = held.spec, []
    for cell in spec.cells(chunk):
        if (local := held.local(cell)) is not None:
            before, after = (cell_bytes(data.view(np.uint8), local, spec.item_bytes) for data in (old, new))
            cells.append(CodedCell(name=spec.name, cell=cell, payload=encode(after, before, spec.dtype, codec=codec).data))
    return cells


def live_tensor(old: np.ndarray, spec_dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(old.view(np.uint8).copy()).to(DEVICE).view(TORCH[spec_dtype]).reshape(shape)


def check(
    held: Held, shape: tuple[int, ...], share: float, *, wild: bool = False, chunk: int = 1 << 16, codec: Codec | None = None
) -> None:
    rng = np.random.default_rng(7)
    old = old_codes(int(np.prod(shape)), held.spec.dtype, rng)
    new = changed(old, held.spec.dtype, share, wild=wild, rng=rng)
    tensor = live_tensor(old, held.spec.dtype, shape)
    weights = CudaWeights({"w": tensor}, {"w": held})
    staged = weights.stage_cells(coded(held, old, new, chunk=chunk, codec=codec))
    assert staged.num_changes >= int((old != new).sum())
    weights.apply(staged)
    assert (weights.read("w") == new.view(np.uint8)).all()
    assert weights.lanes() == weights.tracked_lanes() == {"w": held.lanes(new.view(np.uint8))}
    weights.revert(staged)
    assert (weights.read("w") == old.view(np.uint8)).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "uint8"])
@pytest.mark.parametrize(("share", "wild"), [(0.0, False), (0.001, False), (0.012, False), (0.3, False), (0.5, True), (1.0, False)])
def test_every_density_and_dtype_decodes_to_the_published_bits(dtype: str, share: float, wild: bool) -> None:
    check(whole(TensorSpec(name="w", dtype=dtype, shape=(64, 1500))), (64, 1500), share, wild=wild, codec=Codec.CGR)


@pytest.mark.parametrize("shape", [(1,), (127,), (129,), (1023,), (1025,), (77777,), (3, 5, 4099)])
def test_awkward_shapes_decode(shape: tuple[int, ...]) -> None:
    check(whole(TensorSpec(name="w", dtype="bfloat16", shape=shape)), shape, 0.02, codec=Codec.CGR)


def test_a_full_sized_chunk_decodes() -> None:
    check(whole(TensorSpec(name="w", dtype="bfloat16", shape=(1025, 1024))), (1025, 1024), 0.012, chunk=1 << 20)


def test_row_and_column_shards_take_their_own_cells() -> None:
    spec = TensorSpec(name="w", dtype="bfloat16", shape=(96, 3000), row_cuts=(17,), col_cuts=(1001,))
    check(rows_of(spec, 17, 96), (79, 3000), 0.02)
    check(columns_of(spec, 1001, 3000), (96, 1999), 0.02)


@pytest.mark.parametrize(
    ("dtype", "codec"), [("bfloat16", Codec.XOR), ("bfloat16", Codec.SPARSE), ("bfloat16", Codec.FULL), ("float32", None)]
)
def test_other_codecs_arrive_over_the_host(dtype: str, codec: Codec | None) -> None:
    check(whole(TensorSpec(name="w", dtype=dtype, shape=(30, 1000))), (30, 1000), 0.02, codec=codec)


@pytest.mark.parametrize("share", [0.005, 0.2])
def test_damage_is_refused_or_seen_by_the_fingerprint_and_never_reaches_past_the_tensor(share: float) -> None:
    """Any flipped bit, any cut: an error, or other bits inside the same tensor, which the fingerprint then tells."""
    rng = np.random.default_rng(3)
    held = whole(TensorSpec(name="w", dtype="bfloat16", shape=(20, 1000)))
    old = old_codes(20000, "bfloat16", rng)
    new = changed(old, "bfloat16", share, wild=False, rng=rng)
    (cell,) = coded(held, old, new, chunk=1 << 20, codec=Codec.CGR)
    frame = torch.zeros(22000, dtype=torch.bfloat16, device=DEVICE)
    inner = frame[1000:21000].view(20, 1000)
    inner.copy_(live_tensor(old, "bfloat16", (20, 1000)))
    weights = CudaWeights({"w": inner})
    want, refused = {"w": held.lanes(new.view(np.uint8))}, 0
    damaged = [bytes(cell.payload[: len(cell.payload) - cut]) for cut in (1, 2, len(cell.payload) // 2, len(cell.payload) - 1)]
    for bit in [*range(8, 120), *rng.integers(8, 8 * len(cell.payload), 60).tolist()]:
        data = bytearray(cell.payload)
        data[bit // 8] ^= 1 << (bit % 8)
        damaged.append(bytes(data))
    for data in damaged:
        try:
            staged = weights.stage_cells([CodedCell(name="w", cell=cell.cell, payload=data)])
        except CorruptSnapshot:
            refused += 1
            continue
        weights.apply(staged)
        assert weights.lanes() != want
        weights.revert(staged)
        assert (weights.read("w") == old.view(np.uint8)).all()
    assert refused > 20
    assert not frame[:1000].any() and not frame[21000:].any()


def test_one_damaged_cell_of_many_stops_the_whole_patch() -> None:
    rng = np.random.default_rng(4)
    held = whole(TensorSpec(name="w", dtype="bfloat16", shape=(80000,)))
    old = old_codes(80000, "bfloat16", rng)
    cells = coded(held, old, changed(old, "bfloat16", 0.1, wild=False, rng=rng), chunk=10000)
    cells[5] = CodedCell(name="w", cell=cells[5].cell, payload=bytes(cells[5].payload) + b"\0")
    weights = CudaWeights({"w": live_tensor(old, "bfloat16", (80000,))})
    with pytest.raises(CorruptSnapshot, match=r"1 of 8 chunks are damaged, first chunk 5"):
        weights.stage_cells(cells)


def test_a_cell_outside_the_shard_is_refused() -> None:
    spec = TensorSpec(name="w", dtype="bfloat16", shape=(10, 100), row_cuts=(5,))
    weights = CudaWeights({"w": torch.zeros(5, 100, dtype=torch.bfloat16, device=DEVICE)}, {"w": rows_of(spec, 0, 5)})
    payload = encode(np.ones(1000, np.uint8), np.zeros(1000, np.uint8), "bfloat16", codec=Codec.CGR).data
    with pytest.raises(ValueError, match="outside of what is held"):
        weights.stage_cells([CodedCell(name="w", cell=Cell(500, 5, 100, 100), payload=payload)])
