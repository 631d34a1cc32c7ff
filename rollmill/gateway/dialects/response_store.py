"""Answers that a client may go on from by their id alone, in bounded memory; those unused for longest go first. Knows no wire format.

Ids hold 74 random bits, so that knowing one is the right to use it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from rollmill.chat.messages import ChatMessage, Tool

MAX_RESPONSES = 16384
MAX_STORE_BYTES = 128 * 2**20


class Turn:
    """What one request and its answer added to a conversation, and the turn before it. Conversations share their beginnings."""

    __slots__ = ("new", "num_bytes", "previous")

    def __init__(self, previous: Turn | None, new: tuple[ChatMessage, ...]) -> None:
        self.previous, self.new = previous, new
        own = sum(64 + len(m.text) + len(m.reasoning) + sum(len(c.arguments) for c in m.calls) for m in new)
        # Of the whole conversation: a turn keeps all before it alive, so this is what it may cost.
        self.num_bytes: int = own + (previous.num_bytes if previous is not None else 0)

    def messages(self) -> list[ChatMessage]:
        """The conversation up to and with this answer, without its head."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.previous
        return [m for turn in reversed(turns) for m in turn.new]


class StoredResponse(NamedTuple):
    turn: Turn
    body: bytes = b""
    """As it was told to the client, where it may be asked for again."""
    head: tuple[ChatMessage, ...] = ()
    """What stands before the conversation, where the dialect carries it over."""
    tools: tuple[Tool, ...] = ()

    @property
    def num_bytes(self) -> int:
        return self.turn.num_bytes + len(self.body) + sum(len(m.text) for m in self.head) + sum(len(repr(t)) for t in self.tools)


class ResponseStore:
    def __init__(self, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_STORE_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._held: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def put(self, response_id: str, response: StoredResponse) -> None:
        self.drop(response_id)
        self._held[response_id] = response
        self.num_bytes += response.num_bytes
        while len(self._held) > self._max_responses or self.num_bytes > self._max_bytes:
            _, gone = self._held.popitem(last=False)
            self.num_bytes -= gone.num_bytes

    def get(self, response_id: str) -> StoredResponse | None:
        found = self._held.get(response_id)
        if found is not None:
            self._held.move_to_end(response_id)
        return found

    def drop(self, response_id: str) -> bool:
        """False when it was not there."""
        gone = self._held.pop(response_id, None)
        if gone is not None:
            self.num_bytes -= gone.num_bytes
        return gone is not None
