"""The wire format of Responses: what requests mean, what answers look like, and that items sent back are known for what was sampled."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response
from openai.types.responses.response_stream_event import ResponseStreamEvent
from pydantic import TypeAdapter
from wire_worlds import ENVELOPE, HEX, answer_of, answers, message_of, read_sse, streamed

from rollmill.chat.messages import Call, ChatMessage, ChatRole, Tool
from rollmill.gateway.call import Answer, Finish, ToolChoice
from rollmill.gateway.dialects.response_store import ResponseStore, StoredResponse, Turn
from rollmill.gateway.dialects.responses import Responses, ResponsesCall
from rollmill.web import ApiError

CALL = Call(id="call_1", name="ls", arguments='{"path": "."}')
LS = {"type": "function", "name": "ls", "parameters": {"type": "object"}}
USER, ASSISTANT, SYSTEM, TOOL = ChatRole.USER, ChatRole.ASSISTANT, ChatRole.SYSTEM, ChatRole.TOOL
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def dialect() -> Responses:
    return Responses()


def parsed(dialect: Responses, given: Any = "hi", **fields: Any) -> ResponsesCall:
    return dialect.parse(json.dumps({"model": "policy", "input": given, **fields}).encode())


def messages(dialect: Responses, given: Any, **fields: Any) -> list[ChatMessage]:
    return list(parsed(dialect, given, **fields).messages)


def test_every_field_of_a_request_is_understood(dialect: Responses) -> None:
    call = parsed(
        dialect,
        instructions="be brief",
        tools=[{**LS, "description": None, "strict": True}],
        tool_choice={"type": "function", "name": "ls"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}, "verbosity": "low"},
        max_output_tokens=9,
        temperature=0.25,
        top_p=0.5,
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        top_logprobs=2,
        stream=True,
        truncation="auto",
        metadata={"a": "b"},
        service_tier="auto",
        unknown_field=1,
    )
    assert call.messages == (ChatMessage(role=SYSTEM, text="be brief"), ChatMessage(role=USER, text="hi"))
    assert call.tools == (Tool(name="ls", parameters={"type": "object"}, is_strict=True),)
    assert (call.tool_choice, call.forced_tool, call.parallel_calls) == (ToolChoice.REQUIRED, "ls", False)
    assert (call.schema, call.max_tokens, call.temperature, call.top_p) == ({"type": "object"}, 9, 0.25, 0.5)
    assert (call.num_top_logprobs, call.stream, call.model) == (2, True, "policy")


def test_items_of_one_answer_become_one_message(dialect: Responses) -> None:
    found = messages(
        dialect,
        [
            {"role": "developer", "content": "rules"},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "look", "annotations": []}]},
            {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": "{}", "id": "fc_1", "status": "completed"},
            {"type": "function_call", "call_id": "c2", "name": "cat", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "x"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "y"}]},
            {"role": "assistant", "content": "done"},
            {"role": "user", "content": "more"},
        ],
    )
    calls = (Call(id="c1", name="ls", arguments="{}"), Call(id="c2", name="cat", arguments='{"a": 1}'))
    assert found == [
        ChatMessage(role=SYSTEM, text="rules"),
        ChatMessage(role=USER, text="ab"),
        ChatMessage(role=ASSISTANT, text="look", reasoning="hm", calls=calls),
        ChatMessage(role=TOOL, text="x", call_id="c1", name="ls"),
        ChatMessage(role=TOOL, text="y", call_id="c2", name="cat"),
        ChatMessage(role=ASSISTANT, text="done"),
        ChatMessage(role=USER, text="more"),
    ]


def test_answers_side_by_side_are_told_apart_by_their_ids(dialect: Responses) -> None:
    def item(text: str, response: str) -> dict[str, Any]:
        return {"type": "message", "role": "assistant", "id": f"msg_{response * 32}0000", "content": text}

    found = messages(dialect, [item("a", "1"), item("b", "1"), item("c", "2"), {"role": "assistant", "content": "d"}])
    assert [m.text for m in found] == ["ab", "cd"]


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"input": None}, "input is empty"),
        ({"input": []}, "input is empty"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input[0] is an item of type 'web_search_call'"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role is 'robot'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0] is a part of type 'input_image'"),
        ({"input": [{"type": "function_call", "name": "ls"}]}, "call_id, name and arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0] has type 'web_search'"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [LS, LS]}, "two tools of one name"),
        ({"tool_choice": "maybe"}, "'maybe'"),
        ({"tool_choice": "required"}, "tools is empty"),
        ({"tool_choice": {"type": "function", "name": "rm"}}, "'rm'"),
        ({"tool_choice": {"type": "allowed_tools"}}, "'allowed_tools'"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"metadata": {"a": 1}}, "metadata"),
    ],
)
def test_refusals_name_the_field(dialect: Responses, fields: dict[str, Any], names: str) -> None:
    with pytest.raises(ApiError) as error:
        parsed(dialect, **{"given": fields.pop("input", "hi"), **fields})
    assert error.value.status_code == 400 and names in error.value.detail


def whole(dialect: Responses, answer: Answer, given: Any = "hi", **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(dialect.whole(parsed(dialect, given, **fields), ENVELOPE, [answer]))
    return found


def test_a_whole_response(dialect: Responses) -> None:
    found = whole(dialect, answer_of("see", reasoning="hm", calls=(CALL,)), tools=[LS], metadata={"a": "b"})
    Response.model_validate(found, strict=False)
    reasoning, message, call = found["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"] == [{"type": "output_text", "text": "see", "annotations": [], "logprobs": []}]
    assert (call["call_id"], call["name"], call["arguments"]) == ("call_1", "ls", CALL.arguments)
    assert [i["id"] for i in found["output"]] == [f"rs_{HEX}0000", f"msg_{HEX}0001", f"fc_{HEX}0002"]
    assert (found["id"], found["status"], found["metadata"]) == (f"resp_{HEX}", "completed", {"a": "b"})
    assert found["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 13,
    }


def test_a_cut_answer_is_incomplete(dialect: Responses) -> None:
    answer = answer_of("a", reasoning="b", finish=Finish.LENGTH)
    found = whole(dialect, answer)
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    stream = streamed(dialect.writer(parsed(dialect, stream=True), ENVELOPE), answer)
    event, data = stream[-1]
    assert event == "response.incomplete" and data["response"] == found
    assert [i["status"] for i in found["output"]] == ["completed", "incomplete"]


def test_logprobs_for_those_who_ask(dialect: Responses) -> None:
    fields = {"include": ["message.output_text.logprobs"]}
    (item,) = whole(dialect, answer_of("abc"), **fields)["output"]
    assert item["content"][0]["logprobs"][1] == {"token": "c", "bytes": [99], "logprob": -0.25, "top_logprobs": []}
    stream = streamed(dialect.writer(parsed(dialect, **fields), ENVELOPE), answer_of("abc"))
    (delta,) = [d for e, d in stream if e == "response.output_text.delta"]
    assert [p["logprob"] for p in delta["logprobs"]] == [-0.5, -0.25]
    (done,) = [d for e, d in stream if e == "response.output_text.done"]
    assert done["logprobs"] == delta["logprobs"]


def test_the_events_of_a_stream(dialect: Responses) -> None:
    answer = answer_of("see", reasoning="hm", calls=(CALL,))
    found = streamed(dialect.writer(parsed(dialect, stream=True, tools=[LS]), ENVELOPE), answer, size=100)
    assert [event.removeprefix("response.") for event, _ in found] == [
        *("created", "in_progress"),
        *(
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
            "output_item.done",
        ),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    for _, data in found:
        EVENT.validate_python(data)
    assert found[-1][1]["response"] == whole(dialect, answer, stream=True, tools=[LS])


@settings(max_examples=80, derandomize=True, deadline=None)
@given(answers, st.integers(1, 5))
def test_items_sent_back_are_the_answer_that_was_sampled(answer: Answer, size: int) -> None:
    dialect = Responses()
    stream = streamed(dialect.writer(parsed(dialect, stream=True), ENVELOPE), answer, size)
    done = [data["item"] for event, data in stream if event == "response.output_item.done"]
    assert stream[-1][1]["response"]["output"] == done
    for output in (done, whole(dialect, answer)["output"]):
        nameless = [{k: v for k, v in item.items() if k not in ("id", "status")} for item in output]
        for items in (output, nameless):
            back = messages(dialect, [{"role": "user", "content": "hi"}, *items, {"role": "user", "content": "on"}])
            assert [m.key() for m in back[1:-1]] == [message_of(answer).key()]


def test_a_response_is_gone_on_from_by_its_id(dialect: Responses) -> None:
    whole(dialect, answer_of("first", calls=(CALL,)), "hi", instructions="old rules")
    given = [{"type": "function_call_output", "call_id": "call_1", "output": "x"}]
    found = messages(dialect, given, previous_response_id=f"resp_{HEX}", instructions="new rules")
    assert found == [
        ChatMessage(role=SYSTEM, text="new rules"),
        ChatMessage(role=USER, text="hi"),
        ChatMessage(role=ASSISTANT, text="first", calls=(CALL,)),
        ChatMessage(role=TOOL, text="x", call_id="call_1"),
    ]


def test_streamed_responses_are_kept_too_and_unstored_ones_not(dialect: Responses) -> None:
    streamed(dialect.writer(parsed(dialect, stream=True), ENVELOPE), answer_of("said"))
    assert [m.text for m in messages(dialect, "on", previous_response_id=f"resp_{HEX}")] == ["hi", "said", "on"]
    assert json.loads(dialect.delete(f"resp_{HEX}"))["deleted"]
    whole(dialect, answer_of("said"), store=False)
    for unknown in (lambda: messages(dialect, "on", previous_response_id=f"resp_{HEX}"), lambda: dialect.retrieve(f"resp_{HEX}")):
        with pytest.raises(ApiError) as error:
            unknown()
        assert error.value.status_code == 404


def test_items_are_found_by_reference(dialect: Responses) -> None:
    output = whole(dialect, answer_of("said", calls=(CALL,)))["output"]
    assert json.loads(dialect.retrieve(f"resp_{HEX}"))["output"] == output
    found = messages(dialect, [{"role": "user", "content": "hi"}, *({"type": "item_reference", "id": item["id"]} for item in output)])
    assert found[1].key() == message_of(answer_of("said", calls=(CALL,))).key()
    with pytest.raises(ApiError, match="no item"):
        messages(dialect, [{"type": "item_reference", "id": "msg_nobody"}])


def test_a_failed_stream_says_so(dialect: Responses) -> None:
    writer = dialect.writer(parsed(dialect, stream=True), ENVELOPE)
    writer.start(3)
    ((event, data),) = read_sse(writer.fail(503, "no replica"))
    assert event == "response.failed" and data["response"]["status"] == "failed"
    assert data["response"]["error"] == {"code": "server_error", "message": "no replica"}
    assert len(dialect.store) == 0


def stored(text: str, previous: Turn | None = None) -> StoredResponse:
    return StoredResponse(Turn(previous, (ChatMessage(role=USER, text=text),)), b"{}")


def test_the_store_is_bounded_and_forgets_the_unused_first() -> None:
    store = ResponseStore(max_responses=3)
    for name in "abc":
        store.put(name, stored(name))
    assert store.get("a") is not None
    store.put("d", stored("d"))
    assert [name for name in "abcd" if store.get(name)] == ["a", "c", "d"]
    small = ResponseStore(max_bytes=1000)
    for name in "abc":
        small.put(name, stored("x" * 400))
    assert len(small) == 2 and small.num_bytes <= 1000
    small.put("huge", stored("x" * 2000))
    assert len(small) == 0 and small.num_bytes == 0


def test_a_turn_costs_all_that_it_keeps_alive() -> None:
    first = stored("x" * 100).turn
    second = Turn(first, (ChatMessage(role=USER, text="y" * 100),))
    assert second.num_bytes == 2 * first.num_bytes
    assert [m.text[0] for m in second.messages()] == ["x", "y"]
