"""Conversations to tokens and answers back to messages, in one model's own way; what was sampled is never rendered or encoded again."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from rollmill.chat.call_ids import random_call_id
from rollmill.chat.encoding import Encoding
from rollmill.chat.messages import Call, ChatMessage, ChatRole, Tool
from rollmill.chat.reader import AnswerReader, Thinking
from rollmill.chat.template import Turns, user
from rollmill.chat.text_stream import TextStream
from rollmill.chat.tool_formats import ToolFormat, open_format
from rollmill.chat.tool_grammar import answer_lark, json_text
from rollmill.engine.protocol import Constraint, ConstraintKind
from rollmill.model.tokenizer import Tokenizer

_THINKING = (Thinking("<think>", "</think>"), Thinking("[THINK]", "[/THINK]"), Thinking("<seed:think>", "</seed:think>"))
_NUM_TAIL = 16
"""Tokens at the end of a prompt that can hold an opening of reasoning and the line feeds after it."""


class ChatFormat:
    """One model's chat template, tool format and stop tokens."""

    def __init__(self, tokenizer: Tokenizer, *, tool_format: str = "auto", options: Mapping[str, Any] = {}) -> None:
        """`options` are the template's own switches, such as `enable_thinking`."""
        self.tokenizer = tokenizer
        self.encoding = Encoding(tokenizer)
        """How prompts are encoded: what was sent before costs nothing."""
        self.options = dict(options)
        source = tokenizer.chat_template.text(has_tools=True)
        self.tool_format: ToolFormat = open_format(tool_format, source)
        self.turns = Turns(tokenizer, self.tool_format, options=self.options)
        self.thinking: Thinking | None = next(
            (t for t in _THINKING if t.opening in tokenizer.markers or t.opening in source or t.closing in source), None
        )
        self._is_thinking = self._opens_thinking(self.turns.try_opening([user("u")]))

    def first(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> list[int]:
        """Prompt ids of a whole conversation, ending with the opening of the assistant's turn, or with what the client has begun to say
        in its name."""
        return self.encoding.encode(self.prompt_text(messages, tools))

    def prompt_text(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> str:
        """What `first` encodes."""
        messages, begun = _split_begun(messages)
        return self.turns.opening(messages, tools) + self.tokenizer.neutral(begun)

    def after(
        self, history: Sequence[ChatMessage], last_id: int | None, new: Sequence[ChatMessage], tools: Sequence[Tool] = ()
    ) -> list[int]:
        """Ids that follow a sampled answer: the turn's closing unless `last_id`, its last sampled id, closed it; `new`; the next opening.

        `history` ends just before the answer.
        """
        new, begun = _split_begun(new)
        ids = self.encoding.encode(self.turns.after(history, new, tools) + self.tokenizer.neutral(begun))
        # The policy has closed its turn itself: the template's closing token would be a second one.
        return ids[1:] if ids and ids[0] == last_id and last_id in self.tokenizer.stop_ids else ids

    def realign(
        self,
        history: Sequence[ChatMessage],
        sampled: Sequence[int],
        said: ChatMessage,
        new: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
    ) -> tuple[int, list[int]]:
        """The client repeats an answer differently, as `said`: how many leading sampled ids are still what it says, and the ids that
        follow them: the rest of the answer as the client tells it, closing, `new`, next opening."""
        body = sampled[:-1] if sampled and sampled[-1] in self.tokenizer.stop_ids else sampled
        texts = self._texts(body)
        raw = "".join(texts)
        head, words, tail = self._retold(raw, body, said, tools)
        told = head + words + tail
        if told == raw:
            return len(sampled), self.after(history, sampled[-1] if sampled else None, new, tools)
        num_same = next((n for n, (a, b) in enumerate(zip(raw, told, strict=False)) if a != b), min(len(raw), len(told)))
        ends = list(accumulate(map(len, texts)))
        num_kept = bisect_right(ends, num_same)
        # A token may end inside a character that the client does not say.
        while num_kept and self.tokenizer.decode(body[:num_kept]) != raw[: ends[num_kept - 1]]:
            num_kept -= 1
        num_chars = ends[num_kept - 1] if num_kept else 0
        at = max(num_chars - len(head), 0)
        rest = head[num_chars:] + self.tokenizer.neutral(words[at:]) + tail[max(at - len(words), 0) :]
        return num_kept, self.tokenizer.encode(rest) + self.after(history, None, new, tools)

    def reader(
        self,
        *,
        stops: Sequence[str] = (),
        has_tools: bool = False,
        tools: Sequence[Tool] = (),
        prompt_ids: Sequence[int] = (),
        mint: Callable[[], str] = random_call_id,
        streams_calls: bool = False,
    ) -> AnswerReader:
        """`has_tools`: calls are looked for, even when no tool is given. `tools` tell the types of arguments where the format does not.
        `prompt_ids`: whether the prompt has opened the reasoning is read from its end, not taken from the template.
        `mint` gives calls their ids: `MintedIds` where a seed is known.
        `streams_calls`: arguments of calls of `tools` are shown while they are written, where the format allows it."""
        is_thinking = self._is_thinking
        if prompt_ids and self.thinking is not None:
            is_thinking = self._opens_thinking(self.tokenizer.decode(prompt_ids[-_NUM_TAIL:]))
        finds_calls = (has_tools or bool(tools)) and bool(self.tool_format.blocks)
        return AnswerReader(
            self.tokenizer,
            stop_ids=self.tokenizer.stop_ids,
            stops=stops,
            tool_format=self.tool_format if finds_calls else None,
            tools=tools,
            thinking=self.thinking,
            is_thinking=is_thinking,
            mint=mint,
            streams_calls=streams_calls,
        )

    def text_reader(self, *, stops: Sequence[str] = ()) -> AnswerReader:
        """For continuations of plain text: no turns, no calls, no reasoning."""
        return AnswerReader(self.tokenizer, stop_ids=self.tokenizer.stop_ids, stops=stops)

    def tool_grammar(self, tools: Sequence[Tool], *, forced_tool: str = "", parallel: bool = True) -> Constraint:
        """The answer must be calls of `tools`, or of the one named."""
        known = [t for t in tools if t.name == forced_tool] if forced_tool else list(tools)
        if not known:
            names = ", ".join(t.name for t in tools) or "none"
            raise ValueError(f"a call of {forced_tool or 'some tool'!r} is asked for, the tools of this request are: {names}")
        if not self.tool_format.blocks:
            raise ValueError(f"calls cannot be asked for: the tool format of this model is {self.tool_format.name!r}")
        return self._grammar(known, None, parallel)

    def json_grammar(self, schema: Mapping[str, Any], tools: Sequence[Tool] = (), *, parallel: bool = True) -> Constraint:
        """The answer must be JSON that follows `schema`, or calls of `tools` where there are some: an agent with both uses them first."""
        if self.thinking is None and not tools:
            return Constraint(kind=ConstraintKind.JSON_SCHEMA, text=json_text(schema))
        return self._grammar(tools if self.tool_format.blocks else (), schema, parallel)

    def _grammar(self, tools: Sequence[Tool], schema: Mapping[str, Any] | None, parallel: bool) -> Constraint:
        text = answer_lark(
            self.tool_format,
            tools,
            schema=schema,
            parallel=parallel,
            thinking=self.thinking,
            is_thinking=self._is_thinking,
            specials=self.tokenizer.special_markers,
        )
        return Constraint(kind=ConstraintKind.LARK, text=text)

    def _opens_thinking(self, prompt: str) -> bool:
        return self.thinking is not None and prompt.rstrip().endswith(self.thinking.opening)

    def _texts(self, ids: Sequence[int]) -> list[str]:
        """The text each token completes."""
        stream = TextStream(self.tokenizer)
        out = [stream.feed((i,)) for i in ids]
        return out if not out else [*out[:-1], out[-1] + stream.finish()]

    def _retold(self, raw: str, ids: Sequence[int], said: ChatMessage, tools: Sequence[Tool]) -> tuple[str, str, str]:
        """An answer's raw text with the client's words in place of the model's, in three parts: what is before them, they, and what is
        after them. Reasoning and equal calls stay as sampled."""
        reader = self.reader(has_tools=True, tools=tools)
        reader.feed(ids, last=True)
        was = reader.message()
        text, start = was.text.strip(), self._text_start(raw)
        at = raw.find(text, start)
        if at >= 0 and _same_calls(was, said):
            tail = raw[at + len(text) :]
        else:
            at, tail = max(at, start), self.tool_format.write([self.turns.shape.clean_call(c) for c in said.calls])
        return raw[:at], said.text.strip(), tail

    def _text_start(self, raw: str) -> int:
        """Where reasoning ends and the answer proper begins."""
        if self.thinking is None or not (self._is_thinking or raw.lstrip().startswith(self.thinking.opening)):
            return 0
        at = raw.find(self.thinking.closing)
        if at < 0:
            return len(raw)
        end = at + len(self.thinking.closing)
        return end + len(raw[end:]) - len(raw[end:].lstrip())


def _split_begun(messages: Sequence[ChatMessage]) -> tuple[Sequence[ChatMessage], str]:
    """A conversation that ends with an assistant's text asks for its continuation."""
    if messages and messages[-1].role is ChatRole.ASSISTANT and not messages[-1].calls:
        return messages[:-1], messages[-1].text
    return messages, ""


def _same_calls(a: ChatMessage, b: ChatMessage) -> bool:
    """But for their ids, which clients rewrite."""
    keys = [
        ChatMessage(role=ChatRole.ASSISTANT, calls=tuple(Call(id="", name=c.name, arguments=c.arguments) for c in m.calls)).key()
        for m in (a, b)
    ]
    return keys[0] == keys[1]
