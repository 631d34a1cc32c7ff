"""A policy without a model and agents that behave as badly as real ones: what one did with the other is logged, for tests to judge."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import msgspec
import numpy as np
from gateway_fakes import CHAT, TIMING, TOKENIZER

from rollmill.chat.messages import Call, ChatMessage, ChatRole, Tool
from rollmill.engine.protocol import FinishReason, GenerateReply, VersionSpan
from rollmill.gateway.sessions.episode import Episode
from rollmill.gateway.sessions.placement import Placement
from rollmill.model.route_record import RouteRecord, RouteShape
from rollmill.records import Window

SHAPE = RouteShape(num_layers=2, layers=(1,), num_experts=16, top_k=2)
END, OTHER_END = TOKENIZER.encode("<|im_end|><|endoftext|>")
PIECES = (
    "the file",
    " is",
    " fine",
    "\n",
    " ",
    "x = 1",
    "\u00e9t\u00e9",
    "\u4f60\u597d",
    "\U0001f600",
    "<|im_end|>",
    "<tool_call>",
    "</s>",
    "a b  c",
    "{",
    "",
)
TOOLS = (Tool(name="read", description="Read a file.", parameters={"type": "object", "properties": {"path": {"type": "string"}}}),)
HALF = TOKENIZER.encode("\u4f60")[:1]


def experts_of(tokens: Sequence[int], start: int) -> np.ndarray:
    """A model whose experts are a function of token and position, so that a row in the wrong place shows."""
    ids = np.full((len(tokens) - start, 2, 2), -1, np.int16)
    at = np.arange(start, len(tokens))
    ids[:, 1, 0] = (7 * np.asarray(tokens[start:], np.int64) + 3 * at) % 15
    ids[:, 1, 1] = 15
    return ids


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """One answer as the replica remembers it."""

    prompt: list[int]
    reply: GenerateReply
    num_used: int
    first: int
    """Number of its first token; a token's logprob is its number, so that every token can be told from every other."""


class FakePolicy:
    """Samples texts cut into tokens anyhow, some cut short, some with half a character."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.said = rng, list[Said]()
        self.num_tokens = 0
        self.version = 0

    def text(self) -> str:
        rng = self.rng
        text = "".join(rng.choices(PIECES, k=rng.randint(0, 5)))
        for _ in range(rng.choice((0, 0, 1, 1, 2))):
            arguments = {"path": rng.choice("abc"), "n": rng.randint(0, 1)}
            text += f"<tool_call>{json.dumps({'name': 'read', 'arguments': arguments})}</tool_call>"
        return text

    def ids(self) -> list[int]:
        rng, text = self.rng, self.text()
        ids: list[int] = []
        while text:
            num = rng.choice((1, 3, 50, 50))
            ids += TOKENIZER.encode(text[:num])
            text = text[num:]
        if rng.random() < 0.05:
            ids += HALF
        how = rng.random()
        if how < 0.7 or not ids:
            return [*ids, END if how < 0.65 else OTHER_END]
        return ids[: rng.randint(1, len(ids))]

    def sample(self, placement: Placement) -> Said:
        rng, prompt = self.rng, placement.prompt_ids
        ids = self.ids() if rng.random() < 0.9 or not self.said else list(rng.choice(self.said).reply.token_ids)
        num, first = len(ids), self.num_tokens + 1
        self.num_tokens += num
        self.version += rng.randint(0, 1)
        cut = rng.randint(0, num)
        spans = [VersionSpan(a, b, v) for a, b, v in ((0, cut, self.version), (cut, num, self.version + 1)) if a < b]
        self.version += 1
        routes = b""
        if placement.routes_from is not None and rng.random() < 0.8:
            routes = RouteRecord.of(experts_of([*prompt, *ids], placement.routes_from)[:-1], SHAPE).to_bytes()
        start = rng.randint(0, num)
        reply = GenerateReply(
            token_ids=ids,
            logprobs=(-np.arange(first, first + num, dtype="<f4")).tobytes(),
            spans=spans,
            finish_reason=FinishReason.STOP if ids[-1] in TOKENIZER.stop_ids else FinishReason.LENGTH,
            seed=0,
            num_reused=0,
            replica=rng.choice(("east", "west", "")),
            stale_from=rng.randint(0, num - 1) if rng.random() < 0.2 else None,
            routes=routes,
            forced=[(start, min(num, start + 2))] if rng.random() < 0.2 and start < num else [],
            timing=TIMING,
        )
        said = Said(prompt=prompt, reply=reply, num_used=num if rng.random() < 0.9 else rng.randint(1, num), first=first)
        self.said.append(said)
        return said


class Asked(msgspec.Struct, kw_only=True, eq=False):
    """A request that was placed."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...]
    placement: Placement


class Got(msgspec.Struct, kw_only=True, eq=False):
    """An answer that was added."""

    asked: Asked
    said: Said
    message: ChatMessage


class Chat(msgspec.Struct, kw_only=True):
    """A conversation as a client remembers it."""

    messages: list[ChatMessage]
    tools: tuple[Tool, ...] = ()
    options: list[ChatMessage] = []
    """Answers to the last request that the client may take."""


class World:
    """One episode: agents talk, in turns that interleave, and everything is logged in order."""

    def __init__(self, seed: int, *, realign_tokens: int = 6, wants_routes: bool = True) -> None:
        self.rng = random.Random(seed)
        self.policy = FakePolicy(self.rng)
        self.episode = Episode("e", CHAT, wants_routes=wants_routes, realign_tokens=realign_tokens)
        self.log: list[Asked | Got] = []
        self.running: list[tuple[Asked, Chat]] = []
        self.chats: list[Chat] = []

    def play(self, num_steps: int) -> None:
        self.chats.append(self.opening())
        for _ in range(num_steps):
            chat = self.rng.choice(self.chats)
            self.step(chat)
            if self.rng.random() < 0.85:
                self.finish()
        self.finish()

    def opening(self) -> Chat:
        rng = self.rng
        messages = [ChatMessage(role=ChatRole.SYSTEM, text=rng.choice(("You are one.", "You are two.")))] if rng.random() < 0.7 else []
        return Chat(messages=[*messages, self.user()], tools=rng.choice(((), TOOLS)))

    def user(self) -> ChatMessage:
        return ChatMessage(role=ChatRole.USER, text="".join(self.rng.choices(PIECES, k=3)))

    def step(self, chat: Chat) -> None:
        """What an agent does next with one of its conversations."""
        rng, messages = self.rng, chat.messages
        if chat.options and rng.random() < 0.85:
            messages.append(self.retold(rng.choice(chat.options)))
            chat.options = []
            self.results(chat)
        what = rng.random()
        if what < 0.06:
            # The history is replaced by a summary.
            messages[1:] = [ChatMessage(role=ChatRole.USER, text=f"summary {rng.randint(0, 3)}")]
        elif what < 0.12:
            self.chats.append(self.opening())
        elif what < 0.2 and len(messages) > 2:
            at = rng.randint(1, len(messages))
            self.chats.append(Chat(messages=[*messages[:at], self.user()], tools=chat.tools))
        elif what < 0.25:
            at = rng.randrange(len(messages))
            messages[at] = msgspec.structs.replace(messages[at], text=messages[at].text + "!")
        elif what < 0.28:
            messages.append(ChatMessage(role=ChatRole.ASSISTANT, text="I said this myself."))
            messages.append(self.user())
        elif what < 0.3 and messages[-1].role is not ChatRole.ASSISTANT:
            messages.append(ChatMessage(role=ChatRole.ASSISTANT, text="It begins"))
        elif what < 0.32:
            chat.tools = rng.choice(((), TOOLS))
        self.ask(chat)

    def results(self, chat: Chat) -> None:
        """Tools answer calls; without calls the user speaks, or nobody does."""
        last = chat.messages[-1]
        for call in last.calls:
            chat.messages.append(ChatMessage(role=ChatRole.TOOL, text=self.rng.choice(PIECES), call_id=call.id, name=call.name))
        if not last.calls and self.rng.random() < 0.95:
            chat.messages.append(self.user())

    def retold(self, answer: ChatMessage) -> ChatMessage:
        """An answer as this client puts it into its next request."""
        rng, replace = self.rng, msgspec.structs.replace
        if rng.random() < 0.4:
            answer = replace(answer, reasoning="", text=answer.text.strip())
        if rng.random() < 0.3:
            calls = tuple(replace(c, arguments=json.dumps(json.loads(c.arguments), indent=1)) for c in answer.calls)
            answer = replace(answer, calls=calls)
        if rng.random() < 0.15:
            answer = replace(answer, calls=tuple(replace(c, id=f"mine_{rng.randint(0, 99)}") for c in answer.calls))
        how = rng.random()
        if how < 0.05:
            answer = replace(answer, text=answer.text[: rng.randint(0, len(answer.text))])
        elif how < 0.1:
            answer = replace(answer, text=answer.text + " and more")
        elif how < 0.12:
            answer = replace(answer, text="Something else.", calls=())
        elif how < 0.14:
            answer = replace(answer, calls=(*answer.calls, Call(id="mine", name="read", arguments="{}")))
        return answer

    def ask(self, chat: Chat) -> None:
        asked = Asked(messages=tuple(chat.messages), tools=chat.tools, placement=self.episode.place(chat.messages, chat.tools))
        self.log.append(asked)
        self.running.append((asked, chat))

    def finish(self) -> None:
        """Requests that are on their way are answered, in any order."""
        rng = self.rng
        rng.shuffle(self.running)
        for asked, chat in self.running:
            if rng.random() < 0.08:
                self.episode.abandon(asked.placement, 3)
                continue
            for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
                message = self.answer(asked)
                if rng.random() < 0.9:
                    chat.options.append(message)
        self.running.clear()

    def answer(self, asked: Asked) -> ChatMessage:
        said = self.policy.sample(asked.placement)
        stops = (" is", "x =") if self.rng.random() < 0.2 else ()
        reader = CHAT.reader(stops=stops, has_tools=True, mint=lambda: f"call_{self.rng.getrandbits(96):024x}")
        reader.feed(said.reply.token_ids[: said.num_used], last=True)
        if reader.stopped:
            said = self.policy.said[-1] = msgspec.structs.replace(said, num_used=reader.num_used)
        message = msgspec.structs.replace(reader.message(), reasoning=self.rng.choice(("", "hm")))
        self.episode.add(asked.placement, said.reply, message, num_used=said.num_used)
        self.log.append(Got(asked=asked, said=said, message=message))
        return message


def check_windows(windows: Sequence[Window], said: Sequence[Said], *, has_routes: bool) -> set[int]:
    """What must hold whatever agents do; returns the numbers of the trained tokens."""
    by_number = {s.first + i: (s, i) for s in said for i in range(len(s.reply.token_ids))}
    trained: set[int] = set()
    for index, window in enumerate(windows):
        window.check()
        tokens, versions = window.tokens_T.tolist(), window.versions_T.tolist()
        assert window.parent is None or 0 <= window.parent < index
        numbers = (-window.logprobs_T).astype(int).tolist()
        seen: set[int] = set()
        for at in np.flatnonzero(window.sampled_T).tolist():
            number = numbers[at]
            answer, i = by_number[number]
            assert number not in trained, "a token is trained twice"
            trained.add(number)
            assert i < answer.num_used and not any(a <= i < b for a, b in answer.reply.forced)
            assert (tokens[at], versions[at]) == (answer.reply.token_ids[i], int(answer.reply.versions_T[i]))
            if answer.first not in seen:
                seen.add(answer.first)
                assert tokens[: at - i] == answer.prompt, "the tokens before it are not what it was sampled on"
            assert tokens[at - i : at] == answer.reply.token_ids[:i]
            names = [s.replica for s in window.sources if s.start <= at < s.end]
            assert not answer.reply.replica or names == [answer.reply.replica]
            is_stale = answer.reply.stale_from is not None and i >= answer.reply.stale_from
            assert any(a <= at < b for a, b in window.stale) == is_stale
        is_context = window.sampled_T == 0
        assert (window.logprobs_T[is_context] == 0).all() and (window.versions_T[is_context] == -1).all()
        if window.routes:
            ids = RouteRecord.from_bytes(window.routes).ids_TLK()
            known = ids[:, 1, 0] >= 0
            assert has_routes and len(ids) == len(tokens) and (ids[known] == experts_of(tokens, 0)[known]).all()
    return trained
