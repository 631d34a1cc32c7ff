"""Calls are kept off the hot path, exactly, at the cost of what they add, and the file survives a kill."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.chat.messages import Call, ChatMessage, ChatRole, Tool
from rollmill.engine.protocol import FinishReason, GenerateReply, Timing, VersionSpan
from rollmill.gateway.call import ChatCall, Finish, TextCall, ToolChoice
from rollmill.gateway.dialects.responses import Responses
from rollmill.gateway.recording import record as record_module
from rollmill.gateway.recording.call_rows import (
    MAX_CHAIN,
    NUM_BASES,
    Base,
    CallRecord,
    EpisodeRecord,
    RecordedChoice,
    Row,
    RowEncoder,
    decode_row,
    new_call_id,
)
from rollmill.gateway.recording.record import SqliteRecorder, connect_calls
from rollmill.gateway.recording.recorded import open_episodes, prune, read_calls

DEADLINE_S = 20.0
TOOL = Tool(name="ls", description="list", parameters={"type": "object", "properties": {"path": {"type": "string"}}})


def reply_of(ids: list[int], version: int = 3) -> GenerateReply:
    return GenerateReply(
        token_ids=ids,
        logprobs=np.asarray([-i / 7 for i in ids], "<f4").tobytes(),
        spans=[VersionSpan(0, len(ids), version)] if ids else [],
        finish_reason=FinishReason.STOP,
        seed=5,
        num_reused=2,
        routes=b"\x00\xff",
        timing=Timing(queue_s=0.0, first_token_s=0.1, total_s=0.2),
    )


def user(text: str) -> ChatMessage:
    return ChatMessage(role=ChatRole.USER, text=text)


def said(text: str, *calls: Call) -> ChatMessage:
    return ChatMessage(role=ChatRole.ASSISTANT, text=text, calls=calls)


def record_of(
    messages: list[ChatMessage], prompt: list[int], sampled: list[int], *, episode: str = "e1", at: float = 1.0, text: str = "ok"
) -> CallRecord:
    return CallRecord(
        id=new_call_id(at),
        episode=episode,
        at=at,
        dialect="anthropic",
        model="policy",
        key="alice",
        call=ChatCall(messages=tuple(messages), tools=(TOOL,), tool_choice=ToolChoice.REQUIRED, stops=("\n\n",), temperature=0.5),
        kinds=["append"],
        prompts=[prompt],
        choices=[RecordedChoice(message=said(text), finish=Finish.STOP, stop_string="x", num_used=1, reply=reply_of(sampled))],
        total_s=0.5,
        overhead_s=0.001,
    )


def conversation(num_turns: int, episode: str = "e1") -> list[CallRecord]:
    """A growing one: every request repeats all before it."""
    rng = np.random.default_rng(num_turns)
    messages, ids, found = [], [], []
    for turn in range(num_turns):
        messages.append(user(f"turn {turn}: " + rng.bytes(60).hex()))
        ids = [*ids, *rng.integers(0, 2**17, 40).tolist()]
        sampled = rng.integers(0, 2**17, 20).tolist()
        text = rng.bytes(30).hex()
        found.append(record_of(list(messages), list(ids), sampled, episode=episode, at=float(turn), text=text))
        messages.append(said(text, Call(id="call_1", name="ls", arguments='{"path": "."}')))
        ids = [*ids, *sampled]
    return found


def test_call_ids_are_uuid7_and_sort_by_time() -> None:
    early, late = new_call_id(1_000_000.0), new_call_id(1_000_000.001)
    assert len(early) == 32 and early[12] == "7" and early[16] in "89ab"
    assert early < late
    assert len({new_call_id(5.0) for _ in range(100)}) == 100


@pytest.fixture
def recorder(tmp_path: Path) -> SqliteRecorder:
    return SqliteRecorder(tmp_path)


def test_what_is_read_is_what_was_put(recorder: SqliteRecorder) -> None:
    records = [
        *conversation(12),
        *conversation(3, episode="other"),
        CallRecord(id=new_call_id(), at=9.0, dialect="openai_text", status=400, error="prompt is empty"),
        CallRecord(
            id=new_call_id(),
            at=10.0,
            dialect="openai_text",
            call=TextCall(prompts=("one", [1, 2, 3]), num_choices=2, echo=True),
            kinds=["first", "fork"],
            prompts=[[7, 8], [1, 2, 3]],
            choices=[RecordedChoice(message=said(str(i)), finish=Finish.LENGTH, reply=reply_of([i])) for i in range(4)],
        ),
        CallRecord(id=new_call_id(), episode="other", at=11.0, dialect="anthropic", status=499, prompts=[[1, 2]], num_abandoned=7),
    ]
    for record in records:
        recorder.put(record)
    asyncio.run(recorder.close())
    assert recorder.num_written == len(records) and recorder.num_dropped == 0 and recorder.problem == ""
    found = list(read_calls(recorder.path))
    assert sorted(found, key=lambda r: r.id) == sorted(records, key=lambda r: r.id)
    assert list(read_calls(recorder.path, "e1")) == records[:12]
    assert list(read_calls(recorder.path, "nobody")) == []


def encoded(records: list[CallRecord]) -> list[Row]:
    encoder = RowEncoder()
    return [encoder.encode(i, r, is_there=lambda _: True) for i, r in enumerate(records)]


def decoded(rows: list[Row]) -> list[CallRecord]:
    held: dict[int, Base] = {}
    found = []
    for row in rows:
        record, held[row.number] = decode_row(row, held)
        found.append(record)
    return found


def test_a_growing_conversation_costs_what_it_adds() -> None:
    def cost(row: Row) -> int:
        return len(row.request) + len(row.tokens)

    rows = encoded(conversation(60))
    assert [r.base for r in rows[1:]] == [r.number for r in rows[:-1]]
    assert cost(rows[-1]) < 2 * cost(rows[1])


def test_a_chain_of_rows_is_bounded() -> None:
    records = conversation(MAX_CHAIN * 2 + 5)
    rows = encoded(records)
    assert len([r for r in rows if r.base is None]) >= 2
    assert decoded(rows) == records


def test_a_row_leans_on_no_row_that_was_pruned() -> None:
    records = conversation(3)
    encoder = RowEncoder()
    rows = [encoder.encode(i, r, is_there=lambda number: number != 1) for i, r in enumerate(records)]
    assert [r.base for r in rows] == [None, 0, None]


def test_helpers_beside_a_conversation_keep_their_own_bases() -> None:
    main, helper = conversation(4), [msgspec.structs.replace(r, episode="e1") for r in conversation(3)]
    rows = encoded([main[0], helper[0], main[1], helper[1], main[2], helper[2], main[3]])
    assert NUM_BASES >= 2
    assert [r.base for r in rows] == [None, None, 0, 1, 2, 3, 4]


def test_what_a_dialect_adds_to_a_call_stays_out() -> None:
    dialect = Responses()
    body = b'{"model": "m", "input": "hi", "tools": [{"type": "function", "name": "ls"}], "metadata": {"a": "b"}}'
    call = dialect.parse(body)
    (record,) = decoded(encoded([CallRecord(id="1", at=0.0, dialect="responses", call=call)]))
    assert record.call == ChatCall(model="m", messages=call.messages, tools=call.tools, includes_usage=True)


ids = st.lists(st.integers(0, 3), max_size=12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["", "a", "b"]), ids, ids, st.text(max_size=8)), max_size=12))
def test_any_rows_decode_to_what_they_encode(calls: list[tuple[str, list[int], list[int], str]]) -> None:
    records = [record_of([user(text)], prompt, sampled, episode=episode, text=text) for episode, prompt, sampled, text in calls]
    rows = encoded(records)
    of_episode = {e: [r for r in rows if r.episode == e] for e in ("", "a", "b")}
    assert all(row.base is None for row in of_episode[""])
    for episode, mine in of_episode.items():
        assert decoded(mine) == [r for r in records if r.episode == episode]


def test_put_never_waits_and_counts_what_it_drops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, entered = threading.Event(), threading.Event()
    write = record_module._Writer.write

    def stuck(self: record_module._Writer, batch: list[CallRecord | EpisodeRecord]) -> None:
        entered.set()
        assert held.wait(DEADLINE_S)
        write(self, batch)

    monkeypatch.setattr(record_module._Writer, "write", stuck)
    recorder = SqliteRecorder(tmp_path, max_queue=5)
    records = conversation(9)
    recorder.put(records[0])
    assert entered.wait(DEADLINE_S)
    for record in records[1:]:
        recorder.put(record)
    assert recorder.num_waiting == 5 and recorder.num_dropped == 3
    held.set()
    asyncio.run(recorder.close())
    assert list(read_calls(recorder.path)) == records[:6]
    recorder.put(records[8])
    assert recorder.num_dropped == 4


def test_a_disk_that_fails_loses_its_batch_and_not_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, failing = RowEncoder.encode, ["database or disk is full"]

    def broken(self: RowEncoder, number: int, record: CallRecord, **rest: object) -> Row:
        row = encode(self, number, record, **rest)  # type: ignore[arg-type]
        if failing:
            raise sqlite3.OperationalError(failing.pop())
        return row

    monkeypatch.setattr(RowEncoder, "encode", broken)
    recorder = SqliteRecorder(tmp_path)
    records = conversation(3)
    recorder.put(records[0])
    wait_for(lambda: recorder.num_dropped == 1)
    assert "disk is full" in recorder.problem
    for record in records[1:]:
        recorder.put(record)
    asyncio.run(recorder.close())
    assert list(read_calls(recorder.path)) == records[1:]


def wait_for(condition: object) -> None:
    until = time.monotonic() + DEADLINE_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.005)


def test_a_killed_recorder_leaves_every_committed_call(tmp_path: Path) -> None:
    script = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_gateway_record import conversation
from rollmill.gateway.recording.record import SqliteRecorder
recorder = SqliteRecorder(Path({str(tmp_path)!r}))
for record in conversation(400):
    recorder.put(record)
    while recorder.num_waiting > 16:
        time.sleep(0.001)
    print(recorder.num_written, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        num = 0
        for line in process.stdout:
            num = int(line)
            if num >= 40:
                break
        os.kill(process.pid, signal.SIGKILL)
    found = list(read_calls(tmp_path / "calls.db"))
    assert len(found) >= num
    expected = conversation(400)[: len(found)]
    assert [msgspec.structs.replace(r, id="") for r in found] == [msgspec.structs.replace(r, id="") for r in expected]


def test_open_episodes_are_those_not_closed(recorder: SqliteRecorder) -> None:
    for key in ("a", "b", "c"):
        recorder.put(EpisodeRecord(key=key, at=1.0, is_open=True, options={"seed": 3, "sampling": {"temperature": 1.0}}))
    recorder.put(EpisodeRecord(key="b", at=2.0, is_open=False))
    asyncio.run(recorder.close())
    found = open_episodes(recorder.path)
    assert [r.key for r in found] == ["a", "c"]
    assert found[0].options == {"seed": 3, "sampling": {"temperature": 1.0}}


def test_prune_takes_whole_ended_episodes_only(recorder: SqliteRecorder) -> None:
    old, young, running = conversation(4, "old"), conversation(8, "young"), conversation(3, "running")
    recorder.put(EpisodeRecord(key="running", at=0.0, is_open=True))
    recorder.put(EpisodeRecord(key="old", at=0.0, is_open=True))
    recorder.put(EpisodeRecord(key="old", at=4.0, is_open=False))
    single = [msgspec.structs.replace(r, episode="") for r in conversation(6)]
    for record in [*old, *young, *running, *single]:
        recorder.put(record)
    asyncio.run(recorder.close())
    assert prune(recorder.path, before=5.0) == len(old) + 5
    left = list(read_calls(recorder.path))
    assert left == [single[5], *running, *young]
    assert [r.key for r in open_episodes(recorder.path)] == ["running"]


def test_a_recorder_goes_on_with_the_file_of_another(tmp_path: Path) -> None:
    records = conversation(6)
    for part in (records[:3], records[3:]):
        recorder = SqliteRecorder(tmp_path)
        for record in part:
            recorder.put(record)
        asyncio.run(recorder.close())
    assert list(read_calls(tmp_path / "calls.db")) == records


def test_foreign_files_are_refused_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "calls.db").write_bytes(b"not a database at all" * 100)
    with pytest.raises(ValueError, match="not a file of calls"):
        SqliteRecorder(tmp_path)
    newer = tmp_path / "newer.db"
    db = connect_calls(newer)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(ValueError, match="has schema 99"):
        list(read_calls(newer))
    with pytest.raises(ValueError, match="is not there"):
        list(read_calls(tmp_path / "none.db"))
