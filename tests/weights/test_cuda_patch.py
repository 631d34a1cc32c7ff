"""Patches are swapped into live CUDA weights in place, bit for bit, and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from rollmill.weights.cuda.live import CudaWeights
from rollmill.weights.cuda.patch import SparsePatch
from rollmill.weights.cuda.place import Piece
from rollmill.weights.schema import Cell

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


def random_patch(name: str, tensor: torch.Tensor, share: float, seed: int) -> SparsePatch:
    rng = np.random.default_rng(seed)
    count, size = tensor.numel(), tensor.element_size()
    positions = np.flatnonzero(rng.random(count) < share).astype(np.uint32)
    codes = rng.integers(0, 256, len(positions) * size, dtype=np.uint8).view(f"u{size}")
    return SparsePatch(name=name, positions=positions, codes=codes)


def patched(tensor: torch.Tensor, patch: SparsePatch) -> np.ndarray:
    data = flat_bytes(tensor).copy()
    data.view(patch.codes.dtype)[patch.positions] = patch.codes
    return data


@pytest.mark.parametrize("share", [0.0005, 0.012, 0.6, 1.0])
def test_apply_writes_every_code_and_revert_restores_every_bit(share: float) -> None:
    live = make()
    before = {name: flat_bytes(tensor) for name, tensor in live.items()}
    patches = [random_patch(name, tensor, share, at) for at, (name, tensor) in enumerate(live.items())]
    want = {patch.name: patched(live[patch.name], patch) for patch in patches}
    weights = CudaWeights(live)
    was = weights.fingerprint()
    staged = weights.stage(patches)
    pointers = [tensor.data_ptr() for tensor in live.values()]
    weights.apply(staged)
    assert all((flat_bytes(live[name]) == data).all() for name, data in want.items())
    assert weights.fingerprint() == weights.tracked_fingerprint() != was
    assert pointers == [tensor.data_ptr() for tensor in live.values()]
    weights.revert(staged)
    assert all((flat_bytes(live[name]) == data).all() for name, data in before.items())
    assert weights.fingerprint() == weights.tracked_fingerprint() == was


def test_the_memory_between_strided_rows_is_left_alone() -> None:
    frame = torch.zeros(50, 600, dtype=torch.bfloat16, device=DEVICE)
    weights = CudaWeights({"w": frame[:, 30:430]})
    everything = np.arange(50 * 400, dtype=np.uint32)
    weights.apply(weights.stage([SparsePatch(name="w", positions=everything, codes=np.full(len(everything), 0x3F80, np.uint16))]))
    assert bool((frame[:, 30:430] == 1).all())
    assert not frame[:, :30].any() and not frame[:, 430:].any()


def test_tracked_fingerprint_misses_damage_that_the_full_one_sees() -> None:
    live = make()
    weights = CudaWeights(live)
    live["bf16"].view(torch.int16)[7, 7] ^= 4
    assert weights.tracked_fingerprint() != weights.fingerprint()


def test_a_column_shard_is_tracked_in_global_coordinates() -> None:
    local = torch.randn(64, 500, device=DEVICE).bfloat16()
    piece = Piece(name="w", dtype="bfloat16", shape=(64, 9000), cell=Cell(8500, 64, 500, 9000), tensor=local)
    weights = CudaWeights([piece])
    staged = weights.stage([random_patch("w", local, 0.05, 3)])
    weights.apply(staged)
    assert weights.fingerprint() == weights.tracked_fingerprint()


def test_a_patch_is_applied_once_and_reverted_once() -> None:
    live = make()
    weights = CudaWeights(live)
    staged = weights.stage([random_patch("norm", live["norm"], 0.5, 1)])
    with pytest.raises(ValueError, match="not applied"):
        weights.revert(staged)
    weights.apply(staged)
    with pytest.raises(ValueError, match="applied already"):
        weights.apply(staged)


def test_an_empty_patch_changes_nothing() -> None:
    weights = CudaWeights(make())
    was = weights.fingerprint()
    weights.apply(weights.stage([]))
    weights.apply(weights.stage([SparsePatch(name="norm", positions=np.empty(0, np.uint32), codes=np.empty(0, np.uint16))]))
    assert weights.fingerprint() == was


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
        weights.stage([SparsePatch(name="norm", positions=np.array(positions, np.uint32), codes=codes)])


def test_unknown_and_doubled_names_are_refused() -> None:
    live = make()
    weights = CudaWeights(live)
    patch = random_patch("norm", live["norm"], 0.5, 1)
    with pytest.raises(ValueError, match="no live tensor is called 'other'"):
        weights.stage([SparsePatch(name="other", positions=patch.positions, codes=patch.codes)])
    with pytest.raises(ValueError, match="two patches are for the same tensor"):
        weights.stage([patch, patch])
