"""One conversation, token-exact: what was sampled is kept as sampled, only what is new is rendered and encoded.

The context of every call is the context of the call before, plus the sampled ids, plus the encoding of the text between.
Nothing is ever re-tokenised, so the trained ids equal the sampled ones by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from blake3 import blake3

from rollmill.engine.protocol import FinishReason, GenerateReply, GenerateRequest
from rollmill.model.route_record import RouteRecord
from rollmill.records import Boundary, RunFailure, SourceSpan, Window

if TYPE_CHECKING:
    from rollmill.gateway.gateway import Gateway


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy said in one turn."""

    text: str
    """Without the end-of-turn token."""
    is_complete: bool
    """False when the turn was cut by a limit instead of ended by the policy."""
    num_tokens: int


class ContextFull(Exception):
    """The new messages leave no room for an answer. The session is as it was before the call."""

    def __init__(self, num_tokens: int, max_context: int) -> None:
        super().__init__(f"the conversation would take {num_tokens} tokens, the context holds {max_context} and one must be left to sample")


class Session:
    """Grows one context window turn by turn."""

    def __init__(self, gateway: Gateway, key: str, *, seed: int, temperature: float, min_version: int | None) -> None:
        self._gateway, self._key, self._seed = gateway, key, seed
        self._temperature, self._min_version = temperature, min_version
        self.messages: list[dict[str, Any]] = []
        self._tokens: list[int] = []
        self._sampled: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._sources: list[SourceSpan] = []
        self._stale: list[tuple[int, int]] = []
        self._routes: list[RouteRecord] = []
        self._num_routed = 0
        self._num_turns = 0
        self._oldest: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version among the tokens sampled so far."""
        return self._oldest

    async def reply(self, new: Sequence[dict[str, Any]], *, max_tokens: int, max_context: int, deadline: float) -> Reply:
        """Append `new` messages and let the policy answer. The answer joins `messages` as plain text.

        ContextFull when the prompt would reach `max_context` tokens, counted as the replica counts them.
        """
        tokenizer = self._gateway.tokenizer
        new = [{**m, "content": tokenizer.neutral(m["content"])} if isinstance(m.get("content"), str) else m for m in new]
        if not self._tokens:
            context = tokenizer.encode(tokenizer.render(new))
        else:
            context = tokenizer.encode(tokenizer.render_after(self.messages[:-1], new))
            # The policy has closed its turn itself: the template's closing token would be a second one.
            if context and self._tokens[-1] in tokenizer.stop_ids and context[0] == self._tokens[-1]:
                context = context[1:]
        if self.num_tokens + len(context) >= max_context:
            raise ContextFull(self.num_tokens + len(context), max_context)
        self._extend(context, [0] * len(context), [0.0] * len(context), [-1] * len(context))
        self.messages.extend(new)
        seed = int.from_bytes(blake3(f"{self._seed}/{self._key}/{self._num_turns}".encode()).digest(7), "little")
        request = GenerateRequest(
            prompt_ids=self._tokens,
            max_tokens=max_tokens,
            temperature=self._temperature,
            seed=seed,
            stop_ids=sorted(tokenizer.stop_ids),
            session=self._key,
            min_version=self._min_version,
            routes_from=self._num_routed if self._gateway.wants_routes else None,
        )
        answer = await self._gateway.generate(request, deadline=deadline)
        if answer.finish_reason in (FinishReason.CANCELLED, FinishReason.ERROR, FinishReason.DEADLINE) or not answer.token_ids:
            raise RunFailure(Boundary.MODEL, f"the replica ended the turn with {answer.finish_reason} after {len(answer.token_ids)} tokens")
        ids = answer.token_ids
        self._extend(ids, [1] * len(ids), answer.logprobs_T.tolist(), answer.versions_T.tolist())
        self._keep_evidence(answer)
        self._num_turns += 1
        oldest = min(span.version for span in answer.spans)
        self._oldest = oldest if self._oldest is None else min(self._oldest, oldest)
        is_complete = ids[-1] in tokenizer.stop_ids
        text = tokenizer.decode(ids[:-1] if is_complete else ids)
        self.messages.append({"role": "assistant", "content": text})
        return Reply(text=text, is_complete=is_complete, num_tokens=len(ids))

    def branch(self, key: str) -> Session:
        """Another conversation with the same past. What was sampled so far counts as context there: it is trained where it was sampled,
        and nowhere twice."""
        other = Session(self._gateway, key, seed=self._seed, temperature=self._temperature, min_version=self._min_version)
        other.messages = [dict(message) for message in self.messages]
        num = self.num_tokens
        other._extend(list(self._tokens), [0] * num, [0.0] * num, [-1] * num)
        other._routes, other._num_routed, other._num_turns = list(self._routes), self._num_routed, self._num_turns
        return other

    def window(self) -> Window:
        """The context so far, with the evidence."""
        return Window.of(
            tokens=self._tokens,
            sampled=self._sampled,
            logprobs=self._logprobs,
            versions=self._versions,
            routes=self._route_bytes(),
            sources=tuple(self._sources),
            stale=tuple(self._stale),
        )

    def _route_bytes(self) -> bytes:
        """One row per token. The last sampled token was never computed, nor was context that no call followed."""
        if not self._routes:
            return b""
        tail = RouteRecord.missing(self._routes[0].shape, self.num_tokens - self._num_routed)
        return RouteRecord.join([*self._routes, tail]).to_bytes()

    def _keep_evidence(self, answer: GenerateReply) -> None:
        """Who sampled this turn and on what, and the experts of what the call computed and the record does not have yet."""
        start, end = self.num_tokens - len(answer.token_ids), self.num_tokens
        if answer.stale_from is not None:
            self._stale.append((start + answer.stale_from, end))
        if self._sources and self._sources[-1].replica == answer.replica:
            start = self._sources.pop().start
        if answer.replica:
            self._sources.append(SourceSpan(start, end, answer.replica))
        if not answer.routes or not self._gateway.wants_routes:
            # A replica that keeps no routes: the next call asks for these tokens again.
            return
        try:
            record = RouteRecord.from_bytes(answer.routes)
        except ValueError as error:
            raise RunFailure(Boundary.MODEL, f"replica {answer.replica} sent routes that cannot be used: {error}") from error
        if self._routes and record.shape != self._routes[0].shape:
            raise RunFailure(Boundary.MODEL, f"replica {answer.replica} sent routes of another model: {record.shape}")
        if record.num_tokens != end - 1 - self._num_routed:
            asked = f"the {end - 1 - self._num_routed} tokens from {self._num_routed} on"
            raise RunFailure(Boundary.MODEL, f"replica {answer.replica} sent routes of {record.num_tokens} tokens, asked for {asked}")
        self._routes.append(record)
        self._num_routed = end - 1

    def _extend(self, tokens: list[int], sampled: list[int], logprobs: list[float], versions: list[int]) -> None:
        self._tokens += tokens
        self._sampled += sampled
        self._logprobs += logprobs
        self._versions += versions
