"""The OpenAPI 3.1 description of every endpoint: requests from the records that decode them, replies by their outermost shape; no I/O.

What it says of a request is what the decoder accepts. Values that only a check refuses (a range that hangs on the model, two fields that
exclude each other) are not in it: they are the documented 400.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollmill.gateway.dialects.anthropic_input import CountRequest, MessagesRequest
from rollmill.gateway.dialects.dialect import MAX_CHOICES, MAX_TOKENS, MAX_TOP_LOGPROBS
from rollmill.gateway.dialects.openai_chat import ChatRequest
from rollmill.gateway.dialects.openai_text import TextRequest
from rollmill.gateway.dialects.responses_input import ResponsesRequest
from rollmill.gateway.front.service import OpenEpisode

Schema = dict[str, Any]
JSON = "application/json"
EVENTS = "text/event-stream"
PLAIN = "text/plain"
EPISODE_PREFIX = "/e/{episode}"

STATUS_TEXTS = {
    200: "Done.",
    201: "Opened.",
    400: "The request cannot be answered; the text names the field and what to change.",
    401: "No key, or one that is not known.",
    403: "The key opens another episode, or may not do this.",
    404: "No such model, episode, response or path.",
    405: "The path takes another method.",
    408: "The body did not arrive in time.",
    409: "No replica serves the weight version that was asked for yet; retry.",
    410: "The episode has ended.",
    413: "The body is too large, or the episode holds all that it may.",
    429: "The key's quota is used up; `retry-after` says for how long.",
    503: "No replica answers, or too many calls run; `retry-after` says when to come back.",
    504: "The answer was not there before the deadline.",
}
REFUSALS = (400, 401, 403, 405, 408, 413)
CALL_REFUSALS = (*REFUSALS, 404, 409, 410, 429, 503, 504)

_ID = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_LIST = {"type": "array"}
_TEXT = {"type": "string"}


def _object(**fields: Schema) -> Schema:
    """An object that has at least these."""
    return {"type": "object", "properties": fields, "required": list(fields)}


def _const(value: str) -> Schema:
    return {"const": value}


OPENAI_ERROR = _object(error=_object(message=_TEXT, type=_TEXT))
ANTHROPIC_ERROR = _object(type=_const("error"), error=_object(type=_TEXT, message=_TEXT))
REPLIES: dict[str, Schema] = {
    "ChatCompletion": _object(
        id=_ID,
        object=_const("chat.completion"),
        created=_COUNT,
        model=_TEXT,
        choices={"type": "array", "minItems": 1},
        usage={"type": "object"},
    ),
    "TextCompletion": _object(
        id=_ID,
        object=_const("text_completion"),
        created=_COUNT,
        model=_TEXT,
        choices={"type": "array", "minItems": 1},
        usage={"type": "object"},
    ),
    "Response": _object(id=_ID, object=_const("response"), created_at=_COUNT, status=_TEXT, model=_TEXT, output=_LIST),
    "DeletedResponse": _object(id=_ID, object=_const("response"), deleted={"const": True}),
    "AnthropicMessage": _object(
        id=_ID,
        type=_const("message"),
        role=_const("assistant"),
        model=_TEXT,
        content=_LIST,
        stop_reason=_TEXT,
        usage=_object(input_tokens=_COUNT, output_tokens=_COUNT),
    ),
    "TokenCount": _object(input_tokens=_COUNT),
    "Model": _object(id=_ID, object=_const("model")),
    "Models": _object(object=_const("list"), data=_LIST),
    "Health": _object(status=_TEXT, replicas=_COUNT),
    "OpenedEpisode": _object(id=_ID, object=_const("episode"), key=_TEXT, openai_base_url=_TEXT, anthropic_base_url=_TEXT),
    "Episode": _object(id=_ID, object=_const("episode"), num_windows=_COUNT, num_tokens=_COUNT, tally={"type": "object"}),
    "OpenAIError": OPENAI_ERROR,
    "AnthropicError": ANTHROPIC_ERROR,
    "Anything": {"type": "object"},
}


_LS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
_HI = {"role": "user", "content": "What is in the folder src?"}
_FUNCTION = {"name": "ls", "description": "List a folder.", "parameters": _LS}
_MESSAGES_TOOL = {"name": "ls", "description": "List a folder.", "input_schema": _LS}
EXAMPLES: dict[str, list[Any]] = {
    "/v1/chat/completions": [
        {"model": "policy", "messages": [_HI], "max_tokens": 64},
        {"messages": [_HI], "tools": [{"type": "function", "function": _FUNCTION}], "max_tokens": 64, "stream": True, "n": 2},
    ],
    "/v1/completions": [
        {"model": "policy", "prompt": "Once upon a time", "max_tokens": 16, "logprobs": 1},
        {"prompt": [[5, 6, 7], [8]], "max_tokens": 16, "stream": True, "return_token_ids": True},
    ],
    "/v1/responses": [
        {"model": "policy", "input": "What is in the folder src?", "max_output_tokens": 64},
        {"input": [_HI], "instructions": "Be brief.", "tools": [{"type": "function", **_FUNCTION}], "stream": True, "store": False},
    ],
    "/v1/messages": [
        {"model": "policy", "max_tokens": 64, "messages": [_HI], "stop_sequences": ["END"]},
        {"max_tokens": 64, "messages": [_HI], "system": "Be brief.", "tools": [_MESSAGES_TOOL], "stream": True, "temperature": 0.5},
    ],
    "/v1/messages/count_tokens": [{"model": "policy", "messages": [_HI], "tools": [_MESSAGES_TOOL]}],
    "/v1/episodes": [{"metadata": {"task": "7"}, "seed": 7, "temperature": 1.0}],
}
"""Bodies that are answered, by path."""
RANGES: dict[str, Schema] = {
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": MAX_TOKENS},
    "n": {"minimum": 1, "maximum": MAX_CHOICES},
    "max_tokens": {"minimum": 1, "maximum": MAX_TOKENS},
    "max_completion_tokens": {"minimum": 1, "maximum": MAX_TOKENS},
    "top_logprobs": {"minimum": 0, "maximum": MAX_TOP_LOGPROBS},
    "messages": {"minItems": 1},
}
"""What checks say of fields beyond their types; the same in every record that has them."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One method of one path."""

    method: str
    path: str
    summary: str
    request: Any = None
    """The record that decodes the body; None: it has none."""
    reply: str
    """Name in `REPLIES`; empty: plain text."""
    success: int = 200
    statuses: Sequence[int] = REFUSALS
    error: str = "OpenAIError"
    streams: bool = False
    needs_key: bool = True


ENDPOINTS = (
    Endpoint(
        method="post",
        path="/v1/chat/completions",
        summary="The next message of a conversation (OpenAI).",
        request=ChatRequest,
        reply="ChatCompletion",
        statuses=CALL_REFUSALS,
        streams=True,
    ),
    Endpoint(
        method="post",
        path="/v1/completions",
        summary="The continuation of text or token ids (OpenAI).",
        request=TextRequest,
        reply="TextCompletion",
        statuses=CALL_REFUSALS,
        streams=True,
    ),
    Endpoint(
        method="post",
        path="/v1/responses",
        summary="The next items of a conversation (OpenAI Responses).",
        request=ResponsesRequest,
        reply="Response",
        statuses=CALL_REFUSALS,
        streams=True,
    ),
    Endpoint(method="get", path="/v1/responses/{id}", summary="A kept response.", reply="Response", statuses=(*REFUSALS, 404)),
    Endpoint(method="delete", path="/v1/responses/{id}", summary="Forget a response.", reply="DeletedResponse", statuses=(*REFUSALS, 404)),
    Endpoint(
        method="post",
        path="/v1/messages",
        summary="The next message of a conversation (Anthropic).",
        request=MessagesRequest,
        reply="AnthropicMessage",
        statuses=CALL_REFUSALS,
        error="AnthropicError",
        streams=True,
    ),
    Endpoint(
        method="post",
        path="/v1/messages/count_tokens",
        summary="How many tokens a conversation takes.",
        request=CountRequest,
        reply="TokenCount",
        error="AnthropicError",
    ),
    Endpoint(method="get", path="/v1/models", summary="Names that a request may ask for.", reply="Models"),
    Endpoint(method="get", path="/v1/models/{id}", summary="One of them.", reply="Model", statuses=(*REFUSALS, 404)),
    Endpoint(
        method="post",
        path="/v1/episodes",
        summary="Open an episode; needs a key with may_admin.",
        request=OpenEpisode,
        reply="OpenedEpisode",
        success=201,
    ),
    Endpoint(
        method="get",
        path="/v1/episodes/{id}",
        summary="An open episode in numbers; needs a key with may_admin.",
        reply="Episode",
        statuses=(*REFUSALS, 404, 410),
    ),
    Endpoint(
        method="post",
        path="/v1/episodes/{id}/end",
        summary="End an episode; needs a key with may_admin.",
        reply="Episode",
        statuses=(*REFUSALS, 404, 410),
    ),
    Endpoint(method="get", path="/health", summary="Whether replicas answer.", reply="Health", statuses=(503,), needs_key=False),
    Endpoint(method="get", path="/metrics", summary="Counters as Prometheus text; needs a key with may_admin.", reply=""),
    Endpoint(method="get", path="/openapi.json", summary="This description.", reply="Anything", needs_key=False),
)


@functools.cache
def openapi_json() -> bytes:
    return msgspec.json.encode(describe(ENDPOINTS))


def describe(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The whole document."""
    records = [e.request for e in endpoints if e.request is not None]
    schemas, components = msgspec.json.schema_components(records, ref_template="#/components/schemas/{name}")
    assert not components.keys() & REPLIES.keys(), "a request and a reply share a name"
    _add_ranges(components)
    of = dict(zip(map(id, records), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        for prefix in ("", EPISODE_PREFIX):
            operation = _operation(endpoint, of.get(id(endpoint.request)), prefix)
            paths.setdefault(prefix + endpoint.path, {})[endpoint.method] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Rollmill gateway",
            "version": "1",
            "description": "OpenAI and Anthropic endpoints over a policy in training. Calls below /e/{episode} belong to that episode.",
        },
        "paths": paths,
        "components": {
            "schemas": {**components, **REPLIES},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"header": []}],
    }


def _add_ranges(components: Mapping[str, Any]) -> None:
    for record in components.values():
        for name, field in record.get("properties", {}).items():
            for kind in field.get("anyOf", [field]):
                if name in RANGES and kind.get("type") in ("integer", "number", "array"):
                    kind.update(RANGES[name])


def _operation(endpoint: Endpoint, request: Mapping[str, Any] | None, prefix: str) -> dict[str, Any]:
    path = prefix + endpoint.path
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": f"{endpoint.method}{path}".replace("/", "_").replace("{", "").replace("}", ""),
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1, "maxLength": 256}} for name in names
        ],
        "responses": {str(status): _answer(endpoint, status) for status in (endpoint.success, *sorted(endpoint.statuses))},
    }
    if request is not None:
        examples = {str(i): {"value": body} for i, body in enumerate(EXAMPLES[endpoint.path])}
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": request, "examples": examples}}}
    if not endpoint.needs_key:
        operation["security"] = [{}]
    return operation


def _answer(endpoint: Endpoint, status: int) -> dict[str, Any]:
    # A gateway without replicas tells its health all the same.
    name = endpoint.reply if status == endpoint.success or endpoint.reply == "Health" else endpoint.error
    content: dict[str, Any] = {JSON: {"schema": {"$ref": f"#/components/schemas/{name}"}}} if name else {PLAIN: {"schema": _TEXT}}
    if status == 200 and endpoint.streams:
        # Of one event, as those who read server-sent events from a description take it.
        content[EVENTS] = {"schema": _object(data=_TEXT)}
    answer: dict[str, Any] = {"description": STATUS_TEXTS[status], "content": content}
    if endpoint.streams:
        answer["headers"] = {"x-request-id": {"schema": _TEXT}}
        if status == 200:
            answer["headers"]["x-policy-version"] = {"schema": {"type": "string"}, "description": "Newest weight version that sampled."}
        if status in (409, 429, 503):
            answer["headers"]["retry-after"] = {"schema": _TEXT}
    return answer
