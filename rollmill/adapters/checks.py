"""What every foreign engine must be held to: requests it would answer with something else, version stamps, finish reasons; pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rollmill.engine.client import EngineRejected, EngineUnavailable, VersionUnmet
from rollmill.engine.protocol import FinishReason, GenerateRequest, ScoreRequest, VersionSpan

SWAPPING = "rollmill-swapping"
"""The stamp while weights are being replaced: a token that carries it was sampled from nobody knows what."""


class Stamp(msgspec.Struct, frozen=True):
    """Sampled tokens [start, end) carry this version; vLLM and SGLang have the same form for it."""

    version: str
    start: int
    end: int


def check(request: GenerateRequest, *, vocab_size: int, max_len: int, has_routes: bool) -> None:
    """Refuse what these engines would serve as something else than was asked."""
    try:
        request.check(vocab_size=vocab_size, max_len=max_len)
    except ValueError as error:
        raise EngineRejected(str(error)) from error
    if request.top_p < 1 or request.top_k > 0:
        raise EngineRejected(
            f"top_p={request.top_p}, top_k={request.top_k}: this engine gives logprobs of the cut distribution, while the trainer "
            "computes those of the whole one; use top_p=1 and top_k=0"
        )
    if request.num_top or request.constraint is not None:
        raise EngineRejected("num_top and constraint: only Rollmill's own engine has them behind this protocol; leave them out")
    if request.routes_from is not None and not has_routes:
        raise EngineRejected(
            "routes_from needs a server started with --enable-return-routed-experts and an adapter that was given the shape of the experts"
        )


def check_score(request: ScoreRequest, *, vocab_size: int, max_len: int) -> None:
    try:
        request.as_generate().check(vocab_size=vocab_size, max_len=max_len)
    except ValueError as error:
        raise EngineRejected(str(error)) from error
    if request.temperature not in (0, 1):
        raise EngineRejected(f"temperature is {request.temperature}: this engine scores given tokens at temperature 1 only")


def check_version(request: GenerateRequest | ScoreRequest, versions: Sequence[int]) -> None:
    oldest = getattr(request, "min_version", None)
    for version in versions:
        if request.exact_version not in (None, version) or (oldest is not None and version < oldest):
            wanted = f"{request.exact_version} exactly" if request.exact_version is not None else f"{oldest} or newer"
            raise VersionUnmet(f"version {version} is served, the request wants {wanted}", version=version)


def version_of(stamp: str) -> int:
    """The version of our store that a stamp names; any other stamp means that the server was started anew or left in mid-swap."""
    if not stamp.isdecimal():
        why = "an unfinished swap" if stamp == SWAPPING else "a checkpoint of its own"
        raise EngineUnavailable(f"the engine serves {why} (stamp {stamp!r}), no version of the store; apply one and ask again")
    return int(stamp)


def spans_of(stamps: Sequence[Stamp], num_tokens: int) -> list[VersionSpan]:
    """Our spans, which touch and cover all tokens."""
    if not num_tokens:
        return []
    spans = [VersionSpan(start=stamp.start, end=stamp.end, version=version_of(stamp.version)) for stamp in stamps]
    edges = [0, *(edge for span in spans for edge in (span.start, span.end)), num_tokens]
    if any(a != b for a, b in zip(edges[::2], edges[1::2], strict=True)) or any(span.start >= span.end for span in spans):
        raise EngineUnavailable(f"version spans {[(s.start, s.end) for s in spans]} do not cover the {num_tokens} sampled tokens")
    return spans


def finish_of(reason: str, request: GenerateRequest, *, num_sampled: int, max_len: int, is_late: bool) -> FinishReason:
    """These engines have no word for a used-up context, and an abort is ours when the deadline has passed."""
    if reason == "abort":
        return FinishReason.DEADLINE if is_late else FinishReason.CANCELLED
    if reason == "length":
        is_full = num_sampled < request.max_tokens and len(request.prompt_ids) + num_sampled >= max_len
        return FinishReason.CONTEXT if is_full else FinishReason.LENGTH
    if reason == "stop":
        return FinishReason.STOP
    raise EngineUnavailable(f"the engine ended a request with {reason!r}")
