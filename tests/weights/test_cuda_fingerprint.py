"""The fingerprint on a CUDA device is the one of the host, for every dtype, layout and sharding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from rollmill.weights import proof
from rollmill.weights.cuda.fingerprint import FingerprintPlan, fingerprint_tensors
from rollmill.weights.cuda.place import Piece, pieces_of
from rollmill.weights.schema import TensorSpec
from rollmill.weights.shard import columns_of, rows_of

DEVICE = torch.device("cuda", 0)


def bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bit pattern, NaN payloads and negative zeros included."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    if dtype is torch.bool:
        raw &= 1
    return torch.from_numpy(raw).view(dtype).reshape(shape).to(DEVICE) if count else torch.empty(shape, dtype=dtype, device=DEVICE)


def values(plan: FingerprintPlan, tensors: dict[str, torch.Tensor]) -> dict[str, proof.Lanes]:
    zeros = [on_host(name, torch.zeros_like(tensor).contiguous()) for name, tensor in tensors.items()]
    return dict(zip(tensors, map(proof.add, plan.read(), zeros), strict=True))


def on_host(name: str, tensor: torch.Tensor) -> proof.Lanes:
    return proof.from_hex(proof.fingerprint({name: tensor.cpu()}).tensors[name])


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.uint8,
        torch.int64,
        torch.complex128,
        torch.bool,
    ],
)
@pytest.mark.parametrize("shape", [(), (1,), (4095,), (4096,), (4097,), (3, 4096), (70, 4096), (129, 5000), (0, 5)])
def test_device_and_host_agree_on_every_width_and_awkward_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = bits(shape, dtype)
    assert fingerprint_tensors({"w": tensor}) == {"w": on_host("w", tensor)}


def test_many_tensors_of_mixed_widths_in_one_plan_agree_with_the_host() -> None:
    tensors = {
        "embed": bits((1000, 2048), torch.bfloat16),
        "norm": bits((2048,), torch.bfloat16, 1),
        "scale": bits((16, 16), torch.float32, 2),
        "codes": bits((512, 1024), torch.float8_e4m3fn, 3),
        "empty": bits((0,), torch.bfloat16),
        "steps": bits((5,), torch.int64, 4),
    }
    plan = FingerprintPlan(pieces_of(tensors), DEVICE)
    for _ in range(2):
        plan.launch()
        assert values(plan, tensors) == {name: on_host(name, tensor) for name, tensor in tensors.items()}


def test_memory_that_begins_off_a_16_byte_line_is_read_right() -> None:
    for skip in range(1, 9):
        tensor = bits((3 * 4096 + 77,), torch.bfloat16)[skip:]
        assert fingerprint_tensors({"w": tensor}) == {"w": on_host("w", tensor)}


def test_rows_with_a_stride_are_read_where_they_lie() -> None:
    tensor = bits((300, 5000), torch.bfloat16)[:, 100:4500]
    plan = FingerprintPlan(pieces_of({"w": tensor}), DEVICE)
    plan.launch()
    assert values(plan, {"w": tensor}) == {"w": on_host("w", tensor.contiguous())}


def test_a_transposed_tensor_is_refused_in_place_and_copied_when_asked_once() -> None:
    tensor = bits((64, 32), torch.bfloat16).t()
    with pytest.raises(ValueError, match="make the live tensor contiguous"):
        FingerprintPlan(pieces_of({"w": tensor}), DEVICE)
    assert fingerprint_tensors({"w": tensor}) == {"w": on_host("w", tensor.contiguous())}


def test_column_and_row_shards_add_up_to_the_pieces_of() -> None:
    weight = bits((96, 6000), torch.bfloat16)
    spec = TensorSpec(name="w", dtype="bfloat16", shape=(96, 6000))
    columns = [
        Piece(held=columns_of(spec, low, high), tensor=weight[:, low:high].contiguous())
        for low, high in [(0, 2000), (2000, 5001), (5001, 6000)]
    ]
    rows = [Piece(held=rows_of(spec, low, high), tensor=weight[low:high].clone()) for low, high in [(0, 11), (11, 50), (50, 96)]]
    for shards in (columns, rows):
        total = on_host("w", torch.zeros_like(weight))
        for shard in shards:
            plan = FingerprintPlan([shard], DEVICE)
            plan.launch()
            total = proof.add(total, plan.read()[0])
        assert total == on_host("w", weight)


def test_one_flipped_bit_changes_both_lanes() -> None:
    tensor = bits((70, 4096), torch.bfloat16)
    before = fingerprint_tensors({"w": tensor})["w"]
    tensor.view(torch.int16)[69, 4095] ^= 1
    after = fingerprint_tensors({"w": tensor})["w"]
    assert before[0] != after[0] and before[1] != after[1]


def test_a_captured_graph_sees_the_weights_of_the_moment() -> None:
    tensor = bits((70, 4096), torch.bfloat16)
    plan = FingerprintPlan(pieces_of({"w": tensor}), DEVICE)
    plan.launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.launch()
    tensor.view(torch.int16).add_(3)
    graph.replay()
    assert values(plan, {"w": tensor}) == {"w": on_host("w", tensor)}
