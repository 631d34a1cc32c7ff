"""An answer that may come in parts from several replicas: what is still to be asked, and one reply for the whole; knows no connection.

The pieces of a part that broke say of its tokens what its reply would have said, but for their routes: see `Unfinished.finish`.
"""

from __future__ import annotations

from collections.abc import Sequence

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


class Gathered:
    """The tokens of an answer with all that is said of them, gathered in order from pieces and from the reply of the last part."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.tops: list[list[tuple[int, float]]] = []
        self.spans: list[VersionSpan] = []
        self.forced: list[tuple[int, int]] = []
        self.stale_from: int | None = None
        self.num_reused = 0
        """Of the first part: the others' prompts hold sampled tokens."""
        self.sources: list[SourceSpan] = []

    def add(self, piece: Piece) -> None:
        """A piece with a name begins a part; those behind it are of the same replica."""
        is_plain = not piece.replica and not piece.forced and piece.stale_from is None
        if is_plain and self.sources and self.spans[-1].version == piece.version:
            # Nearly all of a stream, token by token: the last spans are drawn to its end when somebody asks.
            self.token_ids += piece.token_ids
            self.logprobs += piece.logprobs
            self.tops += piece.tops
            return
        spans = [VersionSpan(0, len(piece.token_ids), piece.version)]
        replica = piece.replica or (self.sources[-1].replica if self.sources else "")
        self._extend(piece, piece.logprobs, spans, replica)

    def add_reply(self, reply: GenerateReply) -> None:
        self._extend(reply, reply.logprobs_T.tolist(), reply.spans, reply.replica)

    def _extend(self, new: Piece | GenerateReply, logprobs: list[float], spans: Sequence[VersionSpan], replica: str) -> None:
        self._draw()
        at, end = len(self.token_ids), len(self.token_ids) + len(new.token_ids)
        if at == 0:
            self.num_reused = new.num_reused
        if self.stale_from is None and new.stale_from is not None:
            self.stale_from = at + new.stale_from
        self.token_ids += new.token_ids
        self.logprobs += logprobs
        self.tops += new.tops
        for span in spans:
            _add_span(self.spans, at + span.start, at + span.end, span.version)
        for first, last in new.forced:
            if self.forced and self.forced[-1][1] == at + first:
                self.forced[-1] = (self.forced[-1][0], at + last)
            else:
                self.forced.append((at + first, at + last))
        if self.sources and self.sources[-1].replica == replica:
            self.sources[-1] = SourceSpan(self.sources[-1].start, end, replica)
        elif end > at:
            self.sources.append(SourceSpan(at, end, replica))

    def _draw(self) -> None:
        """The last spans through the last token."""
        if self.spans:
            _add_span(self.spans, self.spans[-1].end, len(self.token_ids), self.spans[-1].version)
        if self.sources:
            self.sources[-1] = SourceSpan(self.sources[-1].start, len(self.token_ids), self.sources[-1].replica)

    def reply(self, reason: FinishReason, *, seed: int, timing: Timing, routes: bytes = b"") -> ContinuedReply:
        self._draw()
        return ContinuedReply(
            token_ids=self.token_ids,
            logprobs=np.asarray(self.logprobs, "<f4").tobytes(),
            spans=self.spans,
            finish_reason=reason,
            seed=seed,
            num_reused=self.num_reused,
            stale_from=self.stale_from,
            replica=self.sources[-1].replica if self.sources else "",
            routes=routes,
            tops=self.tops,
            forced=self.forced,
            timing=timing,
            sources=tuple(source for source in self.sources if source.replica),
        )


class Unfinished:
    """One request whose answer grows piece by piece."""

    def __init__(self, request: GenerateRequest) -> None:
        assert request.seed is not None, "an answer without a seed cannot be continued"
        self._request, self._seed = request, request.seed
        self._kept = Gathered()
        """Of the parts that broke."""
        self._part: list[Piece] = []
        self._num_of_part = 0

    @property
    def num_tokens(self) -> int:
        return len(self._kept.token_ids) + self._num_of_part

    @property
    def is_continued(self) -> bool:
        """An earlier part broke after its first token."""
        return bool(self._kept.token_ids)

    @property
    def num_of_part(self) -> int:
        """Tokens since the last break."""
        return self._num_of_part

    @property
    def version(self) -> int | None:
        """What sampled the newest token of the parts that broke."""
        return self._kept.spans[-1].version if self._kept.spans else None

    def rest(self, *, elapsed_s: float, left_s: float) -> GenerateRequest:
        """What is still to be sampled: the position-keyed sampler goes on with the same seed where it was."""
        assert not self._part, "the last part has not been called broken"
        ours, said = self._request, self._kept.token_ids
        wire = bounded(ours, elapsed_s=elapsed_s, left_s=left_s)
        if not said:
            return wire
        text_from = len(ours.prompt_ids) if ours.constraint_from is None else ours.constraint_from
        return msgspec.structs.replace(
            wire,
            prompt_ids=ours.prompt_ids + said,
            max_tokens=ours.max_tokens - len(said),
            constraint_from=text_from if ours.constraint is not None else None,
        )

    def take(self, piece: Piece) -> None:
        """Contradiction for a piece that cannot be trusted; then nothing was taken."""
        num = len(piece.token_ids)
        if len(piece.logprobs) != num or (self._request.num_top and len(piece.tops) != num):
            raise Contradiction(f"a piece of {num} tokens has {len(piece.logprobs)} logprobs and {len(piece.tops)} lists of likely tokens")
        if self.num_tokens + num > self._request.max_tokens:
            raise Contradiction(f"{self.num_tokens + num} tokens came, {self._request.max_tokens} were asked for")
        if (piece.forced and not _are_spans(piece.forced, num)) or not 0 <= (piece.stale_from or 0) < num:
            raise Contradiction(f"a piece of {num} tokens calls {piece.forced} forced, and stale from {piece.stale_from} on")
        self._part.append(piece)
        self._num_of_part += num

    def broke(self) -> None:
        """The replica is gone: what it gave so far stays, the next part is another's."""
        for piece in self._part:
            self._kept.add(piece)
        self._part, self._num_of_part = [], 0

    def reached(self, *, elapsed_s: float, max_len: int) -> FinishReason | None:
        """Why there is nothing left to sample, although no reply said so. `max_len`: the replicas' context, 0 when not known."""
        ours, said = self._request, self._kept.token_ids
        if not said:
            return None
        if said[-1] in ours.stop_ids:
            return FinishReason.STOP
        if len(said) >= ours.max_tokens:
            return FinishReason.LENGTH
        if max_len and len(ours.prompt_ids) + len(said) >= max_len:
            return FinishReason.CONTEXT
        return FinishReason.DEADLINE if ours.deadline_s is not None and elapsed_s >= ours.deadline_s else None

    def finish(self, last: GenerateReply, *, timing: Timing) -> GenerateReply:
        """One reply for the whole, given that of the last part. An answer of one part is that reply itself.

        Of the tokens that parts before it had computed there are the routes of the last part's own computation, or none.
        """
        num = len(last.token_ids)
        if last.token_ids[: self._num_of_part] != [token for piece in self._part for token in piece.token_ids]:
            raise Contradiction(f"the reply of replica {last.replica} does not begin with the tokens it has sent")
        if len(last.logprobs) != 4 * num or (self._request.num_top and len(last.tops) != num):
            raise Contradiction(f"the reply of replica {last.replica} has {num} tokens and not as many logprobs")
        if not self._kept.token_ids:
            return last
        routes = self._routes(last)
        self._kept.add_reply(last)
        return self._kept.reply(last.finish_reason, seed=self._seed, timing=timing, routes=routes)

    def finish_without(self, reason: FinishReason, *, timing: Timing) -> GenerateReply:
        """The reply when the last part broke after its last token. Without routes: whoever goes on asks for these tokens again."""
        assert not self._part, "the last part has not been called broken"
        return self._kept.reply(reason, seed=self._seed, timing=timing)

    def _routes(self, last: GenerateReply) -> bytes:
        """Rows of tokens that an earlier part had computed are this part's second computation: the same by the same weights alone."""
        first, kept = self._request.routes_from, self._kept
        if not last.routes or first is None:
            return b""
        is_one_version = {s.version for s in kept.spans} == {s.version for s in last.spans[:1]}
        if is_one_version and kept.stale_from is None and last.stale_from != 0:
            return last.routes
        try:
            record = RouteRecord.from_bytes(last.routes)
        except ValueError as error:
            raise Contradiction(f"replica {last.replica} sent routes that cannot be used: {error}") from error
        # The last token of a part is never computed by it.
        num_again = min(record.num_tokens, max(0, len(self._request.prompt_ids) + len(kept.token_ids) - 1 - first))
        rest = record.cut(num_again, record.num_tokens)
        return RouteRecord.join([RouteRecord.missing(record.shape, num_again), rest]).to_bytes()


def _are_spans(spans: list[tuple[int, int]], end: int) -> bool:
    """Whether they are in order and within [0, end)."""
    edges = [edge for span in spans for edge in span]
    return edges[0] >= 0 and edges[-1] <= end and all(a < b for a, b in spans) and edges == sorted(edges)


def _add_span(spans: list[VersionSpan], start: int, end: int, version: int) -> None:
    """Append; spans of one version that touch become one."""
    if start == end:
        return
    if spans and spans[-1].version == version:
        start = spans.pop().start
    spans.append(VersionSpan(start, end, version))
