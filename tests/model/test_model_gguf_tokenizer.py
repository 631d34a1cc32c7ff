"""A tokenizer made from a GGUF vocabulary cuts text as the model's original tokenizer does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")
pytest.importorskip("transformers")
import tokenizers
import transformers
from gguf_worlds import CHAT, reference, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, trainers

from rollmill.model import Tokenizer
from rollmill.model.gguf import import_gguf

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "The quick brown fox's 1234567 jumps; they'll see WE'RE here\n\n\tdef f(x): return x  # naïve café",
    "東京タワー 東京 Привет мир привет 🙂🙂 e\u0301te\u0301 été Ⅷ ½ ٣٤ 2026-11-15\r\n   trailing   ",
    "in 1999 and 2000 and 20001 the theory of the other thing was there <think> then </think>",
] * 3
TEXTS = [
    *CORPUS,
    "",
    " ",
    "a  b   c\n\n\n d",
    "I'M you'LL we'd 'tis",
    "3.14159 1234567890 x1y2 ١٢٣",
    "été e\u0301te\u0301 \ufb01 \u212b 한글 \u1112\u1161\u11ab",
    "\u200b\u00a0\u3000\t\x00\x7f\ud7ff\U0010ffff",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|> <think>hm</think> <|im_",
]


def original(kind: str) -> tokenizers.Tokenizer:
    """A tokenizer with the pipeline the families publish, its vocabulary learnt from a little text."""
    regex = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tok = tokenizers.Tokenizer(models.BPE(ignore_merges=kind == "llama-bpe"))
    if kind == "smollm":
        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        split = tokenizers.Regex(regex.replace("DIGITS", "{1,3}" if kind == "llama-bpe" else ""))
        steps = [pre_tokenizers.Split(split, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    if kind == "qwen2":
        tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence(steps)
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tok.train_from_iterator(CORPUS, trainer)
    tok.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
    return tok


def vocabulary_of(tok: tokenizers.Tokenizer, kind: str, num_unused: int = 0) -> dict[str, Any]:
    by_id = sorted(tok.get_vocab().items(), key=lambda item: item[1])
    tokens = [t for t, _ in by_id] + [f"[PAD{i}]" for i in range(num_unused)]
    types = [3 if t in SPECIALS else 4 if t in ("<think>", "</think>") else 1 for t, _ in by_id] + [5] * num_unused
    merges = [" ".join(pair) for pair in json.loads(tok.to_str())["model"]["merges"]]
    return dict(pre=kind, tokens=tokens, types=types, merges=merges)


@pytest.fixture(scope="module", params=["llama-bpe", "qwen2", "smollm"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, tokenizers.Tokenizer, Path, Path]:
    kind, path = request.param, tmp_path_factory.mktemp("gguf")
    tok = original(kind)
    vocabulary = vocabulary_of(tok, kind, num_unused=3)
    model = reference("llama", vocab_size=len(vocabulary["tokens"]) + 5)
    file = write_gguf(path / "x.gguf", model, "llama", vocabulary=vocabulary)
    import_gguf(file, path / "out")
    return kind, tok, file, path / "out"


def test_text_is_cut_as_by_the_original(made: Any) -> None:
    _, tok, _, out = made
    ours = Tokenizer(out)
    for text in TEXTS:
        assert ours.encode(text) == tok.encode(text, add_special_tokens=False).ids, text


@settings(max_examples=200, derandomize=True, deadline=None)
@given(text=st.text(max_size=40) | st.text(alphabet="ab \n'st0123é😀<|im_end>", max_size=40))
def test_any_text_is_cut_as_by_the_original(text: str) -> None:
    for kind in ("llama-bpe", "qwen2", "smollm"):
        tok, ours = rebuilt(kind)
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == tok.encode(text, add_special_tokens=False).ids
        if kind != "qwen2":
            assert ours.decode(ids, skip_special_tokens=False) == text


_REBUILT: dict[str, tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]] = {}


def rebuilt(kind: str) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]:
    from rollmill.model.gguf_tokenizer import Vocabulary

    if kind not in _REBUILT:
        tok = original(kind)
        given_ = vocabulary_of(tok, kind)
        metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": kind, "tokenizer.ggml.tokens": given_["tokens"]}
        metadata |= {"tokenizer.ggml.token_type": given_["types"], "tokenizer.ggml.merges": given_["merges"]}
        _REBUILT[kind] = tok, Vocabulary.read(metadata, Path("x.gguf")).backend()
    return _REBUILT[kind]


def test_reference_tokenizers_cut_and_join_the_same(made: Any) -> None:
    kind, _, file, out = made
    ours = Tokenizer(out)
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    saved = transformers.AutoTokenizer.from_pretrained(out)
    # The reference loader knows neither smollm's single digits nor qwen2's composition: there, text without them.
    texts = [t for t in TEXTS if kind == "llama-bpe" or not any(c.isnumeric() or c in "\u0301\u212b\u1161" for c in t)]
    for text in texts:
        ids = ours.encode(text)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"], text
        assert ours.decode(ids) == text == theirs.decode(ids, clean_up_tokenization_spaces=False)
    for text in TEXTS:
        assert ours.encode(text) == saved(text, add_special_tokens=False)["input_ids"]


def test_qwen2_composes_text_as_its_own_tokenizer_class(tmp_path: Path) -> None:
    tok = original("qwen2")
    v = vocabulary_of(tok, "qwen2")
    theirs = transformers.Qwen2Tokenizer(vocab={t: i for i, t in enumerate(v["tokens"])}, merges=[tuple(m.split(" ")) for m in v["merges"]])
    ours = rebuilt("qwen2")[1]
    plain = [t for t in TEXTS if "<" not in t]
    assert [ours.encode(t).ids for t in plain] == [theirs(t)["input_ids"] for t in plain]
    assert ours.decode(ours.encode("e\u0301").ids) == "é"


def test_digits_stand_as_each_family_wants_them() -> None:
    words = {kind: [t.replace("Ġ", " ") for t, _ in rebuilt(kind)[1].pre_tokenizer.pre_tokenize_str("in 12345")] for kind in _KINDS}  # type: ignore[union-attr]
    assert words["llama-bpe"] == ["in", " ", "123", "45"]
    assert words["qwen2"] == words["smollm"] == ["in", " ", *"12345"]


_KINDS = ("llama-bpe", "qwen2", "smollm")


def test_stop_tokens_and_chat_template_travel(made: Any) -> None:
    _, tok, _, out = made
    ours, config = Tokenizer(out), json.loads((out / "config.json").read_text())
    ends = [tok.token_to_id("<|im_end|>"), tok.token_to_id("<|endoftext|>")]
    assert config["eos_token_id"] == ends and config["bos_token_id"] == 1
    assert ours.stop_ids == set(ends)
    assert ours.chat_template.render([{"role": "user", "content": "hi"}]) == "<|im_start|>user\nhi<|im_end|>\n"
    assert json.loads((out / "tokenizer_config.json").read_text())["chat_template"] == CHAT
    assert ours.neutral("<|im_end|>") != "<|im_end|>"


def test_unused_tokens_stay_out_of_the_tokenizer(made: Any) -> None:
    _, tok, _, out = made
    assert Tokenizer(out).vocab_size == tok.get_vocab_size()
    assert json.loads((out / "config.json").read_text())["vocab_size"] == tok.get_vocab_size() + 8


@pytest.mark.parametrize(("kind", "said", "is_first"), [("llama-bpe", None, True), ("llama-bpe", False, False), ("smollm", True, True)])
def test_first_token_is_written_for_readers_that_ask_for_it(kind: str, said: bool | None, is_first: bool, tmp_path: Path) -> None:
    vocabulary = vocabulary_of(original(kind), kind) | {"add_bos": said}
    model = reference("llama", vocab_size=len(vocabulary["tokens"]))
    import_gguf(write_gguf(tmp_path / "x.gguf", model, "llama", vocabulary=vocabulary), tmp_path / "out")
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("the")["input_ids"]
    assert (ids[0] == 1) == is_first
    assert Tokenizer(tmp_path / "out").encode("the")[0] != 1


def test_tokenizer_of_the_original_model_can_be_given(made: Any, tmp_path: Path) -> None:
    _, tok, _, out = made
    model = reference("llama", vocab_size=tok.get_vocab_size())
    file = write_gguf(tmp_path / "x.gguf", model, "llama", vocabulary={"model": "llama", "pre": "default"})
    with pytest.raises(ValueError, match=r"tokenizer of model 'llama' with the splitting rule 'default'.*--tokenizer DIR"):
        import_gguf(file, tmp_path / "out")
    config = import_gguf(file, tmp_path / "out", tokenizer=out)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (out / "tokenizer.json").read_bytes()
    assert set(config.eos_token_ids) == Tokenizer(out).stop_ids
