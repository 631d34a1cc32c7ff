"""What a client asks of the gateway and what it gets, in no dialect: every wire format is turned into a `ChatCall` or `TextCall` and
made from `Event`s and `Answer`s."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec
import numpy as np

from rollmill.chat.messages import Call, ChatMessage, Tool
from rollmill.engine.protocol import VersionSpan


class ToolChoice(StrEnum):
    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    """Some tool; which one is `ChatCall.forced_tool` when the client named it."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What all calls have in common. None: the server's or the episode's own."""

    model: str = ""
    """`name`, `name:step` or `name@tag`."""
    max_tokens: int | None = None
    """None: as many as the context holds."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stops: tuple[str, ...] = ()
    num_choices: int = 1
    num_top_logprobs: int | None = None
    """None: no logprobs are wanted; 0: the sampled token's alone."""
    wants_token_ids: bool = False
    """vLLM's `return_token_ids`: prompt and answer ids beside the text."""
    stream: bool = False
    includes_usage: bool = False
    """A stream ends with the counts."""


class ChatCall(Ask, frozen=True, kw_only=True):
    """The next message of a conversation."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice.AUTO
    forced_tool: str = ""
    parallel_calls: bool = True
    schema: dict[str, Any] | None = None
    """The answer must be JSON that follows this schema; `{}`: any JSON object."""


class TextCall(Ask, frozen=True, kw_only=True):
    """The continuation of plain text or of token ids."""

    prompts: tuple[str | list[int], ...]
    """Several prompts give several choices, prompt by prompt."""
    echo: bool = False


class EventKind(StrEnum):
    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"
    """A tool call begins: `call_id` and `name` are known, `text` is the beginning of its arguments or empty."""
    ARGUMENTS = "arguments"
    """More of the arguments of the call that began last."""
    TOKENS = "tokens"
    """Tokens were sampled that released no text yet."""
    END = "end"
    """The last of this choice; `answer` is whole."""


class Finish(StrEnum):
    STOP = "stop"
    """The model ended its turn, or a stop string was met (`Answer.stop_string`)."""
    LENGTH = "length"
    CALLS = "tool_calls"


class TopLogprob(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One finished choice."""

    text: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    finish: Finish
    stop_string: str | None = None
    """The stop string that ended it; it is not in `text`."""
    token_ids: list[int]
    """As sampled, stop token included."""
    logprobs: np.ndarray
    """float32[T]"""
    tops: list[list[TopLogprob]] = []
    """Per token, most likely first, when asked for."""
    spans: list[VersionSpan] = []
    num_prompt: int
    num_reused: int = 0
    """Prompt tokens found in the replica's cache."""
    prompt_ids: list[int] = []
    """When token ids were asked for."""
    replica: str = ""

    @property
    def version(self) -> int:
        """The newest weight version that sampled in it; -1 when nothing was sampled."""
        return max((s.version for s in self.spans), default=-1)


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something happened to choice `index`."""

    index: int
    kind: EventKind
    text: str = ""
    call_id: str = ""
    name: str = ""
    token_ids: list[int] = []
    """Sampled since the last event of this choice."""
    logprobs: list[float] = []
    tops: list[list[TopLogprob]] = []
    answer: Answer | None = None
