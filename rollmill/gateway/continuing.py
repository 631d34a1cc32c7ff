"""An answer that may come in parts from several replicas: what is still to be asked, and one reply for the whole; knows no connection.

A part that broke is known by its pieces alone, so what only a reply tells is stated as the worst it can be: see `Unfinished.finish`.
Shapes: T sampled tokens.
"""

from __future__ import annotations

import msgspec
import numpy as np

from rollmill.engine.protocol import FinishReason, GenerateReply, GenerateRequest, Piece, Timing, VersionSpan
from rollmill.model.route_record import RouteRecord
from rollmill.records import SourceSpan

# Beyond our own deadline, so that it is ours that ends a call, and a replica whose client vanished still frees the row.
GRACE_S = 5.0
MAX_DEADLINE_S = 86400.0


class ContinuedReply(GenerateReply, frozen=True, kw_only=True):
    """A reply whose tokens came from more than one replica; `replica` is the last."""

    sources: tuple[SourceSpan, ...]
    """Which replica sampled the tokens [start, end) of `token_ids`; they touch and cover all."""


class Contradiction(RuntimeError):
    """A replica's pieces and its reply do not fit each other or the request."""


def sources_of(reply: GenerateReply) -> tuple[SourceSpan, ...]:
    """Which replica sampled which of the reply's tokens."""
    if isinstance(reply, ContinuedReply):
        return reply.sources
    return (SourceSpan(0, len(reply.token_ids), reply.replica),) if reply.token_ids and reply.replica else ()


def bounded(request: GenerateRequest, *, elapsed_s: float, left_s: float) -> GenerateRequest:
    """The request with what is left of its own deadline, or of the call's when it has none."""
    deadline_s = left_s + GRACE_S if request.deadline_s is None else max(1e-3, request.deadline_s - elapsed_s)
    return msgspec.structs.replace(request, deadline_s=min(deadline_s, MAX_DEADLINE_S))


class Unfinished:
    """One request whose answer grows piece by piece."""

    def __init__(self, request: GenerateRequest) -> None:
        assert request.seed is not None, "an answer without a seed cannot be continued"
        self._request = request
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._tops: list[list[tuple[int, float]]] = []
        self._spans: list[VersionSpan] = []
        self._sources: list[SourceSpan] = []
        self._part_from = 0
        self._stale_from: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    @property
    def version(self) -> int | None:
        """What sampled the newest token."""
        return self._spans[-1].version if self._spans else None

    def rest(self, *, elapsed_s: float, left_s: float) -> GenerateRequest:
        """What is still to be sampled: the position-keyed sampler goes on with the same seed where it was."""
        ours, num = self._request, self.num_tokens
        wire = bounded(ours, elapsed_s=elapsed_s, left_s=left_s)
        if not num:
            return wire
        text_from = len(ours.prompt_ids) if ours.constraint_from is None else ours.constraint_from
        return msgspec.structs.replace(
            wire,
            prompt_ids=ours.prompt_ids + self._ids,
            max_tokens=ours.max_tokens - num,
            constraint_from=text_from if ours.constraint is not None else None,
        )

    def take(self, piece: Piece) -> None:
        """Contradiction for a piece that cannot be trusted; then nothing was taken."""
        num = len(piece.token_ids)
        if len(piece.logprobs) != num or (self._request.num_top and len(piece.tops) != num):
            raise Contradiction(f"a piece of {num} tokens has {len(piece.logprobs)} logprobs and {len(piece.tops)} lists of likely tokens")
        if self.num_tokens + num > self._request.max_tokens:
            raise Contradiction(f"{self.num_tokens + num} tokens came, {self._request.max_tokens} were asked for")
        start = len(self._ids)
        self._ids += piece.token_ids
        self._logprobs += piece.logprobs
        self._tops += piece.tops
        _add_span(self._spans, start, start + num, piece.version)

    @property
    def num_of_part(self) -> int:
        """Tokens since the last break."""
        return self.num_tokens - self._part_from

    def broke(self, replica: str) -> None:
        """The replica is gone: what it gave so far stays, the next part is another's."""
        start, end = self._part_from, self.num_tokens
        if start == end:
            return
        versions = [s for s in self._spans if s.end > start]
        if self._stale_from is None and len(versions) > 1:
            # Whether its swap kept the cache only its reply would have told.
            self._stale_from = versions[1].start
        self._sources = _with_source(self._sources, SourceSpan(start, end, replica))
        self._part_from = end

    def reached(self, *, elapsed_s: float, max_len: int) -> FinishReason | None:
        """Why there is nothing left to sample, although no reply said so. `max_len`: the replicas' context, 0 when not known."""
        ours = self._request
        if not self._ids:
            return None
        if self._ids[-1] in ours.stop_ids:
            return FinishReason.STOP
        if self.num_tokens >= ours.max_tokens:
            return FinishReason.LENGTH
        if max_len and len(ours.prompt_ids) + self.num_tokens >= max_len:
            return FinishReason.CONTEXT
        return FinishReason.DEADLINE if ours.deadline_s is not None and elapsed_s >= ours.deadline_s else None

    def finish(self, last: GenerateReply, *, timing: Timing) -> GenerateReply:
        """One reply for the whole, given that of the last part. An answer of one part is that reply itself.

        Of the parts that broke, it is not known which tokens a constraint forced: all count as forced, and none is learnt from.
        Tokens after a swap within such a part count as stale. Experts that another version computed again are left out.
        """
        start, num = self._part_from, len(last.token_ids)
        if last.token_ids[: self.num_tokens - start] != self._ids[start:]:
            raise Contradiction(f"the reply of replica {last.replica} does not begin with the tokens it has sent")
        if len(last.logprobs) != 4 * num or (self._request.num_top and len(last.tops) != num):
            raise Contradiction(f"the reply of replica {last.replica} has {num} tokens and not as many logprobs")
        if not start:
            return last
        end = start + num
        spans = [VersionSpan(s.start, min(s.end, start), s.version) for s in self._spans if s.start < start]
        for span in last.spans:
            _add_span(spans, start + span.start, start + span.end, span.version)
        stale_from = self._stale_from
        if stale_from is None and last.stale_from is not None:
            stale_from = start + last.stale_from
        return self._whole(
            token_ids=self._ids[:start] + last.token_ids,
            logprobs=np.asarray(self._logprobs[:start], "<f4").tobytes() + last.logprobs,
            spans=spans,
            finish_reason=last.finish_reason,
            stale_from=stale_from,
            replica=last.replica,
            sources=_with_source(self._sources, SourceSpan(start, end, last.replica)),
            routes=self._routes(last),
            tops=self._tops[:start] + last.tops,
            forced=self._forced_before(start) + [(start + a, start + b) for a, b in last.forced],
            timing=timing,
        )

    def finish_without(self, reason: FinishReason, *, timing: Timing) -> GenerateReply:
        """The reply when the last part broke after its last token. Without routes: whoever goes on asks for these tokens again."""
        assert self._part_from == self.num_tokens, "the last part has not been called broken"
        return self._whole(
            token_ids=self._ids,
            logprobs=np.asarray(self._logprobs, "<f4").tobytes(),
            spans=self._spans,
            finish_reason=reason,
            stale_from=self._stale_from,
            replica=self._sources[-1].replica,
            sources=self._sources,
            routes=b"",
            tops=self._tops,
            forced=self._forced_before(self.num_tokens),
            timing=timing,
        )

    def _whole(self, *, sources: list[SourceSpan], **facts: object) -> ContinuedReply:
        assert self._request.seed is not None
        # What the first replica found in its cache is lost with it.
        return ContinuedReply(seed=self._request.seed, num_reused=0, sources=tuple(sources), **facts)  # type: ignore[arg-type]

    def _forced_before(self, end: int) -> list[tuple[int, int]]:
        return [(0, end)] if self._request.constraint is not None else []

    def _routes(self, last: GenerateReply) -> bytes:
        """Rows of tokens that an earlier part had computed are this part's second computation: the same by the same weights alone."""
        first = self._request.routes_from
        if not last.routes or first is None:
            return b""
        versions = {s.version for s in self._spans if s.start < self._part_from}
        if last.spans and versions == {last.spans[0].version}:
            return last.routes
        try:
            record = RouteRecord.from_bytes(last.routes)
        except ValueError as error:
            raise Contradiction(f"replica {last.replica} sent routes that cannot be used: {error}") from error
        # The last token of a part is never computed by it.
        num_again = min(record.num_tokens, max(0, len(self._request.prompt_ids) + self._part_from - 1 - first))
        kept = record.cut(num_again, record.num_tokens)
        return RouteRecord.join([RouteRecord.missing(record.shape, num_again), kept]).to_bytes()


def _add_span(spans: list[VersionSpan], start: int, end: int, version: int) -> None:
    """Append; spans of one version that touch become one."""
    if start == end:
        return
    if spans and spans[-1].version == version:
        start = spans.pop().start
    spans.append(VersionSpan(start, end, version))


def _with_source(sources: list[SourceSpan], new: SourceSpan) -> list[SourceSpan]:
    if new.start == new.end:
        return sources
    if sources and sources[-1].replica == new.replica:
        return [*sources[:-1], SourceSpan(sources[-1].start, new.end, new.replica)]
    return [*sources, new]
