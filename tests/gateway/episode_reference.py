"""The rules of an episode's graph once more, slow and simple: every request is compared with everything said before, word for word."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import msgspec
from episode_world import Asked, Got
from gateway_fakes import CHAT, TOKENIZER

from rollmill.chat.messages import Call, ChatMessage, ChatRole, Tool

Messages = tuple[ChatMessage, ...]


class Answer(msgspec.Struct, kw_only=True, eq=False):
    asked: Asked
    ids: list[int]
    first: int
    """Number of its first token."""
    forced: list[tuple[int, int]]
    message: ChatMessage
    known_as: list[Messages]
    """Conversations that end with it, as its client may put them."""
    group: Group


class Group(msgspec.Struct, kw_only=True, eq=False):
    """One request's place: what it goes on from, and the answers to it, however often it was made."""

    parent: Answer | None
    num_kept: int
    context: list[int]
    answers: list[Answer] = []

    def prompt(self) -> list[int]:
        if self.parent is None:
            return self.context
        return self.parent.group.prompt() + self.parent.ids[: self.num_kept] + self.context


def value(arguments: str) -> object:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def is_same_call(a: Call, b: Call, strict: bool) -> bool:
    return a.name == b.name and value(a.arguments) == value(b.arguments) and (not strict or a.id == b.id)


def is_same(a: ChatMessage, b: ChatMessage, strict: bool) -> bool:
    if a.role is not b.role or len(a.calls) != len(b.calls) or (strict and a.call_id != b.call_id):
        return False
    texts = (a.text.strip(), b.text.strip()) if a.role is ChatRole.ASSISTANT else (a.text, b.text)
    return texts[0] == texts[1] and all(is_same_call(x, y, strict) for x, y in zip(a.calls, b.calls, strict=True))


def are_same(a: Messages, b: Messages, strict: bool) -> bool:
    return len(a) == len(b) and all(is_same(x, y, strict) for x, y in zip(a, b, strict=True))


def is_one(a: Answer, b: Answer) -> bool:
    """Whether a client can tell them apart."""
    return a is b or (a.asked.tools == b.asked.tools and are_same(a.known_as[0], b.known_as[0], strict=True))


def line(answer: Answer | None) -> Iterator[Answer]:
    while answer is not None:
        yield answer
        answer = answer.group.parent


class Reference:
    """Reads the log of a world."""

    def __init__(self, *, realign_tokens: int) -> None:
        self.realign_tokens = realign_tokens
        self.answers: list[Answer] = []
        self.places: dict[int, Group] = {}
        self.calls: dict[int, int] = {}
        self.followed: set[int] = set()

    def read(self, log: Sequence[Asked | Got]) -> None:
        for event in log:
            if isinstance(event, Asked):
                group = self.place(event.messages, event.tools)
                assert group.prompt() == event.placement.prompt_ids
                self.places[id(event)], self.calls[id(event)] = group, len(self.calls)
                if group.parent is not None:
                    self.followed.add(id(group.parent))
            else:
                self.add(event)

    def add(self, got: Got) -> None:
        group, messages = self.places[id(got.asked)], got.asked.messages
        if not group.answers:
            for other in self.newest(messages, got.asked.tools, strict=True):
                if (other.group.parent, other.group.num_kept, other.group.context) == (group.parent, group.num_kept, group.context):
                    group = other.group
                break
        known_as = [(*messages, got.message)]
        if messages[-1].role is ChatRole.ASSISTANT and not messages[-1].calls:
            merged = msgspec.structs.replace(got.message, text=messages[-1].text + got.message.text)
            known_as.append((*messages[:-1], merged))
        reply = got.said.reply
        answer = Answer(
            asked=got.asked,
            ids=reply.token_ids[: got.said.num_used],
            first=got.said.first,
            forced=reply.forced,
            message=got.message,
            known_as=known_as,
            group=group,
        )
        group.answers.append(answer)
        self.answers.append(answer)

    def newest(self, messages: Messages, tools: tuple[Tool, ...], *, strict: bool) -> Iterator[Answer]:
        """Answers to this request, the last one first."""
        for answer in reversed(self.answers):
            if answer.asked.tools == tools and are_same(answer.asked.messages, messages, strict):
                yield answer

    def known(self, messages: Messages, tools: tuple[Tool, ...], *, strict: bool) -> Iterator[Answer]:
        """Answers that this conversation ends with, the last one first."""
        for answer in reversed(self.answers):
            if answer.asked.tools == tools and any(are_same(k, messages, strict) for k in answer.known_as):
                yield answer

    def place(self, messages: Messages, tools: tuple[Tool, ...]) -> Group:
        at, depth = None, 0
        for n in range(len(messages), 0, -1):
            at = next(self.known(messages[:n], tools, strict=True), None)
            if at is not None:
                depth = n
                break
        named = at
        for strict in (True, False):
            for answer in self.newest(messages, tools, strict=strict):
                if strict or named is None or any(is_one(a, named) for a in line(answer.group.parent)):
                    return answer.group
        for n in range(len(messages), depth, -1):
            found = next(
                (a for a in self.known(messages[:n], tools, strict=False) if named is None or any(is_one(x, named) for x in line(a))), None
            )
            if found is not None:
                at, depth = found, n
                break
        spoken = [n for n, m in enumerate(messages) if m.role is ChatRole.ASSISTANT]
        is_begun = spoken and spoken[-1] == len(messages) - 1 and not messages[-1].calls
        if spoken and spoken[-1] >= depth and not is_begun:
            group = self.realigned(messages, tools, spoken[-1], at)
            if group is not None:
                return group
        if at is None:
            return Group(parent=None, num_kept=0, context=CHAT.first(messages, tools))
        if is_begun and depth == len(messages):
            return Group(parent=at, num_kept=len(at.ids) - (bool(at.ids) and at.ids[-1] in TOKENIZER.stop_ids), context=[])
        context = CHAT.after(messages[: depth - 1], at.ids[-1] if at.ids else None, messages[depth:], tools)
        return Group(parent=at, num_kept=len(at.ids), context=context)

    def realigned(self, messages: Messages, tools: tuple[Tool, ...], n: int, at: Answer | None) -> Group | None:
        before = next(self.newest(messages[:n], tools, strict=True), None)
        if before is None:
            loose = self.newest(messages[:n], tools, strict=False)
            before = next((a for a in loose if at is None or any(is_one(x, at) for x in line(a.group.parent))), None)
        if before is None:
            return None
        said = messages[n]

        def score(answer: Answer) -> tuple[bool, int]:
            shared = 0
            while shared < min(len(answer.message.text), len(said.text)) and answer.message.text[shared] == said.text[shared]:
                shared += 1
            return bool({c.id for c in answer.message.calls} & {c.id for c in said.calls}), shared

        best = max(reversed(before.group.answers), key=score)
        num, rest = CHAT.realign(messages[:n], best.ids, said, messages[n + 1 :], tools)
        whole = best.ids[:num] + rest
        num = next((i for i, (a, b) in enumerate(zip(best.ids, whole, strict=False)) if a != b), min(len(best.ids), len(whole)))
        return Group(parent=best, num_kept=num, context=whole[num:]) if num else None

    def counts(self, answer: Answer) -> bool:
        others = answer.group.answers
        if any(id(a) in self.followed for a in others):
            return id(answer) in self.followed
        return self.calls[id(answer.asked)] == max(self.calls[id(a.asked)] for a in others)

    def windows(self) -> list[list[tuple[int, int]]]:
        """Of every window its tokens: (id, number of the trained token or 0)."""
        groups = {id(a.group): a.group for a in self.answers}
        done: set[int] = set()
        found = []
        for leaf in self.answers:
            kept = [g.num_kept for g in groups.values() if g.parent is leaf]
            if not self.counts(leaf) or (kept and len(leaf.ids) - max(kept) <= self.realign_tokens):
                continue
            window, held = list[tuple[int, int]](), len(leaf.ids)
            for answer in line(leaf):
                part = [(i, 0) for i in answer.group.context]
                for n in range(held):
                    number = answer.first + n
                    is_new = number not in done and not any(a <= n < b for a, b in answer.forced)
                    part.append((answer.ids[n], number if is_new else 0))
                window, held = part + window, answer.group.num_kept
            if any(number for _, number in window):
                done |= {number for _, number in window}
                found.append(window)
        return found

    def num_orphans(self) -> int:
        return sum(not self.counts(a) for a in self.answers)
