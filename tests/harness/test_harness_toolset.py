"""Tools from typed functions: the schema says what the signature says, and every wrong call is one useful line."""

from __future__ import annotations

import asyncio
import threading
from enum import StrEnum
from functools import partial
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from rollmill.harness import CallError, FunctionTools
from rollmill.harness.toolset import form_of
from rollmill.records import Boundary, RunFailure


class Side(StrEnum):
    LEFT = "left"
    RIGHT = "right"


class Point(BaseModel):
    x: int
    y: int = 0


def turn(side: Side, steps: int = 1, speed: float | None = None, how: Literal["slow", "fast"] = "slow", tags: tuple[str, ...] = ()) -> str:
    """Turn to a side
    and go.

    Longer words that no model needs.

    Args:
        side: where to,
            seen from above
        steps (int): how many

    Returns:
        what was done
    """
    return f"{side} {steps} {speed} {how} {tags}"


def go(to: Point) -> Point:
    return to


def use(functions: Any, name: str, strict: bool = True, **arguments: Any) -> str:
    return asyncio.run(FunctionTools(functions, strict=strict).call(name, arguments))


def refused(functions: Any, name: str, strict: bool = True, **arguments: Any) -> str:
    with pytest.raises(CallError) as caught:
        use(functions, name, strict, **arguments)
    return str(caught.value)


def test_schema_and_docs_come_from_the_signature_and_the_docstring() -> None:
    [tool] = FunctionTools([turn]).tools()
    assert tool.name == "turn" and tool.description == "Turn to a side and go."
    properties = tool.parameters["properties"]
    assert tool.parameters["required"] == ["side"] and list(properties) == ["side", "steps", "speed", "how", "tags"]
    assert properties["steps"] == {"type": "integer", "description": "how many", "default": 1}
    assert properties["side"]["description"] == "where to, seen from above" and "title" not in str(tool.parameters)


def test_valid_arguments_arrive_as_the_types_the_function_names() -> None:
    assert use([turn], "turn", side="left", steps=2, speed=1, tags=["a"]) == "left 2 1.0 slow ('a',)"
    assert use([go], "go", to={"x": 1}) == "x=1 y=0"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "error: turn needs the left|right argument 'side'"),
        ({"side": "left", "far": 1}, "error: turn has no argument 'far'; it takes: side, steps, speed, how, tags"),
        ({"side": "left", "steps": "3"}, "error: turn needs the whole number argument 'steps', got \"3\""),
        ({"side": "left", "steps": None}, "error: turn needs the whole number argument 'steps', got null"),
        ({"side": "left", "speed": "quick"}, "error: turn needs the number argument 'speed', got \"quick\""),
        ({"side": "left", "how": "odd"}, "error: 'how' of turn: Input should be 'slow' or 'fast', got \"odd\""),
        ({"side": "up"}, "error: 'side' of turn: Input should be 'left' or 'right', got \"up\""),
        ({"side": "left", "tags": ["a", 1]}, "error: 'tags[1]' of turn: Input should be a valid string, got 1"),
        ({"side": "left", "tags": "a"}, "error: turn needs the list argument 'tags', got \"a\""),
        ({"side": "left", "tags": ["\udc00"]}, "error: 'tags' of turn holds a character that is not text"),
    ],
)
def test_each_wrong_call_is_told_in_one_line(arguments: dict[str, Any], told: str) -> None:
    assert refused([turn], "turn", **arguments) == told


def test_nested_and_deep_arguments_are_told_too() -> None:
    assert refused([go], "go", to={"x": "a"}).startswith("error: 'to[\"x\"]' of go: Input should be a valid integer")
    assert refused([go], "go", to={}).startswith("error: 'to[\"x\"]' of go: Field required")
    deep: Any = 1
    for _ in range(500):
        deep = [deep]
    assert refused([go], "go", to=deep).startswith("error: go cannot take these arguments")


def test_lenient_tools_coerce_what_is_safe_and_ignore_extras() -> None:
    assert use([turn], "turn", strict=False, side="left", steps="3", far=1) == "left 3 None slow ()"
    assert refused([turn], "turn", strict=False, side="left", steps="x") == "error: turn needs the whole number argument 'steps', got \"x\""


@settings(derandomize=True, max_examples=200)
@given(
    st.dictionaries(
        st.sampled_from(["side", "steps", "speed", "how", "tags", "é\ud800"]),
        st.one_of(
            st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.text()), st.sampled_from(["left", "\udfff"])
        ),
    )
)
def test_any_arguments_are_taken_or_refused_with_sayable_words(arguments: dict[str, Any]) -> None:
    for strict in (True, False):
        try:
            FunctionTools([turn], strict=strict).checked("turn", arguments)
        except CallError as error:
            assert str(error).startswith("error: ") and "\n" not in str(error)
            str(error).encode()


class Counter:
    """Public methods are tools, in the order written; what begins with an underscore or is no method is not."""

    limit = 3

    def __init__(self) -> None:
        self.count = 0

    @property
    def expensive(self) -> int:
        raise AssertionError("looked at")

    def up(self, by: int = 1) -> int:
        """Count up."""
        self.count += by
        return self.count

    async def down(self) -> int:
        """Count down."""
        self.count -= 1
        return self.count

    def _hidden(self) -> None: ...


def test_public_methods_of_an_object_are_tools_and_share_its_state() -> None:
    counter = Counter()
    tools = FunctionTools(counter)
    assert [t.name for t in tools.tools()] == ["up", "down"]

    async def scene() -> list[str]:
        return [await tools.call("up", {"by": 5}), await tools.call("down", {})]

    assert asyncio.run(scene()) == ["5", "4"] and counter.count == 4


def test_schemas_are_made_once_per_function_not_once_per_episode() -> None:
    FunctionTools(Counter())
    made = form_of.cache_info().misses
    for _ in range(50):
        FunctionTools(Counter())
    assert form_of.cache_info().misses == made


def test_blocking_functions_run_beside_the_loop() -> None:
    def where() -> str:
        return threading.current_thread().name

    async def here() -> str:
        return threading.current_thread().name

    assert use([where], "where").startswith("tool") and use([here], "here") == "MainThread"


def test_results_are_told_as_text() -> None:
    def echo(kind: str) -> Any:
        return {"text": "a", "none": None, "dict": {"é": 1}, "list": [1, "b"], "number": 1.5, "true": True}[kind]

    assert [use([echo], "echo", kind=k) for k in ("text", "none", "dict", "list", "number", "true")] == [
        "a", "(no output)", '{"é": 1}', '[1, "b"]', "1.5", "True",
    ]  # fmt: skip


def test_what_a_function_raises_is_told_but_its_lost_connection_is_the_environments_failure() -> None:
    def act(error: str) -> None:
        raise {"value": ValueError("game over"), "silent": KeyError(), "gone": ConnectionError("reset"), "late": TimeoutError("db")}[error]

    tools = FunctionTools([act])
    assert use([act], "act", error="value") == "error: game over" and use([act], "act", error="silent") == "error: KeyError"
    for error in ("gone", "late"):
        with pytest.raises(RunFailure) as caught:
            asyncio.run(tools.call("act", {"error": error}))
        assert caught.value.boundary is Boundary.TASK


def test_function_that_never_ends_is_answered_for() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    assert asyncio.run(FunctionTools([wait], timeout_s=0.05).call("wait", {})) == "error: wait did not answer within 0.05 s"


def test_functions_that_no_model_could_call_are_refused_when_the_toolset_is_made() -> None:
    def open_ended(**options: Any) -> None: ...

    def raw(loop: threading.Thread) -> None: ...

    with pytest.raises(ValueError, match=r"'open_ended' takes .*options.*: a model can only be told of named arguments"):
        FunctionTools([open_ended])
    with pytest.raises(ValueError, match="'raw' has an argument whose type JSON cannot carry"):
        FunctionTools([raw])

    class Local: ...

    def hidden(what: Local) -> None: ...

    with pytest.raises(ValueError, match="'hidden' has a type hint that cannot be looked up: name 'Local' is not defined"):
        FunctionTools([hidden])
    with pytest.raises(ValueError, match="two tools have one name"):
        FunctionTools([turn, turn])
    with pytest.raises(ValueError, match="there is no tool 'stop'; tools: turn"):
        FunctionTools([turn], ends=["stop"])


def test_partial_functions_and_callable_objects_are_tools_by_the_name_given() -> None:
    class Adder:
        def __call__(self, a: int, b: int) -> int:
            return a + b

    assert [t.name for t in FunctionTools(f for f in (turn, go)).tools()] == ["turn", "go"]
    tools = FunctionTools({"left": partial(turn, Side.LEFT), "add": Adder()})
    assert [t.name for t in tools.tools()] == ["left", "add"]
    assert asyncio.run(tools.call("add", {"a": 1, "b": 2})) == "3"
    assert asyncio.run(tools.call("left", {"steps": 2})) == "left 2 None slow ()"
