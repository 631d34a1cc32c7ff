"""Answers, the events that they come as, and what clients make of server-sent events; for tests of wire formats."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from hypothesis import strategies as st

from rollmill.chat.messages import Call, ChatMessage, ChatRole
from rollmill.engine.protocol import VersionSpan
from rollmill.gateway.call import Answer, Event, EventKind, Finish
from rollmill.gateway.dialects.dialect import Envelope, StreamWriter

HEX = "0123456789abcdef0123456789abcdef"
ENVELOPE = Envelope(id=HEX, created=1_700_000_000, model="policy", decode=lambda ids: "".join(chr(97 + i % 26) for i in ids))


def answer_of(
    text: str = "", *, reasoning: str = "", calls: tuple[Call, ...] = (), finish: Finish = Finish.STOP, stop: str | None = None
) -> Answer:
    return Answer(
        text=text,
        reasoning=reasoning,
        calls=calls,
        finish=Finish.CALLS if calls and finish is Finish.STOP else finish,
        stop_string=stop,
        token_ids=[1, 2, 3],
        logprobs=np.asarray([-0.5, -0.25, -1.0], np.float32),
        spans=[VersionSpan(0, 3, 7)],
        num_prompt=10,
        num_reused=4,
    )


def message_of(answer: Answer) -> ChatMessage:
    return ChatMessage(role=ChatRole.ASSISTANT, text=answer.text, calls=answer.calls, reasoning=answer.reasoning)


def events_of(answer: Answer, size: int = 3) -> list[Event]:
    """As a stream tells it, a few characters at a time."""

    def pieces(text: str) -> list[str]:
        return [text[i : i + size] for i in range(0, len(text), size)]

    found = [Event(index=0, kind=EventKind.REASONING, text=t) for t in pieces(answer.reasoning)]
    found.append(Event(index=0, kind=EventKind.TOKENS, token_ids=[1], logprobs=[-0.5]))
    found += [Event(index=0, kind=EventKind.TEXT, text=t, token_ids=[2], logprobs=[-0.25]) for t in pieces(answer.text)]
    for call in answer.calls:
        found.append(Event(index=0, kind=EventKind.CALL, call_id=call.id, name=call.name))
        found += [Event(index=0, kind=EventKind.ARGUMENTS, text=t) for t in pieces(call.arguments)]
    return [*found, Event(index=0, kind=EventKind.END, answer=answer)]


def streamed(writer: StreamWriter, answer: Answer, size: int = 3) -> list[tuple[str, dict[str, Any]]]:
    """(event, data) of a whole stream."""
    written = writer.start(answer.num_prompt)
    for event in events_of(answer, size):
        written += writer.write(event)
    return read_sse(written + writer.finish([answer]))


def read_sse(written: bytes) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for chunk in written.decode().split("\n\n")[:-1]:
        lines = chunk.split("\n")
        assert [line.partition(":")[0] for line in lines] == ["event", "data"], chunk
        event, data = lines[0].partition(": ")[2], json.loads(lines[1].partition(": ")[2])
        assert data["type"] == event
        found.append((event, data))
    return found


texts = st.text(max_size=12)
call_ids = st.integers(0, 16**24 - 1).map(lambda n: f"call_{n:024x}") | st.sampled_from(["call_1", "toolu_x", "strange id", "7"])
arguments = st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=6) | st.none() | st.booleans(), max_size=3)
calls = st.lists(
    st.builds(
        lambda i, n, a: Call(id=i, name=n, arguments=json.dumps(a, ensure_ascii=False)), call_ids, st.sampled_from(["ls", "cat"]), arguments
    ),
    max_size=3,
).map(tuple)
answers = st.builds(lambda t, r, c: answer_of(t, reasoning=r, calls=c), texts, texts, calls)
"""Of every shape: empty, white space alone, many calls."""
