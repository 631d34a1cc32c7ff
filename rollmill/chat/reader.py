"""Sampled tokens to a message as they arrive: text, reasoning and tool calls set apart.

However the tokens are cut into pieces, the bits join to the same message, and nothing is shown that could still turn out to be the
beginning of a marker. What is made here is for clients and people; nothing is ever trained on it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import cache

import msgspec

from rollmill.chat.call_ids import random_call_id
from rollmill.chat.call_parsers import Block, Draft, Malformed
from rollmill.chat.call_stream import CallStream
from rollmill.chat.json_extent import JsonExtent
from rollmill.chat.messages import Call, ChatMessage, ChatRole, Tool
from rollmill.chat.text_stream import Decoder, TextStream, held_suffix
from rollmill.chat.tool_formats import ToolFormat


class BitKind(StrEnum):
    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"
    """A tool call: `call_id` and `name` are known, `text` is what there is of its arguments."""
    ARGUMENTS = "arguments"
    """More of the arguments of the call that began last."""


class Bit(msgspec.Struct, frozen=True, kw_only=True):
    """What a few more tokens brought to light."""

    kind: BitKind
    text: str = ""
    call_id: str = ""
    name: str = ""


class Thinking(msgspec.Struct, frozen=True):
    """The texts around what a model thinks aloud before it answers."""

    opening: str
    closing: str


class _Part(StrEnum):
    """START -> REASONING -> TEXT <-> CALL; an answer without reasoning goes from START to TEXT, and from CALL to ARGUMENTS to TEXT where
    calls are shown while they are written."""

    START = "start"
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"
    ARGUMENTS = "arguments"


@cache
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


class AnswerReader:
    """Feed it the tokens of one answer; `message` after the last."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        stop_ids: frozenset[int] = frozenset(),
        stops: Sequence[str] = (),
        tool_format: ToolFormat | None = None,
        tools: Sequence[Tool] = (),
        thinking: Thinking | None = None,
        is_thinking: bool = False,
        mint: Callable[[], str] = random_call_id,
        streams_calls: bool = False,
    ) -> None:
        """`is_thinking`: the prompt has opened the reasoning already. `streams_calls`: arguments are shown while they are written, where
        the format and the tool are known; such a call stays a call when it turns out malformed, its arguments unfinished."""
        self._stream = TextStream(decoder, stops)
        self._stop_ids, self._format, self._thinking, self._mint = stop_ids, tool_format, thinking, mint
        self._tools = {t.name: t for t in tools}
        self._markers = tool_format.markers if tool_format is not None else ()
        self._marker = _any_of(self._markers) if self._markers else None
        self._is_plain = tool_format is None and thinking is None
        self._part = _Part.REASONING if is_thinking else _Part.START if thinking is not None else _Part.TEXT
        self._ending: int | None = None
        self._held = ""
        self._blank = ""
        self._drops_blank = is_thinking
        self._block: Block | None = None
        self._extent: JsonExtent | None = None
        self._streams_calls = streams_calls
        self._call: CallStream | None = None
        self._num_scanned = 0
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[Call] = []
        self._problems: list[str] = []
        self._num_fed = 0

    @property
    def stopped(self) -> bool:
        """A stop string was met: the request can end."""
        return self._stream.stop_string is not None

    @property
    def stop_string(self) -> str | None:
        return self._stream.stop_string

    @property
    def num_used(self) -> int:
        """Leading tokens that count: through the one that completed the stop string, all otherwise."""
        return self._stream.num_used if self.stopped else self._num_fed

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with each malformed call, as advice to the model. Their text stays in the text, unless they were shown."""
        return tuple(self._problems)

    @property
    def num_ended(self) -> int:
        """Calls that are whole, or malformed for good."""
        return len(self._calls) - (self._part is _Part.ARGUMENTS)

    def message(self) -> ChatMessage:
        return ChatMessage(role=ChatRole.ASSISTANT, text="".join(self._texts), reasoning="".join(self._reasoning), calls=tuple(self._calls))

    def feed(self, ids: Sequence[int], *, last: bool = False) -> list[Bit]:
        """What these tokens bring; with `last`, also everything that was held back."""
        self._num_fed += len(ids)
        if ids:
            if self._ending is not None:
                ids, self._ending = [self._ending, *ids], None
            if ids[-1] in self._stop_ids:
                # The end of a turn is no text, unless something follows it after all.
                ids, self._ending = ids[:-1], ids[-1]
        text = self._stream.feed(ids)
        if last:
            text += self._stream.finish()
        bits: list[Bit] = []
        if self._is_plain:
            if text:
                self._texts.append(text)
                bits.append(Bit(kind=BitKind.TEXT, text=text))
            return bits
        last = last or self.stopped
        if text or last:
            self._held += text
            while self._go_on(bits, last):
                pass
        return bits

    def _go_on(self, bits: list[Bit], last: bool) -> bool:
        """Take what can be taken from the text held; whether a part ended and there may be more."""
        if self._part is _Part.TEXT:
            return self._read_text(bits, last)
        if self._part is _Part.CALL:
            return self._read_call(bits, last)
        if self._part is _Part.ARGUMENTS:
            return self._read_arguments(bits, last)
        if self._part is _Part.REASONING:
            return self._read_reasoning(bits, last)
        return self._read_start(last)

    def _read_start(self, last: bool) -> bool:
        """Reasoning is only reasoning at the beginning: later on, its marker is something the model talks about."""
        assert self._thinking is not None
        opening, bare = self._thinking.opening, self._held.lstrip()
        if bare.startswith(opening):
            self._held, self._part, self._drops_blank = bare[len(opening) :], _Part.REASONING, True
            return True
        if opening.startswith(bare) and not last:
            return False
        self._part = _Part.TEXT
        return True

    def _read_reasoning(self, bits: list[Bit], last: bool) -> bool:
        assert self._thinking is not None
        at = self._held.find(self._thinking.closing)
        if at < 0:
            size = len(self._held) - (0 if last else held_suffix(self._held, (self._thinking.closing,)))
            self._show(BitKind.REASONING, size, bits)
            return False
        self._show(BitKind.REASONING, at, bits)
        self._held = self._held[len(self._thinking.closing) :]
        self._part, self._blank, self._drops_blank = _Part.TEXT, "", True
        return True

    def _read_text(self, bits: list[Bit], last: bool) -> bool:
        if self._format is not None and self._format.is_bare and not self._texts:
            bare = self._held.lstrip("; \t\r\n" if self._calls else " \t\r\n")
            if not bare and not last:
                return False
            if bare.startswith("{"):
                self._open(Block(""), bare)
                return True
        found = self._marker.search(self._held) if self._marker is not None else None
        if found is None:
            held = 0 if last else held_suffix(self._held, self._markers)
            self._show(BitKind.TEXT, len(self._held) - held, bits)
            if last and self._blank and not self._calls and not self._drops_blank:
                self._add(BitKind.TEXT, self._blank, bits)
                self._blank = ""
            return False
        self._show(BitKind.TEXT, found.start(), bits)
        assert self._format is not None
        block = next((b for b in self._format.blocks if b.opening == found[0]), None)
        if block is None:
            self._held = self._held[len(found[0]) :]
        else:
            self._open(block, self._held)
        return True

    def _open(self, block: Block, held: str) -> None:
        self._part, self._held, self._block = _Part.CALL, held, block
        self._extent, self._num_scanned = None, len(block.opening)

    def _read_call(self, bits: list[Bit], last: bool) -> bool:
        assert self._block is not None and self._format is not None
        end = self._call_end()
        if self._streams_calls and self._begin_arguments(len(self._held) if end is None else end - len(self._block.closing), bits):
            return True
        if end is None and not last:
            return False
        drafts = []
        if end is None or end < 0:
            # Cut short, or no call after all: its opening is text, and what follows is looked at again.
            end = max(len(self._block.opening), 1)
        else:
            try:
                drafts = self._format.parse(self._held[:end], self._tools)
            except Malformed as problem:
                # A bare JSON object may just be an answer in JSON.
                if self._block.opening:
                    self._problems.append(str(problem))
        self._part = _Part.TEXT
        if not drafts:
            self._show(BitKind.TEXT, end, bits)
            return True
        for draft in drafts:
            self._add_call(draft, bits)
        self._held = self._held[end:]
        return True

    def _begin_arguments(self, size: int, bits: list[Bit]) -> bool:
        assert self._format is not None
        self._call = CallStream.begin(self._format, self._held, size, self._tools)
        if self._call is None:
            return False
        self._add_call(self._call.draft, bits)
        self._part, self._held = _Part.ARGUMENTS, self._held[len(self._call.head) :]
        return True

    def _read_arguments(self, bits: list[Bit], last: bool) -> bool:
        assert self._block is not None and self._call is not None
        closing = self._block.closing
        at = self._held.find(closing)
        is_whole = at >= 0
        size = at if is_whole else len(self._held) - (0 if last else held_suffix(self._held, (closing,)))
        text, self._held = self._call.feed(self._held[:size]), self._held[size:]
        if is_whole or last:
            try:
                if not is_whole:
                    raise Malformed(f"error: the tool call ends before its {closing}")
                text += self._call.finish(closing, self._tools)
            except Malformed as problem:
                self._problems.append(str(problem))
            self._calls[-1] = msgspec.structs.replace(self._calls[-1], arguments=self._call.arguments)
            self._part, self._held = _Part.TEXT, self._held[len(closing) :]
        if text:
            bits.append(Bit(kind=BitKind.ARGUMENTS, text=text))
        return self._part is _Part.TEXT

    def _add_call(self, draft: Draft, bits: list[Bit]) -> None:
        call = Call(id=draft.id or self._mint(), name=draft.name, arguments=draft.arguments)
        self._calls.append(call)
        bits.append(Bit(kind=BitKind.CALL, call_id=call.id, name=call.name, text=call.arguments))

    def _call_end(self) -> int | None:
        """One past the block in the text held; None while it is not there, -1 when this is no call."""
        assert self._block is not None and self._format is not None
        opening, closing = self._block
        if closing:
            at = self._held.find(closing, self._num_scanned)
            # Only what is new is searched, and as much before it as may hold the beginning of the closing.
            self._num_scanned = max(len(opening), len(self._held) - len(closing) + 1)
            return at + len(closing) if at >= 0 else None
        if self._extent is None:
            assert self._format.json_at is not None
            start = self._format.json_at(self._held[len(opening) :])
            if start is None or start < 0:
                return start
            self._extent, self._num_scanned = JsonExtent(), len(opening) + start
        before, self._num_scanned = self._num_scanned, len(self._held)
        end = self._extent.feed(self._held[before:])
        return None if end is None else before + end

    def _show(self, kind: BitKind, size: int, bits: list[Bit]) -> None:
        """The next `size` characters held; white space waits for what follows it, since around calls and reasoning it means nothing."""
        text, self._held = self._blank + self._held[:size], self._held[size:]
        body = text.rstrip()
        self._blank = text[len(body) :]
        if self._drops_blank:
            body = body.lstrip()
        if body:
            self._drops_blank = False
            self._add(kind, body, bits)

    def _add(self, kind: BitKind, text: str, bits: list[Bit]) -> None:
        (self._texts if kind is BitKind.TEXT else self._reasoning).append(text)
        bits.append(Bit(kind=kind, text=text))
