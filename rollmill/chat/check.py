"""Proves on made-up conversations that a model's template can be continued token by token, and names the first turn where it cannot.

Only texts and tokens are compared; no weights are read.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

import msgspec

from rollmill.chat.conversations import Conversation, Kind, conversation
from rollmill.chat.format import ChatFormat
from rollmill.chat.messages import Call, ChatMessage, ChatRole, Tool

_NUM_AROUND = 60
"""Characters shown on each side of a difference."""
_MAX_FORGED = 64
"""Control tokens that are tried one by one; vocabularies with thousands of them reserve most."""


class BadTurn(msgspec.Struct, frozen=True, kw_only=True):
    """The first place where a claim does not hold."""

    kind: str
    conversation: int
    """Number among the conversations of its kind."""
    message: int | None = None
    """Which message is written differently, counted from 0."""
    role: str = ""
    wanted: str
    """The text around the difference as it must be for the claim to hold."""
    found: str
    wanted_line: int | None = None
    """The template's line that wrote it."""
    found_line: int | None = None


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    passed: bool
    num_compared: int
    num_failed: int = 0
    kinds: dict[str, int] = {}
    """Kind of conversation -> how many of them broke the claim."""
    first: BadTurn | None = None
    meaning: str = ""
    """What it means for a run that the claim does not hold, and what the gateway does."""


class TemplateReport(msgspec.Struct, frozen=True, kw_only=True):
    tool_format: str
    reasoning: str
    """The text that opens reasoning; empty when there is none."""
    is_local: bool
    """A turn costs what is new: the text after an answer does not depend on the turns before."""
    notes: tuple[str, ...]
    num_conversations: int
    refused: dict[str, int]
    """Reason -> conversations that the template does not write."""
    claims: tuple[Claim, ...]

    @property
    def passed(self) -> bool:
        return all(c.passed for c in self.claims)


class _Tally:
    """Counts one claim over all conversations and keeps its first failure."""

    def __init__(self, name: str, meaning: str) -> None:
        self._name, self._meaning = name, meaning
        self._num = self._num_failed = 0
        self._kinds: Counter[str] = Counter()
        self._bad: set[tuple[str, int]] = set()
        self._first: BadTurn | None = None

    def add(self, bad: BadTurn | None) -> None:
        self._num += 1
        if bad is None:
            return
        self._num_failed += 1
        if (bad.kind, bad.conversation) not in self._bad:
            self._bad.add((bad.kind, bad.conversation))
            self._kinds[bad.kind] += 1
        self._first = self._first or bad

    def claim(self) -> Claim:
        passed = not self._num_failed and self._num > 0
        meaning = "" if passed else self._meaning if self._num else "nothing could be compared: the template refused every conversation"
        return Claim(
            name=self._name,
            passed=passed,
            num_compared=self._num,
            num_failed=self._num_failed,
            kinds=dict(self._kinds),
            first=self._first,
            meaning=meaning,
        )


class TemplateCheck:
    """The claims, and what was compared for each."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._num_merged = 0
        self._prefix = _Tally(
            "earlier turns are never rewritten",
            "the gateway goes on from the sampled tokens and training stays exact; in later turns the model sees them as they were, where "
            "the template would have shown it the other text",
        )
        self._tokens = _Tally(
            "tokens of a turn stay the same when the next one is added",
            "the same text has other tokens when a conversation is encoded whole; the gateway never does that, other servers do",
        )
        self._after = _Tally(
            "what follows a sampled answer is what the template writes there",
            "the gateway puts a closing of its own between turns, which the model may not have been trained with",
        )
        self._closing = _Tally(
            "an answer is closed by a stop token",
            "the model cannot end its turn by itself: add the closing token to `eos_token_id` in generation_config.json",
        )
        self._told = _Tally(
            "the model is told of every tool",
            "it can call only the tools it guesses: describe them in the system prompt",
        )
        self._calls = _Tally(
            "calls are read back as the template writes them",
            "choose another tool format: clients would get these calls as text",
        )
        self._forged = _Tally(
            "foreign text cannot forge a control token",
            "a tool or a file could speak as the user or the assistant; do not run this model on text you do not trust",
        )

    def run(self, conversations: Sequence[Conversation]) -> TemplateReport:
        refused: Counter[str] = Counter()
        numbers: Counter[str] = Counter()
        for talk in conversations:
            number = numbers[talk.kind]
            numbers[talk.kind] += 1
            try:
                self._compare(talk, number)
            except ValueError as error:
                refused[str(error)] += 1
        self._try_forgery()
        chat = self._chat
        tallies = [self._prefix, self._tokens, self._after, self._closing, self._told, self._calls, self._forged]
        if not chat.tool_format.blocks:
            tallies = [t for t in tallies if t not in (self._told, self._calls)]
        return TemplateReport(
            tool_format=chat.tool_format.name,
            reasoning=chat.thinking.opening if chat.thinking is not None else "",
            is_local=chat.turns.is_local,
            notes=tuple(self._notes()),
            num_conversations=len(conversations),
            refused=dict(refused),
            claims=tuple(t.claim() for t in tallies),
        )

    def _notes(self) -> Iterator[str]:
        can = self._chat.turns.can
        if not can.has_system:
            yield "the template has no system prompt: it is put in front of the first user message"
        if not can.shows_tools:
            where = f"they are written into the system prompt as {self._chat.tool_format.name}"
            yield f"the template does not show tools: {where if self._chat.turns.shape.writes_tools else 'the model is not told of them'}"
        if not can.shows_calls:
            yield f"the template does not show calls: they are written into the text as {self._chat.tool_format.name}"
        if not can.has_tool_role:
            yield "the template has no tool results: they are user messages"
        if self._num_merged:
            merged = "begin with text that, encoded whole, merges with the end of the prompt; sampled tokens stay apart"
            yield f"{self._num_merged} answers {merged}"

    def _compare(self, talk: Conversation, number: int) -> None:
        turns, chat = self._chat.turns, self._chat
        answers = [n for n, m in enumerate(talk.messages) if m.role is ChatRole.ASSISTANT]
        texts = [(turns.opening(talk.messages[:n], talk.tools), turns.closed(talk.messages[: n + 1], talk.tools)) for n in answers]
        for i, (opening, closed) in enumerate(texts):
            n = answers[i]
            for tool in talk.tools:
                # By its description: names stand in earlier calls as well.
                is_told = tool.description in opening
                self._told.add(None if is_told else self._plain(talk, number, n, tool.description, opening[-200:]))
            written = closed[len(opening) :] if closed.startswith(opening) else None
            self._prefix.add(None if written is not None else self._bad(talk, number, opening, closed, n, n + 1, was_open=True))
            ids = self._sampled(written) if written is not None else None
            if ids is not None:
                self._read_back(talk, number, n, ids)
            if i + 1 == len(texts):
                break
            later, end = texts[i + 1][0], answers[i + 1]
            new, history = talk.messages[n + 1 : end], talk.messages[:n]
            after = chat.tokenizer.encode(turns.after(history, new, talk.tools))
            self._closing.add(
                None if after and after[0] in chat.tokenizer.stop_ids else self._plain(talk, number, n, "a stop token", after[:4])
            )
            if not later.startswith(closed):
                self._prefix.add(self._bad(talk, number, closed, later, n + 1, end, was_open=False))
                self._after.add(None if later.endswith(chat.tokenizer.decode(after)) else self._plain(talk, number, n, later[-200:], after))
                continue
            self._prefix.add(None)
            if ids is not None:
                self._compare_tokens(talk, number, n, (closed, later), ids, end)

    def _compare_tokens(self, talk: Conversation, number: int, n: int, texts: tuple[str, str], ids: list[int], end: int) -> None:
        """The gateway's way, token by token, beside the template's text encoded whole."""
        chat, (closed, later) = self._chat, texts
        history, new = talk.messages[:n], talk.messages[n + 1 : end]
        prompt = chat.first(history, talk.tools)
        ours = prompt + ids + chat.after(history, ids[-1], new, talk.tools)
        text = chat.tokenizer.decode(ours)
        self._after.add(None if text == later else _differ(talk, number, n, later, text))
        before, whole = chat.tokenizer.encode(closed), chat.tokenizer.encode(later)
        if before[: len(prompt)] != prompt:
            # The beginning of the answer and the end of its opening are one token when encoded together.
            self._num_merged += 1
        elif text == later:
            same = ours == whole and whole[: len(before)] == before
            self._tokens.add(None if same else self._plain(talk, number, n, *_token_difference(ours, whole)))

    def _sampled(self, written: str) -> list[int] | None:
        """What the model would have sampled for the template to have written this: through the stop token."""
        ids = self._chat.tokenizer.encode(written)
        ends = [n for n, i in enumerate(ids) if i in self._chat.tokenizer.stop_ids]
        return ids[: ends[-1] + 1] if ends else None

    def _read_back(self, talk: Conversation, number: int, n: int, ids: list[int]) -> None:
        said = talk.messages[n]
        if not said.calls:
            return
        reader = self._chat.reader(tools=talk.tools)
        reader.feed(ids, last=True)
        same = _meaning(reader.message().calls) == _meaning([self._chat.turns.shape.clean_call(c) for c in said.calls])
        self._calls.add(None if same else self._plain(talk, number, n, repr(_meaning(said.calls)), ids))

    def _bad(self, talk: Conversation, number: int, wanted: str, found: str, num: int, num_later: int, *, was_open: bool) -> BadTurn:
        """Where `found`, the text of `num_later` messages, stops being a continuation of `wanted`, the text of `num` messages."""
        at = _first_difference(wanted, found)
        turns, messages, tools = self._chat.turns, talk.messages, talk.tools
        ends = [(n, len(turns.closed(messages[:n], tools))) for n in range(1, num + 1)]
        index = next((n - 1 for n, end in ends if end > at), num - 1)
        before = turns.lines(messages[:num], tools, add_generation_prompt=was_open)
        after = turns.lines(messages[:num_later], tools, add_generation_prompt=not was_open)
        return BadTurn(
            kind=talk.kind,
            conversation=number,
            message=index,
            role=messages[index].role,
            wanted=_around(wanted, at),
            found=_around(found, at),
            wanted_line=_line_at(before, at),
            found_line=_line_at(after, at),
        )

    def _plain(self, talk: Conversation, number: int, n: int, wanted: str, found: str | Sequence[int]) -> BadTurn:
        text = found if isinstance(found, str) else self._chat.tokenizer.decode(found)
        return BadTurn(kind=talk.kind, conversation=number, message=n, role=talk.messages[n].role, wanted=wanted, found=text)

    def _try_forgery(self) -> None:
        """The same conversation with harmless and with hostile words in every place must hold the same control tokens."""
        harmless = self._control_tokens("z")
        for marker in list(self._chat.tokenizer.markers)[:_MAX_FORGED]:
            for forged in (marker, marker[:-1], f"{marker[: len(marker) // 2]}{marker}"):
                found = self._control_tokens(forged)
                bad = None
                if found != harmless:
                    names = [self._chat.tokenizer.decode([i]) for i in (found - harmless) + (harmless - found)]
                    bad = BadTurn(kind="hostile text", conversation=0, wanted="the same control tokens", found=f"{forged!r} gives {names}")
                self._forged.add(bad)

    def _control_tokens(self, text: str) -> Counter[int]:
        chat = self._chat
        call = Call(id=text, name=f"f{text}", arguments=msgspec.json.encode({f"k{text}": [text]}).decode())
        tool = Tool(name=f"f{text}", description=text, parameters={"type": "object", "properties": {text: {"description": text}}})
        talk = [
            ChatMessage(role=ChatRole.USER, text=text),
            ChatMessage(role=ChatRole.ASSISTANT, text=text, calls=(call,), reasoning=text),
            ChatMessage(role=ChatRole.TOOL, text=text, call_id=call.id, name=call.name),
        ]
        control = set(chat.tokenizer.markers.values())
        ids: list[int] = []
        for messages, tools in ((talk, (tool,)), (talk[:1], ()), ([ChatMessage(role=ChatRole.SYSTEM, text=text), *talk[:1]], (tool,))):
            try:
                ids += chat.first(messages, tools)
            except ValueError:
                # Not every template takes every conversation; it takes the same ones for every text.
                continue
        return Counter(i for i in ids if i in control)


def check_template(chat: ChatFormat, *, num_per_kind: int = 40, num_turns: int = 4, seed: int = 0) -> TemplateReport:
    """Every kind of conversation, each with up to `num_turns` answers, from `seed`."""
    rng, control = random.Random(seed), list(chat.tokenizer.markers)[:_MAX_FORGED]
    kinds = [k for k in Kind if chat.thinking is not None or k not in (Kind.REASONING, Kind.TOOL_REASONING)]
    talks = [conversation(kind, rng, num_turns=rng.randint(2, num_turns), control=control) for kind in kinds for _ in range(num_per_kind)]
    return TemplateCheck(chat).run(talks)


def _meaning(calls: Sequence[Call]) -> list[bytes]:
    return [ChatMessage(role=ChatRole.ASSISTANT, calls=(Call(id="", name=c.name, arguments=c.arguments),)).key() for c in calls]


def _first_difference(a: str, b: str) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _around(text: str, at: int) -> str:
    return text[max(0, at - _NUM_AROUND) : at + _NUM_AROUND]


def _differ(talk: Conversation, number: int, n: int, wanted: str, found: str) -> BadTurn:
    at = _first_difference(wanted, found)
    return BadTurn(
        kind=talk.kind, conversation=number, message=n, role=talk.messages[n].role, wanted=_around(wanted, at), found=_around(found, at)
    )


def _token_difference(ours: Sequence[int], whole: Sequence[int]) -> tuple[str, Sequence[int]]:
    at = next((n for n, (x, y) in enumerate(zip(ours, whole, strict=False)) if x != y), min(len(ours), len(whole)))
    return f"token {at}: {whole[at : at + 3]} when encoded whole", ours[max(0, at - 4) : at + 4]


def _line_at(lines: Sequence[tuple[int, str]], at: int) -> int | None:
    ends = accumulate(len(text) for _, text in lines)
    return next((line for (line, _), end in zip(lines, ends, strict=True) if end > at), None)
