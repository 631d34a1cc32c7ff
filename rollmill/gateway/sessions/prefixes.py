"""What sequences have in common at their beginning, for two and for one against many; pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Generic, TypeVar

from blake3 import blake3

T = TypeVar("T")


def num_shared(a: Sequence[object], b: Sequence[object]) -> int:
    """How many leading items are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Prefixes(Generic[T]):
    """Finds the known beginnings of a sequence of bytes, longest first, in one pass over it.

    >>> known = Prefixes[str]()
    >>> known.put(b"one ", "a"); known.put(b"one two ", "b"); known.put(b"two ", "c")
    >>> known.beginnings(b"one two three")
    [(8, 'b'), (4, 'a')]
    """

    def __init__(self) -> None:
        self._items: dict[tuple[int, bytes], T] = {}
        self._lengths: list[int] = []

    def put(self, data: bytes, item: T) -> None:
        """The newest of equal ones is kept."""
        at = bisect_left(self._lengths, len(data))
        if at == len(self._lengths) or self._lengths[at] != len(data):
            self._lengths.insert(at, len(data))
        self._items[len(data), blake3(data).digest(16)] = item

    def beginnings(self, data: bytes) -> list[tuple[int, T]]:
        """(length, item). Each known length is one digest of a running hash: the bytes are read once, whatever is known."""
        found, hasher, at = list[tuple[int, T]](), blake3(), 0
        view = memoryview(data)
        for length in self._lengths:
            if length > len(data):
                break
            hasher.update(view[at:length])
            at = length
            if (item := self._items.get((length, hasher.digest(16)))) is not None:
                found.append((length, item))
        found.reverse()
        return found
