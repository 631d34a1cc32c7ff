"""The tokenizer files of a model from the vocabulary inside a GGUF file; byte-level BPE of the kinds named in `KINDS`, no other.

A GGUF file names its splitting rule and does not state it, so each rule is written out here as its models were trained with it.
"""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from rollmill.model.gguf_file import GGUFError

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
"""Control tokens that end an answer whatever the model's own end token is."""


class _Kind(msgspec.Struct, frozen=True, kw_only=True):
    split: str | None
    """How text falls into words; None: GPT-2's rule after every digit stood alone."""
    is_composed: bool = False
    """Whether text is brought into NFC first."""
    keeps_whole_words: bool = False
    """Whether a word of the vocabulary is one token even where no chain of merges leads to it."""


_LLAMA3 = _Kind(split=_WORDS % "{1,3}", keeps_whole_words=True)
KINDS = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _Kind(split=_WORDS % "", is_composed=True),
    "smollm": _Kind(split=None),
}
"""By `tokenizer.ggml.pre`."""


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """What a GGUF file says about its tokenizer, checked."""

    kind: str
    """Key of `KINDS`."""
    tokens: list[str]
    """By id, the unused ones at the end included."""
    types: list[int]
    """By id: 3 is a control token, 4 one that a person added, 5 filling."""
    merges: list[tuple[str, str]]
    """Most frequent first."""
    bos_id: int | None
    pad_id: int | None
    stop_ids: tuple[int, ...]
    """The model's own end token first."""
    has_bos_first: bool
    chat_template: str | None

    @classmethod
    def read(cls, metadata: dict[str, Any], path: Path) -> Vocabulary:
        model, kind = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
        if model != "gpt2" or not isinstance(kind, str) or kind not in KINDS:
            raise GGUFError(
                f"{path} has a tokenizer of model {reprlib.repr(model)} with the splitting rule {reprlib.repr(kind)}; "
                f"this version makes 'gpt2' with {', '.join(KINDS)}: give the tokenizer of the original model with --tokenizer DIR"
            )
        tokens = _strings(metadata, "tokenizer.ggml.tokens", path)
        types = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
        if not isinstance(types, list) or len(types) != len(tokens):
            raise GGUFError(f"{path} is damaged: tokenizer.ggml.token_type does not have an entry for each of {len(tokens):,} tokens")
        words = {t: i for i, t in enumerate(tokens) if types[i] != _UNUSED}
        if len(words) != sum(t != _UNUSED for t in types):
            twice = next(t for i, t in enumerate(tokens) if types[i] != _UNUSED and words[t] != i)
            raise GGUFError(f"{path} is damaged: its vocabulary has the token {reprlib.repr(twice)} twice")
        merges = [_merge(line, words, path) for line in _strings(metadata, "tokenizer.ggml.merges", path)]
        eos, *others = (_token_id(metadata, f"tokenizer.ggml.{name}_token_id", len(tokens), path) for name in ("eos", "eot", "eom"))
        template = metadata.get("tokenizer.chat_template")
        if not isinstance(template, str | None):
            raise GGUFError(f"{path} is damaged: its tokenizer.chat_template is no text")
        named = [words[t] for t in _ENDS if t in words and types[words[t]] == _CONTROL]
        return cls(
            kind=kind,
            tokens=tokens,
            types=types,
            merges=merges,
            bos_id=_token_id(metadata, "tokenizer.ggml.bos_token_id", len(tokens), path),
            pad_id=_token_id(metadata, "tokenizer.ggml.padding_token_id", len(tokens), path),
            stop_ids=tuple(dict.fromkeys(i for i in (eos, *others, *named) if i is not None)),
            has_bos_first=bool(metadata.get("tokenizer.ggml.add_bos_token", KINDS[kind] is _LLAMA3)),
            chat_template=template,
        )

    def write(self, out: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json."""
        self.backend().save(str(out / "tokenizer.json"))
        named = {"bos_token": self.bos_id, "eos_token": self.stop_ids[0] if self.stop_ids else None, "pad_token": self.pad_id}
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        config |= {name: self.tokens[i] for name, i in named.items() if i is not None}
        config["stop_tokens"] = [self.tokens[i] for i in self.stop_ids[1:]]
        if self.chat_template:
            config["chat_template"] = self.chat_template
        (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")

    def backend(self) -> tokenizers.Tokenizer:
        kind = KINDS[self.kind]
        words = {t: i for i, t in enumerate(self.tokens) if self.types[i] != _UNUSED}
        tok = tokenizers.Tokenizer(models.BPE(words, self.merges, ignore_merges=kind.keeps_whole_words))
        if kind.is_composed:
            tok.normalizer = normalizers.NFC()
        first: Any = pre_tokenizers.Digits(individual_digits=True)
        if kind.split:
            first = pre_tokenizers.Split(tokenizers.Regex(kind.split), "isolated")
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind.split is None)
        tok.pre_tokenizer = pre_tokenizers.Sequence([first, last])
        tok.decoder = decoders.ByteLevel()
        if self.has_bos_first and self.bos_id is not None:
            bos = self.tokens[self.bos_id]
            tok.post_processor = processors.TemplateProcessing(
                single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, self.bos_id)]
            )
        for wanted, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
            added = [
                AddedToken(t, normalized=False, special=is_special)
                for t, kind_ in zip(self.tokens, self.types, strict=True)
                if kind_ == wanted
            ]
            tok.add_special_tokens(added) if is_special else tok.add_tokens(added)
        return tok


def _strings(metadata: dict[str, Any], key: str, path: Path) -> list[str]:
    found = metadata.get(key)
    if not isinstance(found, list) or not found or not isinstance(found[0], str):
        raise GGUFError(f"{path} lacks {key}: give the tokenizer of the original model with --tokenizer DIR")
    return found


def _merge(line: str, words: dict[str, int], path: Path) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    if left not in words or right not in words or left + right not in words:
        raise GGUFError(f"{path} is damaged: its merge {reprlib.repr(line)} does not join two tokens of its vocabulary to a third")
    return left, right


def _token_id(metadata: dict[str, Any], key: str, num_tokens: int, path: Path) -> int | None:
    found = metadata.get(key)
    if found is not None and (type(found) is not int or not 0 <= found < num_tokens):
        raise GGUFError(f"{path} is damaged: {key} is {reprlib.repr(found)}, its vocabulary has {num_tokens:,} tokens")
    return found
