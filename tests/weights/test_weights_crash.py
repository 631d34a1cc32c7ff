"""Claims about kill -9: whatever the moment, the store opens, no number comes twice, and a replica gets the right bits."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from weights_fakes import EngineFake, publish_and_die, publish_steps, same_bits, weights_at

from rollmill.weights import DirectoryStore, Follower, verify

DEADLINE_S = 60.0
SPAWN = multiprocessing.get_context("forkserver")
# torch is imported once, in the fork server; every trainer that is killed below starts from there in milliseconds.
SPAWN.set_forkserver_preload(["rollmill.weights"])


def run_trainer(body: Callable[..., None], path: Path, *args: int, kill_after: int | None = None) -> list[tuple[str, int]]:
    """What the trainer process said before it ended or was killed."""
    here, there = SPAWN.Pipe(duplex=False)
    trainer = SPAWN.Process(target=body, args=(str(path), *args, there))
    trainer.start()
    there.close()
    said: list[tuple[str, int]] = []
    try:
        while True:
            assert here.poll(DEADLINE_S), "the trainer process neither speaks nor ends"
            said.append(here.recv())
            if kill_after is not None and len(said) >= kill_after:
                trainer.kill()
    except EOFError:
        trainer.join(DEADLINE_S)
        assert trainer.exitcode in (0, -9)
    return said


def assert_sound(path: Path, said: list[tuple[str, int]], engine: EngineFake, follower: Follower) -> None:
    store = DirectoryStore(path)
    assert verify(store) == []
    announced = [version for what, version in said if what == "published"]
    latest = store.latest()
    if announced:
        assert latest is not None and latest >= max(announced), "what was announced is durable"
    staged = follower.poll()
    if staged is not None:
        follower.swap(staged)
    assert follower.version == latest
    if latest is not None:
        assert same_bits(engine.live, weights_at(store.manifest(latest).step))


@pytest.mark.parametrize("die_at", [*range(1, 26), 33, 41, 46])
def test_a_trainer_killed_before_any_single_write_leaves_a_store_that_opens(tmp_path: Path, die_at: int) -> None:
    engine = EngineFake()
    follower = Follower(DirectoryStore(tmp_path), apply=engine.apply)
    first = run_trainer(publish_and_die, tmp_path, 0, die_at)
    assert not any(version == 3 for what, version in first if what == "published"), "it was killed before its end"
    assert_sound(tmp_path, first, engine, follower)
    second = run_trainer(publish_steps, tmp_path, 2, 3)
    assert_sound(tmp_path, second, engine, follower)
    old, new = ({version for what, version in said if what == "assigned"} for said in (first, second))
    resumed_in_place = old & new
    assert len(resumed_in_place) <= 1 and all(DirectoryStore(tmp_path).manifest(v).step == 2 for v in resumed_in_place)
    assert list(tmp_path.rglob("*.tmp")) == [], "what the dead one left half-written is gone"


def test_a_trainer_killed_at_random_moments_again_and_again_never_reuses_a_number(tmp_path: Path) -> None:
    rng = random.Random(5)
    engine = EngineFake()
    follower = Follower(DirectoryStore(tmp_path), apply=engine.apply)
    assigned: list[int] = []
    for _ in range(8):
        said = run_trainer(publish_steps, tmp_path, rng.randrange(1000, 2000), 40, kill_after=rng.randrange(1, 30))
        assert_sound(tmp_path, said, engine, follower)
        assigned += [version for what, version in said if what == "assigned"]
    assert len(assigned) == len(set(assigned)) and assigned == sorted(assigned)
