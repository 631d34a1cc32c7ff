"""Reads back what each tracker really holds, from its own files, and makes runs to be tracked."""

from __future__ import annotations

import json
from pathlib import Path

ROWS = list[tuple[str, float, float]]
"""(name, step on its own axis, value), one per number."""


def make_run(folder: Path, num_steps: int = 5) -> Path:
    (folder / "metrics").mkdir(parents=True)
    (folder / "run.toml").write_text(
        '[run]\nseed = 7\n[agent]\nenv = { API_KEY = "hidden" }\n[weights]\nstore = "s3://b/p?secret=hidden"\n'
    )
    append(folder, "trainer", 0, num_steps)
    append(folder, "rollout", 0, 2 * num_steps)
    return folder


def append(folder: Path, role: str, first: int, num: int) -> None:
    name = "reward/mean" if role == "trainer" else "rollout/num_running"
    with (folder / "metrics" / f"{role}.jsonl").open("a") as file:
        for i in range(first, first + num):
            file.write(json.dumps({"t": 1000.0 + i, "step": i * (1 if role == "trainer" else 8), name: i / 4, "loss/sum": None}) + "\n")


def expected(num_trainer: int, num_rollout: int) -> ROWS:
    return sorted(
        [("trainer/reward/mean", float(i), i / 4) for i in range(num_trainer)]
        + [("rollout/num_running", 8.0 * i, i / 4) for i in range(num_rollout)]
    )


def from_tensorboard(folder: Path) -> ROWS:
    """Read as TensorBoard does, all files of a folder one after the other."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    rows = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    rows.append((value.tag, float(event.step), float(value.tensor.float_val[0])))
    return sorted(rows)


def from_trackio(project: str, name: str) -> ROWS:
    from trackio.sqlite_storage import SQLiteStorage

    rows = []
    for run in SQLiteStorage.get_runs(project):
        assert run.startswith(name)
        for log in SQLiteStorage.get_logs(project, run):
            rows += [(key, float(log["step"]), float(value)) for key, value in log.items() if "/" in key]
    return sorted(rows)


def wandb_rows(folder: Path) -> dict[int, dict[str, float]]:
    """Rows by W&B's own step, over all offline folders of a run; none may be there twice."""
    from wandb.proto import wandb_internal_pb2

    from rollmill.trackers.wandb_log import records

    found: dict[int, dict[str, float]] = {}
    for path in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb")):
        for data in records(path.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.WhichOneof("record_type") != "history":
                continue
            row = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            step = int(row.pop("_step"))
            row.pop("_runtime")
            assert step not in found, f"row {step} was written twice"
            found[step] = row
    return found


def from_wandb(folder: Path) -> ROWS:
    rows = []
    for row in wandb_rows(folder).values():
        axis = "trainer/step" if "trainer/step" in row else "rollout/step"
        rows += [(key, float(row[axis]), value) for key, value in row.items() if key not in (axis, "_timestamp")]
    return sorted(rows)
