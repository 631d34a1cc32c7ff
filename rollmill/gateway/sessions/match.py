"""Recognises what was sampled in what a client repeats, by looking keys up, never by comparing conversations one by one; pure.

The deepest answer wins, exact keys before loose ones, and of answers with equal keys the newest is meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from rollmill.chat.messages import ChatMessage, ChatRole
from rollmill.gateway.sessions.chain import Key, Keys
from rollmill.gateway.sessions.graph import Prompt, Sample

# Newest candidates looked at when ids disagree: clients that rewrite ids and repeat one request more often than this get a branch.
MAX_CANDIDATES = 8


N = TypeVar("N", Prompt, Sample)


class Index(Generic[N]):
    """Nodes by their keys."""

    def __init__(self) -> None:
        self._exact: dict[bytes, N] = {}
        self._loose: dict[bytes, list[N]] = {}

    def put(self, key: Key, node: N) -> None:
        self._exact[key.exact] = node
        known = self._loose.setdefault(key.loose, [])
        if not known or known[-1] is not node:
            known.append(node)

    def exact(self, key: Key) -> N | None:
        return self._exact.get(key.exact)

    def below(self, key: Key, sample: Sample | None) -> N | None:
        """The newest with this loose key that comes after `sample`: where ids named an answer, others that say the same are not meant."""
        for node in reversed(self._loose.get(key.loose, [])[-MAX_CANDIDATES:]):
            if sample is None or _is_below(node, sample):
                return node
        return None


def _is_below(node: Prompt | Sample, sample: Sample) -> bool:
    """Answers that say the same under the same ids are one and the same to a client."""
    at = node.parent if isinstance(node, Prompt) else node
    while at is not None and at is not sample and at.known_as != sample.known_as:
        at = at.prompt.parent
    return at is not None


class Match(msgspec.Struct, frozen=True, kw_only=True):
    """Where a conversation belongs."""

    prompt: Prompt | None = None
    """The same request was made before."""
    sample: Sample | None = None
    """The deepest answer that the conversation repeats."""
    num_messages: int = 0
    """Messages up to and including that answer."""
    drifted: Prompt | None = None
    """The request before the last assistant message of the conversation, when no answer to it reads like that message."""
    num_before: int = 0
    """Messages before that assistant message."""


class Book:
    """The index of an episode's requests and answers."""

    def __init__(self) -> None:
        self.keys = Keys()
        self._prompts: Index[Prompt] = Index()
        self._samples: Index[Sample] = Index()

    def put(self, key: Key, sample: Sample, begun: tuple[Key, str] | None = None) -> None:
        """`key` is that of the request, as the client put it. `begun`: it ended with the beginning of the answer, after another key."""
        whole_key = self.keys.after(key, sample.message)
        sample.known_as = whole_key.exact
        self._prompts.put(key, sample.prompt)
        self._samples.put(whole_key, sample)
        if begun is not None:
            before, text = begun
            whole = msgspec.structs.replace(sample.message, text=text + sample.message.text)
            self._samples.put(self.keys.after(before, whole), sample)

    def prompt(self, key: Key) -> Prompt | None:
        """The same request, word for word."""
        return self._prompts.exact(key)

    def find(self, keys: Sequence[Key], messages: Sequence[ChatMessage]) -> Match:
        """Look `messages` up; `keys` is their chain."""
        at = [i for i in range(len(messages), 0, -1) if messages[i - 1].role is ChatRole.ASSISTANT]
        sample, num = None, 0
        for i in at:
            if (sample := self._samples.exact(keys[i])) is not None:
                num = i
                break
        prompt = self._prompts.exact(keys[-1]) or self._prompts.below(keys[-1], sample)
        if prompt is not None:
            return Match(prompt=prompt)
        for i in at:
            if i <= num:
                break
            if (other := self._samples.below(keys[i], sample)) is not None:
                sample, num = other, i
                break
        drifted = None
        if at and at[0] > num:
            before = keys[at[0] - 1]
            drifted = self._prompts.exact(before) or self._prompts.below(before, sample)
        return Match(sample=sample, num_messages=num, drifted=drifted, num_before=at[0] - 1 if drifted is not None else 0)
