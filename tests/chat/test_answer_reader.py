"""Claims about reading an answer: its parts are set apart the same way however its tokens arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import pytest
from chat_worlds import ADD, LS, Bytes, counting_ids, pieces
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.chat.call_ids import MintedIds
from rollmill.chat.messages import Call, ChatMessage, ChatRole, Tool
from rollmill.chat.reader import AnswerReader, Bit, BitKind, Thinking
from rollmill.chat.tool_formats import FORMATS

STOP = 7
THINK = Thinking("<think>", "</think>")
REAL = [f for f in FORMATS if f != "none"]
STREAMED = [f for f in REAL if FORMATS[f].streamed is not None]


def reader(
    form: str | None = None,
    *,
    thinking: Thinking | None = None,
    is_thinking: bool = False,
    stops: Sequence[str] = (),
    streams_calls: bool = False,
) -> AnswerReader:
    return AnswerReader(
        Bytes(),
        stop_ids=frozenset({STOP}),
        stops=stops,
        tool_format=FORMATS[form] if form else None,
        tools=(LS, ADD),
        thinking=thinking,
        is_thinking=is_thinking,
        mint=counting_ids(),
        streams_calls=streams_calls,
    )


def read(text: str, form: str | None = None, **how: object) -> AnswerReader:
    out = reader(form, **how)  # type: ignore[arg-type]
    out.feed(text.encode(), last=True)
    return out


def joined(bits: Sequence[Bit]) -> ChatMessage:
    calls: list[Call] = []
    for bit in bits:
        if bit.kind is BitKind.CALL:
            calls.append(Call(id=bit.call_id, name=bit.name, arguments=bit.text))
        elif bit.kind is BitKind.ARGUMENTS:
            calls[-1] = Call(id=calls[-1].id, name=calls[-1].name, arguments=calls[-1].arguments + bit.text)
    text = "".join(b.text for b in bits if b.kind is BitKind.TEXT)
    reasoning = "".join(b.text for b in bits if b.kind is BitKind.REASONING)
    return ChatMessage(role=ChatRole.ASSISTANT, text=text, reasoning=reasoning, calls=tuple(calls))


SHREDS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "\n", " ", "a", "\u20ac", "{", "}", "[", "]", '"', "\\", ";", "<", "x[ARGS]"),
    *('{"name": "ls", "arguments": {"path": "\u20ac"}}', '{"name": "ls", "parameters": {}}', '[{"name": "ls", "arguments": {}}]'),
    *("[TOOL_CALLS]", "<|python_tag|>", "<function=ls>", "</function>", "<parameter=path>", "</parameter>", "ls\n<arg_key>", "</arg_key>"),
    *("<arg_value>", "</arg_value>", "functools", "<|tool_call|>", "<|tool_call_begin|>", "functions.ls:0", "<|tool_call_argument_begin|>"),
    *("<|tool_call_end|>", "STOP", "S", chr(STOP)),
]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    shreds=st.lists(st.sampled_from(SHREDS), max_size=14),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    form=st.sampled_from([None, *REAL]),
    thinks=st.sampled_from([None, False, True]),
    stops=st.sampled_from([(), ("STOP",), ("STOP", "\n\n")]),
    streams=st.booleans(),
)
def test_any_cut_of_the_tokens_gives_the_same_message(
    shreds: list[str], cuts: list[int], form: str | None, thinks: bool | None, stops: tuple[str, ...], streams: bool
) -> None:
    ids = "".join(shreds).encode()
    how = {"thinking": None if thinks is None else THINK, "is_thinking": bool(thinks), "stops": stops, "streams_calls": streams}
    whole = read("".join(shreds), form, **how)
    cut, bits = reader(form, **how), []  # type: ignore[arg-type]
    for piece in pieces(ids, cuts):
        bits += cut.feed(piece)
    bits += cut.feed((), last=True)
    assert cut.message() == whole.message() == joined(bits)
    assert (cut.stop_string, cut.num_used, cut.problems) == (whole.stop_string, whole.num_used, whole.problems)
    assert cut.stopped == (cut.stop_string is not None)
    if not cut.stopped:
        assert cut.num_used == len(ids)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    form=st.sampled_from(REAL),
    text=st.text("ab \u20ac", max_size=6),
    values=st.lists(
        st.one_of(
            st.fixed_dictionaries({"path": st.text("ab/\u20ac \"'\\\n", min_size=1, max_size=8).map(lambda t: f"x{t}x")}),
            st.fixed_dictionaries({"a": st.integers(), "why": st.just("2"), "rest": st.lists(st.integers(), max_size=3)}),
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_what_a_format_writes_it_reads_back(form: str, text: str, values: list[dict[str, object]]) -> None:
    calls = [Call(id="", name="ls" if "path" in v else "add", arguments=json.dumps(v)) for v in values]
    before = "" if form == "llama3_json" else text
    got = read(before + FORMATS[form].write(calls) + chr(STOP), form)
    assert [(c.name, json.loads(c.arguments)) for c in got.message().calls] == [(c.name, json.loads(c.arguments)) for c in calls]
    assert got.message().text == before.rstrip() and got.problems == ()


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>\n {"name":"ls","arguments":{"path":"."}} \n</tool_call>'),
        ("llama3_json", '  {"name": "ls", "parameters": {"path": "."}}\n'),
        ("llama3_json", '<|python_tag|>{"name": "ls", "arguments": {"path": "."}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "ls", "arguments": {"path": "."}, "id": "abcdefghi"}]'),
        ("mistral", '[TOOL_CALLS]ls[ARGS]{"path": "."}'),
        ("mistral_args", '[TOOL_CALLS]ls[CALL_ID]abcdefghi[ARGS]{"path": "."}'),
        ("mistral_args", '[TOOL_CALLS]ls{"path": "."}'),
        ("qwen3_coder", "<tool_call>\n<function=ls>\n<parameter=path>\n.\n</parameter>\n</function>\n</tool_call>"),
        ("qwen3_coder", "<function=ls><parameter=path>.</parameter></function>\n</tool_call>"),
        ("glm45", "<tool_call>ls\n<arg_key>path</arg_key>\n<arg_value>.</arg_value>\n</tool_call>"),
        ("json_list", 'functools[{"name": "ls", "arguments": {"path": "."}}]'),
        ("kimi_k2", '<|tool_call_begin|>functions.ls:3<|tool_call_argument_begin|>{"path": "."}<|tool_call_end|>'),
    ],
)
def test_other_ways_of_writing_the_same_call_are_read(form: str, text: str) -> None:
    message = read(text, form).message()
    assert [(c.name, json.loads(c.arguments)) for c in message.calls] == [("ls", {"path": "."})] and message.text == ""


def test_a_format_that_writes_ids_keeps_them() -> None:
    kimi = read("<|tool_call_begin|>functions.ls:3<|tool_call_argument_begin|>{}<|tool_call_end|>", "kimi_k2")
    assert kimi.message().calls[0].id == "functions.ls:3"
    assert read("[TOOL_CALLS]ls[CALL_ID]abcdefghi[ARGS]{}", "mistral").message().calls[0].id == "abcdefghi"
    assert AnswerReader(Bytes(), tool_format=FORMATS["hermes"])._mint()[:5] == "call_"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("{oops", "error: the tool call is not valid JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[" * 100_000, "error: the tool call is not valid JSON: "),
        ("[]", 'error: a tool call needs "name" and "arguments"'),
        ('{"arguments": {}}', 'error: a tool call needs "name" and "arguments"'),
        ('{"name": 3, "arguments": {}}', 'error: a tool call needs "name" and "arguments"'),
        ('{"name": "ls", "arguments": "{}"}', 'error: a tool call needs "name" and "arguments"'),
        ('{"name": "ls", "arguments": {"a": NaN}}', "error: the tool call is not valid JSON: "),
        ('{"name": "\\ud800", "arguments": {}}', 'error: a tool call needs "name" and "arguments"'),
    ],
)
def test_malformed_call_stays_in_the_text_and_is_told_of(body: str, problem: str) -> None:
    got = read(f"look <tool_call>{body}</tool_call>", "hermes")
    assert got.message() == ChatMessage(role=ChatRole.ASSISTANT, text=f"look <tool_call>{body}</tool_call>")
    assert len(got.problems) == 1 and got.problems[0].startswith(problem)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", "[TOOL_CALLS][ARGS]{}"),
        ("mistral", "[TOOL_CALLS]ls[ARGS]{oops}"),
        ("mistral", "[TOOL_CALLS][3]"),
        ("json_list", "<|tool_call|>[3]"),
        ("qwen3_coder", "<tool_call>ls</tool_call>"),
        ("qwen3_coder", "<function=ls>what</function>"),
        ("glm45", "<tool_call></tool_call>"),
        ("glm45", "<tool_call>ls<arg_key>path</arg_key></tool_call>"),
        ("kimi_k2", "<|tool_call_begin|>ls<|tool_call_end|>"),
        ("deepseek_v3", "<\uff5ctool\u2581call\u2581begin\uff5c>ls<\uff5ctool\u2581call\u2581end\uff5c>"),
        ("llama3_json", "<|python_tag|>print(3)"),
        ("hermes", '<tool_call>{"name": "ls", "arguments": {'),
    ],
)
def test_what_is_no_call_in_other_formats_is_text(form: str, text: str) -> None:
    message = read(text, form).message()
    assert (message.text, message.calls) == (text, ())


def test_answer_in_json_is_no_malformed_call() -> None:
    got = read('{"answer": 3} is it', "llama3_json")
    assert got.message().text == '{"answer": 3} is it' and got.problems == ()


def test_half_a_surrogate_pair_in_arguments_stays_an_escape() -> None:
    (call,) = read('<tool_call>{"name": "ls", "arguments": {"path": "\\ud800"}}</tool_call>', "hermes").message().calls
    assert call.arguments == '{"path": "\\ud800"}'


def test_white_space_around_calls_is_dropped_and_between_words_kept() -> None:
    call = '<tool_call>{"name": "ls", "arguments": {}}</tool_call>'
    message = read(f"one \n{call}\n{call}\ntwo  {call}\n", "hermes").message()
    assert message.text == "one \n\n\ntwo" and len(message.calls) == 3
    assert read("ends with a line \n", "hermes").message().text == "ends with a line \n"


def test_schema_says_which_bare_values_are_text() -> None:
    text = FORMATS["glm45"].write([Call(id="", name="add", arguments='{"a": 3, "why": "4", "rest": [5], "odd": "6"}')])
    (call,) = read(text, "glm45").message().calls
    assert json.loads(call.arguments) == {"a": 3, "why": "4", "rest": [5], "odd": "6"}


@pytest.mark.parametrize(
    ("text", "is_thinking", "reasoning", "said"),
    [
        ("<think>\nhm\n</think>\n\nyes ", False, "hm", "yes "),
        ("hm\n</think>\n\nyes", True, "hm", "yes"),
        ("\n <think>cut off", False, "cut off", ""),
        ("no <think>aloud</think>", False, "", "no <think>aloud</think>"),
        ("<thin", False, "", "<thin"),
        ("", True, "", ""),
    ],
)
def test_reasoning_is_set_apart(text: str, is_thinking: bool, reasoning: str, said: str) -> None:
    message = read(text, thinking=THINK, is_thinking=is_thinking).message()
    assert (message.reasoning, message.text) == (reasoning, said)


def test_only_what_may_begin_a_marker_is_held_back() -> None:
    out = reader("hermes")
    assert [b.text for b in out.feed(b"look <tool")] == ["look"]
    assert [b.text for b in out.feed(b"box")] == [" <toolbox"]
    assert out.feed(b'<tool_call>{"name": "ls", "arguments": {}}</tool_call') == []
    (bit,) = out.feed(b">")
    assert (bit.kind, bit.name, bit.text) == (BitKind.CALL, "ls", "{}")


def test_stop_string_ends_an_answer_inside_a_call() -> None:
    out = read('a <tool_call>{"name": "END', "hermes", stops=["END"])
    assert out.stop_string == "END" and out.message().text == 'a <tool_call>{"name": "'


def test_end_of_turn_is_no_text_unless_something_follows() -> None:
    out = reader()
    out.feed([65, STOP])
    out.feed([], last=True)
    assert out.message().text == "A" and out.num_used == 2
    more = reader()
    more.feed([65, STOP])
    more.feed([66, STOP], last=True)
    assert more.message().text == f"A{chr(STOP)}B"


def actionable(message: ChatMessage) -> list[tuple[str, object]]:
    """Calls that a client can act on."""
    out = []
    for call in message.calls:
        try:
            out.append((call.name, json.loads(call.arguments)))
        except ValueError:
            continue
    return out


BODY = [
    *('{"path": "a"}', '"path": "', "\u20ac", "b", '"', "\\", "\\n", "{", "}", "[1, ", "]", ", ", ": ", "NaN", "\n", "</tool", "STOP"),
    *('"arguments": {}', '"name": "add"', "<END>", "<NEXT>"),
]


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    form=st.sampled_from(STREAMED),
    body=st.lists(st.sampled_from(BODY), max_size=8),
    cuts=st.one_of(st.lists(st.integers(0, 400), max_size=12), st.just(list(range(400)))),
    stops=st.sampled_from([(), ("STOP",)]),
)
def test_calls_shown_while_written_are_those_read_when_whole(form: str, body: list[str], cuts: list[int], stops: tuple[str, ...]) -> None:
    begin, _, end = FORMATS[form].write([Call(id="", name="ls", arguments="SPLIT")]).partition("SPLIT")
    text = f"so {begin}{{{''.join(body)}{end}".replace("<END>", end).replace("<NEXT>", end + begin)
    cut, bits = reader(form, stops=stops, streams_calls=True), []
    for piece in pieces(text.encode(), cuts):
        bits += cut.feed(piece)
    bits += cut.feed((), last=True)
    at_once = read(text, form, stops=stops, streams_calls=True)
    when_whole = read(text, form, stops=stops)
    assert cut.message() == at_once.message() == joined(bits) and cut.problems == at_once.problems
    assert cut.message().key() == joined(bits).key() and cut.num_ended == len(cut.message().calls)
    assert actionable(cut.message()) == actionable(when_whole.message())
    if not cut.problems:
        assert cut.message().key() == when_whole.message().key() and when_whole.problems == ()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    form=st.sampled_from(STREAMED),
    texts=st.lists(st.text('ab"\\\\{}[]\u20ac\n</t', max_size=12), min_size=1, max_size=3),
    indent=st.booleans(),
)
def test_well_formed_calls_shown_token_by_token_are_whole(form: str, texts: list[str], indent: bool) -> None:
    arguments = [json.dumps({"path": t, "more": [{t: None}]}, indent=2 if indent else None) for t in texts]
    text = FORMATS[form].write([Call(id="", name="ls", arguments=a) for a in arguments])
    out = reader(form, streams_calls=True)
    bits = [bit for byte in text.encode() for bit in out.feed((byte,))] + out.feed((), last=True)
    assert [c.arguments for c in out.message().calls] == arguments and out.problems == ()
    assert joined(bits) == out.message() and out.message().key() == read(text, form).message().key()


def test_arguments_are_shown_while_they_are_written() -> None:
    out = reader("hermes", streams_calls=True)
    assert out.feed(b'<tool_call>\n{"name": "ls", "arguments": ') == []
    (call,) = out.feed(b"{")[:1]
    assert (call.kind, call.name, call.text, out.num_ended) == (BitKind.CALL, "ls", "", 0)
    assert [b.text for b in out.feed(b'"path": "a\\"')] == ['"path": "a\\"']
    # The last brace waits until the call is known to be whole.
    assert [b.text for b in out.feed(b'}b</tool"}}\n</tool_call')] == ['}b</tool"']
    assert [(b.kind, b.text) for b in out.feed(b"> yes", last=True)] == [(BitKind.ARGUMENTS, "}"), (BitKind.TEXT, " yes")]
    assert out.message().calls == (Call(id=call.call_id, name="ls", arguments='{"path": "a\\"}b</tool"}'),) and out.num_ended == 1


@pytest.mark.parametrize(
    ("body", "shown", "problem"),
    [
        ('{"path": oops}}</tool_call>', '{"path": oops', "error: the tool call is not valid JSON: "),
        ('{"path": "."}}}</tool_call>', '{"path": "."', "error: the tool call is not valid JSON: "),
        ('{"path": "."}</tool_call>', '{"path": "."', "error: the tool call is not valid JSON: "),
        ('{"path": "</tool_call>', '{"path": "', "error: the tool call is not valid JSON: "),
        ('{}, "name": "rm"}</tool_call>', "{", "error: a tool call has one name and one object of arguments"),
        ('{}, "arguments": {"path": 3}}</tool_call>', "{", "error: a tool call has one name and one object of arguments"),
        ('{"path": "a', '{"path": "a', "error: the tool call ends before its </tool_call>"),
        ('{"path": "a"}}', '{"path": "a"', "error: the tool call ends before its </tool_call>"),
    ],
)
def test_shown_call_that_turns_out_malformed_stays_unfinished(body: str, shown: str, problem: str) -> None:
    got = read(f'so <tool_call>{{"name": "ls", "arguments": {body}', "hermes", streams_calls=True)
    message = got.message()
    assert (message.text, [c.arguments for c in message.calls]) == ("so", [shown])
    assert len(got.problems) == 1 and got.problems[0].startswith(problem)
    # A client repeats what it was given.
    assert ChatMessage(role=ChatRole.ASSISTANT, text="so", calls=message.calls).key() == message.key()


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "rm", "arguments": {"path": ',
        '<tool_call>{"arguments": {"path": ',
        '<tool_call>{"name": "ls", "arguments": "',
        '<tool_call>{"name": "ls", "parameters": {',
        f'<tool_call>{" " * 2000}{{"name": "ls", "arguments": {{',
    ],
)
def test_nothing_is_shown_of_what_may_be_no_call_of_a_known_tool(text: str) -> None:
    out = reader("hermes", streams_calls=True)
    assert out.feed(text.encode()) == []
    assert "".join(b.text for b in out.feed((), last=True)) == text


def test_tool_named_like_the_closing_is_read_the_same_in_any_cut() -> None:
    odd, text = Tool(name="a</tool_call>b"), b'<tool_call>{"name": "a</tool_call>b", "arguments": {}}</tool_call>'
    messages = []
    for size in (1, 30, len(text)):
        out = AnswerReader(Bytes(), tool_format=FORMATS["hermes"], tools=[odd], streams_calls=True)
        for start in range(0, len(text), size):
            out.feed(text[start : start + size])
        out.feed((), last=True)
        messages.append(out.message())
    assert messages == [messages[0]] * 3 and messages[0].calls == ()


def test_ids_of_calls_follow_from_a_seed() -> None:
    text = FORMATS["hermes"].write([Call(id="", name="ls", arguments="{}")] * 2)

    def ids(seed_text: str) -> list[str]:
        out = AnswerReader(Bytes(), tool_format=FORMATS["hermes"], mint=MintedIds(seed_text))
        out.feed(text.encode(), last=True)
        return [c.id for c in out.message().calls]

    assert ids("1/e/0") == ids("1/e/0") and len({*ids("1/e/0"), *ids("1/e/1")}) == 4
    assert all(re.fullmatch("call_[0-9a-f]{24}", i) for i in ids("1/e/0"))
