"""The compactor as a role: it looks again and again, tells of every look, collects only when asked, and outlives a store in trouble."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ops_fakes import TinyRun, keys_in

from rollmill.weights import compact_role
from rollmill.weights.compact_role import run_compactor
from rollmill.weights.compactor import Compactor
from rollmill.weights.manifest import Kind
from rollmill.weights.objects import StoreUnavailable
from rollmill.weights.store import WeightStore, open_store

DEADLINE_S = 30.0


class Look:
    """Hears what the role says; asks it to stop once `enough` says so, and fails the test when that takes too long."""

    def __init__(self, enough: Callable[[], bool]) -> None:
        self.said: list[dict[str, float]] = []
        self._enough, self._until = enough, time.monotonic() + DEADLINE_S

    def say(self, done: dict[str, float], step: int) -> None:
        self.said.append(done)

    def should_stop(self) -> bool:
        assert time.monotonic() < self._until, f"waited {DEADLINE_S:.0f} s, {len(self.said)} looks so far"
        return bool(self.said) and self._enough()


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return open_store(tmp_path / "store")


def run(store: WeightStore, look: Look, *, collect_after_s: float = 0.0) -> None:
    where = str(store.objects.path)  # type: ignore[attr-defined]
    run_compactor(where, every_s=0.0, collect_after_s=collect_after_s, should_stop=look.should_stop, say=look.say)


def kinds(store: WeightStore) -> set[Kind]:
    return {store.route(name).kind for name in store.routes()}


def test_the_role_makes_what_is_due_says_so_and_takes_nothing_away_unasked(store: WeightStore) -> None:
    trainer = TinyRun(store)
    trainer.publish(6)
    before = keys_in(store.objects)
    look = Look(lambda: len(look.said) == 2)
    run(store, look)
    assert [done["weights/num_made"] > 0 for done in look.said] == [True, False]
    assert all(done["timing_s/compact"] >= 0 for done in look.said)
    assert before < keys_in(store.objects) and Kind.FOLD in kinds(store)
    trainer.check_routes()


def test_the_role_that_is_stopped_before_its_first_look_does_nothing(store: WeightStore) -> None:
    TinyRun(store).publish(6)
    before = keys_in(store.objects)
    run_compactor(
        str(store.objects.path),  # type: ignore[attr-defined]
        every_s=3600.0,
        collect_after_s=0.0,
        should_stop=iter([False, True]).__next__,
        say=lambda done, step: pytest.fail("there was no look"),
    )
    assert keys_in(store.objects) == before


def test_what_nobody_needs_goes_after_the_grace_when_collection_was_asked_for(store: WeightStore) -> None:
    trainer = TinyRun(store)
    trainer.publish(7)
    for anchor in (3, 5):
        trainer.add_full(anchor)
    look = Look(lambda: store.versions() == [3, 4, 5, 6] and not store.tombstones())
    run(store, look, collect_after_s=0.01)
    assert len(look.said) >= 2, "marked at one look, deleted at a later one"
    assert {int(key.split("/")[1]) for key in store.objects.list("packs/")} == {3, 4, 5, 6}
    trainer.check(range(3, 7))
    trainer.check_routes()


def test_the_role_outlives_a_store_that_cannot_be_used_for_a_while(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    TinyRun(store).publish(6)

    class Reluctant(Compactor):
        """Of a disk that is full at the first look."""

        num_steps = 0

        def step(self, now: float) -> list:
            Reluctant.num_steps += 1
            if Reluctant.num_steps == 1:
                raise StoreUnavailable(errno.ENOSPC, "no space left for a pack")
            return super().step(now)

    monkeypatch.setattr(compact_role, "Compactor", Reluctant)
    look = Look(lambda: len(look.said) == 2)
    run(store, look)
    assert [done["weights/num_made"] > 0 for done in look.said] == [False, True]
    assert "no space left for a pack" in caplog.text and Kind.FOLD in kinds(store)
