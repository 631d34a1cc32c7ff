"""Keys of conversations: what two requests must have in common for one to be the beginning of the other; pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from blake3 import blake3

from rollmill.chat.messages import ChatMessage, Tool


class Key(msgspec.Struct, frozen=True, array_like=True):
    """What a conversation up to some message is known by.

    The exact key holds the ids of tool calls, which are minted here, so that it names one answer among answers that say the same.
    The loose one leaves them out, since some clients rewrite them.
    """

    exact: bytes
    loose: bytes

    def then(self, message: ChatMessage) -> Key:
        said = message.key()
        exact = _hash(self.exact, said)
        if message.calls or message.call_id:
            calls = tuple(msgspec.structs.replace(c, id="") for c in message.calls)
            said = msgspec.structs.replace(message, calls=calls, call_id="").key()
        elif self.exact == self.loose:
            return Key(exact, exact)
        return Key(exact, _hash(self.loose, said))


def chain(tools: Sequence[Tool], messages: Sequence[ChatMessage]) -> list[Key]:
    """Keys of the conversation's prefixes, the empty one first. Tools are part of what the model is told, so they come before all else."""
    start = blake3(msgspec.msgpack.encode([t.as_template() for t in tools], order="deterministic")).digest(16)
    keys = [Key(start, start)]
    for message in messages:
        keys.append(keys[-1].then(message))
    return keys


def _hash(before: bytes, said: bytes) -> bytes:
    return blake3(before + said).digest(16)
