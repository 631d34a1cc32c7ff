"""The quantised profiles on a device: the codes of the CPU, rows that stand alone, graphs that see new weights."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from rollmill.ops import Ops, QuantisedOps, ops_for
from rollmill.ops.activations import fp8_rows, nvfp4_rows

DEVICE = torch.device("cuda", 0)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def parameter(*shape: int, seed: int = 1) -> torch.nn.Parameter:
    return torch.nn.Parameter((random(*shape, seed=seed) * 0.05).to(DEVICE, torch.bfloat16))


def every_way() -> list[tuple[str, Ops]]:
    """nvfp4 is always emulated, fp8 where the device has no product of its own."""
    return [
        ("fp8", ops_for("fp8", DEVICE)),
        ("fp8, emulated", QuantisedOps("fp8", ops_for("exact", DEVICE))),
        ("nvfp4", ops_for("nvfp4", DEVICE)),
    ]


@pytest.mark.parametrize("rounding", [fp8_rows, nvfp4_rows])
def test_tokens_are_rounded_to_the_bits_of_the_cpu(rounding) -> None:
    for size in (1.0, 2.0**-60, 2.0**90, 1e-42):
        x = random(300, 2000) ** 3 * size
        assert torch.equal(rounding(x.to(DEVICE)).cpu().view(torch.int32), rounding(x).view(torch.int32))


@pytest.mark.parametrize(("name", "ops"), every_way(), ids=lambda way: way if isinstance(way, str) else "")
def test_rows_and_tokens_stand_alone(name: str, ops: Ops) -> None:
    weight, gate_up, down = parameter(1024, 512), parameter(4, 256, 512, seed=2), parameter(4, 512, 128, seed=3)
    x = random(2048, 512).to(DEVICE, torch.bfloat16)
    gen = torch.Generator().manual_seed(4)
    ids = torch.stack([torch.randperm(4, generator=gen)[:2].sort().values for _ in range(2048)]).to(DEVICE)
    gates = torch.rand(2048, 2, generator=gen).to(DEVICE)
    with torch.inference_mode():
        whole, mixed = ops.linear(x, weight), ops.experts(x, ids, gates, gate_up, down)
        for count in (1, 2, 7, 16, 31, 64, 257):
            for at in (0, 5, 2048 - count):
                rows = slice(at, at + count)
                assert torch.equal(ops.linear(x[rows], weight), whole[rows]), (count, at)
                assert torch.equal(ops.experts(x[rows], ids[rows], gates[rows], gate_up, down), mixed[rows]), (count, at)


def test_the_devices_product_agrees_with_the_emulation() -> None:
    """The tensor cores keep fewer bits of a sum than float32: 2^-13 of the largest partial sum for each of 4 blocks;
    bfloat16 out may round to either neighbour, which are 2^-7 apart."""
    native, emulated = (ops for _, ops in every_way()[:2])
    weight, x = parameter(1024, 512), random(100, 512).to(DEVICE, torch.bfloat16)
    with torch.inference_mode():
        found, wanted = native.linear(x, weight).float(), emulated.linear(x, weight).float()
    assert (found - wanted).abs().max() <= wanted.abs().max() * (4 * 2.0**-13 + 2.0**-7)


@pytest.mark.parametrize(("name", "ops"), every_way(), ids=lambda way: way if isinstance(way, str) else "")
def test_a_captured_step_sees_weights_that_a_kernel_wrote(name: str, ops: Ops) -> None:
    weight, other = parameter(1024, 512), parameter(1024, 512, seed=8)
    x = random(8, 512).to(DEVICE, torch.bfloat16)
    with torch.inference_mode():
        wanted = ops.linear(x, other).clone()
        ops.linear(x, weight)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = ops.linear(x, weight)
        weight.data.copy_(other.data)
        ops.refresh()
        graph.replay()
        assert torch.equal(y, wanted)
