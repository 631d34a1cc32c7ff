"""The run directory: who may use it, where each role listens, and the configuration it was started with."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blake3 import blake3

from rollmill.config import RunConfig, dump_config, load_config
from rollmill.fleet.disk import room_for

# What may not change between a run and its resumption: the ledger's groups would mean something else.
IDENTITY = ("run.seed", "model.path", "tasks.family", "tasks.kinds", "tasks.levels", "rollout.group_size", "trainer.groups_per_batch")


class RunDirError(ValueError):
    """A run directory that cannot be used as asked."""


@contextlib.contextmanager
def hold(run_dir: Path, name: str) -> Iterator[None]:
    """Own a run (or one of its roles) for as long as the block lasts. The lock dies with the process, also by kill -9."""
    path = run_dir / "locks" / name
    with room_for(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise RunDirError(
                f"{run_dir} is in use: {name} runs as process {file.read().strip() or '?'}; stop it or set another run.dir"
            ) from None
        file.truncate(0)
        # Past the buffer: what a full disk refuses would be tried again when the block ends, and hide how it ended.
        with room_for(path):
            os.write(file.fileno(), str(os.getpid()).encode())
        yield


def prepare(config: RunConfig, *, resume: bool) -> Path:
    """Make or reopen the run directory and write the resolved run file into it; returns that file."""
    run_dir = config.run.dir
    file = run_dir / "run.toml"
    if file.is_file() and not resume:
        raise RunDirError(f"{run_dir} already holds a run; add --resume to go on with it, or set another run.dir")
    if resume and not file.is_file():
        raise RunDirError(f"there is no run to resume in {run_dir}; start it without --resume")
    if resume:
        before, now = load_config(file).model_dump(mode="json"), config.model_dump(mode="json")
        for key in IDENTITY:
            section, _, name = key.partition(".")
            if before[section][name] != now[section][name]:
                raise RunDirError(
                    f"{key} was {before[section][name]!r} when {run_dir} was started and is {now[section][name]!r} now; "
                    "a resumed run must keep it. Change it back or set another run.dir"
                )
    _check_model(config, run_dir, resume=resume)
    for name in ("logs", "roles", "metrics"):
        (run_dir / name).mkdir(parents=True, exist_ok=True)
    write_atomic(file, dump_config(config))
    return file


def _check_model(config: RunConfig, run_dir: Path, *, resume: bool) -> None:
    """Remember which model a run began with; refuse to go on with another one under the same path."""
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
    files = [config.model.path / n for n in names if (config.model.path / n).is_file()] + sorted(config.model.path.glob("*.safetensors"))
    now = {file.name: blake3().update_mmap(file).hexdigest() for file in files}
    record = run_dir / "model.json"
    before = json.loads(record.read_text()) if resume and record.is_file() else now
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            raise RunDirError(
                f"{config.model.path / name} is not the file {run_dir} was started with; "
                "tokens and weights of the run would no longer fit. Put it back or set another run.dir"
            )
    run_dir.mkdir(parents=True, exist_ok=True)
    write_atomic(record, json.dumps(now, indent=2) + "\n")


def write_atomic(path: Path, text: str) -> None:
    work = path.with_suffix(path.suffix + f".{os.getpid()}.tmp")
    try:
        with room_for(path):
            work.write_text(text)
            work.replace(path)
    finally:
        work.unlink(missing_ok=True)


def announce(run_dir: Path, role: str, facts: dict[str, Any]) -> None:
    """Tell the other roles where this one listens."""
    (run_dir / "roles").mkdir(parents=True, exist_ok=True)
    write_atomic(run_dir / "roles" / f"{role}.json", json.dumps({"pid": os.getpid(), **facts}))


def announced(run_dir: Path, role: str) -> dict[str, Any] | None:
    try:
        return json.loads((run_dir / "roles" / f"{role}.json").read_text())
    except (FileNotFoundError, ValueError):
        return None


class ReplicaBook:
    """The base URLs of the engines that announced themselves; files are read again only when they changed."""

    def __init__(self, run_dir: Path, num_replicas: int) -> None:
        self._paths = [run_dir / "roles" / f"engine-{i}.json" for i in range(num_replicas)]
        self._known: dict[Path, tuple[int, str]] = {}

    def __call__(self) -> list[str]:
        urls = []
        for path in self._paths:
            try:
                stamp = path.stat().st_mtime_ns
                if path not in self._known or self._known[path][0] != stamp:
                    self._known[path] = (stamp, json.loads(path.read_text())["url"])
            except (FileNotFoundError, ValueError, KeyError):
                continue
            urls.append(self._known[path][1])
        return urls
