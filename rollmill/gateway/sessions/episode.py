"""One episode's conversations, token-exact: places every request in the graph of what was really sampled, and keeps what is sampled next.

Sampled tokens are never encoded again: a request that repeats an answer goes on from its sampled ids. Knows no replica. Long requests may
be placed in other threads.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3

from rollmill.chat.format import ChatFormat
from rollmill.chat.messages import ChatMessage, ChatRole, Tool
from rollmill.engine.protocol import GenerateReply, VersionSpan
from rollmill.gateway.routing.continuing import sources_of
from rollmill.gateway.sessions.chain import Key
from rollmill.gateway.sessions.graph import Graph, Prompt, Sample, ids_before, path_of, routed_before, routes_in
from rollmill.gateway.sessions.match import Book
from rollmill.gateway.sessions.placement import COUNTED_AS, EpisodeClosed, EpisodeFull, PlaceKind, Placement, Sampling
from rollmill.gateway.sessions.prefixes import num_shared
from rollmill.gateway.sessions.raw import RawBook
from rollmill.gateway.sessions.skew import Skew, skew_of
from rollmill.gateway.sessions.telling import told
from rollmill.gateway.sessions.windows import windows_of
from rollmill.model.route_record import RouteShape
from rollmill.records import Boundary, RunFailure, SourceSpan, Window

MAX_ANSWERS = 8192
MAX_TOKENS = 1 << 24


class Episode:
    """What one agent's run says and is told, whatever calls it makes in whatever order."""

    def __init__(
        self,
        key: str,
        chat: ChatFormat,
        *,
        seed: int = 0,
        sampling: Sampling | None = None,
        min_version: int | None = None,
        wants_routes: bool = False,
        realign_tokens: int = 64,
        max_answers: int = MAX_ANSWERS,
        max_tokens: int = MAX_TOKENS,
        max_answer_tokens: int | None = None,
    ) -> None:
        """`sampling` is imposed on every call; None leaves it to the client. `max_answer_tokens`: no answer may have more, whatever
        its call asks for."""
        self.key, self.chat, self.seed, self.sampling = key, chat, seed, sampling
        self.min_version, self.wants_routes, self.realign_tokens = min_version, wants_routes, realign_tokens
        self.max_answers, self.max_tokens, self.max_answer_tokens = max_answers, max_tokens, max_answer_tokens
        self.graph = Graph()
        self.tally: Counter[str] = Counter()
        self.oldest_version: int | None = None
        """The oldest weight version among the tokens sampled so far."""
        self.is_closed = False
        self.num_seeds = 0
        """Seeds handed out."""
        self._book = Book()
        self._raw = RawBook(chat.tokenizer)
        self._lock = threading.Lock()
        self.num_calls = 0
        """Requests that were placed, answered or not."""
        self._counted: set[int] = set()
        self._route_shape: RouteShape | None = None

    def next_seed(self) -> int:
        """One per sampled choice, in order; the same for the same seed, key and number."""
        self.num_seeds += 1
        return int.from_bytes(blake3(f"{self.seed}/{self.key}/{self.num_seeds - 1}".encode()).digest(7), "little")

    def place(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> Placement:
        """The tokens of this conversation, what was sampled in it as it was sampled. Raises ValueError for what cannot be rendered."""
        if not messages:
            raise ValueError("the conversation is empty; send at least one message")
        self._check_room(0)
        keys = self._book.keys.chain(tools, messages)
        match = self._book.find(keys, messages)
        is_begun = messages[-1].role is ChatRole.ASSISTANT and not messages[-1].calls
        begun = (keys[-2], messages[-1].text) if is_begun else None
        if match.prompt is not None:
            return self._placed(PlaceKind.RETRY, match.prompt, keys[-1], begun)
        if match.drifted is not None and not (is_begun and match.num_before == len(messages) - 1):
            prompt = self._realigned(match.drifted, messages, match.num_before, tools)
            if prompt is not None:
                return self._placed(self._kind(prompt), prompt, keys[-1], begun)
        at, num = match.sample, match.num_messages
        if at is not None and is_begun and num == len(messages):
            # The client asks for more of this very answer, so it stays open.
            num_kept = len(at.ids) - (at.last_id in self.chat.tokenizer.stop_ids)
            prompt = _prompt(at, num_kept, (), messages=())
            return self._placed(self._kind(prompt), prompt, keys[-1], begun)
        if at is None:
            context = self.chat.first(messages, tools)
        else:
            context = self.chat.after(messages[: num - 1], at.last_id, messages[num:], tools)
        prompt = _prompt(at, len(at.ids) if at is not None else 0, context, messages=tuple(messages[num:]))
        return self._placed(self._kind(prompt), prompt, keys[-1], begun)

    def place_text(self, text: str) -> Placement:
        """Raw text: goes on from sampled tokens as far as their text is what it repeats."""
        if not text:
            raise ValueError("the prompt is empty; send at least one character")
        self._check_room(0)
        return self._placed_raw(*self._raw.find_text(text, self.graph), text=text)

    def place_ids(self, ids: Sequence[int]) -> Placement:
        """Raw token ids: goes on from sampled tokens as far as it repeats them."""
        if not ids:
            raise ValueError("the prompt is empty; send at least one token")
        if min(ids) < 0 or max(ids) >= 2**31:
            raise ValueError(f"the prompt holds {min(ids) if min(ids) < 0 else max(ids)}, which is no token id")
        self._check_room(0)
        return self._placed_raw(*self._raw.find_ids(ids, self.graph))

    def add(self, placement: Placement, reply: GenerateReply, message: ChatMessage, *, num_used: int | None = None) -> Sample | None:
        """Keep an answer. `message` is it as the client gets it; tokens from `num_used` on were sampled but are no part of it.

        RunFailure when the replica's evidence contradicts itself. An answer that comes after the end is counted and not kept.
        """
        if self.is_closed:
            self.tally["late"] += 1
            self.tally["late_tokens"] += len(reply.token_ids)
            return None
        num = len(reply.token_ids) if num_used is None else num_used
        assert 0 <= num <= len(reply.token_ids), f"{num} of {len(reply.token_ids)} tokens are to be used"
        if num < len(reply.token_ids):
            self.tally["unused_tokens"] += len(reply.token_ids) - num
        with self._lock:
            sample = self._sample(placement, self._joined(placement), reply, message, num)
            if not sample.prompt.samples:
                self.graph.add_prompt(sample.prompt)
                self._raw.put(sample.prompt)
            self.graph.add_sample(sample)
            if placement.key is not None:
                self._book.put(placement.key, sample, placement.begun)
        for span in sample.spans:
            self.oldest_version = span.version if self.oldest_version is None else min(self.oldest_version, span.version)
        if placement.call not in self._counted:
            self._counted.add(placement.call)
            self.tally[COUNTED_AS[placement.kind]] += 1
        self.tally["orphaned"] = self.graph.num_orphans
        return sample

    def abandon(self, placement: Placement, num_tokens: int) -> None:
        """Sampled, but the client left before it had it all: nothing came of it, so it is not trained."""
        self.tally["abandoned"] += 1
        self.tally["abandoned_tokens"] += num_tokens

    def windows(self) -> tuple[Window, ...]:
        """What is trained: every token that counts in exactly one window."""
        return windows_of(self.graph, realign_tokens=self.realign_tokens)

    def untrained(self) -> Counter[str]:
        """Tokens that were sampled for this episode and are trained in no window, by why not. With those that are trained: all of them."""
        found = Counter({name: self.tally[f"{name}_tokens"] for name in ("unused", "abandoned", "late")})
        for sample in self.graph.samples:
            if not sample.is_own:
                continue
            held = self.graph.num_held(sample, self.realign_tokens)
            found["cut" if sample.counts else "orphaned"] += len(sample.ids) - held
            found["forced"] += sum(max(0, min(end, held) - start) for start, end in sample.forced)
        return +found

    def messages(self) -> tuple[dict[str, Any], ...]:
        """For people: the conversation of the longest window."""
        leaf = max(self.graph.leaves(self.realign_tokens), key=lambda s: s.prompt.end + len(s.ids), default=None)
        return tuple(told(m) for m in self._conversation(leaf)) if leaf is not None else ()

    def answer(self) -> str:
        """What was said last, in whichever window: after a compaction that is hardly ever the longest."""
        *_, leaf = (None, *self.graph.leaves(self.realign_tokens))
        return self._conversation(leaf)[-1].text if leaf is not None else ""

    def skew(self) -> Skew:
        """How far the answers' text is from their tokens: what an encoder would have made of them."""
        return skew_of(self.graph.samples, self.chat.tokenizer)

    def close(self) -> None:
        self.is_closed = True

    def branch(self, key: str, at: Sample | None) -> tuple[Episode, Sample | None]:
        """Another episode with the same past up to `at`. What was sampled so far counts as context there: it is trained where it was
        sampled, and nowhere twice."""
        other = Episode(
            key,
            self.chat,
            seed=self.seed,
            sampling=self.sampling,
            min_version=self.min_version,
            wants_routes=self.wants_routes,
            realign_tokens=self.realign_tokens,
            max_answers=self.max_answers,
            max_tokens=self.max_tokens,
            max_answer_tokens=self.max_answer_tokens,
        )
        other.graph, leaf = self.graph.branch(at)
        other.num_seeds, other._route_shape, other.num_calls = self.num_seeds, self._route_shape, self.num_calls
        for sample in other.graph.samples:
            if sample.key is not None:
                other._book.put(sample.key, sample)
            other._raw.put(sample.prompt)
        return other, leaf

    def _realigned(self, before: Prompt, messages: Sequence[ChatMessage], num_before: int, tools: Sequence[Tool]) -> Prompt | None:
        """Go on from what the client left of the answer; None when it left nothing, so that it says something of its own."""
        said = messages[num_before]
        sample = _nearest(before.samples, said)
        ids = sample.ids.tolist()
        num, rest = self.chat.realign(messages[:num_before], ids, said, messages[num_before + 1 :], tools)
        while rest and num < len(ids) and rest[0] == ids[num]:
            num, rest = num + 1, rest[1:]
        if num == 0:
            return None
        new = tuple(messages[num_before + 1 :])
        return _prompt(sample, num, rest, messages=new, said=said if num < len(ids) else None)

    def _kind(self, prompt: Prompt) -> PlaceKind:
        if prompt.parent is None:
            return PlaceKind.FORK if self.graph.samples else PlaceKind.FIRST
        if prompt.num_kept < len(prompt.parent.ids):
            return PlaceKind.REALIGN
        return PlaceKind.APPEND if prompt.parent.max_kept < 0 else PlaceKind.FORK

    def _placed_raw(
        self, found: Prompt | None, parent: Sample | None, num_kept: int, context: Sequence[int], *, text: str | None = None
    ) -> Placement:
        if found is not None:
            return self._placed(PlaceKind.RETRY, found, None)
        prompt = _prompt(parent, num_kept, context, text=text)
        return self._placed(self._kind(prompt), prompt, None)

    def _placed(self, kind: PlaceKind, prompt: Prompt, key: Key | None, begun: tuple[Key, str] | None = None) -> Placement:
        self._check_room(len(prompt.context))
        with self._lock:
            if prompt.parent is not None:
                self.graph.follow(prompt.parent)
                self.tally["orphaned"] = self.graph.num_orphans
            call = self.num_calls
            self.num_calls += 1
        return Placement(
            kind=kind,
            prompt_ids=np.concatenate([*ids_before(prompt.parent, prompt.num_kept), prompt.context]).tolist(),
            routes_from=routed_before(prompt.parent, prompt.num_kept) if self.wants_routes else None,
            call=call,
            prompt=prompt,
            key=key,
            begun=begun,
        )

    def _sample(self, placement: Placement, prompt: Prompt, reply: GenerateReply, message: ChatMessage, num: int) -> Sample:
        """The first `num` tokens of a reply, with the evidence."""
        start, routes = placement.routes_from or 0, None
        if placement.routes_from is not None:
            routes = routes_in(reply, num_prompt=prompt.end, routes_from=start)
        if routes is not None:
            if self._route_shape is not None and routes.shape != self._route_shape:
                raise RunFailure(Boundary.MODEL, f"replica {reply.replica} sent routes of another model: {routes.shape}")
            self._route_shape = routes.shape
            routes = routes.cut(0, min(routes.num_tokens, prompt.end + num - start))
        return Sample(
            number=len(self.graph.samples),
            call=placement.call,
            prompt=prompt,
            ids=np.asarray(reply.token_ids[:num], np.int32),
            logprobs=reply.logprobs_T[:num],
            spans=tuple(VersionSpan(s.start, min(s.end, num), s.version) for s in reply.spans if s.start < num),
            forced=tuple((first, min(end, num)) for first, end in reply.forced if first < num),
            stale_from=reply.stale_from if reply.stale_from is not None and reply.stale_from < num else None,
            sources=tuple(SourceSpan(s.start, min(s.end, num), s.replica) for s in sources_of(reply) if s.start < num),
            routes=routes,
            routes_from=start,
            num_routed=start + (routes.num_tokens if routes is not None else 0),
            message=message,
            key=placement.key,
        )

    def _joined(self, placement: Placement) -> Prompt:
        """The request's place; that of an equal one when it was answered while this one was on its way."""
        new = placement.prompt
        assert new is not None, "a placement of no episode was added to one"
        if new.samples:
            return new
        if placement.key is None:
            return self._raw.find_ids(placement.prompt_ids, self.graph)[0] or new
        old = self._book.prompt(placement.key)
        if old is None or old.parent is not new.parent or old.num_kept != new.num_kept or not np.array_equal(old.context, new.context):
            return new
        return old

    def _check_room(self, num_new: int) -> None:
        if self.is_closed:
            raise EpisodeClosed(f"episode {self.key} has ended")
        if len(self.graph.samples) >= self.max_answers:
            self.tally["full"] += 1
            raise EpisodeFull(
                f"episode {self.key} has {len(self.graph.samples)} answers, at most {self.max_answers} are kept; start another"
            )
        if self.graph.num_tokens + num_new > self.max_tokens:
            self.tally["full"] += 1
            held = f"{self.graph.num_tokens} tokens and this request adds {num_new}"
            raise EpisodeFull(f"episode {self.key} holds {held}, at most {self.max_tokens} are kept; start another")

    def _conversation(self, leaf: Sample) -> list[ChatMessage]:
        said: list[ChatMessage] = []
        for prompt, sample, _ in path_of(leaf):
            if prompt.said is not None:
                said[-1] = prompt.said
            said += prompt.messages if prompt.messages is not None else (self._read(prompt),)
            message = sample.message
            if said and said[-1].role is ChatRole.ASSISTANT and not said[-1].calls:
                # It was asked to go on with what was said already: together they are one answer.
                begun = said.pop()
                message = msgspec.structs.replace(message, text=begun.text + message.text, reasoning=begun.reasoning + message.reasoning)
            said.append(message)
        return said

    def _read(self, prompt: Prompt) -> ChatMessage:
        return ChatMessage(role=ChatRole.USER, text=self.chat.tokenizer.decode(prompt.context.tolist()))


def _prompt(parent: Sample | None, num_kept: int, context: Sequence[int], **rest: Any) -> Prompt:
    start = parent.prompt.end + num_kept if parent is not None else 0
    return Prompt(parent=parent, num_kept=num_kept, start=start, context=np.asarray(context, np.int32), **rest)


def _nearest(samples: Sequence[Sample], said: ChatMessage) -> Sample:
    """The answer that the client means: by the ids of its calls, else by how much of its text is there, the newest of equals."""
    names = {c.id for c in said.calls}
    best, score = samples[-1], (False, -1)
    for sample in samples:
        shared = num_shared(sample.message.text, said.text) if len(samples) > 1 else 0
        found = (any(c.id in names for c in sample.message.calls), shared)
        if found >= score:
            best, score = sample, found
    return best
