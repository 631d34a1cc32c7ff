"""Frames survive any fragmentation, bodies read back as they were written, and nonsense is refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.sandbox.agent import wire

U32 = st.integers(0, (1 << 32) - 1)
FRAMES = st.lists(st.tuples(U32, U32, st.binary(max_size=200)), max_size=8)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(FRAMES, st.integers(1, 64))
def test_frames_survive_any_fragmentation(frames, step):
    stream = b"".join(wire.frame(*frame) for frame in frames)
    splitter, got = wire.Splitter(), []
    for start in range(0, len(stream), step):
        got += splitter.feed(stream[start : start + step])
    assert got == frames


@settings(max_examples=60, derandomize=True, deadline=None)
@given(FRAMES, st.binary(max_size=40))
def test_splitter_never_gives_more_than_it_was_fed(frames, noise):
    splitter = wire.Splitter()
    try:
        got = splitter.feed(b"".join(wire.frame(*frame) for frame in frames) + noise)
    except ValueError:
        return
    assert got[: len(frames)] == frames
    assert sum(wire.HEAD.size + len(body) for _, _, body in got[len(frames) :]) <= len(noise)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(st.binary(max_size=30), max_size=5), st.lists(st.binary(max_size=30), max_size=5), st.binary(), st.binary(), U32, U32)
def test_command_reads_back_as_it_was_written(argv, env, cwd, stdin, flags, limit):
    fields = wire.Body(wire.exec_body(argv, env, cwd, stdin, flags=flags, max_output_bytes=limit))
    assert fields.take(wire.EXEC) == (flags, limit, len(argv), len(env))
    assert [fields.text() for _ in argv] == argv and [fields.text() for _ in env] == env
    assert (fields.text(), fields.text()) == (cwd, stdin) and not fields


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_a_body_or_refused(data):
    fields = wire.Body(data)
    try:
        while fields:
            fields.text()
    except (ValueError, struct.error):
        return
    assert fields.rest() == b""


def test_frame_larger_than_any_is_refused_before_it_is_awaited():
    with pytest.raises(ValueError, match="out of step"):
        wire.Splitter().feed(wire.HEAD.pack(wire.MAX_BODY_BYTES + 1, 1, 1))
