"""The gates: claims of equality about one model on one machine, each compared bit for bit, and faults that must be noticed.

    rows        a row of every operation is the same among any neighbours
    layouts     a prompt whole, in chunks, over shuffled pages, from a shared prefix, token by token: one set of logprobs
    trainer     the trainer's packed forward, alone and in a batch, with and without recomputed layers, equals the engine's tokens
    faults      one flipped weight bit and one changed order of a sum are both seen

Shapes: T tokens, N rows, D inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch

from rollmill.engine.engine import Engine
from rollmill.engine.protocol import GenerateReply, GenerateRequest, ScoreRequest
from rollmill.model import Model, PackedAttention
from rollmill.numerics.trace import first_difference, trace_packed, trace_paged
from rollmill.ops import PAGE, Ops
from rollmill.ops.noisy import NoisyOps

ROWS = (1, 2, 7, 8, 16, 31, 64, 257, 2048)
DEADLINE_S = 600.0


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """One claim and what became of it."""

    name: str
    passed: bool
    num_compared: int
    """Rows or tokens whose bits were compared."""
    detail: str = ""
    """What differed first; empty when nothing did."""


def run_gates(model: Model, *, num_tokens: int = 200, num_sequences: int = 12, seed: int = 0) -> Iterator[Gate]:
    """All gates, one after the other."""
    yield from row_gates(model, seed=seed)
    yield from layout_gates(model, num_tokens=num_tokens, seed=seed)
    yield from engine_gates(model, num_sequences=num_sequences, num_tokens=num_tokens, seed=seed)
    yield from fault_gates(model, num_tokens=min(num_tokens, 80), seed=seed)


def _texts(model: Model, lengths: Sequence[int], seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, model.config.vocab_size, n).tolist() for n in lengths]


# Rows.


def row_gates(model: Model, *, seed: int = 0) -> Iterator[Gate]:
    c, ops = model.config, model.ops
    shapes = {tuple(p.shape): name for name, p in reversed(list(model.named_parameters())) if p.dim() == 2}
    weights = dict(model.named_parameters())
    for shape, name in sorted(shapes.items()):
        op = ops.linear_fp32 if shape[0] == c.vocab_size else ops.linear
        yield _rows(f"linear {shape[1]} x {shape[0]}", partial(_by, op, weights[name]), model, shape[1])
    norm = model.norm
    yield _rows(f"rms_norm {c.hidden_size}", lambda x: ops.rms_norm(x, norm, c.norm_eps), model, c.hidden_size)
    yield _rows(f"swiglu {c.intermediate_size}", ops.swiglu, model, 2 * c.intermediate_size)
    yield _rows(f"score {c.vocab_size}", lambda x: _scored(ops, x), model, c.vocab_size, dtype=torch.float32, most=257)
    if c.moe:
        layer = next(i for i in range(c.num_layers) if c.is_sparse(i))
        block: Any = model.layers[layer].mlp
        yield _rows(f"experts of layer {layer}", lambda x: block.mix(x, ops, None), model, c.hidden_size)


def _by(op: Callable[..., torch.Tensor], weight: torch.Tensor, x_ND: torch.Tensor) -> torch.Tensor:
    return op(x_ND, weight)


def _scored(ops: Ops, logits_NV: torch.Tensor) -> torch.Tensor:
    ids_N = (logits_NV[:, 0].abs() * 1000).long() % logits_NV.shape[1]
    return torch.stack(ops.score(logits_NV * 4, ids_N), 1)


@torch.no_grad()
def _rows(
    name: str,
    op: Callable[[torch.Tensor], torch.Tensor],
    model: Model,
    width: int,
    *,
    dtype: torch.dtype | None = None,
    most: int = ROWS[-1],
) -> Gate:
    gen = torch.Generator().manual_seed(width)
    x_ND = torch.randn(most, width, generator=gen).to(device=model.embed.device, dtype=dtype or model.embed.dtype)
    whole = op(x_ND)
    num_compared = 0
    for count in (n for n in ROWS if n <= most):
        for at in {0, min(3, most - count), most - count}:
            num_compared += count
            if not torch.equal(op(x_ND[at : at + count]), whole[at : at + count]):
                return Gate(
                    name=name, passed=False, num_compared=num_compared, detail=f"{count} rows from row {at} on differ from all {most}"
                )
    return Gate(name=name, passed=True, num_compared=num_compared)


# Layouts.


def layout_gates(model: Model, *, num_tokens: int, seed: int = 0) -> Iterator[Gate]:
    """Every operation of the forward, not only its end."""
    tokens = _texts(model, [num_tokens], seed)[0]
    whole = trace_packed(model, tokens)
    for chunk in sorted({1, 7, PAGE, 777, num_tokens}):
        if chunk > num_tokens and chunk != 777:
            continue
        apart = first_difference(whole, trace_paged(model, tokens, chunk=chunk))
        what = "decode token by token" if chunk == 1 else f"prefill in chunks of {chunk}"
        yield Gate(name=f"{what} = packed", passed=apart is None, num_compared=num_tokens, detail=str(apart or ""))


# Engine and trainer.


def packed_logprobs(
    model: Model, sequences: Sequence[Sequence[int]], starts: Sequence[int], temperature: float = 1.0
) -> list[torch.Tensor]:
    """What the trainer computes: the logprob of each token from its sequence's start on, all sequences in one packed forward."""
    device = model.embed.device
    attention = PackedAttention([len(s) for s in sequences], device)
    tokens_T = torch.tensor([t for s in sequences for t in s], device=device)
    hidden_TD = model(tokens_T, attention.positions_T, attention)
    out, at = [], 0
    for sequence, start in zip(sequences, starts, strict=True):
        rows = slice(at + start - 1, at + len(sequence) - 1)
        out.append(model.score(hidden_TD[rows], tokens_T[at + start : at + len(sequence)], temperature)[0].detach())
        at += len(sequence)
    return out


def engine_gates(model: Model, *, num_sequences: int, num_tokens: int, seed: int = 0) -> Iterator[Gate]:
    rng = np.random.default_rng(seed)
    shared = _texts(model, [PAGE + 10], seed)[0]
    prompts = [shared + p for p in _texts(model, rng.integers(1, max(num_tokens // 2, 2), num_sequences).tolist(), seed + 1)]
    requests = [GenerateRequest(prompt_ids=p, max_tokens=max(num_tokens // 2, 4), seed=i) for i, p in enumerate(prompts)]
    most = max(len(p) for p in prompts) + max(num_tokens // 2, 4) + 1
    engine = Engine(model, model.config, version=0, num_slots=num_sequences, max_len=min(most, model.config.max_position), step_tokens=256)
    engine.start()
    try:
        crowd = [f.result(DEADLINE_S) for f in [engine.generate(r) for r in requests]]
        warm = engine.generate(requests[0]).result(DEADLINE_S)
        texts = [r.prompt_ids + reply.token_ids for r, reply in zip(requests, crowd, strict=True)]
        scored = [
            engine.score(ScoreRequest(token_ids=t, start=len(r.prompt_ids))).result(DEADLINE_S)
            for t, r in zip(texts, requests, strict=True)
        ]
    finally:
        engine.close()
    sampled = sum(len(r.token_ids) for r in crowd)
    yield _same("a shared prefix and an empty engine = a crowd", [warm.logprobs], [crowd[0].logprobs], len(warm.token_ids))
    yield _same("scored by prefill = sampled", [s.logprobs for s in scored], [r.logprobs for r in crowd], sampled)
    starts = [len(p) for p in prompts]
    yield from _trainer_gates(model, texts, starts, crowd, sampled)


def _trainer_gates(model: Model, texts: list[list[int]], starts: list[int], crowd: list[GenerateReply], sampled: int) -> Iterator[Gate]:
    wanted = [r.logprobs for r in crowd]
    for recomputes in (False, True):
        model.recompute_layers = recomputes
        try:
            how = "recomputed layers" if recomputes else "kept activations"
            packed = packed_logprobs(model, texts, starts)
            yield _same(f"trainer, packed, {how} = engine", _raw(packed), wanted, sampled)
            alone = [packed_logprobs(model, [t], [s])[0] for t, s in zip(texts, starts, strict=True)]
            yield _same(f"trainer, one by one, {how} = engine", _raw(alone), wanted, sampled)
        finally:
            model.recompute_layers = False


def _raw(parts: Sequence[torch.Tensor]) -> list[bytes]:
    return [p.float().cpu().numpy().astype("<f4").tobytes() for p in parts]


def _same(name: str, left: Sequence[bytes], right: Sequence[bytes], count: int) -> Gate:
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        if a != b:
            x, y = np.frombuffer(a, "<f4"), np.frombuffer(b, "<f4")
            off = np.flatnonzero(x.view(np.int32) != y.view(np.int32))
            detail = f"sequence {i}: {len(off)} of {len(x)} logprobs differ, first token {off[0]}, at most {np.abs(x - y).max():.3g}"
            return Gate(name=name, passed=False, num_compared=count, detail=detail)
    return Gate(name=name, passed=True, num_compared=count)


# Faults: a gate that cannot fail proves nothing.


def fault_gates(model: Model, *, num_tokens: int, seed: int = 0) -> Iterator[Gate]:
    tokens = _texts(model, [num_tokens], seed)[0]
    before = trace_packed(model, tokens)
    name, weight = next(
        (n, p) for n, p in model.named_parameters() if n.startswith(f"layers.{model.config.num_layers // 2}.") and p.dim() > 1
    )
    # A profile that rounds weights does not see the lowest bit: there the highest one of the mantissa is turned over.
    with _flipped_bit(weight, bit=0 if model.ops.profile == "exact" else 6):
        apart = first_difference(before, trace_packed(model, tokens))
    seen = apart is not None and name in apart.op
    yield Gate(name="one flipped weight bit is seen", passed=seen, num_compared=num_tokens, detail="" if seen else f"in {name}: {apart}")
    apart = first_difference(before, trace_packed(model, tokens, _OtherOrder(model.ops)))
    seen = apart is not None
    yield Gate(name="another order of one sum is seen", passed=seen, num_compared=num_tokens, detail="" if seen else "nothing differed")
    apart = first_difference(before, trace_packed(model, tokens, NoisyOps(model.embed.device)))
    yield Gate(name="the noisy profile is seen", passed=apart is not None, num_compared=num_tokens)


class _flipped_bit:
    """One bit of the largest weight's stored value, turned over and back."""

    def __init__(self, weight: torch.Tensor, bit: int) -> None:
        self._weight, self._mask = weight.detach().view(-1), 1 << bit
        self._at = int(self._weight.abs().argmax())

    def __enter__(self) -> None:
        self._before = self._weight[self._at].clone()
        stored = self._before.to(torch.bfloat16).view(torch.int16) ^ self._mask
        self._weight[self._at] = stored.view(torch.bfloat16).to(self._weight.dtype)

    def __exit__(self, *error: object) -> None:
        self._weight[self._at] = self._before


class _OtherOrder:
    """Linear layers that add the second half of their products before the first."""

    def __init__(self, inner: Ops) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def linear(self, x_ND: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        half = x_ND.shape[1] // 2
        out = torch.nn.functional.linear(x_ND[:, half:].float(), weight[:, half:].float())
        out = out + torch.nn.functional.linear(x_ND[:, :half].float(), weight[:, :half].float(), None if bias is None else bias.float())
        return out.to(x_ND.dtype)
