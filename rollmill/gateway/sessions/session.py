"""The default harness's own conversation: one that only grows, over an episode and the replicas that sample for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rollmill.chat.call_ids import MintedIds
from rollmill.chat.messages import ChatMessage, Tool
from rollmill.engine.client import EngineRejected
from rollmill.engine.protocol import FinishReason, GenerateRequest
from rollmill.gateway.routing.replicas import NoAnswer, Replicas
from rollmill.gateway.sessions.episode import Episode
from rollmill.gateway.sessions.graph import Sample
from rollmill.gateway.sessions.placement import Sampling
from rollmill.gateway.sessions.telling import told
from rollmill.gateway.sessions.windows import window_of
from rollmill.records import Boundary, RunFailure, Window

# Ends that are our own doing: what was sampled until then is no turn of the policy.
BROKEN = (FinishReason.CANCELLED, FinishReason.ERROR, FinishReason.DEADLINE, FinishReason.VERSION)


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy said in one turn."""

    text: str
    """All of it, tool calls as they were written, without the end-of-turn token."""
    message: ChatMessage
    """The same, tool calls and reasoning set apart."""
    problems: tuple[str, ...] = ()
    """Malformed tool calls, one line of advice each."""
    is_complete: bool
    """False when the turn was cut by a limit instead of ended by the policy."""
    num_tokens: int


class ContextFull(Exception):
    """The new messages leave no room for an answer. The session is as it was before the call."""

    def __init__(self, num_tokens: int, max_context: int) -> None:
        super().__init__(f"the conversation would take {num_tokens} tokens, the context holds {max_context} and one must be left to sample")


class Session:
    """Grows one conversation turn by turn."""

    def __init__(self, episode: Episode, replicas: Replicas) -> None:
        self.episode, self._replicas = episode, replicas
        self._said: list[ChatMessage] = []
        self._at: Sample | None = None

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far, answers included, for people."""
        return [told(m) for m in self._said]

    @property
    def num_tokens(self) -> int:
        return self._at.prompt.end + len(self._at.ids) if self._at is not None else 0

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version among the tokens sampled so far."""
        return self.episode.oldest_version

    async def reply(
        self,
        new: Sequence[ChatMessage],
        *,
        max_tokens: int,
        max_context: int,
        deadline: float,
        tools: Sequence[Tool] = (),
        reads_calls: bool = True,
    ) -> Reply:
        """Append `new` messages and let the policy answer.

        `tools` are what the model is told of; `reads_calls`: its answer is searched for tool calls, told of any or not.
        ContextFull when the prompt would reach `max_context` tokens, counted as the replica counts them.
        """
        episode, chat = self.episode, self.episode.chat
        try:
            placement = episode.place([*self._said, *new], tools)
        except ValueError as error:
            # A template may object to what a policy or a tool came up with: that ends this attempt, not the run.
            raise RunFailure(Boundary.HARNESS, f"the conversation cannot be rendered: {error}") from error
        if len(placement.prompt_ids) >= max_context:
            raise ContextFull(len(placement.prompt_ids), max_context)
        sampling = episode.sampling or Sampling()
        request = GenerateRequest(
            prompt_ids=placement.prompt_ids,
            max_tokens=max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=episode.next_seed(),
            stop_ids=sorted(chat.tokenizer.stop_ids),
            session=episode.key,
            min_version=episode.min_version,
            routes_from=placement.routes_from,
        )
        try:
            answer = await self._replicas.generate(request, deadline=deadline)
        except (NoAnswer, EngineRejected) as error:
            raise RunFailure(Boundary.MODEL, str(error)) from error
        ids = answer.token_ids
        if answer.finish_reason in BROKEN or not ids:
            raise RunFailure(Boundary.MODEL, f"the replica ended the turn with {answer.finish_reason} after {len(ids)} tokens")
        reader = chat.reader(
            has_tools=reads_calls,
            tools=tools if reads_calls else (),
            prompt_ids=placement.prompt_ids,
            mint=MintedIds(f"{episode.key}/{request.seed}"),
        )
        reader.feed(ids, last=True)
        message = reader.message()
        sample = episode.add(placement, answer, message)
        if sample is None:
            raise RunFailure(Boundary.HARNESS, f"episode {episode.key} was closed while it was being played")
        self._at = sample
        self._said += [*new, message]
        is_complete = ids[-1] in chat.tokenizer.stop_ids
        text = chat.tokenizer.decode(ids[:-1] if is_complete else ids)
        return Reply(text=text, message=message, problems=tuple(reader.problems), is_complete=is_complete, num_tokens=len(ids))

    def branch(self, key: str) -> Session:
        """Another conversation with the same past. What was sampled so far counts as context there: it is trained where it was sampled,
        and nowhere twice."""
        episode, at = self.episode.branch(key, self._at)
        other = Session(episode, self._replicas)
        other._said, other._at = list(self._said), at
        return other

    def window(self) -> Window:
        """The context so far, with the evidence."""
        return window_of(self._at) if self._at is not None else Window.of(tokens=[], sampled=[], logprobs=[], versions=[])

    def windows(self) -> tuple[Window, ...]:
        return self.episode.windows()
