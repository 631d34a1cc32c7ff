"""Paged attention on the CPU: right against float64, and the same bits however keys are paged, chunked, packed or shared out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.ops import PAGE, CpuOps, Ops, Pages, Spans, TorchOps
from rollmill.ops.cpu import threads

OPS = CpuOps()


class Heads(NamedTuple):
    num_heads: int
    num_kv: int
    dim: int


HEADS = [Heads(4, 4, 40), Heads(9, 3, 64), Heads(6, 1, 20), Heads(2, 2, 128)]


def qkv(num_tokens: int, heads: Heads, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    sizes = (heads.num_heads, heads.num_kv, heads.num_kv)
    q, k, v = (torch.randn(num_tokens, n, heads.dim, generator=gen) for n in sizes)
    return q, k, v


def pool(ops: Ops, num_pages: int, heads: Heads) -> Pages:
    return ops.new_pages(num_pages, num_layers=1, num_kv_heads=heads.num_kv, head_dim=heads.dim, dtype=torch.float32)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of one sequence in float64, written out."""
    num_tokens, num_heads, dim = q.shape
    k, v = (x.double().repeat_interleave(num_heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q.double(), k) / dim**0.5
    scores = scores.masked_fill(~torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril(), float("-inf"))
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("ops", [OPS, TorchOps()], ids=lambda o: o.profile)
def test_attention_is_right_to_float32_rounding(heads: Heads, ops: Ops) -> None:
    """Outputs are averages of unit normals over at most 150 keys: a few units of 2**-22 each."""
    q, k, v = qkv(150, heads)
    assert (ops.attend_packed(q, k, v, [150]) - reference(q, k, v)).abs().max() < 4e-6
    spans = Spans.of(new=[150], before=[0], pages=[[2, 0, 1]])
    pages = pool(ops, 3, heads)
    pages.write(0, k, v, spans)
    assert (pages.attend(0, q, spans) - reference(q, k, v)).abs().max() < 4e-6


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("chunk", [1, 5, 64, 77])
def test_chunked_prefill_and_decode_give_the_bits_of_the_whole(heads: Heads, chunk: int) -> None:
    num_tokens = 200
    q, k, v = qkv(num_tokens, heads)
    whole = OPS.attend_packed(q, k, v, [num_tokens])
    pages, held = pool(OPS, 9, heads), [7, 1, 4, 0]
    for at in range(0, num_tokens, chunk):
        end = min(at + chunk, num_tokens)
        spans = Spans.of(new=[end - at], before=[at], pages=[held[: -(-end // PAGE)]])
        pages.write(0, k[at:end], v[at:end], spans)
        assert torch.equal(pages.attend(0, q[at:end], spans), whole[at:end]), at


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 150), st.integers(1, 40)), min_size=1, max_size=6), st.integers(0, 2**31))
def test_a_sequence_attends_alike_alone_packed_and_paged_among_others(shapes: list[tuple[int, int]], seed: int) -> None:
    """Each sequence has some tokens cached before and some new ones; pages are dealt out at random and others' keys lie between."""
    heads, rng = HEADS[seed % len(HEADS)], np.random.default_rng(seed)
    lens = [before + new for before, new in shapes]
    parts = [qkv(n, heads, seed % 1000 + i) for i, n in enumerate(lens)]
    alone = [OPS.attend_packed(*part, [n]) for part, n in zip(parts, lens, strict=True)]
    packed = OPS.attend_packed(*(torch.cat(x) for x in zip(*parts, strict=True)), lens)
    assert torch.equal(packed, torch.cat(alone))
    counts = [-(-n // PAGE) for n in lens]
    dealt = rng.permutation(sum(counts) + 3)
    held = [dealt[sum(counts[:i]) : sum(counts[: i + 1])].tolist() for i in range(len(lens))]
    pages = pool(OPS, len(dealt), heads)
    first = Spans.of(new=[b for b, _ in shapes], before=[0] * len(shapes), pages=held)
    pages.write(0, *(torch.cat([part[i][:b] for part, (b, _) in zip(parts, shapes, strict=True)]) for i in (1, 2)), first)
    spans = Spans.of(new=[n for _, n in shapes], before=[b for b, _ in shapes], pages=held)
    q, k, v = (torch.cat([part[i][b:] for part, (b, _) in zip(parts, shapes, strict=True)]) for i in range(3))
    pages.write(0, k, v, spans)
    assert torch.equal(pages.attend(0, q, spans), torch.cat([a[b:] for a, (b, _) in zip(alone, shapes, strict=True)]))


def test_sharing_rows_out_among_threads_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(300, HEADS[1])
    monkeypatch.setattr(threads, "SPLIT_WORK", 10**12)
    alone = OPS.attend_packed(q, k, v, [100, 200])
    monkeypatch.setattr(threads, "SPLIT_WORK", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(OPS.attend_packed(q, k, v, [100, 200]), alone)
    finally:
        torch.set_num_threads(before)


def test_gradients_are_those_of_plain_attention() -> None:
    parts = [x.requires_grad_() for x in qkv(70, HEADS[1])]
    twin = [x.detach().clone().requires_grad_() for x in parts]
    grad = torch.randn(70, 9, 64, generator=torch.Generator().manual_seed(9))
    OPS.attend_packed(*parts, [30, 40]).backward(grad)
    TorchOps().attend_packed(*twin, [30, 40]).backward(grad)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(parts, twin, strict=True))


def test_what_lies_behind_the_last_key_is_never_used() -> None:
    heads = HEADS[0]
    q, k, v = qkv(10, heads)
    pages = pool(OPS, 1, heads)
    for array in (pages._k[0], pages._v[0]):
        array[:] = np.nan
    spans = Spans.of(new=[10], before=[0], pages=[[0]])
    pages.write(0, k, v, spans)
    assert torch.equal(pages.attend(0, q, spans), OPS.attend_packed(q, k, v, [10]))


def test_large_scores_neither_overflow_nor_lose_the_winner() -> None:
    heads = Heads(1, 1, 8)
    q, k, v = qkv(80, heads)
    out = OPS.attend_packed(q * 1e4, k, v, [80])
    assert torch.isfinite(out).all()
    assert (out - reference(q * 1e4, k, v)).abs().max() < 1e-2
