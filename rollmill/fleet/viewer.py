"""One episode as text for a person: the conversation, the grade, and which weights said what."""

from __future__ import annotations

from pathlib import Path

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
    turns = [f"\n[{m['role']}]\n{m['content'].rstrip()}" for m in trace.messages]
    return "\n".join([*head, *turns])


def _timing(timing_s: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in timing_s.items())
