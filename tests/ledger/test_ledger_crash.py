"""Real processes, really killed: what the ledger promised before kill -9 is there after it, and nothing is trained twice."""

from __future__ import annotations

import json
import os
import random
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

from ledger_walk import walk

from rollmill.ledger import GroupRow, Ledger
from rollmill.records import EpisodeState, GroupState, Role

WALK = Path(__file__).with_name("ledger_walk.py")
NUM_ROUNDS = 12


def start(run_dir: Path, role: Role, seed: int, num_steps: int) -> subprocess.Popen[bytes]:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen([sys.executable, str(WALK), str(run_dir), role, str(seed), str(num_steps)], stdout=subprocess.PIPE, env=env)


def told_before_kill(workers: list[subprocess.Popen[bytes]], num_lines: int) -> list[str]:
    """Read `num_lines` promises from the workers together, kill all of them with -9, and return every promise they made."""
    deadline = time.monotonic() + 60.0
    output: dict[int, bytes] = {}
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            assert worker.stdout is not None
            selector.register(worker.stdout, selectors.EVENT_READ)
        while sum(out.count(b"\n") for out in output.values()) < num_lines:
            ready = selector.select(timeout=max(0.0, deadline - time.monotonic()))
            assert ready, "the workers told nothing for 60 s"
            for key, _ in ready:
                chunk = os.read(key.fd, 65536)
                assert chunk, "a worker ended by itself"
                output[key.fd] = output.get(key.fd, b"") + chunk
    for worker in workers:
        worker.send_signal(signal.SIGKILL)
    for worker in workers:
        assert worker.stdout is not None
        output[worker.stdout.fileno()] = output.get(worker.stdout.fileno(), b"") + worker.stdout.read()
        assert worker.wait(timeout=30) == -signal.SIGKILL
        worker.stdout.close()
    # A line is complete only when its newline came through.
    return [line.decode() for out in output.values() for line in out.split(b"\n")[:-1]]


def check_promises(ledger: Ledger, told: list[str]) -> None:
    for line in told:
        what, subject = line.split()
        if what in ("graded", "failed"):
            assert ledger.episode(subject).state is EpisodeState(what), line
        elif what == "committed":
            head = ledger.head_checkpoint()
            assert head is not None and head.step >= int(subject), line
        else:
            group = ledger.group(subject)
            assert group.state is GroupState(what) or what in ("open", "ready"), line


def check_weights_contain_each_trained_group_once(ledger: Ledger) -> int:
    head = ledger.head_checkpoint()
    weights: list[str] = [] if head is None else json.loads((ledger.run_dir / head.path).read_text())
    trained: list[GroupRow] = [g for step in range(0 if head is None else head.step + 1) for g in ledger.batch(step)]
    assert all(g.state is GroupState.TRAINED for g in trained)
    assert weights == [g.group_id for g in trained]
    assert len(set(weights)) == len(weights) == ledger.progress().num_trained
    return len(weights)


def test_both_roles_killed_again_and_again_lose_nothing_and_train_nothing_twice(tmp_path: Path) -> None:
    rng = random.Random(7)
    told: list[str] = []
    for round_ in range(NUM_ROUNDS):
        workers = [start(tmp_path, role, 100 * round_ + i, 10**9) for i, role in enumerate((Role.ROLLOUT, Role.TRAINER))]
        told += told_before_kill(workers, rng.randint(1, 60))
        with Ledger.create_or_open(tmp_path, Role.SUPERVISOR) as ledger:
            assert ledger.audit() == []
            check_promises(ledger, told)
            check_weights_contain_each_trained_group_once(ledger)
    with Ledger.open_reader(tmp_path) as ledger:
        assert check_weights_contain_each_trained_group_once(ledger) > 0
        assert ledger.progress().num_cancelled_by_reason["process_died"] > 0


def test_two_processes_write_at_once_and_the_ledger_stays_sound(tmp_path: Path) -> None:
    rollout = start(tmp_path, Role.ROLLOUT, 1, 10**9)
    walk(tmp_path, Role.TRAINER, 2, 8)
    told_before_kill([rollout], 1)
    with Ledger.open_reader(tmp_path) as ledger:
        assert ledger.audit() == []
        assert ledger.progress().num_steps_cut >= 8
        check_weights_contain_each_trained_group_once(ledger)


def test_many_processes_may_create_the_ledger_at_once(tmp_path: Path) -> None:
    code = (
        "import sys; from rollmill.ledger import Ledger; from rollmill.records import Role; sys.stdin.read();"
        "l = Ledger.create_or_open(sys.argv[1], Role.SUPERVISOR);"
        "[l.add_eval('x', 0, f'{sys.argv[2]}.{i}', True, 1.0, None, 0.0) for i in range(20)]"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    racers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(i)], stdin=subprocess.PIPE, env=env) for i in range(4)]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.close()
    assert [racer.wait(timeout=60) for racer in racers] == [0, 0, 0, 0]
    with Ledger.open_reader(tmp_path) as ledger:
        assert ledger.eval_summary("x")[0].num_episodes == 80
    assert not list(tmp_path.glob(".ledger-*"))
