"""Conversations to tokens and answers back to messages, in one model's own way; what was sampled is never rendered or encoded again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollmill.chat.messages import ChatMessage, ChatRole, Tool
from rollmill.chat.reader import AnswerReader, Thinking, mint_call_id
from rollmill.chat.template import Turns, user
from rollmill.chat.text_stream import TextStream
from rollmill.chat.tool_formats import ToolFormat, open_format
from rollmill.chat.tool_grammar import tool_lark
from rollmill.engine.protocol import Constraint, ConstraintKind
from rollmill.model.chat_template import ChatTemplate
from rollmill.model.tokenizer import Tokenizer

_THINKING = (Thinking("<think>", "</think>"), Thinking("[THINK]", "[/THINK]"), Thinking("<seed:think>", "</seed:think>"))
_NUM_TAIL = 16
"""Tokens at the end of a prompt that can hold an opening of reasoning and the line feeds after it."""


class ChatFormat:
    """One model's chat template, tool format and stop tokens."""

    def __init__(self, tokenizer: Tokenizer, *, tool_format: str = "auto", options: Mapping[str, Any] = {}) -> None:
        """`options` are the template's own switches, such as `enable_thinking`."""
        self.tokenizer = tokenizer
        self.options = dict(options)
        template = ChatTemplate.of(tokenizer)
        source = template.text(has_tools=True)
        self.tool_format: ToolFormat = open_format(tool_format, source)
        self.turns = Turns(
            template,
            self.tool_format,
            neutral=tokenizer.neutral,
            markers=tokenizer.markers,
            stop_texts=[tokenizer.decode([i]) for i in sorted(tokenizer.stop_ids)],
            options=self.options,
        )
        self.thinking: Thinking | None = next(
            (t for t in _THINKING if t.opening in tokenizer.markers or t.opening in source or t.closing in source), None
        )
        self._is_thinking = bool(tokenizer.templates) and self._opens_thinking(self.turns.try_opening([user("u")]))

    def first(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> list[int]:
        """Prompt ids of a whole conversation, ending with the opening of the assistant's turn, or with what the client has begun to say
        in its name."""
        messages, begun = _split_begun(messages)
        return self.tokenizer.encode(self.turns.opening(messages, tools) + self.tokenizer.neutral(begun))

    def after(
        self, history: Sequence[ChatMessage], last_id: int | None, new: Sequence[ChatMessage], tools: Sequence[Tool] = ()
    ) -> list[int]:
        """Ids that follow a sampled answer: the turn's closing unless `last_id`, its last sampled id, closed it; `new`; the next opening.

        `history` ends just before the answer.
        """
        new, begun = _split_begun(new)
        ids = self.tokenizer.encode(self.turns.after(history, new, tools) + self.tokenizer.neutral(begun))
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
        ended = bool(sampled) and sampled[-1] in self.tokenizer.stop_ids
        texts, told = self._texts(sampled[:-1] if ended else sampled), self._retold(sampled, said, tools)
        whole = "".join(texts)
        if told == whole:
            return len(sampled), self.after(history, sampled[-1] if sampled else None, new, tools)
        num_same = next((n for n, (a, b) in enumerate(zip(whole, told, strict=False)) if a != b), min(len(whole), len(told)))
        num_kept, num_chars, at = 0, 0, 0
        for n, text in enumerate(texts, 1):
            at += len(text)
            if at > num_same:
                break
            if text:
                num_kept, num_chars = n, at
        rest = self.tokenizer.encode(self.tokenizer.neutral(told[num_chars:]))
        return num_kept, rest + self.after(history, None, new, tools)

    def reader(
        self,
        *,
        stops: Sequence[str] = (),
        has_tools: bool = False,
        tools: Sequence[Tool] = (),
        prompt_ids: Sequence[int] = (),
        mint: Callable[[], str] = mint_call_id,
    ) -> AnswerReader:
        """`has_tools`: calls are looked for, even when no tool is given. `tools` tell the types of arguments where the format does not.
        `prompt_ids`: whether the prompt has opened the reasoning is read from its end, not taken from the template."""
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
        text = tool_lark(
            self.tool_format,
            known,
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

    def _retold(self, sampled: Sequence[int], said: ChatMessage, tools: Sequence[Tool]) -> str:
        """The raw text of an answer with the client's words in place of the model's; reasoning and equal calls stay as sampled."""
        reader = self.reader(has_tools=True, tools=tools)
        reader.feed(sampled, last=True)
        was = reader.message()
        ended = bool(sampled) and sampled[-1] in self.tokenizer.stop_ids
        raw = self.tokenizer.decode(sampled[:-1] if ended else sampled)
        start = self._text_start(raw)
        text = was.text.strip()
        at = raw.find(text, start)
        if at >= 0 and _same_calls(was, said):
            tail = raw[at + len(text) :]
        else:
            at, tail = max(at, start), self.tool_format.write(said.calls)
        return raw[:at] + said.text.strip() + tail

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
    return [_meaning(a, n) for n in range(len(a.calls))] == [_meaning(b, n) for n in range(len(b.calls))]


def _meaning(message: ChatMessage, n: int) -> bytes:
    """A call but for its id, which clients rewrite."""
    call = message.calls[n]
    return ChatMessage(role=ChatRole.ASSISTANT, calls=(type(call)(id="", name=call.name, arguments=call.arguments),)).key()
