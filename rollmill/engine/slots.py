"""Which sequence owns which cache row: running ones keep rows 0..n-1 with the decoding ones first, finished sessions wait behind them.

Pure bookkeeping: the bytes are moved by whoever implements `RowMover`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

import msgspec
import numpy as np


class RowMover(Protocol):
    """Moves the contents of cache rows."""

    def copy_row(self, source: int, target: int, num_tokens: int) -> None: ...

    def swap_rows(self, a: int, b: int, num_a: int, num_b: int) -> None: ...


class Tenant(Protocol):
    """A running sequence, as far as its row is concerned."""

    row: int
    num_computed: int
    tokens: list[int]

    @property
    def session(self) -> str | None: ...

    @property
    def is_decoding(self) -> bool: ...


T = TypeVar("T", bound=Tenant)


class Retained(msgspec.Struct, kw_only=True):
    """A finished request's row, kept for the next turn of its session."""

    row: int
    tokens_T: np.ndarray
    """int64[T]: exactly the tokens whose keys and values the row holds."""


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


class Slots(Generic[T]):
    """Rows 0..len(active)-1 belong to `active`, in order; every other row is free or retained, least recently used first."""

    def __init__(self, num_rows: int, mover: RowMover) -> None:
        self.num_rows, self._mover = num_rows, mover
        self.active: list[T] = []
        self.retained: OrderedDict[str, Retained] = OrderedDict()

    @property
    def num_free(self) -> int:
        return self.num_rows - len(self.active)

    def _retained_at(self, row: int) -> Retained | None:
        return next((r for r in self.retained.values() if r.row == row), None)

    def _empty_row(self, first: int) -> int | None:
        """A row from `first` on that holds nothing; the last one, which the running rows reach last."""
        used = {r.row for r in self.retained.values()}
        return next((row for row in range(self.num_rows - 1, first - 1, -1) if row not in used), None)

    def place(self, seq: T) -> int:
        """Give `seq` the next row. Returns how many of its tokens the row holds already."""
        assert self.num_free > 0, "no free row"
        target = len(self.active)
        held = self.retained.pop(seq.session, None) if seq.session is not None else None
        # The last prompt token is always computed: its logits are what is sampled from.
        num_reused = common_prefix(held.tokens_T, np.asarray(seq.tokens[:-1], np.int64)) if held else 0
        in_the_way = self._retained_at(target)
        if held and num_reused and held.row != target:
            if in_the_way is None:
                self._mover.copy_row(held.row, target, num_reused)
            else:
                self._mover.swap_rows(target, held.row, len(in_the_way.tokens_T), num_reused)
                in_the_way.row = held.row
        elif in_the_way is not None:
            self._make_room(in_the_way, target)
        seq.row, seq.num_computed = target, num_reused
        self.active.append(seq)
        return num_reused

    def _make_room(self, guest: Retained, target: int) -> None:
        empty = self._empty_row(target + 1)
        if empty is None:
            _, oldest = self.retained.popitem(last=False)
            if oldest is guest:
                return
            empty = oldest.row
        self._mover.copy_row(target, empty, len(guest.tokens_T))
        guest.row = empty

    def release(self, seq: T, *, retain: bool) -> None:
        """Take the row back and close the gap; keep its contents for the session when asked to."""
        assert self.active[seq.row] is seq, "a row belongs to one sequence"
        if retain and seq.session is not None and seq.num_computed:
            self.retained.pop(seq.session, None)
            kept = Retained(row=seq.row, tokens_T=np.asarray(seq.tokens[: seq.num_computed], np.int64))
            empty = self._empty_row(len(self.active))
            if empty is not None:
                self._mover.copy_row(seq.row, empty, seq.num_computed)
                kept.row = empty
            else:
                # No row to spare: the contents walk to the end of the running rows, which is given up below.
                while seq.row != len(self.active) - 1:
                    other = self.active[self._filler(seq.row)]
                    self._mover.swap_rows(seq.row, other.row, seq.num_computed, other.num_computed)
                    seq.row, other.row = other.row, seq.row
                    self.active[seq.row], self.active[other.row] = seq, other
                kept.row = seq.row
            self.retained[seq.session] = kept
        while seq.row != len(self.active) - 1:
            other = self.active[self._filler(seq.row)]
            self._mover.copy_row(other.row, seq.row, other.num_computed)
            seq.row, other.row = other.row, seq.row
            self.active[seq.row], self.active[other.row] = seq, other
        self.active.pop()

    def _filler(self, row: int) -> int:
        """Who moves into `row`: the last decoding sequence behind it, so that decoding rows stay first; without one the last of all."""
        last = len(self.active) - 1
        while last > row and not self.active[last].is_decoding:
            last -= 1
        return last if last > row else len(self.active) - 1

    def forget_retained(self) -> None:
        """The weights changed: no retained key or value is worth anything."""
        self.retained.clear()
