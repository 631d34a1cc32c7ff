"""One model call as a row of `calls.db` and back, exactly; no I/O. The format is described in docs/formats/calls.md.

A call repeats the conversation before it, so a row holds what is new since an earlier row of its episode, its `base`: token ids after the
ids they share, and the request compressed with the base's request at hand. An episode's rows then cost what was said, not its square.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import zstandard

from rollmill.chat.messages import ChatMessage
from rollmill.engine.protocol import GenerateReply
from rollmill.gateway.call import ChatCall, Finish, TextCall

CALLS_SCHEMA = 1
MAX_CHAIN = 64
"""Rows that lean on one another before one stands alone: what is lost with a damaged row is bounded, and so is what reading one costs."""
BASES_BYTES = 64 * 2**20
NUM_BASES = 4
"""Recent rows of an episode that a new one may lean on: its main conversation and the helpers beside it."""
_LEVEL = 3


def new_call_id(now: float | None = None) -> str:
    """A UUIDv7 as 32 hex digits: milliseconds first, so that ids sort by time; 74 bits are random."""
    millis = int((time.time() if now is None else now) * 1000)
    bits = int.from_bytes(os.urandom(10), "big")
    value = (millis & (1 << 48) - 1) << 80 | 7 << 76 | (bits >> 68) << 64 | 2 << 62 | bits & (1 << 62) - 1
    return f"{value:032x}"


class RecordedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One finished choice."""

    prompt: int = 0
    """Which of the call's prompts it answers."""
    message: ChatMessage
    """As the client was told."""
    finish: Finish
    stop_string: str | None = None
    num_used: int | None = None
    """Leading sampled ids that count; None: all."""
    reply: GenerateReply
    """As the replica sent it."""


class CallRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One call, as it ended."""

    id: str
    """UUIDv7, 32 hex digits."""
    episode: str = ""
    at: float
    """Unix seconds of its arrival."""
    dialect: str
    model: str = ""
    """As the client named it."""
    key: str = ""
    """Name of the API key."""
    status: int = 200
    """HTTP status; 499 when the client left, whatever the status line said."""
    error: str = ""
    call: ChatCall | TextCall | None = None
    """None when the request could not be read."""
    kinds: list[str] = []
    """Per prompt: where the episode placed it (`first`, `append`, `realign`, `fork`)."""
    prompts: list[list[int]] = []
    """Token ids as they went to the replica."""
    choices: list[RecordedChoice] = []
    """Prompt by prompt; fewer than were asked for when some did not end."""
    num_abandoned: int = 0
    """Sampled tokens that the client did not wait for."""
    total_s: float = 0.0
    overhead_s: float = 0.0
    """The part of it that the gateway itself took."""


class EpisodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An episode was opened or closed."""

    key: str
    at: float
    is_open: bool
    options: dict[str, Any] = {}
    """Keyword arguments of `Episodes.open`, as JSON holds them; of the opening alone."""


class Row(NamedTuple):
    """The columns of `calls`, in order."""

    number: int
    id: str
    episode: str
    at: float
    dialect: str
    model: str
    key: str
    status: int
    error: str
    kinds: str
    """Comma between them."""
    num_prompt: int
    num_sampled: int
    num_abandoned: int
    min_version: int | None
    max_version: int | None
    total_s: float
    overhead_s: float
    base: int | None
    """`number` of the row it leans on."""
    request: bytes
    """zstd of JSON: {"chat": ChatCall} or {"text": TextCall}; empty when the request could not be read."""
    response: bytes
    """zstd of JSON: a list of {prompt, message, finish, stop_string, num_used}."""
    tokens: bytes
    """zstd of MessagePack: {prompts: [[num_shared, int32 bytes]...], replies: [GenerateReply...]}."""


class Base(NamedTuple):
    """What later rows of the episode can lean on."""

    number: int
    ids: np.ndarray
    """int32: the first prompt and, after it, the first choice."""
    request: bytes
    num_before: int
    """Rows that it leans on itself, directly or not."""

    @property
    def num_bytes(self) -> int:
        return self.ids.nbytes + len(self.request)


class _Wire(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    chat: ChatCall | None = None
    text: TextCall | None = None


class _Said(msgspec.Struct, frozen=True, kw_only=True):
    prompt: int = 0
    message: ChatMessage
    finish: Finish
    stop_string: str | None = None
    num_used: int | None = None


class _Tokens(msgspec.Struct, frozen=True, kw_only=True):
    prompts: list[tuple[int, bytes]]
    replies: list[GenerateReply]


class RowEncoder:
    """Records to rows, in order; keeps the recent rows that others may lean on, in bounded memory."""

    def __init__(self) -> None:
        self._bases: OrderedDict[int, Base] = OrderedDict()
        self._of: dict[str, list[int]] = {}
        self._episodes: dict[int, str] = {}
        self._num_bytes = 0

    def encode(self, number: int, record: CallRecord, *, is_there: Callable[[int], bool]) -> Row:
        """`is_there`: whether a row is still in the file."""
        prompts = [np.asarray(p, np.int32) for p in record.prompts]
        base = self._find(record.episode, prompts[0], is_there) if prompts else None
        request = _request_json(record.call) if record.call is not None else b""
        spans = [s for c in record.choices for s in c.reply.spans]
        said = [
            _Said(prompt=c.prompt, message=c.message, finish=c.finish, stop_string=c.stop_string, num_used=c.num_used)
            for c in record.choices
        ]
        told = [_told(p, base) for p in prompts]
        tokens = _Tokens(prompts=told, replies=[c.reply for c in record.choices])
        if record.episode and prompts:
            sampled = [np.asarray(record.choices[0].reply.token_ids, np.int32)] if record.choices else []
            num_before = base.num_before + 1 if base is not None else 0
            self._keep(record.episode, Base(number, np.concatenate([prompts[0], *sampled]), request, num_before))
        return Row(
            number=number,
            id=record.id,
            episode=record.episode,
            at=record.at,
            dialect=record.dialect,
            model=record.model,
            key=record.key,
            status=record.status,
            error=record.error,
            kinds=",".join(record.kinds),
            num_prompt=sum(len(p) for p in prompts),
            num_sampled=sum(len(c.reply.token_ids) for c in record.choices),
            num_abandoned=record.num_abandoned,
            min_version=min((s.version for s in spans), default=None),
            max_version=max((s.version for s in spans), default=None),
            total_s=record.total_s,
            overhead_s=record.overhead_s,
            base=base.number if base is not None else None,
            request=_packed(request, base) if request else b"",
            response=_packed(msgspec.json.encode(said), None),
            tokens=_packed(msgspec.msgpack.encode(tokens), None),
        )

    def _find(self, episode: str, ids: np.ndarray, is_there: Callable[[int], bool]) -> Base | None:
        """The recent row of the episode that shares most."""
        best, num_best = None, 0
        for number in self._of.get(episode, ()):
            base = self._bases[number]
            num = _num_shared(base.ids, ids)
            if num > num_best and base.num_before < MAX_CHAIN:
                best, num_best = base, num
        return best if best is not None and is_there(best.number) else None

    def _keep(self, episode: str, base: Base) -> None:
        self._bases[base.number], self._episodes[base.number] = base, episode
        recent = self._of.setdefault(episode, [])
        recent.append(base.number)
        self._num_bytes += base.num_bytes
        if len(recent) > NUM_BASES:
            self._forget(recent[0])
        while self._num_bytes > BASES_BYTES:
            self._forget(next(iter(self._bases)))

    def _forget(self, number: int) -> None:
        self._num_bytes -= self._bases.pop(number).num_bytes
        episode = self._episodes.pop(number)
        self._of[episode].remove(number)
        if not self._of[episode]:
            del self._of[episode]


def decode_row(row: Row, bases: Mapping[int, Base]) -> tuple[CallRecord, Base]:
    """The record, and what rows after it may lean on. `bases` holds the rows of its episode before it."""
    base = bases[row.base] if row.base is not None else None
    request = _unpacked(row.request, base) if row.request else b""
    wire = msgspec.json.decode(request, type=_Wire) if request else _Wire()
    said = msgspec.json.decode(_unpacked(row.response, None), type=list[_Said])
    tokens = msgspec.msgpack.decode(_unpacked(row.tokens, None), type=_Tokens)
    prompts = [_retold(num, rest, base) for num, rest in tokens.prompts]
    replies = tokens.replies
    record = CallRecord(
        id=row.id,
        episode=row.episode,
        at=row.at,
        dialect=row.dialect,
        model=row.model,
        key=row.key,
        status=row.status,
        error=row.error,
        call=wire.chat or wire.text,
        kinds=row.kinds.split(",") if row.kinds else [],
        prompts=[p.tolist() for p in prompts],
        choices=[
            RecordedChoice(prompt=s.prompt, message=s.message, finish=s.finish, stop_string=s.stop_string, num_used=s.num_used, reply=r)
            for s, r in zip(said, replies, strict=True)
        ],
        num_abandoned=row.num_abandoned,
        total_s=row.total_s,
        overhead_s=row.overhead_s,
    )
    pieces = [*prompts[:1], *([np.asarray(replies[0].token_ids, np.int32)] if replies else [])]
    ids = np.concatenate(pieces) if pieces else np.zeros(0, np.int32)
    return record, Base(row.number, ids, request, base.num_before + 1 if base is not None else 0)


def _request_json(call: ChatCall | TextCall) -> bytes:
    """Dialects may carry more in their calls than a call is; that stays out."""
    kind = ChatCall if isinstance(call, ChatCall) else TextCall
    fields = {name: getattr(call, name) for name in kind.__struct_fields__}
    return msgspec.json.encode({"chat" if kind is ChatCall else "text": fields})


def _num_shared(a: np.ndarray, b: np.ndarray) -> int:
    num = min(len(a), len(b))
    differs = a[:num] != b[:num]
    return int(differs.argmax()) if differs.any() else num


def _told(ids: np.ndarray, base: Base | None) -> tuple[int, bytes]:
    num = _num_shared(base.ids, ids) if base is not None else 0
    return num, ids[num:].astype("<i4").tobytes()


def _retold(num: int, rest: bytes, base: Base | None) -> np.ndarray:
    head = base.ids[:num] if base is not None else np.zeros(0, np.int32)
    assert len(head) == num, f"a row shares {num} tokens with a base of {len(head)}"
    return np.concatenate([head, np.frombuffer(rest, "<i4")])


def _dictionary(base: Base | None) -> zstandard.ZstdCompressionDict | None:
    if base is None or not base.request:
        return None
    return zstandard.ZstdCompressionDict(base.request, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def _packed(body: bytes, base: Base | None) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL, dict_data=_dictionary(base), write_checksum=True).compress(body)


def _unpacked(body: bytes, base: Base | None) -> bytes:
    return zstandard.ZstdDecompressor(dict_data=_dictionary(base)).decompress(body)
