"""A grammar of calls lets through what its format writes and nothing else; its sentences are read back as calls that follow the schemas."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from chat_worlds import ADD, CHATML, LS, write_model

from rollmill.chat.format import ChatFormat
from rollmill.chat.messages import Call, Tool
from rollmill.chat.tool_formats import FORMATS
from rollmill.engine.protocol import Constraint, ConstraintKind
from rollmill.model.tokenizer import Tokenizer

llguidance = pytest.importorskip("llguidance")
REAL = [f for f in FORMATS if f != "none"]
MARKERS = sorted({m for f in FORMATS.values() for m in f.markers} | {"[ARGS]", "</arg_value>"})
CALLS = [
    Call(id="", name="ls", arguments='{"path": "a\u20ac/b"}'),
    Call(id="", name="add", arguments='{"a": 3, "why": "so it is", "rest": [1, 2]}'),
]


@pytest.fixture(scope="module", params=[False, True], ids=["markers_are_text", "markers_are_special"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_model(tmp_path_factory.mktemp("model"), CHATML, specials=MARKERS if request.param else ()))


def matcher(tokenizer: Tokenizer, constraint: Constraint) -> llguidance.LLMatcher:
    tokens = llguidance.LLTokenizer(tokenizer._tok.to_str(), n_vocab=tokenizer.vocab_size, eos_token=2)
    compile_ = (
        llguidance.LLMatcher.grammar_from_lark if constraint.kind is ConstraintKind.LARK else llguidance.LLMatcher.grammar_from_json_schema
    )
    out = llguidance.LLMatcher(tokens, compile_(constraint.text), log_level=0)
    assert not out.is_error(), out.get_error()
    return out


def accepts(tokenizer: Tokenizer, constraint: Constraint, text: str) -> bool:
    guide, ids = matcher(tokenizer, constraint), tokenizer.encode(text)
    return guide.try_consume_tokens(ids) == len(ids) and guide.is_accepting()


@pytest.mark.parametrize("form", REAL)
def test_grammar_accepts_calls_as_written_and_refuses_anything_else(tokenizer: Tokenizer, form: str) -> None:
    chat = ChatFormat(tokenizer, tool_format=form)
    write = FORMATS[form].write
    some = chat.tool_grammar([LS, ADD])
    assert accepts(tokenizer, some, write(CALLS)) and accepts(tokenizer, some, write(CALLS[1:]))
    assert not accepts(tokenizer, some, f"I call {write(CALLS)}") and not accepts(tokenizer, some, "no")
    assert not accepts(tokenizer, some, write([Call(id="", name="rm", arguments='{"path": "x"}')]))
    one = chat.tool_grammar([LS, ADD], forced_tool="add", parallel=False)
    assert accepts(tokenizer, one, write(CALLS[1:]))
    assert not accepts(tokenizer, one, write(CALLS[:1])) and not accepts(tokenizer, one, write(CALLS[1:] * 2))
    # Required arguments are not left out.
    assert not accepts(tokenizer, one, write([Call(id="", name="add", arguments="{}")]))


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "mistral_args"])
def test_random_sentences_of_the_grammar_are_read_as_valid_calls(tokenizer: Tokenizer, form: str) -> None:
    chat, rng = ChatFormat(tokenizer, tool_format=form), random.Random(0)
    shape = {"type": "object", "properties": {"n": {"enum": ["one", "two"]}}, "required": ["n"], "additionalProperties": False}
    tool = Tool(name="pick", parameters=shape)
    for _ in range(5):
        guide, ids = matcher(tokenizer, chat.tool_grammar([tool], parallel=False)), []
        while not guide.is_stopped() and len(ids) < 400:
            mask = guide.compute_bitmask()
            allowed = [i for i in range(tokenizer.vocab_size) if mask[i // 8] >> (i % 8) & 1]
            ids.append(rng.choice(allowed))
            guide.consume_token(ids[-1])
        reader = chat.reader(tools=[tool])
        reader.feed(ids, last=True)
        assert [c.name for c in reader.message().calls] == ["pick"], tokenizer.decode(ids)
        assert json.loads(reader.message().calls[0].arguments)["n"] in ("one", "two")


@pytest.mark.parametrize("opens", [False, True])
def test_reasoning_comes_before_what_is_asked_for(tmp_path: Path, opens: bool) -> None:
    template = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}" if opens else "assistant\n{% endif %}")
    chat = ChatFormat(Tokenizer(write_model(tmp_path, template, specials=["<think>", "</think>"])))
    call, thought = FORMATS["hermes"].write(CALLS[:1]), f"{'' if opens else '<think>'}hm, {{}}</think>\n\n"
    grammar = chat.tool_grammar([LS])
    assert accepts(chat.tokenizer, grammar, thought + call) and accepts(chat.tokenizer, grammar, call) == (not opens)
    either = chat.json_grammar({"type": "object", "required": ["x"], "properties": {"x": {"type": "integer"}}}, [LS])
    assert accepts(chat.tokenizer, either, thought + call) and accepts(chat.tokenizer, either, thought + '{"x": 3}')
    assert not accepts(chat.tokenizer, either, thought + '{"y": 3}')


def test_plain_model_follows_a_schema_as_it_is(tokenizer: Tokenizer) -> None:
    chat = ChatFormat(tokenizer, tool_format="hermes")
    plain = chat.json_grammar({"type": "object"})
    assert plain.kind is ConstraintKind.JSON_SCHEMA and json.loads(plain.text)["type"] == "object"
    assert chat.json_grammar({}, [LS]).kind is ConstraintKind.LARK


def test_white_space_has_an_end(tokenizer: Tokenizer) -> None:
    chat, form = ChatFormat(tokenizer, tool_format="hermes"), FORMATS["hermes"]
    for arguments, is_fine in (('{"path":"a"}', True), ('{\n  "path": "a"\n}', True), (f'{{"path":{" " * 40}"a"}}', False)):
        call = form.write([Call(id="", name="ls", arguments=arguments)])
        assert accepts(tokenizer, chat.tool_grammar([LS]), call) == is_fine
        schema = chat.json_grammar(LS.parameters)
        assert accepts(tokenizer, schema, arguments) == is_fine


def test_unknown_forced_tool_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="'rm' is asked for, the tools of this request are: ls, add"):
        ChatFormat(tokenizer).tool_grammar([LS, ADD], forced_tool="rm")
