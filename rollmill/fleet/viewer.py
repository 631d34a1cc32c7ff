"""One episode as text for a person: the conversation, the grade, and which weights said what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from rollmill.ledger import Ledger
from rollmill.records import Trace


def show_episode(run_dir: Path, episode_id: str | None) -> str:
    """The given episode, or the newest graded one."""
    with Ledger.open_reader(run_dir) as ledger:
        episode_id = episode_id or ledger.newest_graded()
        if episode_id is None:
            raise ValueError(f"no graded episode in {run_dir} yet")
        row = ledger.episode(episode_id)
        task = ledger.task_of(row.group_id)
        head = [f"episode {row.episode_id} of task {task.task_id}: {row.state}"]
        if row.grade is None or row.blob is None:
            return "\n".join([*head, row.message or str(row.cancel_reason or "")])
        trace = msgspec.msgpack.decode(ledger.blobs.get(row.blob), type=Trace)
    old, new = trace.version_range()
    head.append(f"reward {row.grade.reward:g} ({row.grade.note}), stopped: {trace.stop}, weight versions {old} to {new}")
    head.append(f"{row.num_tokens} tokens, {row.num_sampled} of them sampled; seconds: {_timing(trace.timing_s)}")
    if len(trace.windows) > 1:
        head.append(f"{len(trace.windows)} context windows: the agent compacted, branched or used helpers; the longest one is shown")
    return "\n".join([*head, *(_turn(message) for message in trace.messages)])


def _turn(message: dict[str, Any]) -> str:
    said = [str(message.get("content") or "").rstrip()]
    for call in message.get("tool_calls") or ():
        function = call["function"]
        said.append(f"-> {function['name']} {json.dumps(function['arguments'], ensure_ascii=False)}")
    return f"\n[{message['role']}]\n" + "\n".join(part for part in said if part)


def _timing(timing_s: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in timing_s.items())
