"""Text to tokens and chat messages to text, by the files that travel with a model.

Knows nothing of sessions: which tokens were really sampled is the gateway's business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]
# Finds where an assistant's own text sits in a rendered template.
_MARK = "\u2063rollmill\u2063here\u2063"


class Tokenizer:
    """tokenizer.json plus the chat template of tokenizer_config.json."""

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"no tokenizer at {path}: tokenizer.json is missing")
        self._tok = tokenizers.Tokenizer.from_file(str(file))
        raw = json.loads((path / "tokenizer_config.json").read_text()) if (path / "tokenizer_config.json").is_file() else {}
        template = raw.get("chat_template")
        if (path / "chat_template.jinja").is_file():
            template = (path / "chat_template.jinja").read_text()
        self._specials = {name: _token_text(raw.get(name)) for name in ("bos_token", "eos_token")}
        env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        env.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
        env.globals["raise_exception"] = _refuse
        self._template = env.from_string(template) if template else None
        self.vocab_size = self._tok.get_vocab_size()
        self._markers = [str(t) for t in self._tok.get_added_tokens_decoder().values() if len(str(t)) > 1]
        stops = {self._specials["eos_token"], *raw.get("stop_tokens", [])}
        self.stop_ids = frozenset(i for i in (self._tok.token_to_id(s) for s in stops if s) if i is not None)

    def neutral(self, text: str) -> str:
        """Foreign text with the model's control tokens broken up, so that a file or a tool cannot forge a turn."""
        for marker in self._markers:
            if marker in text:
                text = text.replace(marker, f"{marker[0]} {marker[1:]}")
        return text

    def encode(self, text: str) -> list[int]:
        """Token ids; special tokens written out in the text become themselves."""
        return self._tok.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tok.decode(list(ids), skip_special_tokens=False)

    def render(self, messages: Sequence[Message], tools: Sequence[Message] | None = None, add_generation_prompt: bool = True) -> str:
        if self._template is None:
            raise ValueError("this tokenizer has no chat template; add one to tokenizer_config.json or use /v1/completions")
        try:
            return self._template.render(
                messages=[dict(m) for m in messages], tools=tools or None, add_generation_prompt=add_generation_prompt, **self._specials
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refused these messages: {error}") from error

    def render_after(self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Message] | None = None) -> str:
        """The text that follows an assistant's sampled text: its closing marker, the `new` messages and the next turn's opening.

        `history` ends just before that assistant message. The sampled text itself is never rendered, so it cannot drift.
        """
        # What a tool prints is the agent's to choose, so the marker grows until no message holds it.
        said, mark = json.dumps([dict(m) for m in (*history, *new)], ensure_ascii=False, default=str), _MARK
        while mark in said:
            mark += _MARK[0]
        text = self.render([*history, {"role": "assistant", "content": mark}, *new], tools)
        if text.count(mark) != 1:
            raise ValueError("the chat template alters assistant text, so a sampled answer cannot be continued token by token")
        return text.partition(mark)[2]


def _token_text(entry: Any) -> str | None:
    return entry.get("content") if isinstance(entry, dict) else entry


def _refuse(message: str) -> None:
    raise TemplateError(message)
