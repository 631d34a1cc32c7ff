"""The description is of what is served, and whatever it allows a client to send is answered as it says: no 5xx, known statuses, shapes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from dialect_worlds import World, scripted
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import checks

from rollmill.gateway.dialects.openapi import ENDPOINTS, EPISODE_PREFIX, EXAMPLES, openapi_json

CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(scripted("Hello, world!")) as world:
        yield world


api = schemathesis.openapi.from_dict(json.loads(openapi_json()))
# Its cases are many and never get past the decoder; `spoiled` reaches further in less time.
api.config.phases.coverage.enabled = False


def test_every_endpoint_that_is_served_is_described(world: World) -> None:
    app = world.server.app
    served = {("POST", path) for path in app._dialects} | {(route.method, route.path) for route in app._routes}
    assert {(e.method.upper(), e.path) for e in ENDPOINTS} == served


def test_the_description_is_served_as_it_is(world: World) -> None:
    served = httpx.get(world.url() + "/openapi.json")
    assert served.content == openapi_json() and served.headers["content-type"] == "application/json"
    document = json.loads(openapi_json())
    assert document["openapi"] == "3.1.0"
    for endpoint in ENDPOINTS:
        for prefix in ("", EPISODE_PREFIX):
            assert endpoint.method in document["paths"][prefix + endpoint.path]
    message = document["components"]["schemas"]["MessagesRequest"]
    assert set(message["required"]) == {"max_tokens", "messages"}


SOME = settings(
    max_examples=6,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@api.exclude(path_regex="^/e/").parametrize()
@SOME
def test_requests_of_the_described_kind_are_answered_as_described(world: World, case: schemathesis.Case) -> None:
    response = case.call(base_url=world.url(), timeout=20)
    case.validate_response(response, checks=CHECKS)


@pytest.mark.parametrize("path", sorted(EXAMPLES))
@pytest.mark.parametrize("prefix", ["", "/e/e%201"])
def test_the_examples_are_answered(world: World, prefix: str, path: str) -> None:
    for body in EXAMPLES[path]:
        reply = httpx.post(world.url() + prefix + path, json=body)
        assert reply.is_success, reply.text
        kind = "text/event-stream" if body.get("stream") else "application/json"
        assert reply.headers["content-type"].startswith(kind)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["text", "tool_use", "user", "tool"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "role", "content", "x"]), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) within a body."""
    if isinstance(value, dict):
        return [(value, k) for k in value] + [p for inner in value.values() for p in places(inner)]
    if isinstance(value, list):
        return [(value, k) for k in range(len(value))] + [p for inner in value for p in places(inner)]
    return []


@st.composite
def spoiled(draw: st.DrawFn, path: str) -> bytes:
    """A good body with one or two places changed: what reaches deeper than noise."""
    body = copy.deepcopy(draw(st.sampled_from(EXAMPLES[path])))
    known = sorted(f for e in ENDPOINTS if e.path == path for f in e.request.__struct_fields__)
    for _ in range(draw(st.integers(1, 2))):
        container, key = draw(st.sampled_from(places(body)))
        match draw(st.sampled_from(["replace", "remove", "add"])):
            case "replace":
                container[key] = draw(anything)
            case "remove":
                del container[key]
            case "add":
                body[draw(st.sampled_from(known))] = draw(anything)
        if not body:
            break
    return json.dumps(body).encode()


@pytest.mark.parametrize("path", sorted(EXAMPLES))
def test_spoiled_requests_are_answered_as_described(world: World, path: str) -> None:
    operation = api[path]["POST"]
    statuses: set[int] = set()
    with httpx.Client(base_url=world.url(), timeout=20) as client:

        @settings(max_examples=30, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(spoiled(path))
        def check(body: bytes) -> None:
            response = client.post(path, content=body, headers={"content-type": "application/json"})
            statuses.add(response.status_code)
            assert response.status_code < 500, response.text
            operation.validate_response(response)

        check()
    assert 400 in statuses and statuses & {200, 201}


def test_nothing_is_left_behind(world: World) -> None:
    world.stub.wait_idle()
    assert world.server.app.num_running == 0
