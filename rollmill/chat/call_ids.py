"""Ids of tool calls: "call_" and 24 hexadecimal digits."""

from __future__ import annotations

import secrets

from blake3 import blake3


def random_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class MintedIds:
    """The ids of one answer's calls, in order; the same for the same text. Answers that can meet in one conversation need different texts.

    >>> MintedIds("7/episode/0")() == MintedIds("7/episode/0")()
    True
    """

    def __init__(self, seed_text: str) -> None:
        self._seed_text, self._num = seed_text, 0

    def __call__(self) -> str:
        self._num += 1
        return f"call_{blake3(f'{self._seed_text}/{self._num - 1}'.encode()).hexdigest(length=12)}"
