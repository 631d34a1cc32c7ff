"""How many episodes at once: grows while it binds, shrinks under pressure, cancels only when the cache overflows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollmill.engine.protocol import Pressure
from rollmill.rollout.concurrency import GROW, Concurrency


def pressure(*, waiting: int = 0, kv: float = 0.1) -> Pressure:
    return Pressure(running=0, waiting=waiting, slots=16, kv_used_frac=kv, version=0, tokens_per_s=0.0)


def test_limit_grows_only_while_it_binds() -> None:
    c = Concurrency(most=64, start=8)
    assert c.observe([pressure()], 3).limit == 8
    assert c.observe([pressure()], 8).limit == 8 + GROW


def test_no_answer_changes_nothing() -> None:
    c = Concurrency(most=64, start=8)
    verdict = c.observe([], 8)
    assert (verdict.limit, verdict.num_to_cancel) == (8, 0)


def test_queue_or_soft_cache_shrinks_without_cancelling() -> None:
    c = Concurrency(most=64, start=50)
    verdict = c.observe([pressure(waiting=9)], 50)
    assert (verdict.limit, verdict.num_to_cancel) == (40, 0)
    assert c.observe([pressure(), pressure(kv=0.95)], 40).limit == 32


def test_overflowing_cache_cancels_what_is_above_the_new_limit() -> None:
    verdict = Concurrency(most=64, start=50).observe([pressure(kv=0.99)], 50)
    assert (verdict.limit, verdict.num_to_cancel) == (40, 10)


looks = st.tuples(st.lists(st.tuples(st.integers(0, 40), st.floats(0, 1)), max_size=3), st.integers(0, 80))


@given(st.integers(1, 64), st.lists(looks, max_size=40))
def test_limit_stays_between_one_and_most(most: int, seen: list[tuple[list[tuple[int, float]], int]]) -> None:
    c = Concurrency(most=most)
    for replicas, num_running in seen:
        verdict = c.observe([pressure(waiting=w, kv=kv) for w, kv in replicas], num_running)
        assert 1 <= verdict.limit <= most and 0 <= verdict.num_to_cancel <= max(0, num_running - verdict.limit)
