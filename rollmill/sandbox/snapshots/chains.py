"""Which layers of which chains to make one, and when a layer is no longer needed; a pure book that performs nothing.

A chain is a tuple of layers, bottom to top, held by an owner: a snapshot or a box. A layer is free when no chain and no flattening
under way names it, and is told so exactly once. At most one flattening is under way.

    add -> (deep) -> next -> done: owners get the shorter chain | failed: not tried again -> drop
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

import msgspec

MAX_DEPTH = 32
"""Mounting a box on so many layers still costs about as much as on one; on 100 it takes three times as long."""
KEEP_LAST = 4
"""Layers at the top that stay: siblings branch there, and would no longer share them."""

L = TypeVar("L", bound=Hashable)


class Flattening(msgspec.Struct, Generic[L], frozen=True):
    """Make `layers`, the bottom of one or more chains, into one."""

    layers: tuple[L, ...]


class Replaced(msgspec.Struct, Generic[L], frozen=True, kw_only=True):
    """What a finished flattening changed."""

    chains: Mapping[Hashable, tuple[L, ...]]
    """Owner -> its chain from now on."""
    free: tuple[L, ...]
    """Layers to give up now, the new one among them when nobody is left to use it."""


class ChainBook(Generic[L]):
    def __init__(self, *, max_depth: int = MAX_DEPTH, keep_last: int = KEEP_LAST) -> None:
        if not 0 <= keep_last <= max_depth - 1:
            raise ValueError(f"keep_last {keep_last} must lie between 0 and max_depth - 1 = {max_depth - 1}")
        self._max_depth = max_depth
        self._keep_last = keep_last
        self._chains: dict[Hashable, tuple[L, ...]] = {}
        self._fixed: set[Hashable] = set()
        self._num_uses: Counter[L] = Counter()
        self._running: Flattening[L] | None = None
        self._hopeless: set[tuple[L, ...]] = set()

    def add(self, owner: Hashable, layers: tuple[L, ...], *, is_fixed: bool = False) -> None:
        """`is_fixed`: the owner has mounted these very layers and keeps them until it is dropped, such as a running box."""
        assert owner not in self._chains, f"{owner!r} holds a chain already"
        assert len({*layers}) == len(layers), f"a layer appears twice in the chain of {owner!r}"
        self._chains[owner] = layers
        if is_fixed:
            self._fixed.add(owner)
        self._num_uses.update(layers)

    def drop(self, owner: Hashable) -> tuple[L, ...]:
        """The owner needs its chain no longer; the layers that nobody needs now."""
        self._fixed.discard(owner)
        return self._release(self._chains.pop(owner))

    def chain(self, owner: Hashable) -> tuple[L, ...]:
        return self._chains[owner]

    def next(self) -> Flattening[L] | None:
        """What to flatten now: the bottom of the deepest chain that is too deep; None when nothing is, or one is under way."""
        if self._running is not None:
            return None
        deep = [self._bottom(chain) for owner, chain in self._chains.items() if owner not in self._fixed and len(chain) > self._max_depth]
        # Of bottoms of one length the first added, so that the book is a function of its history.
        best = max((bottom for bottom in deep if bottom not in self._hopeless), key=len, default=None)
        if best is None:
            return None
        self._running = Flattening(best)
        self._num_uses.update(best)
        return self._running

    def done(self, flattening: Flattening[L], whole: L) -> Replaced[L]:
        """`whole` does what the layers did: every chain that begins with them begins with it from now on, but for fixed ones."""
        self._finish(flattening)
        old = flattening.layers
        changed: dict[Hashable, tuple[L, ...]] = {}
        free: list[L] = []
        self._num_uses[whole] += 1
        for owner, chain in self._chains.items():
            if owner not in self._fixed and chain[: len(old)] == old:
                changed[owner] = (whole, *chain[len(old) :])
                self._num_uses[whole] += 1
                free += self._release(old)
        self._chains |= changed
        free += self._release(old)
        free += self._release((whole,))
        return Replaced(chains=changed, free=tuple(free))

    def failed(self, flattening: Flattening[L]) -> tuple[L, ...]:
        """It could not be done, and would fail again: these layers stay apart. The layers that nobody needs now."""
        self._finish(flattening)
        self._hopeless.add(flattening.layers)
        return self._release(flattening.layers)

    def _bottom(self, chain: tuple[L, ...]) -> tuple[L, ...]:
        return chain[: len(chain) - self._keep_last]

    def _finish(self, flattening: Flattening[L]) -> None:
        assert self._running == flattening, "this flattening is not under way"
        self._running = None

    def _release(self, layers: tuple[L, ...]) -> tuple[L, ...]:
        free = []
        for layer in layers:
            self._num_uses[layer] -= 1
            assert self._num_uses[layer] >= 0, f"{layer!r} was released more often than used"
            if not self._num_uses[layer]:
                del self._num_uses[layer]
                free.append(layer)
        if free:
            self._hopeless = {bottom for bottom in self._hopeless if not {*free} & {*bottom}}
        return tuple(free)
