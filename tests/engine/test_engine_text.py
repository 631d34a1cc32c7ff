"""Claims about text made of tokens as they arrive."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollmill.engine.text import TextStream, ToolCall, ToolGate, split_tool_calls


class Bytes:
    """Every token is a byte."""

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({c % (len(data) + 1) for c in cuts} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(at)]


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40), cuts=st.lists(st.integers(0, 200), max_size=20))
def test_streamed_pieces_join_to_the_whole_text_and_never_split_a_character(text: str, cuts: list[int]) -> None:
    text = text.replace("\ufffd", "")
    stream, out = TextStream(Bytes()), []
    for piece in pieces(text.encode(), cuts):
        out.append(stream.feed(piece))
        assert "\ufffd" not in out[-1]
    out.append(stream.feed([], last=True))
    assert "".join(out) == text == stream.text


@example(data=[b"\xff"] * 4 + ["\u20ac".encode(), b"\xf0\x9f", b"\x94", b"\xff", b"\xff"], cuts=[11])
@settings(max_examples=300, deadline=None)
@given(
    data=st.lists(st.sampled_from([b"\xff", b"\xd1", b"\x94", "\u20ac".encode(), b"a", b"\xf0\x9f", b"\x98"]), max_size=14),
    cuts=st.lists(st.integers(0, 40), max_size=20),
)
def test_bytes_of_any_sort_give_the_same_text_in_pieces_as_at_once(data: list[bytes], cuts: list[int]) -> None:
    whole = b"".join(data)
    stream = TextStream(Bytes())
    for piece in pieces(whole, cuts):
        stream.feed(piece)
    stream.feed([], last=True)
    assert stream.text == Bytes().decode(whole)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("abX", max_size=30),
    stops=st.lists(st.text("abX", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 60), max_size=20),
)
def test_nothing_at_or_past_a_stop_string_is_shown_however_the_tokens_fall(text: str, stops: list[str], cuts: list[int]) -> None:
    stream, shown = TextStream(Bytes(), stops), ""
    for piece in pieces(text.encode(), cuts):
        shown += stream.feed(piece)
        if stream.stopped:
            break
    shown += stream.feed([], last=True)
    assert not any(stop in shown for stop in stops)
    assert text.startswith(shown)
    assert stream.stopped == any(stop in text for stop in stops)
    if not stream.stopped:
        assert shown == text


def test_bytes_that_are_no_character_are_shown_in_the_end() -> None:
    stream = TextStream(Bytes())
    assert stream.feed(b"\xff") == ""
    assert stream.feed(b"", last=True) == "\ufffd"


def test_tool_calls_are_taken_out_and_malformed_ones_stay() -> None:
    good = '<tool_call>\n{"name": "read", "arguments": {"path": "ä.py"}}\n</tool_call>'
    text, calls = split_tool_calls(f"look: {good}{good}<tool_call>{{oops</tool_call>")
    assert text == "look: <tool_call>{oops</tool_call>"
    assert calls == [ToolCall(name="read", arguments='{"path": "ä.py"}')] * 2
    for bad in ('{"arguments": {}}', "[]", '{"name": 3}', "[" * 100_000):
        assert split_tool_calls(f"<tool_call>{bad}</tool_call>") == (f"<tool_call>{bad}</tool_call>", [])


@settings(max_examples=100, deadline=None)
@given(before=st.text("ab<t", max_size=10), cuts=st.lists(st.integers(0, 100), max_size=12))
def test_the_gate_lets_text_through_and_keeps_calls_back(before: str, cuts: list[int]) -> None:
    data = f'{before}<tool_call>{{"name": "ls"}}</tool_call>'.encode()
    gate, shown = ToolGate(enabled=True), ""
    for piece in pieces(data, cuts):
        shown += gate.feed(piece.decode())
    rest, calls = gate.finish()
    assert shown + rest == before and calls == [ToolCall(name="ls", arguments="{}")]
