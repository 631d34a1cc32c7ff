"""Tokens to text as they arrive: whole characters only, and nothing at or past a stop string.

What has been given out after n tokens depends on those n tokens alone, not on how they were cut into pieces.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

# A character has at most four bytes, so at most three tokens at the end can be the beginning of one.
_MAX_PARTIAL_TOKENS = 3


class Decoder(Protocol):
    """Token ids to text; `Tokenizer` is one."""

    def decode(self, ids: Sequence[int]) -> str: ...

    @property
    def token_bytes(self) -> Mapping[int, bytes] | None: ...


class Characters(Protocol):
    def feed(self, ids: Sequence[int]) -> str:
        """The characters these tokens complete."""

    def rest(self) -> str:
        """What the bytes left over are shown as."""


def held_suffix(text: str, markers: Iterable[str]) -> int:
    """Length of the longest end of `text` that may be the beginning of a marker.

    >>> held_suffix("so <tool", ["<tool_call>", "ol"])
    5
    """
    longest = 0
    for marker in markers:
        at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
        while at >= 0:
            if marker.startswith(text[at:]):
                longest = max(longest, len(text) - at)
                break
            at = text.find(marker[0], at + 1)
    return longest


class TextStream:
    """Feed token ids, get text that is safe to show. `stop_string` is the first stop string that was met."""

    def __init__(self, decoder: Decoder, stops: Sequence[str] = ()) -> None:
        table = decoder.token_bytes
        self._characters: Characters = ByteCharacters(table) if table is not None else WindowCharacters(decoder)
        self._stops = tuple(s for s in stops if s)
        self._held = ""
        self.stop_string: str | None = None
        self.num_used = 0
        """Tokens taken, through the one that completed the stop string."""

    def feed(self, ids: Sequence[int]) -> str:
        """The text these tokens release."""
        if not self._stops:
            self.num_used += len(ids)
            return self._characters.feed(ids)
        out = ""
        for token_id in ids:
            if self.stop_string is not None:
                break
            self.num_used += 1
            out += self._pass(self._characters.feed((token_id,)))
        return out

    def finish(self) -> str:
        """Everything that was held back."""
        if self.stop_string is not None:
            return ""
        out = self._pass(self._characters.rest())
        if self.stop_string is None:
            out, self._held = out + self._held, ""
        return out

    def _pass(self, text: str) -> str:
        if not text:
            return ""
        held = self._held + text
        found = min(((at, s) for s in self._stops if (at := held.find(s)) >= 0), default=None)
        if found is not None:
            size, self.stop_string = found
        else:
            size = len(held) - held_suffix(held, self._stops)
        self._held = held[size:]
        return held[:size]


class ByteCharacters:
    """For byte-level vocabularies: the tokens' bytes through an incremental UTF-8 decoder; every token is looked at once."""

    def __init__(self, table: Mapping[int, bytes]) -> None:
        self._bytes_of = table.__getitem__
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(map(self._bytes_of, ids)))

    def rest(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowCharacters:
    """For any other vocabulary: each token is decoded behind those of the last piece given out, which give the decoder its context."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._ids: list[int] = []
        self._read = 0

    def feed(self, ids: Sequence[int]) -> str:
        return "".join([self._one(token_id) for token_id in ids])

    def rest(self) -> str:
        return self._give(len(self._ids))

    def _one(self, token_id: int) -> str:
        self._ids.append(token_id)
        count = len(self._ids)
        full = self._decoder.decode(self._ids)
        if not full.endswith("\ufffd"):
            return self._give(count, full)
        if count - self._read <= _MAX_PARTIAL_TOKENS:
            return ""
        # A cut inside an earlier character shows: its two halves, decoded apart, are not the whole.
        for end in range(count - _MAX_PARTIAL_TOKENS, count):
            if full == self._decoder.decode(self._ids[:end]) + self._decoder.decode(self._ids[end:]):
                return self._give(end)
        return ""

    def _give(self, end: int, full: str | None = None) -> str:
        """Text of tokens up to `end`; those given out before are forgotten."""
        known = self._decoder.decode(self._ids[: self._read])
        text = (self._decoder.decode(self._ids[:end]) if full is None else full)[len(known) :]
        self._ids, self._read = self._ids[self._read :], end - self._read
        return text
