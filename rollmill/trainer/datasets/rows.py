"""One row of a data set as token sequences with a loss mask, cut into tokens exactly as a session would cut them when it samples.

Documents are learnt whole; of a conversation only what the assistant says, its calls and the token that closes its turn included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from rollmill.model.chat_template import Refusal
from rollmill.model.tokenizer import Tokenizer
from rollmill.trainer.datasets.messages import Turn, read_tools, read_turns, with_text_arguments
from rollmill.trainer.datasets.shards import TokenSequence

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>")
"""What closes a document, the first that the vocabulary has. An instruct model's end of turn is not the end of a document."""


class Layout(StrEnum):
    """What a row is read as."""

    TEXT = "text"
    """A document, every token learnt."""
    CHAT = "chat"
    """A conversation, a prompt with its completion, or a text."""
    PAIR = "pair"
    """A chosen and a rejected answer: two sequences, in this order."""


class RowEncoder:
    """Rows to sequences by one model's tokenizer and template."""

    def __init__(self, model_dir: Path, layout: Layout) -> None:
        self.tokenizer, self.layout = Tokenizer(model_dir), layout
        raw = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        bare, marked = raw.encode("a", add_special_tokens=False).ids, raw.encode("a").ids
        self._begin = marked[: marked.index(bare[0])] if bare and bare[0] in marked else []
        """What the model's own tokenizer puts before a document."""
        ends = [self.tokenizer.markers[t] for t in ENDS if t in self.tokenizer.markers] or sorted(self.tokenizer.stop_ids)
        self._end = ends[:1]
        self._stops = [self.tokenizer.decode([i]) for i in sorted(self.tokenizer.stop_ids)]

    def __call__(self, row: Mapping[str, Any]) -> list[TokenSequence]:
        """No sequence: the row has nothing to teach."""
        if self.layout is Layout.TEXT:
            return self._document(row)
        if self.layout is Layout.CHAT:
            return self._chat(row)
        return self._pair(row)

    def _document(self, row: Mapping[str, Any]) -> list[TokenSequence]:
        if not isinstance(row.get("text"), str):
            raise ValueError("a document needs a string `text`" + _has(row))
        ids = [*self._begin, *self.tokenizer.encode(row["text"]), *self._end]
        return [TokenSequence(tokens_T=np.asarray(ids, np.int64))] if row["text"] else []

    def _chat(self, row: Mapping[str, Any]) -> list[TokenSequence]:
        if "messages" in row or "conversations" in row:
            return self._turns(read_turns(row.get("messages", row.get("conversations"))), row)
        if "completion" in row:
            prompt, completion = row.get("prompt"), row["completion"]
            if isinstance(prompt, str) and isinstance(completion, str):
                return [self._completed(prompt, completion)]
            return self._turns([*read_turns(prompt, weight=0.0), *read_turns(completion)], row)
        if "text" in row:
            return self._document(row)
        raise ValueError("a chat row needs a list `messages`, `prompt` and `completion`, or `text`" + _has(row))

    def _completed(self, prompt: str, completion: str) -> TokenSequence:
        before, said = [*self._begin, *self.tokenizer.encode(prompt)], [*self.tokenizer.encode(completion), *self._end]
        weights = np.repeat(np.array([0.0, 1.0], np.float32), [len(before), len(said)])
        weights[0] = 0.0
        return TokenSequence(tokens_T=np.asarray(before + said, np.int64), weights_T=weights)

    def _turns(self, turns: Sequence[Turn], row: Mapping[str, Any]) -> list[TokenSequence]:
        """Usually one sequence. A template that rewrites earlier turns (some drop old reasoning) gives one per stretch it leaves alone:
        each answer is then learnt behind the very context it would be sampled in."""
        if not any(t.is_answer for t in turns):
            raise ValueError("a chat row needs at least one assistant message")
        try:
            return self._written([t.message for t in turns], turns, row)
        except Refusal:
            if not any(t.message.get("tool_calls") for t in turns):
                raise
            # Some templates write the arguments of calls as they stand, and want text.
            return self._written([with_text_arguments(t.message) for t in turns], turns, row)

    def _written(self, messages: list[dict[str, Any]], turns: Sequence[Turn], row: Mapping[str, Any]) -> list[TokenSequence]:
        template, tools, options = self.tokenizer.chat_template, read_tools(row.get("tools")), row.get("chat_template_kwargs") or {}
        out: list[TokenSequence] = []
        ids: list[int] = []
        weights: list[float] = []
        done = ""
        for k, turn in enumerate(turns):
            if not turn.is_answer:
                continue
            opening = template.render(messages[:k], tools, **options)
            closed = template.render(messages[: k + 1], tools, add_generation_prompt=False, **options)
            begin = len(opening)
            if not closed.startswith(opening):
                other = {"role": "assistant", "content": "~another answer~"}
                others = template.render([*messages[:k], other], tools, add_generation_prompt=False, **options)
                begin = _answer_begin(opening, _shared(closed, others))
            if not opening.startswith(done):
                out += _masked(ids, weights)
                ids, weights, done = [], [], ""
            answer = closed[begin:]
            # What a template writes behind the closing token opens the next turn, as it does in a session.
            end = max((answer.rfind(t) + len(t) for t in self._stops if t in answer), default=len(answer))
            context, said = self.tokenizer.encode(opening[len(done) :]), self.tokenizer.encode(answer[:end])
            ids += context + said
            weights += [0.0] * len(context) + [turn.weight] * len(said)
            done = opening + answer[:end]
        return out + _masked(ids, weights)

    def _pair(self, row: Mapping[str, Any]) -> list[TokenSequence]:
        chosen, rejected, prompt = row.get("chosen"), row.get("rejected"), row.get("prompt")
        if chosen is None or rejected is None:
            raise ValueError("a preference row needs `chosen` and `rejected`" + _has(row))
        if isinstance(chosen, str) and isinstance(rejected, str):
            if not isinstance(prompt, str):
                raise ValueError("a preference row whose answers are text needs a text `prompt`; give messages otherwise")
            return [] if chosen == rejected else [self._completed(prompt, chosen), self._completed(prompt, rejected)]
        sides = [_whole_conversation(prompt, side) for side in (chosen, rejected)]
        num_shared = next((i for i, (a, b) in enumerate(zip(*sides, strict=False)) if a.message != b.message), None)
        if num_shared is None:
            return []
        out = []
        for side in sides:
            turns = [Turn(message=t.message, weight=0.0 if i < num_shared else t.weight) for i, t in enumerate(side)]
            found = self._turns(turns, row)
            if len(found) != 1:
                raise ValueError("the two sides of a preference need one stretch of answers each; leave only the last answer to differ")
            out += found
        return out


def _answer_begin(opening: str, shared: str) -> int:
    """Where an answer begins in a conversation whose earlier text the template wrote anew once it was answered.

    `shared` is all that it writes whatever the answer is; the answer begins behind the longest end of `opening` that is found in there.
    """
    low, high = 0, len(opening)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if opening[-middle:] in shared else (low, middle - 1)
    if not low:
        raise ValueError("the chat template writes an answer otherwise than it opens one, so its tokens cannot be told apart")
    return shared.rfind(opening[-low:]) + low


def _shared(a: str, b: str) -> str:
    return a[: next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))]


def _whole_conversation(prompt: Any, side: Any) -> list[Turn]:
    """Some data sets repeat the prompt in front of each answer, some do not, and some tell it as text beside messages."""
    turns = read_turns([{"role": "assistant", "content": side}] if isinstance(side, str) else side)
    if prompt is None or (isinstance(prompt, str) and turns[0].message["role"] in ("user", "system")):
        return turns
    before = read_turns([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, weight=0.0)
    if [t.message for t in turns[: len(before)]] == [t.message for t in before]:
        turns = turns[len(before) :]
    return [*before, *turns]


def _masked(ids: list[int], weights: list[float]) -> list[TokenSequence]:
    # Nothing predicts the first token.
    weights_T = np.asarray(weights, np.float32)
    weights_T[:1] = 0.0
    return [TokenSequence(tokens_T=np.asarray(ids, np.int64), weights_T=weights_T)] if weights_T.any() else []


def _has(row: Mapping[str, Any]) -> str:
    return f"; this one has {', '.join(row) or 'nothing'}"
