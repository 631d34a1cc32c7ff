"""The two steps that numerics are paid in, decode and packed forward, of one model by one set of operations, ready to be timed.

Shapes: T tokens, B sequences, V vocabulary.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from rollmill.bench.shapes import random_model, shape_of
from rollmill.model import Model, PackedAttention, PagedAttention
from rollmill.ops import PAGE, Ops, Pages, Spans

Step = Callable[[], None]
ROWS = 2048
"""Rows of logits made at once in a packed forward: a bound on memory."""


def new_pages(model: Model, batch: int, context: int) -> Pages:
    c = model.config
    return model.ops.new_pages(
        batch * -(-context // PAGE), num_layers=c.num_layers, num_kv_heads=c.num_kv_heads, head_dim=c.head_dim, dtype=model.embed.dtype
    )


def decode_step(model: Model, pages: Pages, batch: int, context: int, ops: Ops | None = None) -> Step:
    """One token for each of `batch` sequences that see `context` keys: forward, head, pick and score."""
    device, width, ops = model.embed.device, -(-context // PAGE), ops or model.ops
    gen = torch.Generator().manual_seed(batch)
    tokens_B = torch.randint(model.config.vocab_size, (batch,), generator=gen).to(device)
    uniform_B = torch.rand(batch, dtype=torch.float64, generator=gen).to(device)
    positions_B = torch.full((batch,), context - 1, device=device)
    table = torch.arange(batch * width).view(batch, width).tolist()
    spans = Spans.of(new=[1] * batch, before=[context - 1] * batch, pages=table, device=device)

    def step() -> None:
        with torch.inference_mode(), model.computed_by(ops):
            logits_BV = model.logits(model(tokens_B, positions_B, PagedAttention(pages, spans)))
            ops.score(logits_BV, ops.pick(logits_BV, uniform_B))

    return step


def prefill_step(model: Model, pages: Pages, length: int, ops: Ops | None = None) -> Step:
    """A prompt of `length` tokens over pages, and the logits of its last token: what the engine does with a newcomer."""
    device, ops = model.embed.device, ops or model.ops
    tokens_T = torch.randint(model.config.vocab_size, (length,), generator=torch.Generator().manual_seed(length)).to(device)
    positions_T = torch.arange(length, device=device)
    spans = Spans.of(new=[length], before=[0], pages=[list(range(-(-length // PAGE)))], device=device)

    def step() -> None:
        with torch.inference_mode(), model.computed_by(ops):
            model.logits(model(tokens_T, positions_T, PagedAttention(pages, spans))[-1:])

    return step


def packed_step(model: Model, count: int, length: int, ops: Ops | None = None) -> Step:
    """The trainer's forward over `count` sequences of `length` tokens, log-probabilities of every token included, no gradient kept."""
    device, ops = model.embed.device, ops or model.ops
    tokens_T = torch.randint(model.config.vocab_size, (count * length,), generator=torch.Generator().manual_seed(length)).to(device)
    attention = PackedAttention([length] * count, device)

    def step() -> None:
        with torch.inference_mode(), model.computed_by(ops):
            hidden_TD = model(tokens_T, attention.positions_T, attention)
            for rows_ND, ids_N in zip(hidden_TD.split(ROWS), tokens_T.split(ROWS), strict=True):
                ops.score(model.logits(rows_ND), ids_N)

    return step


def seconds(step: Step, repeats: int) -> list[float]:
    """Of each repeat, on the CPU's clock."""
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        step()
        took.append(time.perf_counter() - began)
    return took


def free_process(*, shape: str, num_layers: int | None) -> Callable[..., dict[str, Any]]:
    """The fast profile for a process of its own, where the CPU's matrix library is free to choose its sums."""
    model = random_model(shape_of(shape, num_layers), numerics="fast")
    steps: dict[str, Step] = {}

    def answer(kind: str, first: int, second: int, repeats: int) -> dict[str, Any]:
        key = f"{kind} {first} {second}"
        if key not in steps:
            # One at a time: keys and values of the widest batch take gigabytes.
            steps.clear()
            steps[key] = made(model, kind, first, second)
        return {"seconds": statistics.median(seconds(steps[key], repeats))}

    return answer


def made(model: Model, kind: str, first: int, second: int, ops: Ops | None = None, pages: Pages | None = None) -> Step:
    """A step by its name: `decode` batch context, `prefill` 1 length, `packed` count length."""
    if kind == "decode":
        return decode_step(model, pages or new_pages(model, first, second), first, second, ops)
    if kind == "prefill":
        return prefill_step(model, pages or new_pages(model, 1, second), second, ops)
    assert kind == "packed", f"there is no step {kind!r}"
    return packed_step(model, first, second, ops)
