"""What those who wait for a sequence are told: that it got on, now or a little later, piece by piece, and its whole reply at the end;
knows no weights."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import numpy as np

from rollmill.engine.protocol import GenerateReply, Piece, ScoreReply, Timing
from rollmill.engine.scheduler import Sequence, SequenceState, Update

Posted = list[tuple[Sequence, Update]]
PIECE_S = 2e-4
"""Telling one stream of its tokens costs the server's thread about 50 us, during which the compute thread may want the interpreter.
Of n streams each is told every n * PIECE_S at most, so that all of them together take a quarter of a core."""


def deliver(batch: Posted) -> None:
    """Hand updates to their listeners, on the calling thread."""
    for seq, update in batch:
        seq.on_update(seq, update)


def due(seqs: Iterable[Sequence], *, version: int, now: float) -> Posted:
    """News of the running streams whose turn it is; what is not told now is told with the next tokens, or the end."""
    streams = [seq for seq in seqs if seq.streams and seq.state is SequenceState.RUNNING]
    turn = now - PIECE_S * len(streams)
    told: Posted = []
    for seq in streams:
        if seq.told_at <= turn:
            seq.told_at = now
            told.append((seq, news(seq, version=version)))
    return told


def news(seq: Sequence, *, version: int) -> Update:
    """`version` has sampled all that was not told before."""
    return Update(num_sampled=seq.num_sampled, version=version, finished=seq.finish_reason)


def piece_of(seq: Sequence, start: int, end: int, *, version: int, replica: str = "") -> Piece:
    """Its sampled tokens [start, end), by `version`. From any thread, once it has been told that they are there: what they are does
    not change, whatever follows them meanwhile.
    """
    stale_from, is_first = seq.stale_from, start == 0
    return Piece(
        token_ids=seq.tokens[seq.num_prompt + start : seq.num_prompt + end],
        logprobs=seq.logprobs[start:end],
        version=version,
        tops=seq.tops[start:end],
        forced=_within(seq.forced, start, end),
        stale_from=stale_from - start if stale_from is not None and start <= stale_from < end else None,
        replica=replica if is_first else "",
        num_reused=seq.num_reused if is_first else 0,
    )


def _within(spans: list[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """The part of sorted spans that lies in [start, end), counted from `start`."""
    out = []
    for at in range(bisect_right(spans, start, key=lambda span: span[1]), len(spans)):
        first, last = spans[at]
        if first >= end:
            break
        out.append((max(first, start) - start, min(last, end) - start))
    return out


def reply_of(seq: Sequence, replica: str = "") -> GenerateReply:
    """The reply of a finished sequence, sampled by `replica`."""
    assert seq.finish_reason is not None, "the request still runs"
    return GenerateReply(
        token_ids=seq.tokens[seq.num_prompt :],
        logprobs=np.asarray(seq.logprobs, "<f4").tobytes(),
        spans=seq.spans,
        finish_reason=seq.finish_reason,
        seed=seq.seed,
        num_reused=seq.num_reused,
        stale_from=seq.stale_from,
        replica=replica,
        routes=seq.routes,
        tops=seq.tops,
        forced=seq.forced,
        timing=Timing(
            queue_s=(seq.admitted_at or seq.finished_at) - seq.arrived_at,
            first_token_s=seq.first_token_at - seq.arrived_at if seq.first_token_at else 0.0,
            total_s=seq.finished_at - seq.arrived_at,
        ),
    )


def score_of(seq: Sequence) -> ScoreReply:
    """The reply of tokens that were scored; a swap on the way has started them again, so one version computed them all."""
    assert seq.score_from is not None
    return ScoreReply(logprobs=np.asarray(seq.logprobs, "<f4").tobytes(), version=seq.version, start=seq.score_from)
