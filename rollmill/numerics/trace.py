"""Runs a model over the same tokens in different layouts and keeps what every operation gave, row by row, to compare bit by bit.

Shapes: T tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from rollmill.model import Model, PackedAttention, PagedAttention
from rollmill.ops import PAGE, Ops, Pages, Spans

_TRACED = ("rms_norm", "add_rms_norm", "linear", "linear_fp32", "rotate", "swiglu", "experts", "attend_packed")


class Trace:
    """Each operation of a forward under a name that says where it stands, with its output for every token."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._parts: list[list[torch.Tensor]] = []
        self._at = 0

    def begin(self) -> None:
        """The next piece of the sequence."""
        self._at = 0

    def add(self, name: str, out: torch.Tensor) -> None:
        if self._at == len(self.names):
            self.names.append(name)
            self._parts.append([])
        assert self.names[self._at] == name, f"the forward did {name} where it did {self.names[self._at]} before"
        self._parts[self._at].append(out.detach().clone())
        self._at += 1

    def outputs(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, torch.cat(parts)) for name, parts in zip(self.names, self._parts, strict=True)]


class TracedOps:
    """Any operations, with every result noted; a name is taken from the weight that the operation, or the last one before, used."""

    def __init__(self, inner: Ops, model: Model, trace: Trace) -> None:
        self._inner, self._trace = inner, trace
        self.profile, self.is_exact = inner.profile, inner.is_exact
        self._name_of = {p.data_ptr(): name for name, p in model.named_parameters()}
        self._place = "start"

    def __getattr__(self, name: str) -> Any:
        op = getattr(self._inner, name)
        return self._noted(name, op) if name in _TRACED else op

    def _noted(self, name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            out = op(*args, **kwargs)
            used = [self._name_of[a.data_ptr()] for a in args if isinstance(a, torch.Tensor) and a.data_ptr() in self._name_of]
            first = out[0] if isinstance(out, tuple) else out
            self.note(name if name != "attend_packed" else "attend", first, used[0] if used else None)
            return out

        return run

    def note(self, name: str, out: torch.Tensor, place: str | None = None) -> None:
        if place is not None:
            self._place = place
        self._trace.add(f"{name} ({'of' if place else 'after'} {self._place})", out)

    def new_pages(self, *args: Any, **kwargs: Any) -> Pages:
        return _TracedPages(self._inner.new_pages(*args, **kwargs), self)


class _TracedPages:
    def __init__(self, inner: Pages, ops: TracedOps) -> None:
        self._inner, self._ops, self.num_pages = inner, ops, inner.num_pages

    def write(self, layer: int, k_TKE: torch.Tensor, v_TKE: torch.Tensor, spans: Spans) -> None:
        self._inner.write(layer, k_TKE, v_TKE, spans)

    def attend(self, layer: int, q_THE: torch.Tensor, spans: Spans) -> torch.Tensor:
        out = self._inner.attend(layer, q_THE, spans)
        self._ops.note("attend", out)
        return out


@torch.no_grad()
def trace_packed(model: Model, tokens: Sequence[int], ops: Ops | None = None) -> Trace:
    """The trainer's way: the whole sequence at once."""
    trace = Trace()
    traced = TracedOps(ops or model.ops, model, trace)
    attention = PackedAttention([len(tokens)], model.embed.device)
    _run(model, traced, tokens, 0, attention)
    return trace


@torch.no_grad()
def trace_paged(model: Model, tokens: Sequence[int], *, chunk: int, ops: Ops | None = None) -> Trace:
    """The engine's way: `chunk` tokens a step over pages that lie in no order; 1 decodes."""
    trace = Trace()
    traced = TracedOps(ops or model.ops, model, trace)
    c = model.config
    num_pages = -(-len(tokens) // PAGE)
    pages = traced.new_pages(
        num_pages + 2, num_layers=c.num_layers, num_kv_heads=c.num_kv_heads, head_dim=c.head_dim, dtype=model.embed.dtype
    )
    held = np.random.default_rng(0).permutation(num_pages + 2)[:num_pages].tolist()
    for start in range(0, len(tokens), chunk):
        end = min(start + chunk, len(tokens))
        spans = Spans.of(new=[end - start], before=[start], pages=[held], device=model.embed.device)
        trace.begin()
        _run(model, traced, tokens[start:end], start, PagedAttention(pages, spans))
    return trace


def _run(model: Model, ops: TracedOps, tokens: Sequence[int], start: int, attention: Any) -> None:
    device = model.embed.device
    with model.computed_by(ops):
        hidden_TD = model(torch.tensor(tokens, device=device), torch.arange(start, start + len(tokens), device=device), attention)
        model.logits(hidden_TD)


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Where two traces part."""

    op: str
    index: int
    """Position of the operation in the forward, from 0."""
    num_ops: int
    token: int
    """First token whose row differs."""
    num_tokens: int
    """How many rows differ."""
    left: float
    right: float
    """The first two numbers that differ."""
    largest: float
    """Largest absolute difference in this operation."""

    def __str__(self) -> str:
        return (
            f"operation {self.index} of {self.num_ops}, {self.op}: {self.num_tokens} rows differ, first that of token {self.token} "
            f"({self.left!r} and {self.right!r}), at most by {self.largest:.3g}"
        )


def first_difference(left: Trace, right: Trace) -> Difference | None:
    """The first operation whose bits differ; None when all are equal."""
    a, b = left.outputs(), right.outputs()
    assert [n for n, _ in a] == [n for n, _ in b], "two different forwards cannot be compared"
    for index, ((name, x), (_, y)) in enumerate(zip(a, b, strict=True)):
        x, y = x.flatten(1), y.flatten(1)
        # By bits, so that a NaN equals itself.
        differs = _bits(x) != _bits(y)
        if bool(differs.any()):
            rows = differs.any(1).nonzero()[:, 0]
            row, column = (int(i) for i in differs.nonzero()[0])
            return Difference(
                op=name,
                index=index,
                num_ops=len(a),
                token=row,
                num_tokens=len(rows),
                left=float(x[row, column]),
                right=float(y[row, column]),
                largest=float((x.double() - y.double()).abs().max()),
            )
    return None


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({4: torch.int32, 2: torch.int16, 8: torch.int64}[x.element_size()])
