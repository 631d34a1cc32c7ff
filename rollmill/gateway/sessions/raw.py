"""Recognises what was sampled in raw prompts, as token ids or as text, without any conversation; pure.

The books are kept from the first raw request on, so that episodes of conversations never pay for them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from rollmill.gateway.sessions.graph import Graph, Prompt, Sample, ids_before
from rollmill.gateway.sessions.prefixes import Prefixes, num_shared
from rollmill.model.tokenizer import Tokenizer

Found = tuple[Prompt | None, Sample | None, int, Sequence[int]]
"""The same request from before; else the sample to go on from, how many of its tokens are kept, and the ids that follow."""


class RawBook:
    """Every request's prompt, by its ids and by its text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._by_ids: Prefixes[Prompt] | None = None
        self._by_text: Prefixes[Prompt] | None = None
        self._lock = threading.Lock()

    def put(self, prompt: Prompt) -> None:
        """A request that has an answer now."""
        with self._lock:
            if self._by_ids is not None:
                self._by_ids.put(_ids_of(prompt).tobytes(), prompt)
            if self._by_text is not None:
                self._by_text.put(_bytes_of(self._text_of(prompt)), prompt)

    def find_ids(self, ids: Sequence[int], graph: Graph) -> Found:
        asked = np.asarray(ids, "<i4").tobytes()
        with self._lock:
            if self._by_ids is None:
                self._by_ids = Prefixes()
                for prompt in graph.prompts:
                    self._by_ids.put(_ids_of(prompt).tobytes(), prompt)
            known = self._by_ids.beginnings(asked)
        for length, prompt in known:
            rest = ids[length // 4 :]
            if not rest:
                return prompt, None, 0, ()
            sample, num = _best([(s, num_shared(s.ids.tolist(), rest)) for s in prompt.samples])
            if num:
                return None, sample, num, rest[num:]
        return None, None, 0, ids

    def find_text(self, text: str, graph: Graph) -> Found:
        asked = _bytes_of(text)
        with self._lock:
            if self._by_text is None:
                self._by_text = Prefixes()
                for prompt in graph.prompts:
                    self._by_text.put(_bytes_of(self._text_of(prompt)), prompt)
            known = self._by_text.beginnings(asked)
        for length, prompt in known:
            rest = asked[length:].decode("utf-8", "surrogatepass")
            if not rest:
                return prompt, None, 0, ()
            sample, num = _best([(s, self._num_said(s.ids.tolist(), rest)) for s in prompt.samples])
            if num:
                told = len(self._tokenizer.decode(sample.ids[:num].tolist()))
                return None, sample, num, self._tokenizer.encode(rest[told:])
        return None, None, 0, self._tokenizer.encode(text)

    def _text_of(self, prompt: Prompt) -> str:
        return prompt.text if prompt.text is not None else self._tokenizer.decode(_ids_of(prompt).tolist())

    def _num_said(self, ids: list[int], rest: str) -> int:
        """How many leading tokens' text `rest` begins with. Half a character is no text: such a token waits for the next."""
        decode = self._tokenizer.decode
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high + 1) // 2
            if rest.startswith(decode(ids[:middle]).rstrip("\ufffd")):
                low = middle
            else:
                high = middle - 1
        while low and not rest.startswith(decode(ids[:low])):
            low -= 1
        return low


def _ids_of(prompt: Prompt) -> np.ndarray:
    return np.concatenate([*ids_before(prompt.parent, prompt.num_kept), prompt.context]).astype("<i4", copy=False)


def _bytes_of(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _best(scored: Sequence[tuple[Sample, int]]) -> tuple[Sample, int]:
    """The newest of those with most tokens."""
    return max(reversed(scored), key=lambda pair: pair[1])
