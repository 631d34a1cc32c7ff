"""A pulled directory is one version, whole and proved, whatever happened before."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from interop_worlds import flip, model_at, publish_steps, same_bits

from rollmill.weights.interop import pull as pull_module
from rollmill.weights.interop.hf import read_directory
from rollmill.weights.interop.pull import STATE, Pull, Pulled, pull
from rollmill.weights.manifest import unseal
from rollmill.weights.store import WeightStore, open_store

SMALL = 300
"""Bytes in a file, so that there are several."""


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    found = open_store(tmp_path / "store")
    publish_steps(found, 0, 1, 2)
    return found


def holds(folder: Path, step: int) -> bool:
    stray = [path.name for path in folder.iterdir() if path.name.endswith(".new")]
    return same_bits(read_directory(folder), model_at(step)) and not stray


def test_pull_moves_forward_by_deltas_alone(where: str, tmp_path: Path) -> None:
    store, folder = open_store(where), tmp_path / "pulled"
    publish_steps(store, 0, 1, 2)
    first = pull(store, 0, folder, max_file_bytes=SMALL)
    assert first.started_from is None and first.num_files_written == first.num_files > 2 and holds(folder, 0)
    second = pull(store, 2, folder, max_file_bytes=SMALL)
    assert second.started_from == 0 and second.bytes_to_read < first.bytes_to_read and holds(folder, 2)
    third = pull(store, 2, folder, max_file_bytes=SMALL)
    assert (third.started_from, third.num_files_written, third.bytes_to_read) == (2, 0, 0)


def test_files_without_a_change_are_left_alone(store: WeightStore, tmp_path: Path) -> None:
    folder = tmp_path / "pulled"
    pull(store, 0, folder, max_file_bytes=16)
    before = {path.name: path.stat().st_ino for path in folder.glob("*.safetensors")}
    done = pull(store, 1, folder, max_file_bytes=16)
    same = [name for name, number in before.items() if (folder / name).stat().st_ino == number]
    assert 0 < done.num_files_written < done.num_files and len(same) == done.num_files - done.num_files_written and holds(folder, 1)


def test_going_back_and_other_limits_are_pulled_in_full(store: WeightStore, tmp_path: Path) -> None:
    folder = tmp_path / "pulled"
    pull(store, 2, folder, max_file_bytes=SMALL)
    assert pull(store, 1, folder, max_file_bytes=SMALL).started_from is None and holds(folder, 1)
    assert pull(store, 1, folder).started_from is None and holds(folder, 1)
    assert sorted(path.name for path in folder.iterdir()) == [STATE, "model.safetensors"]


@pytest.mark.parametrize("damage", ["edited", "missing", "torn", "state"])
def test_damaged_directory_is_seen_and_pulled_again(store: WeightStore, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "pulled"
    pull(store, 0, folder, max_file_bytes=SMALL)
    shard = sorted(folder.glob("*.safetensors"))[1]
    if damage == "edited":
        flip(shard)
    elif damage == "missing":
        shard.unlink()
    elif damage == "torn":
        shard.write_bytes(shard.read_bytes()[:-3])
    else:
        flip(folder / STATE, 5)
    done = pull(store, 1, folder, max_file_bytes=SMALL)
    assert done.started_from is None and done.why_full and holds(folder, 1)


def test_directory_of_somebody_else_is_left_alone(store: WeightStore, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"precious")
    with pytest.raises(ValueError, match="not written by a pull"):
        pull(store, 0, folder)
    assert (folder / "model.safetensors").read_bytes() == b"precious"


def killed_at(store: WeightStore, folder: Path, nth: int) -> bool:
    """Pull version 1 in a process that is killed before its nth rename; False when it came to its end."""
    child = os.fork()
    if child == 0:
        count, real = 0, os.replace

        def replace(source: object, target: object) -> None:
            nonlocal count
            count += 1
            if count == nth:
                os.kill(os.getpid(), signal.SIGKILL)
            real(source, target)  # type: ignore[arg-type]

        pull_module.os.replace = replace  # type: ignore[attr-defined]
        pull(store, 1, folder, max_file_bytes=SMALL)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_pull_killed_before_any_rename_is_finished_by_the_next(store: WeightStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One thread in the children: a forked process has no others.
    monkeypatch.setattr("rollmill.weights.reader.num_workers", lambda num_bytes: 1)
    nth, killed = 0, True
    while killed:
        nth += 1
        folder = tmp_path / f"pulled{nth}"
        pull(store, 0, folder, max_file_bytes=SMALL)
        killed = killed_at(store, folder, nth)
        state = unseal((folder / STATE).read_bytes(), Pulled, STATE)
        assert not state.is_whole or same_bits(read_directory(folder), model_at(state.version)), "what claims to be whole is"
        done: Pull = pull(store, 1, folder, max_file_bytes=SMALL)
        assert holds(folder, 1) and done.record.version == 1
        assert killed or done.num_files_written == 0
    assert nth > 4
