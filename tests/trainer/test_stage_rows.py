"""Rows of every common shape become the tokens that a session would sample, and only what the assistant says counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "chat"))
from chat_worlds import ENDS, SPECIALS, TEMPLATES, write_model
from stage_worlds import CONVERSATION, DEMO

from rollmill.model import Tokenizer
from rollmill.tasks import open_family
from rollmill.tasks.repo.corpus import traces
from rollmill.trainer.datasets.messages import read_turns
from rollmill.trainer.datasets.rows import Layout, RowEncoder
from rollmill.trainer.datasets.shards import TokenSequence

TOKENIZER = Tokenizer(DEMO)
CHAT, PAIR, TEXT = (RowEncoder(DEMO, layout) for layout in (Layout.CHAT, Layout.PAIR, Layout.TEXT))
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
]
WITH_TOOLS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "two and two?"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "call00001", "function": {"name": "add", "arguments": '{"a": 2}'}}]},
    {"role": "tool", "content": "4", "tool_call_id": "call00001", "name": "add"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "thanks"},
    {"role": "assistant", "content": "welcome"},
]


def learnt(sequence: TokenSequence, tokenizer: Tokenizer = TOKENIZER) -> str:
    assert sequence.weights_T is not None
    return tokenizer.decode(sequence.tokens_T[sequence.weights_T > 0].tolist())


def family_dir(tmp_path: Path, name: str) -> Path:
    bos, eos = ENDS.get(name, (None, "<|im_end|>"))
    return write_model(tmp_path / name, TEMPLATES[name], specials=SPECIALS[name], bos=bos, eos=eos)


def test_only_what_the_assistant_says_is_learnt() -> None:
    [sequence] = CHAT({"messages": CONVERSATION})
    assert learnt(sequence) == "first<|im_end|>second<|im_end|>"
    whole = TOKENIZER.chat_template.render(CONVERSATION, add_generation_prompt=False)
    assert TOKENIZER.decode(sequence.tokens_T.tolist()) == whole.removesuffix("\n")


def test_training_cuts_tokens_where_a_session_would() -> None:
    """The prompt of every turn, as sampling would see it, is a prefix of the training row."""
    for row in traces(open_family("repo"), num=20, seed=1, expert_frac=0.5, levels=(1, 2, 3), system="s"):
        [sequence] = CHAT(row)
        prompt = TOKENIZER.encode(TOKENIZER.chat_template.render(row["messages"][:2]))
        assert sequence.tokens_T[: len(prompt)].tolist() == prompt
        assert sequence.weights_T is not None
        assert not sequence.weights_T[: len(prompt)].any() and sequence.weights_T[len(prompt)] == 1.0


@pytest.mark.parametrize("name", ["qwen25", "qwen3", "llama3", "mistral", "deepseek"])
def test_calls_and_closing_tokens_are_learnt_by_the_templates_of_known_families(tmp_path: Path, name: str) -> None:
    encoder = RowEncoder(family_dir(tmp_path, name), Layout.CHAT)
    sequences = encoder({"messages": WITH_TOOLS, "tools": TOOLS})
    said = [learnt(s, encoder.tokenizer) for s in sequences]
    end = ENDS.get(name, ("", "<|im_end|>"))[1]
    assert "".join(said).count(end) == 3
    told = "".join(said)
    assert "add" in told and '"a": 2' in told and "four" in told and "welcome" in told
    assert "two and two" not in told and "thanks" not in told
    for sequence in sequences:
        # Each stretch is what the template writes for a prefix of the conversation.
        text = encoder.tokenizer.decode(sequence.tokens_T.tolist())
        assert text.endswith(end)


def test_a_template_that_rewrites_earlier_turns_gives_each_answer_its_own_context(tmp_path: Path) -> None:
    forgets = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if loop.last or m.role != 'assistant' else '...' }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    encoder = RowEncoder(write_model(tmp_path / "n", forgets), Layout.CHAT)
    first, second = encoder({"messages": CONVERSATION})
    assert [learnt(s, encoder.tokenizer) for s in (first, second)] == ["first<|im_end|>", "second<|im_end|>"]
    assert "first" not in encoder.tokenizer.decode(second.tokens_T.tolist())


def test_an_answer_is_learnt_behind_the_context_it_is_sampled_in(tmp_path: Path) -> None:
    """Mistral's templates write the system prompt only before the last question, and nowhere once it is answered."""
    encoder = RowEncoder(family_dir(tmp_path, "mistral"), Layout.CHAT)
    messages = [{"role": "system", "content": "sys"}, *CONVERSATION[:2]]
    [sequence] = encoder({"messages": messages})
    assert encoder.tokenizer.decode(sequence.tokens_T.tolist()) == "<s>[INST]sys\n\nu[/INST] first</s>"
    assert learnt(sequence, encoder.tokenizer) == " first</s>"


def test_a_template_that_hides_the_answer_is_refused(tmp_path: Path) -> None:
    template = "{% if add_generation_prompt %}<|im_start|>{% else %}{{ messages | length }}{% endif %}"
    encoder = RowEncoder(write_model(tmp_path / "m", template), Layout.CHAT)
    with pytest.raises(ValueError, match="otherwise than it opens one"):
        encoder({"messages": CONVERSATION})


def test_weight_and_train_decide_what_a_message_counts() -> None:
    messages = [dict(m) for m in CONVERSATION]
    messages[1]["train"], messages[3]["weight"] = False, 0.5
    [sequence] = CHAT({"messages": messages})
    assert sequence.weights_T is not None
    assert learnt(sequence) == "second<|im_end|>" and set(sequence.weights_T.tolist()) == {0.0, 0.5}
    messages[3]["weight"] = 0
    assert CHAT({"messages": messages}) == []
    with pytest.raises(ValueError, match="only what the assistant says"):
        CHAT({"messages": [{"role": "user", "content": "x", "train": True}]})
    with pytest.raises(ValueError, match="weight -1"):
        CHAT({"messages": [{"role": "assistant", "content": "x", "weight": -1}]})


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": CONVERSATION[:1], "completion": CONVERSATION[1:2]},
        {"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "first"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "u"}]}, {**CONVERSATION[1], "tool_calls": None}]},
    ],
    ids=["prompt", "conversations", "parts"],
)
def test_shapes_that_mean_the_same_give_the_same_tokens(row: dict[str, Any]) -> None:
    [expected], [found] = CHAT({"messages": CONVERSATION[:2]}), CHAT(row)
    assert found.weights_T is not None and expected.weights_T is not None
    assert found.tokens_T.tolist() == expected.tokens_T.tolist() and found.weights_T.tolist() == expected.weights_T.tolist()


def test_arguments_and_tools_may_be_json_text() -> None:
    as_object = json.loads(json.dumps(WITH_TOOLS))
    as_object[2]["tool_calls"][0]["function"]["arguments"] = {"a": 2}
    assert [t.message for t in read_turns(as_object)] == [t.message for t in read_turns(WITH_TOOLS)]
    [a], [b] = CHAT({"messages": WITH_TOOLS, "tools": TOOLS}), CHAT({"messages": as_object, "tools": json.dumps(TOOLS)})
    assert a.tokens_T.tolist() == b.tokens_T.tolist()


def test_text_prompt_and_completion_are_learnt_without_a_template() -> None:
    [sequence] = CHAT({"prompt": "2 + 2 =", "completion": " 4"})
    assert TOKENIZER.decode(sequence.tokens_T.tolist()) == "2 + 2 = 4<|endoftext|>"
    assert learnt(sequence) == " 4<|endoftext|>"


def test_document_is_learnt_with_its_end() -> None:
    [sequence] = TEXT({"text": "a b"})
    assert TOKENIZER.decode(sequence.tokens_T.tolist()) == "a b<|endoftext|>" and sequence.weights_T is None
    assert TEXT({"text": ""}) == []


PROMPT = [{"role": "user", "content": "q"}]
GOOD, BAD = [{"role": "assistant", "content": "yes"}], [{"role": "assistant", "content": "no"}]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": PROMPT, "chosen": GOOD, "rejected": BAD},
        {"chosen": PROMPT + GOOD, "rejected": PROMPT + BAD},
        {"prompt": "q", "chosen": PROMPT + GOOD, "rejected": PROMPT + BAD},
        {"prompt": "q", "chosen": GOOD, "rejected": BAD},
        {"prompt": PROMPT, "chosen": PROMPT + GOOD, "rejected": PROMPT + BAD},
        {"prompt": PROMPT, "chosen": "yes", "rejected": BAD},
    ],
)
def test_preferences_in_all_common_shapes_are_the_same_pair(row: dict[str, Any]) -> None:
    chosen, rejected = PAIR(row)
    assert (learnt(chosen), learnt(rejected)) == ("yes<|im_end|>", "no<|im_end|>")
    assert TOKENIZER.decode(chosen.tokens_T.tolist()) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>"


def test_only_answers_behind_the_shared_beginning_are_compared() -> None:
    shared = [*PROMPT, {"role": "assistant", "content": "hm"}, *PROMPT]
    chosen, rejected = PAIR({"chosen": shared + GOOD, "rejected": shared + BAD})
    assert (learnt(chosen), learnt(rejected)) == ("yes<|im_end|>", "no<|im_end|>")


def test_a_pair_without_difference_teaches_nothing_and_half_a_pair_is_an_error() -> None:
    assert PAIR({"prompt": PROMPT, "chosen": GOOD, "rejected": GOOD}) == []
    assert PAIR({"prompt": "q", "chosen": "x", "rejected": "x"}) == []
    with pytest.raises(ValueError, match="`chosen` and `rejected`; this one has chosen"):
        PAIR({"chosen": GOOD})
    with pytest.raises(ValueError, match="needs a text `prompt`"):
        PAIR({"chosen": "a", "rejected": "b"})


def test_first_token_of_a_sequence_never_counts() -> None:
    sequence = CHAT({"prompt": "", "completion": "word"})[0]
    assert sequence.weights_T is not None and sequence.weights_T[0] == 0 and np.all(sequence.weights_T[1:] == 1)
