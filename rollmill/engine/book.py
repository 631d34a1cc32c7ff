"""Which page of keys and values belongs to whom, and which full pages may be shared: pure bookkeeping, without bytes.

A full page is known by its own tokens and the page before it, back to the start of the context: two contexts share a page exactly
when they agree on every token up to its end. Everything known is forgotten when the weights change.

    page   FREE -> HELD -> FREE
                    |  \\-> KEPT (full and known, held by nobody) -> HELD | FREE (taken for another, least recently used first)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq

import numpy as np

from rollmill.ops.base import PAGE

Key = tuple[int, bytes]


class OutOfPages(RuntimeError):
    """Every page is held by a running request."""


class Holding:
    """The pages of one running request, in order, and how many of them, from the first on, are known to the book."""

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.num_known = 0
        self.node = 0
        """Name of the last known page's context; 0 is the empty context."""
        self.pending: Key | None = None
        """The first unknown page of its prompt, while it is being computed for others too."""


class PageBook:
    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._known: dict[Key, tuple[int, int]] = {}
        """(context before, tokens) -> (page, context after)."""
        self._key_of: dict[int, Key] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._pending: dict[Key, Holding] = {}
        self._last_node = 0

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._kept)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def _keys(self, tokens: Seq[int], num_pages: int) -> list[bytes]:
        packed = np.asarray(tokens[: num_pages * PAGE], np.int32).tobytes()
        size = PAGE * 4
        return [packed[i * size : (i + 1) * size] for i in range(num_pages)]

    def open(self, tokens: Seq[int], *, max_shared: int) -> Holding | None:
        """A holding with every known page of this context, at most `max_shared` tokens long.

        None when another request is computing the next page right now: waiting a step is cheaper than computing it twice.
        """
        holding, node = Holding(), 0
        found: list[tuple[int, int]] = []
        for part in self._keys(tokens, max_shared // PAGE):
            hit = self._known.get((node, part))
            if hit is None:
                key = (node, part)
                if key in self._pending:
                    return None
                self._pending[key] = holding
                holding.pending = key
                break
            found.append(hit)
            node = hit[1]
        for page, after in found:
            self._hold(page)
            holding.pages.append(page)
            holding.node = after
        holding.num_known = len(found)
        return holding

    def _hold(self, page: int) -> None:
        self._holders[page] += 1
        self._kept.pop(page, None)

    def grow(self, holding: Holding, num_tokens: int) -> None:
        """Make room for `num_tokens` tokens, or raise and change nothing."""
        missing = -(-num_tokens // PAGE) - len(holding.pages)
        if missing > self.num_available:
            raise OutOfPages(f"{missing} pages are needed, {self.num_available} of {self.num_pages} are not in use")
        for _ in range(missing):
            page = self._free.pop() if self._free else self._take_kept()
            self._holders[page] = 1
            holding.pages.append(page)

    def _take_kept(self) -> int:
        page, _ = self._kept.popitem(last=False)
        del self._known[self._key_of.pop(page)]
        return page

    def learn(self, holding: Holding, tokens: Seq[int], num_computed: int) -> None:
        """The first `num_computed` tokens are in its pages: whoever comes with the same context may share the full ones."""
        full = num_computed // PAGE
        if full <= holding.num_known:
            return
        size = PAGE * 4
        packed = np.asarray(tokens[holding.num_known * PAGE : full * PAGE], np.int32).tobytes()
        for i in range(full - holding.num_known):
            key = (holding.node, packed[i * size : (i + 1) * size])
            page = holding.pages[holding.num_known]
            self._clear_pending(key)
            known = self._known.get(key)
            if known is None:
                self._last_node += 1
                known = self._known[key] = (page, self._last_node)
                self._key_of[page] = key
            # Computed twice by two requests: both pages hold the same bits, and later ones share the first.
            holding.node = known[1]
            holding.num_known += 1

    def _clear_pending(self, key: Key) -> None:
        owner = self._pending.pop(key, None)
        if owner is not None:
            owner.pending = None

    def close(self, holding: Holding) -> None:
        """Give everything back; known pages are kept while nobody needs the room. The end of a context is given up before its start."""
        if holding.pending is not None:
            self._clear_pending(holding.pending)
        for page in reversed(holding.pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._key_of:
                self._kept[page] = None
            else:
                self._free.append(page)
        holding.pages, holding.num_known, holding.node = [], 0, 0

    def forget(self) -> None:
        """The weights changed: no page is worth anything to a newcomer."""
        self._known.clear()
        self._key_of.clear()
        self._free += self._kept
        self._kept.clear()
        for owner in self._pending.values():
            owner.pending = None
        self._pending.clear()

    def first_own(self, holding: Holding) -> int:
        """From this page on nobody else holds any of its pages."""
        first = len(holding.pages)
        while first and self._holders[holding.pages[first - 1]] == 1:
            first -= 1
        return first

    def forget_own(self, holding: Holding) -> None:
        """Its own pages hold something unusable: nobody may share them. Those it shares were computed before, and others go on."""
        for page in holding.pages[self.first_own(holding) :]:
            key = self._key_of.pop(page, None)
            if key is not None:
                del self._known[key]
