"""Attention on the device: a token's output is the same decoded, prefilled in chunks or whole, or packed for training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from rollmill.ops.base import PAGE, Spans
from rollmill.ops.cuda import CudaOps, CudaPages, attention

DEVICE = torch.device("cuda", 0)
HEADS = [(16, 8, 128), (32, 4, 128), (9, 3, 64)]


def made(tokens: int, heads: tuple[int, int, int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    h, k, e = heads
    rng = torch.Generator(DEVICE).manual_seed(seed)
    qkv = torch.randn(tokens, h + 2 * k, e, device=DEVICE, generator=rng).bfloat16()
    qkv[:, :h] *= 3
    q, k_TKE, v = qkv.split([h, k, k], 1)
    return q, k_TKE, v


def new_pages(num_pages: int, heads: tuple[int, int, int]) -> CudaPages:
    pages = CudaOps().new_pages(num_pages, num_layers=2, num_kv_heads=heads[1], head_dim=heads[2], dtype=torch.bfloat16)
    pages.memory_L2PKSE.fill_(float("nan"))
    return pages


def shuffled(lens: list[int], seed: int) -> list[list[int]]:
    """Pages of each sequence, drawn without order from the pool."""
    need = [-(-n // PAGE) for n in lens]
    order = torch.randperm(sum(need) + 5, generator=torch.Generator().manual_seed(seed)).tolist()
    return [[order.pop() for _ in range(n)] for n in need]


def spans(new: list[int], before: list[int], table: list[list[int]]) -> Spans:
    return Spans.of(new=new, before=before, pages=table, device=DEVICE)


@pytest.mark.parametrize("heads", HEADS)
def test_chunks_decode_and_page_order_leave_every_bit(heads: tuple[int, int, int]) -> None:
    length = 2500
    q, k, v = made(length, heads)
    want = CudaOps().attend_packed(q, k, v, [length])
    for chunk in (64, 777, length):
        pages, table = new_pages(50, heads), shuffled([length], chunk)
        parts = []
        for start in range(0, length, chunk):
            at = slice(start, min(start + chunk, length))
            step = spans([at.stop - start], [start], table)
            pages.write(1, k[at], v[at], step)
            parts.append(pages.attend(1, q[at], step))
        assert torch.equal(torch.cat(parts), want), chunk
    for position in (0, 1, 63, 64, 500, 1023, 1024, 1025, 2047, 2048, 2499):
        got = pages.attend(1, q[position : position + 1], spans([1], [position], table))
        assert torch.equal(got, want[position : position + 1]), position


@pytest.mark.parametrize("heads", HEADS)
def test_a_sequence_is_the_same_alone_and_in_a_mixed_batch(heads: tuple[int, int, int]) -> None:
    lens = [1, 1300, 64, 65, 700, 3000]
    q, k, v = made(sum(lens), heads)
    want = CudaOps().attend_packed(q, k, v, lens)
    assert torch.equal(
        torch.cat([CudaOps().attend_packed(*part, [n]) for *part, n in zip(*(x.split(lens) for x in (q, k, v)), lens, strict=True)]), want
    )
    pages, table = new_pages(100, heads), shuffled(lens, 1)
    whole = spans(lens, [0] * len(lens), table)
    pages.write(0, k, v, whole)
    assert torch.equal(pages.attend(0, q, whole), want)
    ends = torch.tensor(lens).cumsum(0) - 1
    last = spans([1] * len(lens), [n - 1 for n in lens], table)
    assert torch.equal(pages.attend(0, q[ends], last), want[ends])
    # One sequence decodes while another prefills.
    mixed = spans([1, 700], [1299, 0], [table[1], table[4]])
    rows = torch.cat([ends[1:2], torch.arange(700) + sum(lens[:4])])
    assert torch.equal(pages.attend(0, q[rows], mixed), want[rows])


def test_it_is_attention() -> None:
    lens = [700, 1500]
    q, k, v = made(sum(lens), (8, 2, 128))
    got = CudaOps().attend_packed(q, k, v, lens).double()
    parts = zip(*(x.double().split(lens) for x in (q, k, v)), strict=True)
    exact = torch.cat(
        [
            F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in part), is_causal=True, enable_gqa=True).transpose(0, 1)
            for part in parts
        ]
    )
    # bfloat16 weights and output: two roundings of at most 2^-9 each, in the mean well below.
    assert float((got - exact).norm() / exact.norm()) < 4e-3


def test_other_splits_are_other_bits() -> None:
    q, k, v = made(2500, (16, 8, 128))
    starts, lens = torch.tensor([0, 2500], dtype=torch.int32, device=DEVICE), torch.tensor([2500], dtype=torch.int32, device=DEVICE)
    first = attention.attend_packed(q, k, v, starts, lens, 2500)
    other = attention.attend_packed(q, k, v, starts, lens, 2500, split=attention.SPLIT // 2)
    assert torch.equal(first[: attention.SPLIT // 2], other[: attention.SPLIT // 2]) and not torch.equal(first, other)


def test_a_captured_step_serves_other_lengths_below_its_bound() -> None:
    heads, lens = (16, 8, 128), [900, 1700, 3]
    q, k, v = made(sum(lens), heads)
    want = CudaOps().attend_packed(q, k, v, lens)
    pages, table = new_pages(64, heads), shuffled(lens, 3)
    pages.write(0, k, v, spans(lens, [0, 0, 0], table))
    ends = torch.tensor(lens).cumsum(0).to(DEVICE) - 1
    live = spans([1, 1, 1], [0, 0, 0], table)
    live = replace(live, longest=4096)
    query = q[ends].contiguous()
    pages.attend(0, query, live)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = pages.attend(0, query, live)
    for back in (0, 1, 2):
        live.lens_B.copy_(torch.tensor(lens) - back)
        query.copy_(q[ends - back])
        graph.replay()
        assert torch.equal(out, want[ends - back])


def test_gradients_are_those_of_attention() -> None:
    lens = [130, 70]
    leaves = [x.contiguous().requires_grad_() for x in made(sum(lens), (8, 2, 64))]
    g = made(sum(lens), (8, 2, 64), seed=1)[0]
    got = torch.autograd.grad(CudaOps().attend_packed(*leaves, lens), leaves, g)
    parts = zip(*(x.double().split(lens) for x in leaves), strict=True)
    outs = [
        F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in part), is_causal=True, enable_gqa=True).transpose(0, 1)
        for part in parts
    ]
    want = torch.autograd.grad(torch.cat(outs), leaves, g.double())
    for a, b in zip(got, want, strict=True):
        assert float((a.double() - b.double()).norm() / b.double().norm()) < 2e-2


def test_a_head_size_without_a_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="head size 80"):
        CudaOps().new_pages(1, num_layers=1, num_kv_heads=1, head_dim=80, dtype=torch.bfloat16)
