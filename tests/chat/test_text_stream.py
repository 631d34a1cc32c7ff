"""Claims about text made of tokens as they arrive."""

from __future__ import annotations

from pathlib import Path

import pytest
from chat_worlds import Bytes, OpaqueBytes, byte_fallback_tokenizer, pieces
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollmill.chat.text_stream import Decoder, TextStream, held_suffix
from rollmill.model.tokenizer import Tokenizer

DECODERS = [Bytes(), OpaqueBytes()]
decoders = pytest.mark.parametrize("decoder", DECODERS, ids=lambda d: type(d).__name__)
cuts = st.lists(st.integers(0, 200), max_size=20)


@decoders
@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=st.text(st.characters(codec="utf-8"), max_size=40), cuts=cuts)
def test_streamed_pieces_join_to_the_whole_text_and_never_split_a_character(decoder: Decoder, text: str, cuts: list[int]) -> None:
    text = text.replace("\ufffd", "")
    stream, out = TextStream(decoder), []
    for piece in pieces(text.encode(), cuts):
        out.append(stream.feed(piece))
        assert "\ufffd" not in out[-1]
    out.append(stream.finish())
    assert "".join(out) == text


@decoders
@example(data=[b"\xff"] * 4 + ["\u20ac".encode(), b"\xf0\x9f", b"\x94", b"\xff", b"\xff"], cuts=[11])
@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    data=st.lists(st.sampled_from([b"\xff", b"\xd1", b"\x94", "\u20ac".encode(), b"a", b"\xf0\x9f", b"\x98"]), max_size=14),
    cuts=st.lists(st.integers(0, 40), max_size=20),
)
def test_bytes_of_any_sort_give_the_same_text_in_pieces_as_at_once(decoder: Decoder, data: list[bytes], cuts: list[int]) -> None:
    whole = b"".join(data)
    stream = TextStream(decoder)
    assert "".join([*map(stream.feed, pieces(whole, cuts)), stream.finish()]) == Bytes().decode(whole)


@decoders
@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.text("abX", max_size=30), stops=st.lists(st.text("abX", min_size=1, max_size=4), max_size=3), cuts=cuts)
def test_nothing_at_or_past_a_stop_string_is_shown_however_the_tokens_fall(
    decoder: Decoder, text: str, stops: list[str], cuts: list[int]
) -> None:
    stream, one_by_one = TextStream(decoder, stops), TextStream(decoder, stops)
    shown = "".join([*map(stream.feed, pieces(text.encode(), cuts)), stream.finish()])
    assert shown == "".join([*(one_by_one.feed([b]) for b in text.encode()), one_by_one.finish()])
    assert not any(stop in shown for stop in stops) and text.startswith(shown)
    assert (stream.stop_string is not None) == any(stop in text for stop in stops)
    if stream.stop_string is None:
        assert shown == text and (not stops or stream.num_used == len(text))
    else:
        # Through the token that completed it, and no further.
        assert text[: stream.num_used].endswith(stream.stop_string)
        assert not any(stop in text[: stream.num_used - 1] for stop in stops)


def test_bytes_that_are_no_character_are_shown_in_the_end() -> None:
    stream = TextStream(Bytes())
    assert stream.feed(b"\xff\xf0") == "\ufffd"
    assert stream.finish() == "\ufffd"


def test_bytes_of_every_token_are_what_the_tokenizer_decodes() -> None:
    tokenizer = Tokenizer(Path(__file__).parents[2] / "models" / "demo")
    assert tokenizer.token_bytes is not None
    for i in range(tokenizer.vocab_size + 2):
        assert tokenizer.token_bytes[i].decode("utf-8", "replace") == tokenizer.decode([i])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=st.text(st.sampled_from("hello world<\u20ac\U0001f600 a"), max_size=20), cuts=cuts)
def test_vocabulary_with_byte_fallback_streams_as_it_decodes(tmp_path_factory: pytest.TempPathFactory, text: str, cuts: list[int]) -> None:
    tokenizer = byte_fallback_tokenizer(tmp_path_factory.getbasetemp() / "fallback")  # written once, read again
    assert tokenizer.token_bytes is None
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer)
    assert "".join([*map(stream.feed, pieces(ids, cuts)), stream.finish()]) == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.text("ab<", max_size=12), markers=st.lists(st.text("ab<", min_size=1, max_size=5), max_size=3))
def test_held_suffix_is_the_longest_end_that_begins_a_marker(text: str, markers: list[str]) -> None:
    naive = max((n for m in markers for n in range(1, len(m)) if n <= len(text) and text.endswith(m[:n])), default=0)
    assert held_suffix(text, markers) == naive
