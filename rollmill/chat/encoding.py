"""Text to token ids in chunks that are remembered, so that a conversation sent again costs only what is new in it.

The ids are those of encoding the whole text: it is cut only in front of control tokens of which that has been tried, and never where
another one might begin earlier. Knows no messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from rollmill.model.tokenizer import Tokenizer

MAX_BYTES = 64 * 2**20
# A list entry and the number it points to.
_ID_BYTES = 40
# Longer chunks than these are files and logs, seldom sent twice, and would drive out everything else.
_MAX_CHUNK_CHARS = 256 * 1024
_BEFORE = ("", "a", "a ", "1\n\n", "\u00e9\t", ".  ")
_BEHIND = ("", "a", " a", "\n\nb", "user\nhi", "\u4e2d ")


class Encoding:
    """What `tokenizer.encode` gives, faster where parts of the text have been seen lately. May be used by several threads."""

    def __init__(self, tokenizer: Tokenizer, *, max_bytes: int = MAX_BYTES) -> None:
        self._tokenizer, self._max_bytes = tokenizer, max_bytes
        cuts = sorted(_cuts(tokenizer), key=len, reverse=True)
        self._cut = re.compile("|".join(map(re.escape, cuts))) if cuts else None
        # Two generations instead of an order of use: nothing moves on a hit, so threads need no lock.
        self._young: dict[str, list[int]] = {}
        self._old: dict[str, list[int]] = {}
        self._young_bytes = 0

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for chunk in self._chunks(text):
            known = self._young.get(chunk)
            ids += known if known is not None else self._look_up(chunk)
        return ids

    def num_new(self, text: str) -> int:
        """Characters of it that would have to be encoded."""
        return sum(len(chunk) for chunk in self._chunks(text) if chunk not in self._young and chunk not in self._old)

    def _chunks(self, text: str) -> Iterator[str]:
        """Each but the first begins with a control token."""
        if self._cut is None:
            yield text
            return
        start = 0
        for found in self._cut.finditer(text):
            if found.start() > start:
                yield text[start : found.start()]
                start = found.start()
        yield text[start:]

    def _look_up(self, chunk: str) -> list[int]:
        ids = self._old.get(chunk)
        if ids is None:
            ids = self._tokenizer.encode(chunk)
            if len(chunk) > _MAX_CHUNK_CHARS:
                return ids
        self._young[chunk] = ids
        self._young_bytes += 4 * len(chunk) + _ID_BYTES * len(ids)
        if self._young_bytes > self._max_bytes // 2:
            self._old, self._young, self._young_bytes = self._young, {}, 0
        return ids


def _cuts(tokenizer: Tokenizer) -> Iterable[str]:
    """The control tokens in front of which a text can be cut.

    A tokenizer splits its text at them first of all, but some take white space before them along, some want a word's edge there, and some
    vocabularies write the first word of a text differently.
    """
    markers = tokenizer.markers
    for marker in markers:
        if any(_covers(other, marker) for other in markers):
            continue
        if all(
            tokenizer.encode(before + marker + behind) == tokenizer.encode(before) + tokenizer.encode(marker + behind)
            and tokenizer.encode(before + marker + marker) == tokenizer.encode(before) + tokenizer.encode(marker) * 2
            for before, behind in zip(_BEFORE, _BEHIND, strict=True)
        ):
            yield marker


def _covers(other: str, marker: str) -> bool:
    """Whether `other`, standing earlier in the text, could reach over the beginning of `marker`."""
    if marker[0] not in other[1:]:
        return False
    return any(marker.startswith(other[i:]) or other[i:].startswith(marker) for i in range(1, len(other)))
