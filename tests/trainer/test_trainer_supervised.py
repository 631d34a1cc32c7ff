"""The supervised stages learn a toy, mask what the assistant did not say, and name the row they cannot use."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.model import Tokenizer, load_model
from rollmill.tasks import open_family
from rollmill.tasks.repo.corpus import traces
from rollmill.trainer.examples import Example, batches, chat_example, text_example
from rollmill.trainer.supervised import SupervisedConfig, stage_midtrain, stage_sft, train_supervised

DEMO = Path(__file__).parents[2] / "models" / "demo"
TOKENIZER = Tokenizer(DEMO)
CONVERSATION = [
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "first"},
    {"role": "tool", "content": "r"},
    {"role": "assistant", "content": "second"},
]


def quiet(line: str) -> None:
    return None


def test_only_what_the_assistant_says_is_learnt() -> None:
    example = chat_example({"messages": CONVERSATION}, TOKENIZER)
    learnt = [int(t) for t, w in zip(example.tokens_T, example.weights_T, strict=True) if w]
    assert TOKENIZER.decode(learnt) == "first<|im_end|>second<|im_end|>"
    assert TOKENIZER.decode(example.tokens_T.tolist()) == TOKENIZER.chat_template.render(CONVERSATION, add_generation_prompt=False)


def test_training_cuts_tokens_where_a_session_would() -> None:
    """The prompt of every turn, as sampling would see it, is a prefix of the training row."""
    for row in traces(open_family("repo"), num=20, seed=1, expert_frac=0.5, levels=(1, 2, 3), system="s"):
        example = chat_example(row, TOKENIZER)
        prompt = TOKENIZER.encode(TOKENIZER.chat_template.render(row["messages"][:2]))
        assert example.tokens_T[: len(prompt)].tolist() == prompt
        assert not example.weights_T[: len(prompt)].any() and example.weights_T[len(prompt)] == 1.0


def test_document_is_learnt_with_its_end() -> None:
    example = text_example({"text": "a b"}, TOKENIZER)
    assert TOKENIZER.decode(example.tokens_T.tolist()) == "a b<|endoftext|>"
    assert example.weights_T.tolist() == [0.0] + [1.0] * (len(example.tokens_T) - 1)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 100))
def test_an_epoch_holds_every_example_once(lengths: list[int], num_tokens: int) -> None:
    examples = [Example(tokens_T=np.full(n, i), weights_T=np.ones(n)) for i, n in enumerate(lengths)]
    seen = [int(e.tokens_T[0]) for b in batches(examples, num_tokens, np.random.default_rng(0)) for e in b]
    assert sorted(seen) == list(range(len(lengths)))


def test_loss_falls_on_a_toy() -> None:
    model, _ = load_model(DEMO)
    examples = [text_example({"text": f"zebra {n} zebra {n} owl {n}"}, TOKENIZER) for n in range(8)]
    losses = []
    for num_steps in (1, 30):
        config = SupervisedConfig(lr=2e-3, num_steps=num_steps, tokens_per_batch=10_000, warmup_steps=2)
        losses.append(train_supervised(model, examples, config, quiet))
    assert math.isfinite(losses[1]) and losses[1] < losses[0] / 2


def write(path: Path, rows: list[object]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_stages_write_a_model_that_loads(tmp_path: Path) -> None:
    config = SupervisedConfig(num_steps=2, tokens_per_batch=100)
    stage_midtrain(DEMO, write(tmp_path / "docs.jsonl", [{"text": "owl"}] * 3), tmp_path / "mid", config, quiet)
    stage_sft(tmp_path / "mid", write(tmp_path / "chat.jsonl", [{"messages": CONVERSATION}] * 3), tmp_path / "sft", config, quiet)
    _, shape = load_model(tmp_path / "sft")
    assert shape == load_model(DEMO)[1]
    assert Tokenizer(tmp_path / "sft").chat_template.render(CONVERSATION) == TOKENIZER.chat_template.render(CONVERSATION)


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ("{", "is not JSON"),
        ("[1]", "holds a list, expected an object"),
        ({"text": "x"}, "a chat row needs a list `messages`"),
        ({"messages": []}, "a chat row needs a list `messages`"),
        ({"messages": ["hello"]}, "every message of a chat row needs to be an object with a `role`"),
        ({"messages": [{"content": "x"}]}, "every message of a chat row needs to be an object with a `role`"),
        ({"messages": [{"role": "user", "content": "x"}]}, "at least one assistant message"),
    ],
)
def test_bad_row_is_named_by_file_and_line(tmp_path: Path, bad: object, told: str) -> None:
    data = write(tmp_path / "chat.jsonl", [{"messages": CONVERSATION}, bad])
    with pytest.raises(ValueError, match=told) as caught:
        stage_sft(DEMO, data, tmp_path / "out", SupervisedConfig(num_steps=1), quiet)
    assert str(caught.value).startswith(f"{data}:2")
    assert not (tmp_path / "out").exists()


def test_missing_or_overlong_data_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no data at"):
        stage_sft(DEMO, tmp_path / "none.jsonl", tmp_path / "out", SupervisedConfig(), quiet)
    data = write(tmp_path / "docs.jsonl", [{"text": "owl " * 2000}])
    with pytest.raises(ValueError, match="no usable row: 1 rows, all longer than the model's 512 tokens"):
        stage_midtrain(DEMO, data, tmp_path / "out", SupervisedConfig(num_steps=1), quiet)
