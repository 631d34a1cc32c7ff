"""Patches are swapped into live CUDA weights in place, bit for bit, and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from rollmill.weights.bits import dtype_name
from rollmill.weights.cuda.live import CudaWeights
from rollmill.weights.live import TensorPatch
from rollmill.weights.schema import TensorSpec
from rollmill.weights.shard import Held, columns_of, whole

DEVICE = torch.device("cuda", 0)


def make(seed: int = 0) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)

    def raw(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        data = rng.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(data).view(dtype).reshape(shape).to(DEVICE)

    return {
        "bf16": raw((300, 4096), torch.bfloat16),
        "norm": raw((77,), torch.bfloat16),
        "fp8": raw((100, 1000), torch.float8_e4m3fn),
        "fp32": raw((5, 999), torch.float32),
        "int64": raw((4097,), torch.int64),
        "strided": raw((50, 600), torch.bfloat16)[:, 30:430],
    }


def flat_bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).cpu().numpy().reshape(-1)


def patch_of(held: Held, positions: np.ndarray, codes: np.ndarray) -> TensorPatch:
    return TensorPatch(held=held, positions=positions, codes=codes, before=np.zeros_like(codes))


def held_of(name: str, tensor: torch.Tensor) -> Held:
    return whole(TensorSpec(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape)))


def random_patch(held: Held, tensor: torch.Tensor, share: float, seed: int) -> TensorPatch:
    rng = np.random.default_rng(seed)
    count, size = tensor.numel(), tensor.element_size()
    positions = np.flatnonzero(rng.random(count) < share).astype(np.int64)
    codes = rng.integers(0, 256, len(positions) * size, dtype=np.uint8).view(f"u{size}")
    return patch_of(held, positions, codes)


def patched(tensor: torch.Tensor, patch: TensorPatch) -> np.ndarray:
    data = flat_bytes(tensor).copy()
    data.view(patch.codes.dtype)[patch.positions] = patch.codes
    return data


@pytest.mark.parametrize("share", [0.0005, 0.012, 0.6, 1.0])
def test_apply_writes_every_code_and_revert_restores_every_bit(share: float) -> None:
    live = make()
    before = {name: flat_bytes(tensor) for name, tensor in live.items()}
    patches = [random_patch(held_of(name, tensor), tensor, share, at) for at, (name, tensor) in enumerate(live.items())]
    want = {patch.held.spec.name: patched(live[patch.held.spec.name], patch) for patch in patches}
    weights = CudaWeights(live)
    was = weights.lanes()
    staged = weights.stage(patches)
    pointers = [tensor.data_ptr() for tensor in live.values()]
    weights.apply(staged)
    assert all((flat_bytes(live[name]) == data).all() for name, data in want.items())
    assert weights.lanes() == weights.tracked_lanes() != was
    assert pointers == [tensor.data_ptr() for tensor in live.values()]
    weights.revert(staged)
    assert all((flat_bytes(live[name]) == data).all() for name, data in before.items())
    assert weights.lanes() == weights.tracked_lanes() == was


def test_the_memory_between_strided_rows_is_left_alone() -> None:
    frame = torch.zeros(50, 600, dtype=torch.bfloat16, device=DEVICE)
    weights = CudaWeights({"w": frame[:, 30:430]})
    everything = np.arange(50 * 400)
    patch = patch_of(held_of("w", frame[:, 30:430]), everything, np.full(len(everything), 0x3F80, np.uint16))
    weights.apply(weights.stage([patch]))
    assert bool((frame[:, 30:430] == 1).all())
    assert not frame[:, :30].any() and not frame[:, 430:].any()


def test_tracked_fingerprint_misses_damage_that_the_full_one_sees() -> None:
    live = make()
    weights = CudaWeights(live)
    live["bf16"].view(torch.int16)[7, 7] ^= 4
    assert weights.tracked_lanes() != weights.lanes()


def test_a_column_shard_is_tracked_in_global_coordinates() -> None:
    local = torch.randn(64, 500, device=DEVICE).bfloat16()
    held = columns_of(TensorSpec(name="w", dtype="bfloat16", shape=(64, 9000)), 8500, 9000)
    weights = CudaWeights({"w": local}, {"w": held})
    assert weights.lanes() == {"w": held.lanes(flat_bytes(local))}
    staged = weights.stage([random_patch(held, local, 0.05, 3)])
    weights.apply(staged)
    assert weights.lanes() == weights.tracked_lanes()


def test_applying_twice_is_applying_once_and_so_is_reverting() -> None:
    live = make()
    weights = CudaWeights(live)
    staged = weights.stage([random_patch(held_of("norm", live["norm"]), live["norm"], 0.5, 1)])
    before = flat_bytes(live["norm"])
    weights.revert(staged)
    assert np.array_equal(flat_bytes(live["norm"]), before)
    weights.apply(staged)
    after = flat_bytes(live["norm"])
    weights.apply(staged)
    assert np.array_equal(flat_bytes(live["norm"]), after) and not np.array_equal(before, after)
    weights.revert(staged)
    weights.revert(staged)
    assert np.array_equal(flat_bytes(live["norm"]), before)


def test_an_empty_patch_changes_nothing() -> None:
    weights = CudaWeights(make())
    was = weights.lanes()
    weights.apply(weights.stage([]))
    nothing = patch_of(weights.held()["norm"], np.empty(0, np.int64), np.empty(0, np.uint16))
    weights.apply(weights.stage([nothing]))
    assert weights.lanes() == was


@pytest.mark.parametrize(
    ("positions", "codes", "message"),
    [
        ([3, 3], np.array([1, 2], np.uint16), "ascend"),
        ([5, 3], np.array([1, 2], np.uint16), "ascend"),
        ([77], np.array([1], np.uint16), "at most 76"),
        ([1], np.array([1], np.uint32), "unsigned code of 2 bytes"),
        ([1, 2], np.array([1], np.uint16), "one unsigned code"),
    ],
)
def test_a_patch_that_does_not_fit_is_refused(positions: list[int], codes: np.ndarray, message: str) -> None:
    weights = CudaWeights(make())
    with pytest.raises(ValueError, match=message):
        weights.stage([patch_of(weights.held()["norm"], np.array(positions, np.int64), codes)])


def test_loaded_bytes_are_the_bytes_that_are_read() -> None:
    live = make()
    weights = CudaWeights(live)
    for name, data in {name: np.roll(flat_bytes(tensor), 8) for name, tensor in live.items()}.items():
        weights.load(name, data)
        assert (weights.read(name) == data).all()
    assert weights.lanes() == weights.tracked_lanes()


def test_unknown_and_doubled_names_are_refused() -> None:
    live = make()
    weights = CudaWeights(live)
    patch = random_patch(held_of("norm", live["norm"]), live["norm"], 0.5, 1)
    with pytest.raises(ValueError, match="no live tensor is called 'other'"):
        weights.stage([patch_of(held_of("other", live["norm"]), patch.positions, patch.codes)])
    with pytest.raises(ValueError, match="two patches are for the same tensor"):
        weights.stage([patch, patch])
