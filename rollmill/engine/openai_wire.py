"""The OpenAI request shapes this engine understands, checked and turned into native requests; fields it does not know are ignored."""

from __future__ import annotations

from typing import Any

import msgspec

from rollmill.engine.protocol import MAX_SEED, GenerateRequest

MAX_CHOICES = 128
MAX_STOPS = 16


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None


class _Common(msgspec.Struct, frozen=True, kw_only=True):
    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def stops(self) -> list[str]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MAX_STOPS:
            raise ValueError(f"stop has {len(stops)} strings, at most {MAX_STOPS} are allowed")
        if any(not s or len(s) > 1024 for s in stops):
            raise ValueError("stop holds an empty string or one of more than 1024 characters")
        return stops

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def to_native(self, prompt_ids: list[int], *, max_tokens: int, stop_ids: frozenset[int]) -> list[GenerateRequest]:
        """One native request per choice; choice i of a seeded request uses seed + i."""
        num_choices = 1 if self.n is None else self.n
        if not 1 <= num_choices <= MAX_CHOICES:
            raise ValueError(f"n is {num_choices}, it must be between 1 and {MAX_CHOICES}")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED - MAX_CHOICES:
            raise ValueError(f"seed is {self.seed}, it must be between 0 and 2**63 - {MAX_CHOICES + 1}")
        return [
            GenerateRequest(
                prompt_ids=prompt_ids,
                max_tokens=max_tokens,
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                top_k=self.top_k or 0,
                seed=None if self.seed is None else self.seed + i,
                stop_ids=sorted(stop_ids),
            )
            for i in range(num_choices)
        ]


class ChatRequest(_Common, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def check(self) -> None:
        if not self.messages:
            raise ValueError("messages is empty; send at least one")
        if self.top_logprobs:
            raise ValueError(f"top_logprobs is {self.top_logprobs}; this engine reports the sampled token only, leave it out or send 0")
        if self.tool_choice not in (None, "auto", "none"):
            raise ValueError(f"tool_choice is {self.tool_choice!r}; this engine knows 'auto' and 'none'")

    def plain_messages(self) -> list[dict[str, Any]]:
        """Messages with text contents, as chat templates expect them."""
        out = []
        for i, message in enumerate(self.messages):
            role, content = message.get("role"), message.get("content")
            if not isinstance(role, str) or not role:
                raise ValueError(f"messages[{i}].role is {role!r}, it must be a word such as 'user'")
            if isinstance(content, list):
                if any(not isinstance(p, dict) or p.get("type") != "text" or not isinstance(p.get("text"), str) for p in content):
                    raise ValueError(f"messages[{i}].content holds a part that is not text; this model reads text only")
                content = "".join(p["text"] for p in content)
            if content is not None and not isinstance(content, str):
                raise ValueError(f"messages[{i}].content is of type {type(content).__name__}, it must be text")
            out.append({**message, "content": content or ""})
        return out


class CompletionRequest(_Common, frozen=True, kw_only=True):
    prompt: str | list[int]
    """Text, or token ids."""
    logprobs: int | None = None
    echo: bool | None = None

    def check(self) -> None:
        if self.logprobs is not None and not 0 <= self.logprobs <= 1:
            raise ValueError(f"logprobs is {self.logprobs}; this engine reports the sampled token only, send 0 or 1")
        if self.echo:
            raise ValueError("echo is true; this engine returns sampled tokens only, leave it out")
