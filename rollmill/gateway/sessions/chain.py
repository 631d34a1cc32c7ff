"""Keys of conversations: what two requests must have in common for one to be the beginning of the other; pure."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import msgspec
from blake3 import blake3

from rollmill.chat.messages import ChatMessage, ChatRole, Tool
from rollmill.gateway.halves import without_halves

MAX_REMEMBERED = 16_384


class Key(msgspec.Struct, frozen=True, array_like=True):
    """What a conversation up to some message is known by.

    The exact key holds the ids of tool calls, which are minted here, so that it names one answer among answers that say the same.
    The loose one leaves them out, since some clients rewrite them.
    """

    exact: bytes
    loose: bytes


class Keys:
    """Makes keys. Clients repeat their whole conversation with every request, so what a message says is worked out once."""

    def __init__(self) -> None:
        self._said: dict[ChatMessage, tuple[bytes, bytes]] = {}

    def chain(self, tools: Sequence[Tool], messages: Sequence[ChatMessage]) -> list[Key]:
        """Of the conversation's prefixes, the empty one first. Tools are part of what the model is told, so they come before all else."""
        start = _digest(msgspec.msgpack.encode([t.as_template() for t in tools], order="deterministic"))
        keys = [Key(start, start)]
        for message in messages:
            keys.append(self.after(keys[-1], message))
        return keys

    def after(self, key: Key, message: ChatMessage) -> Key:
        """Of the conversation that goes on with this message."""
        said = self._said.get(message)
        if said is None:
            if len(self._said) >= MAX_REMEMBERED:
                self._said.clear()
            said = self._said[message] = _said(message)
        words, ids = said
        exact = _digest(key.exact + words + ids)
        return Key(exact, exact if key.exact == key.loose and not ids else _digest(key.loose + words))


def _said(message: ChatMessage) -> tuple[bytes, bytes]:
    """What a message says, and the ids in it."""
    if message.role is ChatRole.ASSISTANT:
        message = msgspec.structs.replace(message, text=_plain(message.text))
    if not message.calls and not message.call_id:
        return _digest(message.key()), b""
    calls = tuple(msgspec.structs.replace(c, id="", arguments=_readable(c.arguments)) for c in message.calls)
    words = msgspec.structs.replace(message, calls=calls, call_id="").key()
    return _digest(words), _digest(msgspec.msgpack.encode(([c.id for c in message.calls], message.call_id)))


def _plain(text: str) -> str:
    """Clients and what lies between change line ends and how accents are composed; an answer is the same answer nevertheless."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def _readable(arguments: str) -> str:
    """Half a character that was sampled does not come back from every client."""
    return without_halves(arguments.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogatepass")


def _digest(data: bytes) -> bytes:
    return blake3(data).digest(16)
