"""Turns the events of one answer into blocks that open, grow and close one after the other; knows no wire format.

White space alone opens no block, it waits for the text that follows it. Joined in order, the text blocks are the
answer's text but for white space at its end, so that a client which sends the blocks back is understood as repeating the answer.
"""

from __future__ import annotations

from enum import StrEnum

from rollmill.gateway.call import Answer, Event, EventKind


class BlockKind(StrEnum):
    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


class Block:
    """What has been said in one block so far."""

    __slots__ = ("call_id", "index", "kind", "name", "parts")

    def __init__(self, index: int, kind: BlockKind, *, call_id: str = "", name: str = "", text: str = "") -> None:
        self.index, self.kind, self.call_id, self.name = index, kind, call_id, name
        self.parts: list[str] = [text] if text else []

    @property
    def text(self) -> str:
        """Of a call: its arguments."""
        return "".join(self.parts)


class BlockWriter:
    """A stream of blocks; a dialect says what the three moments of a block look like."""

    def __init__(self, *, shows_reasoning: bool) -> None:
        self._shows_reasoning = shows_reasoning
        self._open: Block | None = None
        self._waiting = {BlockKind.TEXT: "", BlockKind.REASONING: ""}
        self.blocks: list[Block] = []
        """All that were opened, in order."""

    def opens(self, block: Block, event: Event) -> bytes:
        """`block` has its kind and name, and no text yet."""
        raise NotImplementedError

    def grows(self, block: Block, text: str, event: Event) -> bytes:
        raise NotImplementedError

    def closes(self, block: Block) -> bytes:
        raise NotImplementedError

    def write(self, event: Event) -> bytes:
        kind = event.kind
        if kind is EventKind.TEXT:
            return self._say(BlockKind.TEXT, event)
        if kind is EventKind.ARGUMENTS:
            assert self._open is not None and self._open.kind is BlockKind.CALL, "arguments come after the call that they belong to"
            return self._grow(self._open, event.text, event) if event.text else b""
        if kind is EventKind.REASONING:
            return self._say(BlockKind.REASONING, event) if self._shows_reasoning else b""
        if kind is EventKind.CALL:
            out = self.start_block(BlockKind.CALL, event)
            return out + self._grow(self.blocks[-1], event.text, event) if event.text else out
        return self.close() if kind is EventKind.END else b""

    def close(self) -> bytes:
        """End the block that is open, if one is."""
        block, self._open = self._open, None
        return self.closes(block) if block is not None else b""

    def _say(self, kind: BlockKind, event: Event) -> bytes:
        if not event.text:
            return b""
        if self._open is not None and self._open.kind is kind:
            return self._grow(self._open, event.text, event)
        text = self._waiting[kind] + event.text
        if text.isspace():
            self._waiting[kind] = text
            return b""
        self._waiting[kind] = ""
        return self.start_block(kind, event) + self._grow(self.blocks[-1], text, event)

    def start_block(self, kind: BlockKind, event: Event) -> bytes:
        """End the block that is open, and open another."""
        closed = self.close()
        self._open = Block(len(self.blocks), kind, call_id=event.call_id, name=event.name)
        self.blocks.append(self._open)
        return closed + self.opens(self._open, event)

    def _grow(self, block: Block, text: str, event: Event) -> bytes:
        block.parts.append(text)
        return self.grows(block, text, event)


def blocks_of(answer: Answer, *, shows_reasoning: bool) -> list[Block]:
    """The blocks of an answer that is told as a whole: reasoning, text, calls."""
    found: list[Block] = []
    if shows_reasoning and answer.reasoning.strip():
        found.append(Block(0, BlockKind.REASONING, text=answer.reasoning))
    if answer.text.strip():
        found.append(Block(len(found), BlockKind.TEXT, text=answer.text))
    for call in answer.calls:
        found.append(Block(len(found), BlockKind.CALL, call_id=call.id, name=call.name, text=call.arguments))
    return found
