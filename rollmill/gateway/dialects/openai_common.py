"""What the two OpenAI text endpoints share: the sampling fields of a request, counts, and logprobs as their clients read them; no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rollmill.engine.protocol import MAX_SEED
from rollmill.gateway.call import Answer, Event, TopLogprob
from rollmill.gateway.dialects.dialect import MAX_CHOICES, MAX_TOKENS, Envelope, check_number, check_sampling, checked_stops
from rollmill.web import ApiError

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both request bodies; fields that are not listed are ignored."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """vLLM's: prompt and answer ids beside the text."""
    logit_bias: dict[str, float] | None = None
    user: str | None = None

    def ask(self, *, max_tokens: int | None, num_top_logprobs: int | None) -> dict[str, Any]:
        """The keyword arguments of `Ask`, checked."""
        check_sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=self.seed)
        check_number("n", self.n, 1, MAX_CHOICES)
        check_number("max_tokens", max_tokens, 1, MAX_TOKENS)
        if self.logit_bias:
            raise ApiError(
                400, "logit_bias is not supported: it would change what the policy samples; leave it out", extra=_param("logit_bias")
            )
        return {
            "model": self.model or "",
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "seed": None if self.seed is None else self.seed & MAX_SEED,
            "stops": checked_stops("stop", self.stop),
            "num_choices": 1 if self.n is None else self.n,
            "num_top_logprobs": num_top_logprobs,
            "wants_token_ids": bool(self.return_token_ids),
            "stream": bool(self.stream),
            "includes_usage": bool(self.stream_options and self.stream_options.include_usage),
        }


def _param(name: str) -> dict[str, Any]:
    return {"param": name}


def usage(answers: Sequence[Answer], num_choices: int) -> dict[str, Any]:
    """Counts over all choices; a prompt that several choices share counts once."""
    firsts = answers[::num_choices]
    num_prompt, num_sampled = sum(a.num_prompt for a in firsts), sum(len(a.token_ids) for a in answers)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": sum(a.num_reused for a in firsts)},
    }


def version_runs(answer: Answer) -> list[tuple[int, int]]:
    """[start, version] of every run of sampled tokens that one weight version made."""
    return [(s.start, s.version) for s in answer.spans]


class Sampled(msgspec.Struct, frozen=True):
    """Tokens with their logprobs, of an event or of a whole answer."""

    token_ids: list[int]
    logprobs: list[float]
    tops: list[list[TopLogprob]]

    @classmethod
    def of(cls, source: Event | Answer) -> Sampled:
        logprobs = source.logprobs if isinstance(source, Event) else source.logprobs.tolist()
        return cls(source.token_ids, logprobs, source.tops or [[] for _ in source.token_ids])


def chat_logprobs(sampled: Sampled, envelope: Envelope) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = envelope.decode([token_id])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = [
        {**entry(i, lp), "top_logprobs": [entry(t.token_id, t.logprob) for t in tops]}
        for i, lp, tops in zip(sampled.token_ids, sampled.logprobs, sampled.tops, strict=True)
    ]
    return {"content": content, "refusal": None}


def text_logprobs(sampled: Sampled, envelope: Envelope, offset: int) -> dict[str, Any]:
    """`offset`: characters of the choice's text before these tokens."""
    tokens = [envelope.decode([i]) for i in sampled.token_ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    tops = [{envelope.decode([t.token_id]): t.logprob for t in row} for row in sampled.tops]
    return {"tokens": tokens, "token_logprobs": sampled.logprobs, "top_logprobs": tops, "text_offset": offsets}


def encode(value: Any) -> bytes:
    return _encode(value)
