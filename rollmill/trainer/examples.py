"""Rows of a supervised data set as token arrays with a loss mask: `{"text": ...}` or `{"messages": [...]}`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollmill.model.tokenizer import Tokenizer


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence. `weights_T[i]` is the loss weight of predicting token i from those before it."""

    tokens_T: np.ndarray
    weights_T: np.ndarray


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, row) of a JSONL file; a line that is not a JSON object is an error that names it."""
    with path.open() as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number} holds a {type(row).__name__}, expected an object with `text` or `messages`")
            yield number, row


def text_example(row: Mapping[str, Any], tokenizer: Tokenizer) -> Example:
    """Every token of a document is learnt, its end too."""
    if not isinstance(row.get("text"), str):
        raise ValueError("a mid-training row needs a string `text`")
    ids = tokenizer.encode(row["text"] + "<|endoftext|>")
    weights = np.ones(len(ids), np.float32)
    weights[0] = 0.0
    return Example(tokens_T=np.asarray(ids, np.int32), weights_T=weights)


def chat_example(row: Mapping[str, Any], tokenizer: Tokenizer) -> Example:
    """Only what the assistant says is learnt, its end-of-turn token included.

    The conversation is cut where the template opens an assistant turn; each piece is encoded on its own, exactly as a
    session does when it samples, so training never sees a token boundary that sampling cannot produce.
    """
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("a chat row needs a list `messages`")
    if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        raise ValueError("every message of a chat row needs to be an object with a `role`")
    ids: list[int] = []
    weights: list[float] = []
    done = ""
    for k, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        opening = tokenizer.chat_template.render(messages[:k])
        closed = tokenizer.chat_template.render(messages[: k + 1], add_generation_prompt=False)
        if not opening.startswith(done) or not closed.startswith(opening):
            raise ValueError("the chat template rewrites earlier turns, so this conversation cannot be masked turn by turn")
        context, said = tokenizer.encode(opening[len(done) :]), tokenizer.encode(closed[len(opening) :])
        last = max((i for i, t in enumerate(said) if t in tokenizer.stop_ids), default=len(said) - 1)
        ids += context + said
        weights += [0.0] * len(context) + [1.0] * (last + 1) + [0.0] * (len(said) - last - 1)
        done = closed
    if not ids:
        raise ValueError("a chat row needs at least one assistant message")
    return Example(tokens_T=np.asarray(ids, np.int32), weights_T=np.asarray(weights, np.float32))


def batches(examples: list[Example], num_tokens: int, rng: np.random.Generator) -> Iterable[list[Example]]:
    """One epoch in random order, cut into batches of about `num_tokens`, each of sequences of similar length."""
    order = np.array([len(e.tokens_T) for e in examples]) + rng.uniform(0, 16, len(examples))
    groups: list[list[Example]] = [[]]
    size = 0
    for i in np.argsort(order, kind="stable"):
        size += len(examples[i].tokens_T)
        groups[-1].append(examples[i])
        if size >= num_tokens:
            groups.append([])
            size = 0
    full = [g for g in groups if g]
    return [full[i] for i in rng.permutation(len(full))]
