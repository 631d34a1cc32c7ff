"""Texts that end a sample: found as its tokens come, so that each token is looked at once; knows no engine."""

from __future__ import annotations

from collections.abc import Sequence

from rollmill.model.tokenizer import Tokenizer

_TAIL_TOKENS = 64
"""Where tokens are not just bytes, a stop text is looked for in this many last ones."""


class StopTexts:
    """The stop texts of one sample.

    `cut` gives how many tokens stay: up to the one that completes the first stop text, which is the last.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._texts = [text.encode() for text in texts]
        self._longest = max(map(len, self._texts))
        self._num_seen, self._tail = 0, b""
        self._cut: int | None = None

    def cut(self, tokens: Sequence[int]) -> int | None:
        """`tokens` are all that were sampled, those of earlier calls first; None while no text is complete."""
        table = self._tokenizer.token_bytes
        while self._cut is None and self._num_seen < len(tokens):
            self._num_seen += 1
            if table is not None:
                whole = self._tail + table[tokens[self._num_seen - 1]]
                self._tail = whole[-self._longest :]
            else:
                whole = self._tokenizer.decode(tokens[max(0, self._num_seen - _TAIL_TOKENS) : self._num_seen]).encode()
            if any(text in whole for text in self._texts):
                self._cut = self._num_seen
        return self._cut
