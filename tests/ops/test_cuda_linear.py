"""A row of a linear layer has the same bits at any batch size and place, from any kernel; one that breaks this is found out."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from rollmill.ops.cuda import CudaOps, linear
from rollmill.ops.cuda.matmul import REFERENCE, Tile, product

DEVICE = torch.device("cuda", 0)
SHAPES = [(4096, 2048), (2048, 6144), (6144, 4096), (128, 2048), (1000, 960)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, device=DEVICE, generator=rng).bfloat16()


@pytest.mark.parametrize("is_fp32", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_at_any_batch_size_and_place(shape: tuple[int, int], is_fp32: bool) -> None:
    ops, w = CudaOps(), random(*shape)
    run = ops.linear_fp32 if is_fp32 else ops.linear
    x = random(2048, shape[1], seed=1)
    want = run(x, w)
    assert want.dtype == (torch.float32 if is_fp32 else torch.bfloat16)
    for m in (1, 2, 7, 8, 16, 31, 64, 100, 129, 257, 2048):
        for start in {0, 3, 2048 - m}:
            if start + m <= 2048:
                assert torch.equal(run(x[start : start + m], w), want[start : start + m]), (m, start)
    assert not ops.products.refused


def test_a_bias_is_added_before_the_only_rounding() -> None:
    ops, w, bias, x = CudaOps(), random(4096, 2048), random(4096, seed=2), random(300, 2048, seed=1)
    want = ops.linear(x, w, bias)
    for m in (1, 8, 33, 300):
        assert torch.equal(ops.linear(x[:m], w, bias), want[:m])
    exact = x.double() @ w.double().t() + bias.double()
    # One rounding of bfloat16 is off by at most 2^-8 of the value; the float32 sum, of terms up to some 150, by less than 1e-3.
    assert bool(((want.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-3).all())


@pytest.mark.parametrize(
    "tile", [Tile(16, 16, 256), Tile(16, 64, 64, 8, 3), Tile(32, 32, 128), Tile(128, 128, 64, 8, 4), Tile(128, 256, 64, 8, 3)]
)
def test_every_tile_gives_the_bits_of_the_reference(tile: Tile) -> None:
    w, x = random(2048, 6144), random(257, 6144, seed=1)
    assert torch.equal(product(x, w, None, tile), product(x, w, None, REFERENCE))


def test_the_sum_in_float32_is_within_its_error_bound() -> None:
    w, x = random(512, 4096), random(64, 4096, seed=1)
    got, exact = CudaOps().linear_fp32(x, w).double(), x.double() @ w.double().t()
    # Each of K additions loses at most one part in 2^23 (the tensor cores truncate) of the largest partial sum, at most sum |x||w|.
    bound = (x.double().abs() @ w.double().abs().t()) * 4096 * 2**-23
    assert bool(((got - exact).abs() <= bound).all())
    assert float((got - exact).norm() / exact.norm()) < 1e-5


def test_a_kernel_that_splits_the_sum_is_refused_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def halves(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, out: torch.dtype) -> torch.Tensor:
        k = x.shape[1] // 2
        return (torch.mm(x[:, :k], w[:, :k].t(), out_dtype=torch.float32) + torch.mm(x[:, k:], w[:, k:].t(), out_dtype=torch.float32)).to(
            out
        )

    w, x = random(2048, 6144), random(300, 6144, seed=1)
    want = CudaOps().linear(x, w)
    assert not torch.equal(halves(x, w, None, torch.bfloat16), want)
    monkeypatch.setattr(linear, "vendor", halves)
    ops = CudaOps()
    assert torch.equal(ops.linear(x, w), want)
    assert list(ops.products.refused.values()) == ["cuBLASLt at 320 rows"]


def test_one_flipped_bit_of_a_weight_shows() -> None:
    ops, w, x = CudaOps(), random(2048, 2048), random(8, 2048, seed=1)
    want = ops.linear_fp32(x, w)
    w.view(torch.int16)[1234, 567] ^= 1
    got = ops.linear_fp32(x, w)
    assert not torch.equal(got, want) and torch.equal(got[:, :1234], want[:, :1234])


def test_capturing_before_the_proof_is_refused() -> None:
    ops, w, x = CudaOps(), random(512, 512), random(8, 512)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="before its kernel was proven"), torch.cuda.graph(graph):
        ops.linear(x, w)


@pytest.mark.parametrize("m", [1, 8, 32, 128, 300])
def test_a_captured_product_has_the_bits_of_the_eager_one(m: int) -> None:
    ops, w, x = CudaOps(), random(4096, 2048), random(m, 2048, seed=1)
    want = ops.linear(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ops.linear(x, w)
    got.fill_(7)
    graph.replay()
    assert torch.equal(got, want)


def test_gradients_are_those_of_the_product() -> None:
    ops = CudaOps()
    x, w, bias = (t.requires_grad_() for t in (random(70, 256), random(96, 256, seed=1), random(96, seed=2)))
    g = random(70, 96, seed=3)
    got = torch.autograd.grad(ops.linear(x, w, bias), (x, w, bias), g)
    want = torch.autograd.grad(torch.nn.functional.linear(x.double(), w.double(), bias.double()), (x, w, bias), g.double())
    for a, b in zip(got, want, strict=True):
        assert float((a.double() - b.double()).norm() / b.double().norm()) < 5e-3


def test_other_dtypes_are_refused_with_advice() -> None:
    with pytest.raises(ValueError, match="load the model as bfloat16"):
        CudaOps().linear(torch.zeros(2, 4, device=DEVICE), torch.zeros(3, 4, device=DEVICE))
