"""Text to tokens and back, by the files that travel with a model.

Knows nothing of conversations: their template is only carried, and which tokens were really sampled is the gateway's business.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from rollmill.model.chat_template import ChatTemplate


class Tokenizer:
    """tokenizer.json, and what config.json, tokenizer_config.json, generation_config.json and chat_template.jinja say about it."""

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"no tokenizer at {path}: tokenizer.json is missing")
        self._tok = tokenizers.Tokenizer.from_file(str(file))
        raw = _read_object(path / "tokenizer_config.json")
        self._templates = _templates(path, raw.get("chat_template"))
        self._specials = {name: _token_text(raw.get(name)) for name in ("bos_token", "eos_token")}
        self.vocab_size = self._tok.get_vocab_size()
        self.markers: Mapping[str, int] = {str(t): i for i, t in self._tok.get_added_tokens_decoder().items() if self._is_control(t)}
        """Control tokens by their text."""
        self.special_markers: Mapping[str, int] = {str(t): i for i, t in self._tok.get_added_tokens_decoder().items() if t.special}
        """Those of them that text alone never becomes, as constrained decoding sees it."""
        first = "|".join(re.escape(m) for m in sorted(self.markers, key=len, reverse=True))
        self._forged = re.compile(first) if first else None
        stops = {self._specials["eos_token"], *raw.get("stop_tokens", [])}
        self.stop_ids = frozenset(i for i in (self._tok.token_to_id(s) for s in stops if s) if i is not None) | _end_ids(path)
        """Tokens that end an answer."""

    def _is_control(self, token: tokenizers.AddedToken) -> bool:
        """Some vocabularies also add runs of spaces and HTML tags, which foreign text may hold in good faith."""
        text = str(token)
        return len(text) > 1 and (token.special or "|" in text or "\uff5c" in text or any(text in t for t in self._templates.values()))

    def neutral(self, text: str) -> str:
        """Foreign text with the model's control tokens broken up, so that a file or a tool cannot forge a turn."""
        while self._forged is not None and self._forged.search(text):
            # Once more after each pass: breaking one marker can lay open another that overlapped it.
            text = self._forged.sub(_broken, text)
        return text

    def encode(self, text: str) -> list[int]:
        """Token ids; special tokens written out in the text become themselves."""
        if not text.isascii():
            # JSON can spell half a surrogate pair, which is no text.
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return self._tok.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tok.decode(list(ids), skip_special_tokens=False)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """How the model writes conversations; refuses to render when the directory has no template."""
        return ChatTemplate(self._templates, self._specials)

    @cached_property
    def token_bytes(self) -> Mapping[int, bytes] | None:
        """The bytes of each token, where a text is just its tokens' bytes one after the other (byte-level vocabularies); else None."""
        return TokenBytes(self._tok) if isinstance(self._tok.decoder, tokenizers.decoders.ByteLevel) else None


class TokenBytes(dict[int, bytes]):
    """Filled as tokens are met: a vocabulary has hundreds of thousands, a run sees a few."""

    def __init__(self, tok: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._tok, self._byte_of = tok, {char: byte for byte, char in _byte_chars().items()}

    def __missing__(self, token_id: int) -> bytes:
        text = self._tok.id_to_token(token_id) or ""
        try:
            out = bytes(self._byte_of[c] for c in text)
        except KeyError:
            # An added token is plain text when it holds a character outside the byte alphabet.
            out = text.encode()
        self[token_id] = out
        return out


def _byte_chars() -> dict[int, str]:
    """Byte -> the printable character that stands for it in byte-level vocabularies."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    rest = [b for b in range(256) if b not in set(plain)]
    return {b: chr(b) for b in plain} | {b: chr(256 + n) for n, b in enumerate(rest)}


def _broken(match: re.Match[str]) -> str:
    return f"{match[0][0]} {match[0][1:]}"


def _read_object(file: Path) -> dict[str, Any]:
    raw = json.loads(file.read_text()) if file.is_file() else {}
    if not isinstance(raw, dict):
        raise ValueError(f"{file} holds a {type(raw).__name__}, expected a JSON object")
    return raw


def _templates(path: Path, entry: Any) -> dict[str, str]:
    """One text, or a list of named ones; the file beside it wins over the default."""
    found = {"default": entry} if isinstance(entry, str) else {}
    if isinstance(entry, list):
        found = {e["name"]: e["template"] for e in entry}
    if (path / "chat_template.jinja").is_file():
        found["default"] = (path / "chat_template.jinja").read_text()
    return found


def _end_ids(path: Path) -> frozenset[int]:
    """Models with several ends of turn list them only there."""
    entries = [_read_object(path / name).get("eos_token_id") for name in ("config.json", "generation_config.json")]
    return frozenset(i for e in entries for i in ([e] if isinstance(e, int) else e or []))


def _token_text(entry: Any) -> str | None:
    return entry.get("content") if isinstance(entry, dict) else entry
