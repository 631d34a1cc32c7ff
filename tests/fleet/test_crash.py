"""Kill -9 of every role and of the supervisor at many random points: nothing finished is lost, nothing is trained twice."""

from __future__ import annotations

import random
import time
from pathlib import Path

from rollmill.ledger import Ledger
from rollmill.records import EpisodeState
from rollmill.weights import open_store, verify
from tests.fleet.live_run import ROLES, LiveRun, await_until, is_alive, run_file

STEPS, GROUPS_PER_BATCH = 24, 2


def test_every_admitted_group_is_trained_exactly_once_whatever_is_killed(tmp_path: Path) -> None:
    rng = random.Random(20)
    # The compactor looks often enough to be killed at its work.
    run = LiveRun(run_file(tmp_path, run={"steps": STEPS}, weights={"compact_every_s": 0.3}))
    finished_before: set[str] = set()
    num_kills = {role: 0 for role in (*ROLES, "supervisor")}

    def num_committed() -> int:
        if not (run.run_dir / "ledger.db").is_file():
            return 0
        with Ledger.open_reader(run.run_dir) as ledger:
            return ledger.progress().num_steps_committed

    for life in range(4):
        run.start(*(["--resume"] if life else []))
        assert run.process is not None
        # Each life of the supervisor: a few role kills at random moments, then the supervisor itself.
        for _ in range(3):
            victim = rng.choice(ROLES) if min(num_kills[r] for r in ROLES) >= 2 else min(ROLES, key=lambda r: num_kills[r])
            await_until(f"{victim} runs", lambda v=victim: run.is_up(v) or run.process.poll() is not None)
            time.sleep(rng.uniform(0.0, 1.5))
            finished_before |= run.graded()
            num_kills[victim] += run.kill(victim)
            if run.process.poll() is not None or num_committed() >= STEPS - 4:
                break
        if run.process.poll() is not None or life == 3 or num_committed() >= STEPS - 4:
            break
        pids = run.role_pids()
        run.process.kill()
        run.process.wait(10)
        num_kills["supervisor"] += 1
        await_until("no orphan is left", lambda p=pids: not any(is_alive(pid) for pid in p), 20)
        assert run.process.stdout is not None
        run.process.stdout.close()

    output = run.finish(180)
    assert run.process is not None and run.process.returncode == 0, output
    assert num_kills["supervisor"] >= 1 and all(num_kills[role] >= 1 for role in ROLES), num_kills

    with Ledger.open_reader(run.run_dir) as ledger:
        assert ledger.audit() == []
        progress = ledger.progress()
        assert progress.num_steps_committed == STEPS
        assert progress.num_admitted == progress.num_ready == progress.num_open == 0
        assert progress.num_trained == STEPS * GROUPS_PER_BATCH
        trained = [row.group_id for step in range(STEPS) for row in ledger.batch(step)]
        assert len(trained) == len(set(trained)) == STEPS * GROUPS_PER_BATCH
        lost = [e for e in finished_before if ledger.episode(e).state != EpisodeState.GRADED]
        assert not lost
        versions = [row.version for row in ledger.versions()]
        assert versions == sorted(set(versions))
    assert verify(open_store(run.run_dir / "weights")) == []
