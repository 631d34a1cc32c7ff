"""Anthropic's wire format: what requests mean, what answers look like, and that an answer sent back is known for what was sampled."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_worlds import ENVELOPE, HEX, answer_of, answers, call_ids, message_of, read_sse, streamed

from rollmill.chat.messages import Call, ChatMessage, ChatRole, Tool
from rollmill.gateway.call import Answer, Finish, ToolChoice
from rollmill.gateway.dialects.anthropic import Messages
from rollmill.gateway.dialects.anthropic_input import MessagesCall, call_id_of, use_id
from rollmill.web import ApiError

DIALECT = Messages()
USE = "toolu_" + HEX[:24]
CALL = "call_" + HEX[:24]


def parsed(messages: list[dict[str, Any]] | None = None, **fields: Any) -> MessagesCall:
    body = {"model": "policy", "max_tokens": 16, "messages": messages or [{"role": "user", "content": "hi"}], **fields}
    return DIALECT.parse(json.dumps(body).encode())


def refused(**fields: Any) -> str:
    with pytest.raises(ApiError) as error:
        parsed(**fields)
    assert error.value.status_code == 400
    return error.value.detail


def test_every_field_of_a_request_is_understood() -> None:
    call = parsed(
        system="be brief",
        tools=[{"name": "ls", "description": "list", "input_schema": {"type": "object"}, "strict": True}],
        tool_choice={"type": "tool", "name": "ls", "disable_parallel_tool_use": True},
        temperature=0.25,
        top_p=0.5,
        top_k=7,
        stop_sequences=["END"],
        stream=True,
        thinking={"type": "enabled", "budget_tokens": 100},
        metadata={"user_id": "u"},
        output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}},
        unknown_field=[1],
    )
    assert call == MessagesCall(
        model="policy",
        max_tokens=16,
        temperature=0.25,
        top_p=0.5,
        top_k=7,
        stops=("END",),
        stream=True,
        includes_usage=True,
        messages=(ChatMessage(role=ChatRole.SYSTEM, text="be brief"), ChatMessage(role=ChatRole.USER, text="hi")),
        tools=(Tool(name="ls", description="list", parameters={"type": "object"}, is_strict=True),),
        tool_choice=ToolChoice.REQUIRED,
        forced_tool="ls",
        parallel_calls=False,
        schema={"type": "object"},
        shows_thinking=True,
        head=(ChatMessage(role=ChatRole.SYSTEM, text="be brief"),),
        new=(ChatMessage(role=ChatRole.USER, text="hi"),),
    )


@pytest.mark.parametrize(
    ("choice", "expected"),
    [({"type": "auto"}, ToolChoice.AUTO), ({"type": "any"}, ToolChoice.REQUIRED), ({"type": "none"}, ToolChoice.NONE)],
)
def test_tool_choices(choice: dict[str, str], expected: ToolChoice) -> None:
    call = parsed(tools=[{"name": "ls", "input_schema": {}}], tool_choice=choice)
    assert (call.tool_choice, call.forced_tool, call.parallel_calls) == (expected, "", True)


def test_results_and_texts_of_a_user_message_keep_their_order() -> None:
    call = parsed(
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "look: "},
                    {"type": "tool_use", "id": USE, "name": "ls", "input": {"n": 1.0, "path": "é"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": USE, "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
                    {"type": "text", "text": "and then"},
                    {"type": "tool_result", "tool_use_id": "other", "content": "no such file", "is_error": True},
                    {"type": "tool_result", "tool_use_id": "third"},
                ],
            },
            {"role": "system", "content": "late news"},
            {"role": "user", "content": "go on"},
        ],
        system=[{"type": "text", "text": "x-anthropic-billing-header: v=1; h=abc"}, {"type": "text", "text": "s"}],
    )
    user, tool, system = ChatRole.USER, ChatRole.TOOL, ChatRole.SYSTEM
    assert call.messages == (
        ChatMessage(role=system, text="s"),
        ChatMessage(role=user, text="a\nb"),
        ChatMessage(
            role=ChatRole.ASSISTANT,
            text="look: ",
            reasoning="hm",
            calls=(Call(id=CALL, name="ls", arguments='{"n": 1.0, "path": "\\u00e9"}'),),
        ),
        ChatMessage(role=tool, text="x\ny", call_id=CALL, name="ls"),
        ChatMessage(role=user, text="and then"),
        ChatMessage(role=tool, text="Error: no such file", call_id="other"),
        ChatMessage(role=tool, text="", call_id="third"),
        ChatMessage(role=system, text="late news"),
        ChatMessage(role=user, text="go on"),
    )


USED = {"type": "tool_use", "id": "x", "name": "y", "input": {}}


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, fields]}]}


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role is 'robot'"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "y", "input": {}}]}]},
            "send their results",
        ),
        (block(type="image", source={"type": "base64"}), "messages[0].content[1] is a block of type 'image'"),
        (block(type="document"), "'document'"),
        (block(type="text"), "messages[0].content[1].text is missing"),
        (block(type="tool_result"), "tool_use_id"),
        (block(type="tool_result", tool_use_id="x", content=[{"type": "image"}]), "messages[0].content[1].content[0]"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "y", "input": [1]}]}]}, "input"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "y", "input": {}}]}]}, "id and a name"),
        ({"tools": [{"name": "web", "type": "web_search_20250305"}]}, "'web' has type 'web_search_20250305'"),
        ({"tools": [{"name": "a"}, {"name": "a"}]}, "two tools of one name"),
        ({"tool_choice": {"type": "any"}}, "tools is empty"),
        ({"tool_choice": {"type": "tool", "name": "ls"}}, "'ls'"),
        ({"tool_choice": {"type": "maybe"}}, "'maybe'"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config"),
        ({"system": [{"type": "image"}]}, "system[0]"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], names: str) -> None:
    assert names in refused(**fields)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"null", b'{"max_tokens":1,"messages":[]}', b'\xff{"a":1}', b"[" * 100_000])
def test_bodies_that_are_no_request_are_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as error:
        DIALECT.parse(body)
    assert error.value.status_code == 400


def test_arguments_that_are_not_utf8_are_refused() -> None:
    body = b'{"max_tokens":1,"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"b","input":{"x":"\xff"}}]}]}'
    with pytest.raises(ApiError, match="not UTF-8"):
        DIALECT.parse(body)


def test_count_tokens_takes_no_max_tokens() -> None:
    call = DIALECT.parse_count(b'{"model":"m","messages":[{"role":"user","content":"hi"}],"system":"s"}')
    assert [m.text for m in call.messages] == ["s", "hi"]
    assert json.loads(DIALECT.counted(5)) == {"input_tokens": 5}


@given(call_ids)
@settings(max_examples=50, derandomize=True, deadline=None)
def test_call_ids_come_back(call_id: str) -> None:
    assert call_id_of(use_id(call_id)) == (CALL if call_id == CALL else call_id)


def test_our_ids_look_like_theirs() -> None:
    assert use_id(CALL) == USE and call_id_of(USE) == CALL


def told(answer: Answer, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DIALECT.whole(parsed(**fields), ENVELOPE, [answer]))
    return found


def test_a_whole_message() -> None:
    answer = answer_of("see", reasoning="hm", calls=(Call(id=CALL, name="ls", arguments='{"n": 1.50}'),))
    assert b'"input":{"n": 1.50}' in DIALECT.whole(parsed(), ENVELOPE, [answer])
    assert told(answer) == {
        "id": f"msg_{HEX}",
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": [{"type": "text", "text": "see"}, {"type": "tool_use", "id": USE, "name": "ls", "input": {"n": 1.5}}],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {"input_tokens": 6, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4, "output_tokens": 3},
    }


@pytest.mark.parametrize("arguments", ['{"a": "\\ud800"}', '{"a": 12345678901234567890123}', '{"a": 1e400}', "{}"])
def test_odd_arguments_reach_the_tool(arguments: str) -> None:
    answer = answer_of(calls=(Call(id=CALL, name="ls", arguments=arguments),))
    assert f'"input":{arguments}'.encode() in DIALECT.whole(parsed(), ENVELOPE, [answer])


@pytest.mark.parametrize(
    ("answer", "reason", "sequence"),
    [
        (answer_of("a"), "end_turn", None),
        (answer_of("a", finish=Finish.LENGTH), "max_tokens", None),
        (answer_of("a", stop="END"), "stop_sequence", "END"),
    ],
)
def test_stop_reasons(answer: Answer, reason: str, sequence: str | None) -> None:
    assert (told(answer)["stop_reason"], told(answer)["stop_sequence"]) == (reason, sequence)
    delta = streamed(DIALECT.writer(parsed(), ENVELOPE), answer)[-2][1]["delta"]
    assert delta == {"stop_reason": reason, "stop_sequence": sequence}


def test_a_thread_keeps_what_was_said_and_its_head() -> None:
    dialect = Messages()

    def body(*messages: dict[str, Any], **fields: Any) -> bytes:
        return json.dumps({"model": "policy", "max_tokens": 16, "messages": messages, **fields}).encode()

    hi, go = {"role": "user", "content": "hi"}, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": USE, "content": "x"}]}
    create = dialect.parse(body(hi, system="s", tools=[{"name": "ls"}], thread={"type": "create"}))
    answer = answer_of("see", calls=(Call(id=CALL, name="ls", arguments="{}"),))
    streamed(dialect.writer(create, ENVELOPE), answer)
    follow = dialect.parse(body(go, thread={"type": "continue", "previous_message_id": f"msg_{HEX}"}))
    assert follow.messages == (
        *create.messages,
        message_of(answer),
        ChatMessage(role=ChatRole.TOOL, text="x", call_id=CALL, name="ls"),
    )
    assert follow.tools == create.tools
    dialect.parse(body(hi))
    assert len(dialect.store) == 1
    dialect.whole(dialect.parse(body(hi)), ENVELOPE, [answer])
    assert len(dialect.store) == 1
    with pytest.raises(ApiError) as error:
        dialect.parse(body(go, thread={"type": "continue", "previous_message_id": "msg_nobody"}))
    assert json.loads(dialect.error(404, "x", error.value.extra))["error"]["details"] == {"error_code": "thread_not_found"}


def test_thinking_is_told_to_those_who_ask() -> None:
    answer = answer_of("a", reasoning="hm")
    assert [b["type"] for b in told(answer)["content"]] == ["text"]
    (thinking, text) = told(answer, thinking={"type": "adaptive"})["content"]
    assert (thinking["thinking"], text["text"]) == ("hm", "a") and thinking["signature"]


def test_the_events_of_a_stream() -> None:
    answer = answer_of(
        "\nsee ", reasoning="hm", calls=(Call(id=CALL, name="ls", arguments='{"a":1}'), Call(id="x", name="cat", arguments="{}"))
    )
    found = streamed(DIALECT.writer(parsed(thinking={"type": "enabled"}), ENVELOPE), answer, size=2)
    assert [event for event, _ in found] == [
        "message_start",
        "ping",
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_delta", "content_block_stop"),
        *(
            "content_block_start",
            "content_block_delta",
            "content_block_delta",
            "content_block_delta",
            "content_block_delta",
            "content_block_stop",
        ),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        "message_delta",
        "message_stop",
    ]
    assert found[0][1]["message"]["usage"]["input_tokens"] == 10
    assert found[2][1]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert found[4][1]["delta"]["type"] == "signature_delta"
    assert found[11][1]["content_block"] == {"type": "tool_use", "id": USE, "name": "ls", "input": {}}
    assert found[12][1]["delta"] == {"type": "input_json_delta", "partial_json": '{"'}
    assert found[-2][1]["usage"]["cache_read_input_tokens"] == 4


def accumulated(events: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The content that a client builds from a stream."""
    content: list[dict[str, Any]] = []
    for event, data in events:
        if event == "content_block_start":
            assert data["index"] == len(content)
            content.append({**data["content_block"], "json": ""})
        elif event == "content_block_delta":
            delta = data["delta"]
            place = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature", "input_json_delta": "json"}[
                delta["type"]
            ]
            content[data["index"]][place] += delta.get("partial_json", delta.get("text", delta.get("thinking", delta.get("signature"))))
    for made in content:
        text = made.pop("json")
        if made["type"] == "tool_use":
            made["input"] = json.loads(text)
    return content


@settings(max_examples=80, derandomize=True, deadline=None)
@given(answers, st.integers(1, 5), st.sampled_from(["enabled", "disabled"]))
def test_an_answer_sent_back_is_the_answer_that_was_sampled(answer: Answer, size: int, thinking: str) -> None:
    asked = parsed(thinking={"type": thinking})
    stream = accumulated(streamed(DIALECT.writer(asked, ENVELOPE), answer, size))
    whole = json.loads(DIALECT.whole(asked, ENVELOPE, [answer]))["content"]
    for content in (stream, whole):
        back = parsed([{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}, {"role": "user", "content": "on"}])
        assert back.messages[1].key() == message_of(answer).key()


def test_no_block_is_empty() -> None:
    for answer in (answer_of(""), answer_of(" \n"), answer_of("\n\n", calls=(Call(id="x", name="ls", arguments="{}"),))):
        blocks = accumulated(streamed(DIALECT.writer(parsed(), ENVELOPE), answer))
        assert blocks == told(answer)["content"]
        assert all(b["type"] != "text" for b in blocks)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (409, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
        (529, "overloaded_error"),
    ],
)
def test_errors_have_their_shape(status: int, kind: str) -> None:
    assert json.loads(DIALECT.error(status, "why")) == {"type": "error", "error": {"type": kind, "message": "why"}}
    ((event, data),) = read_sse(DIALECT.writer(parsed(), ENVELOPE).fail(status, "why"))
    assert (event, data["error"]["type"]) == ("error", kind)
