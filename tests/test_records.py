"""Records: arrays survive the wire bit for bit, and a window that contradicts itself is refused."""

from __future__ import annotations

import doctest
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill import records
from rollmill.records import Boundary, RunFailure, SourceSpan, StopReason, Trace, Window, encode

token = st.tuples(
    st.integers(0, 2**31 - 1),
    st.integers(0, 1),
    st.floats(width=32, allow_nan=True, allow_infinity=True),
    st.integers(0, 2**31 - 1),
)


def window(rows: list[tuple[int, int, float, int]]) -> Window:
    """The first token of a window is never a sampled one."""
    return Window.of(
        tokens=[r[0] for r in rows],
        sampled=[r[1] for r in rows],
        logprobs=[r[2] for r in rows],
        versions=[r[3] if r[1] else -1 for r in rows],
    )


@given(st.lists(st.lists(token, max_size=20), max_size=4))
def test_trace_survives_the_wire_bit_for_bit(rows: list[list[tuple[int, int, float, int]]]) -> None:
    rows = [[(r[0][0], 0, r[0][2], r[0][3]), *r[1:]] if r else r for r in rows]
    trace = Trace(episode_id="g000000.0.0", windows=tuple(window(r) for r in rows), stop=StopReason.SUBMITTED)
    back = msgspec.msgpack.decode(encode(trace), type=Trace)
    assert back == trace
    for mine, theirs in zip(rows, back.windows, strict=True):
        theirs.check()
        assert theirs.tokens_T.tolist() == [r[0] for r in mine]
        assert theirs.logprobs_T.tobytes() == np.array([r[2] for r in mine], "<f4").tobytes()
    assert back.num_sampled == sum(r[1] for rs in rows for r in rs)
    versions = [r[3] for rs in rows for r in rs if r[1]]
    assert back.version_range() == ((min(versions), max(versions)) if versions else (-1, -1))


def test_window_refuses_arrays_of_different_length() -> None:
    good = Window.of(tokens=[1, 2], sampled=[0, 1], logprobs=[0.0, -0.5], versions=[-1, 3])
    for name in ("tokens", "logprobs", "versions"):
        with pytest.raises(ValueError, match="disagree on their length"):
            msgspec.structs.replace(good, **{name: getattr(good, name)[:-4]}).check()


def test_window_refuses_sampled_token_without_version() -> None:
    with pytest.raises(ValueError, match="no weight version"):
        Window.of(tokens=[1, 2], sampled=[0, 1], logprobs=[0.0, math.nan], versions=[-1, -1]).check()


@pytest.mark.parametrize(
    "facts",
    [
        {"sources": (SourceSpan(0, 3, "a"),)},
        {"sources": (SourceSpan(1, 2, "a"), SourceSpan(0, 1, "b"))},
        {"sources": (SourceSpan(2, 1, "a"),)},
        {"stale": ((-1, 2),)},
        {"stale": ((0, 2), (1, 2))},
    ],
)
def test_window_refuses_spans_beyond_its_tokens_or_out_of_order(facts: dict[str, tuple]) -> None:
    good = Window.of(
        tokens=[1, 2], sampled=[0, 1], logprobs=[0.0, -0.5], versions=[-1, 3], sources=(SourceSpan(1, 2, "a"),), stale=((1, 2),)
    )
    good.check()
    with pytest.raises(ValueError, match=f"{next(iter(facts))} .* are not spans in order within its 2 tokens"):
        msgspec.structs.replace(good, **facts).check()


def test_trace_written_before_there_were_routes_still_opens() -> None:
    old = msgspec.to_builtins(Window.of(tokens=[1, 2], sampled=[0, 1], logprobs=[0.0, -0.5], versions=[-1, 3]), builtin_types=(bytes,))
    new = {k: v for k, v in old.items() if k not in ("routes", "sources", "stale")}
    window = msgspec.msgpack.decode(msgspec.msgpack.encode(new), type=Window)
    assert (window.routes, window.sources, window.stale) == (b"", (), ()) and window.num_tokens == 2


def test_failure_names_its_boundary() -> None:
    failure = RunFailure(Boundary.SANDBOX, "box 3 is gone")
    assert str(failure) == "sandbox: box 3 is gone" and failure.boundary is Boundary.SANDBOX


def test_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(records).failed == 0


def test_window_refuses_a_sampled_first_token_and_negative_ids() -> None:
    with pytest.raises(ValueError, match="starts with a sampled token"):
        Window.of(tokens=[1, 2], sampled=[1, 1], logprobs=[-0.1, -0.5], versions=[3, 3]).check()
    with pytest.raises(ValueError, match="token id -4"):
        Window.of(tokens=[1, -4], sampled=[0, 1], logprobs=[0.0, -0.5], versions=[-1, 3]).check()
