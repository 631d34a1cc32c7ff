"""Retokenisation skew: how often an answer's text, encoded again, gives other ids than were sampled. Looked at on demand only.

It is what training on re-encoded text would get wrong. Nothing here trains on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rollmill.gateway.sessions.graph import Sample
from rollmill.gateway.sessions.prefixes import num_shared
from rollmill.model.tokenizer import Tokenizer


class Skew(msgspec.Struct, frozen=True, kw_only=True):
    """
    >>> Skew(num_answers=4, num_skewed=1, num_tokens=200, num_skewed_tokens=30).token_frac
    0.15
    """

    num_answers: int = 0
    num_skewed: int = 0
    """Answers whose text encodes to other ids."""
    num_tokens: int = 0
    num_skewed_tokens: int = 0
    """Tokens from the first difference on."""

    @property
    def answer_frac(self) -> float:
        return self.num_skewed / max(1, self.num_answers)

    @property
    def token_frac(self) -> float:
        return self.num_skewed_tokens / max(1, self.num_tokens)

    def __add__(self, other: Skew) -> Skew:
        return Skew(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})


def skew_of(samples: Sequence[Sample], tokenizer: Tokenizer) -> Skew:
    """Of the answers sampled here; each is encoded once, however often this is asked."""
    own = [s for s in samples if s.is_own]
    for sample in own:
        if sample.skew_from is None:
            ids = sample.ids.tolist()
            sample.skew_from = num_shared(ids, tokenizer.encode(tokenizer.decode(ids)))
    lost = [len(s.ids) - s.skew_from for s in own if s.skew_from is not None]
    return Skew(
        num_answers=len(own),
        num_skewed=sum(s.skew_from is not None and s.skew_from < len(s.ids) for s in own),
        num_tokens=sum(len(s.ids) for s in own),
        num_skewed_tokens=sum(lost),
    )
