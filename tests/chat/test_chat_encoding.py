"""Encoding in remembered chunks gives what encoding the whole text gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.chat.encoding import Encoding
from rollmill.chat.format import ChatFormat
from rollmill.chat.messages import ChatMessage, ChatRole
from rollmill.model.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
MODELS = [p for p in (ROOT / "models" / "demo", ROOT / "models" / "SmolLM2-135M") if (p / "tokenizer.json").is_file()]
TOKENIZERS = {p.name: Tokenizer(p) for p in MODELS}
ENCODINGS = {name: Encoding(tokenizer, max_bytes=20_000) for name, tokenizer in TOKENIZERS.items()}
FORMATS = {name: ChatFormat(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def test_there_is_a_tokenizer_to_try() -> None:
    assert "demo" in TOKENIZERS


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_chunks_encode_as_the_whole_text_does(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    part = st.one_of(st.text(max_size=12), st.sampled_from(sorted(tokenizer.markers)), st.sampled_from([" ", "\n", "user\n", "<|", "|>"]))
    text = "".join(data.draw(st.lists(part, max_size=12)))
    for _ in range(2):
        assert ENCODINGS[name].encode(text) == tokenizer.encode(text)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(texts=st.lists(st.text(max_size=30), min_size=1, max_size=8))
def test_conversations_encode_as_their_whole_text_does(name: str, texts: list[str]) -> None:
    chat = FORMATS[name]
    roles = (ChatRole.USER, ChatRole.ASSISTANT)
    messages = [ChatMessage(role=roles[i % 2], text=text) for i, text in enumerate([*texts, "x"][: 1 + 2 * (len(texts) // 2)])]
    assert chat.first(messages) == TOKENIZERS[name].encode(chat.turns.opening(messages))


class CountingTokenizer(Tokenizer):
    num_chars = 0

    def encode(self, text: str) -> list[int]:
        self.num_chars += len(text)
        return super().encode(text)


def turns(num: int) -> str:
    return "".join(f"<|im_start|>user\nquestion number {i}<|im_end|>\n" for i in range(num))


def test_a_conversation_sent_again_costs_only_what_is_new() -> None:
    tokenizer = CountingTokenizer(MODELS[0])
    encoding = Encoding(tokenizer)
    encoding.encode(turns(50))
    longer = turns(51)
    num_new = len(longer) - len(turns(50)) - len("<|im_end|>\n")
    assert encoding.num_new(longer) == num_new
    tokenizer.num_chars = 0
    encoding.encode(longer)
    assert tokenizer.num_chars == num_new
    assert encoding.num_new(longer) == 0


def test_what_is_remembered_is_bounded_and_the_latest_stays() -> None:
    encoding = Encoding(TOKENIZERS["demo"], max_bytes=100_000)
    for i in range(3000):
        encoding.encode(f"<|im_start|>user\n{i} is the number of this text<|im_end|>\n")
    kept = [*encoding._young.items(), *encoding._old.items()]
    assert sum(4 * len(text) + 40 * len(ids) for text, ids in kept) <= 101_000
    assert encoding.num_new("<|im_start|>user\n2999 is the number of this text<|im_end|>\n") == 0


def _tokenizer(tmp_path: Path, token: tokenizers.AddedToken) -> Tokenizer:
    tok = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "\u2581": 2, "c": 3}, []))
    tok.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    tok.add_tokens([token])
    tok.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(tmp_path)


@pytest.mark.parametrize("options", [{"lstrip": True}, {"single_word": True}])
def test_control_tokens_that_look_back_are_not_cut_at(tmp_path: Path, options: dict[str, bool]) -> None:
    tokenizer = _tokenizer(tmp_path, tokenizers.AddedToken("<|m|>", special=True, normalized=False, **options))
    encoding = Encoding(tokenizer)
    for text in ("a <|m|> b", "a<|m|>b", " a  <|m|>", "<|m|>a<|m|>"):
        assert encoding.encode(text) == tokenizer.encode(text)


def test_a_first_word_that_is_written_differently_stays_first(tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path, tokenizers.AddedToken("<|m|>", special=True, normalized=False))
    encoding = Encoding(tokenizer)
    assert tokenizer.encode("a<|m|>a") != tokenizer.encode("a") + tokenizer.encode("<|m|>") + tokenizer.encode("a")
    for text in ("a<|m|>a", "<|m|>a", "a b<|m|> b<|m|><|m|>c"):
        assert encoding.encode(text) == tokenizer.encode(text)
