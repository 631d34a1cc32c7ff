"""Who gets a call: home first, and the rule that takes a call elsewhere holds for every state of the replicas."""

from __future__ import annotations

from collections import Counter

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.engine.protocol import Pressure
from rollmill.gateway.routing.balance import MAX_ASIDE_S, MAX_FILL_RATIO, VERSION_KNOWN_S, Need, Standing, choose, is_hopeless

NOW = 1000.0
MANY = settings(max_examples=150, derandomize=True, deadline=None)
LOADS = st.integers(0, 40)


def pressure(running: int, slots: int = 8, version: int = 1, waiting: int = 0) -> Pressure:
    return Pressure(running=running, waiting=waiting, slots=slots, kv_used_frac=0.0, version=version, tokens_per_s=0.0)


def standing(url: str, running: int = 0, slots: int = 8, **facts: object) -> Standing:
    s = Standing.of(url, NOW)
    s.hear(pressure(running, slots), NOW)
    for name, value in facts.items():
        setattr(s, name, value)
    return s


def fleet(num: int) -> list[Standing]:
    return [standing(f"http://10.0.0.{i}:8000") for i in range(num)]


def home(standings: list[Standing], session: str) -> str:
    return choose(standings, Need(session=session), NOW)[0]


@st.composite
def states(draw: st.DrawFn) -> list[Standing]:
    found = []
    for i in range(draw(st.integers(1, 6))):
        s = standing(f"http://r{i}", draw(LOADS), draw(st.integers(1, 16)))
        s.num_in_flight = draw(LOADS)
        s.in_flight_then = draw(st.integers(0, s.num_in_flight))
        if draw(st.booleans()):
            s.pressure = None
        s.version = draw(st.none() | st.integers(0, 4))
        s.version_at = NOW - draw(st.sampled_from([0.0, VERSION_KNOWN_S, 60.0]))
        s.failed_at = NOW - draw(st.floats(0, 100))
        s.aside_until = draw(st.sampled_from([0.0, NOW + 1]))
        found.append(s)
    return found


NEEDS = st.builds(
    Need,
    session=st.none() | st.text(max_size=8),
    min_version=st.none() | st.integers(0, 4),
    exact_version=st.none() | st.integers(0, 4),
    liked_version=st.none() | st.integers(0, 4),
)


@given(states(), NEEDS)
@MANY
def test_order_names_each_replica_that_may_do_once(standings: list[Standing], need: Need) -> None:
    order = choose(standings, need, NOW)
    may = [s for s in standings if s.version is None or need.allows(s.version) or NOW - s.version_at > VERSION_KNOWN_S]
    ready = [s for s in may if not s.is_aside(NOW)]
    assert sorted(order) == sorted(s.url for s in (ready or may))


@given(states(), NEEDS)
@MANY
def test_replicas_known_to_serve_the_version_come_before_unknown_ones(standings: list[Standing], need: Need) -> None:
    by_url = {s.url: s for s in standings}
    order = [by_url[url] for url in choose(standings, need, NOW)]
    if any(not s.is_aside(NOW) for s in order) and (need.exact_version, need.min_version) != (None, None):
        known = [s.version is not None and need.allows(s.version) for s in order]
        assert known == sorted(known, reverse=True)


@given(states(), NEEDS)
@MANY
def test_nobody_is_sent_to_a_full_replica_while_an_equal_one_has_room(standings: list[Standing], need: Need) -> None:
    need = msgspec.structs.replace(need, min_version=None, exact_version=None, liked_version=None)
    by_url = {s.url: s for s in standings}
    ready = [s for s in standings if not s.is_aside(NOW)]
    if not ready:
        return
    first = by_url[choose(standings, need, NOW)[0]]
    if any(s.fill < 1 for s in ready):
        assert first.fill < 1
    else:
        assert first.fill < MAX_FILL_RATIO * sum(s.fill for s in ready) / len(ready)


@given(states(), NEEDS)
@MANY
def test_choice_is_a_function_of_the_state_and_not_of_its_order(standings: list[Standing], need: Need) -> None:
    for s, failed in zip(standings, range(len(standings)), strict=True):
        s.failed_at, s.called_at = float(failed), float(failed)
    assert choose(standings, need, NOW) == choose(standings[::-1], need, NOW)


def test_conversation_leaves_home_when_home_is_full_and_returns() -> None:
    standings = fleet(4)
    first = next(s for s in standings if s.url == home(standings, "a"))
    first.hear(pressure(6, waiting=2), NOW)
    assert home(standings, "a") != first.url
    first.hear(pressure(7), NOW)
    assert home(standings, "a") == first.url


def test_calls_of_our_own_count_between_two_looks() -> None:
    standings = fleet(2)
    first = next(s for s in standings if s.url == home(standings, "a"))
    for _ in range(8):
        first.start(NOW)
    assert first.load == 8 and home(standings, "a") != first.url
    first.hear(pressure(8), NOW)
    assert first.load == 8
    first.num_in_flight -= 3
    assert first.load == 5 and home(standings, "a") == first.url


def test_replica_that_joins_takes_its_share_and_moves_nothing_else() -> None:
    sessions = [f"g{i:06d}.{i % 8}.0" for i in range(4000)]
    for num in (1, 3, 9):
        before, after = fleet(num), fleet(num + 1)
        moved = [(home(before, s), home(after, s)) for s in sessions if home(before, s) != home(after, s)]
        assert {new for _, new in moved} == {after[-1].url}
        assert 0.8 < len(moved) / (len(sessions) / (num + 1)) < 1.2


def test_sessions_are_spread_evenly() -> None:
    standings = fleet(8)
    counts = Counter(home(standings, f"s{i}") for i in range(8000))
    assert len(counts) == 8 and 850 < min(counts.values()) <= max(counts.values()) < 1150


def test_calls_of_no_conversation_go_to_the_emptiest_and_take_turns() -> None:
    standings, seen = fleet(3), []
    for i in range(9):
        url = choose(standings, Need(), NOW)[0]
        seen.append(url)
        next(s for s in standings if s.url == url).called_at = NOW + i + 1
    assert Counter(seen) == dict.fromkeys((s.url for s in standings), 3)
    standings[1].hear(pressure(0), NOW)
    standings[0].start(NOW)
    standings[2].start(NOW)
    assert choose(standings, Need(), NOW)[0] == standings[1].url


def test_failures_in_a_row_put_a_replica_aside_for_longer_and_an_answer_ends_it() -> None:
    s, pauses = standing("http://a"), []
    now = NOW
    for _ in range(8):
        assert s.fail(now, pause_s=0.2, jitter=0.0) and s.is_aside(now)
        assert not s.fail(now, pause_s=0.2, jitter=0.0), "calls that fail together are one failure"
        pauses.append(round(s.aside_until - now, 6))
        now = s.aside_until
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, MAX_ASIDE_S, MAX_ASIDE_S, MAX_ASIDE_S]
    s.answer(now)
    assert not s.is_aside(now) and s.fail(now, pause_s=0.2, jitter=1.0) and s.aside_until - now < 0.11


def test_when_all_failed_the_one_that_failed_first_is_tried() -> None:
    standings = fleet(3)
    for s, ago in zip(standings, (1.0, 3.0, 2.0), strict=True):
        s.fail(NOW - ago, pause_s=1.0, jitter=0.0)
        s.aside_until = NOW + 5
    assert choose(standings, Need(session="a"), NOW) == [standings[i].url for i in (1, 2, 0)]


def test_answer_that_broke_goes_on_by_the_version_that_began_it_where_there_is_one() -> None:
    standings = fleet(4)
    standings[2].serves(5, NOW)
    standings[3].version = None
    order = choose(standings, Need(session="x", liked_version=5), NOW)
    assert order[0] == standings[2].url and order[-1] == standings[3].url


def test_only_a_version_that_all_have_passed_is_hopeless() -> None:
    standings = fleet(2)
    for s in standings:
        s.serves(5, NOW)
    assert is_hopeless(standings, Need(exact_version=4), NOW)
    assert not is_hopeless(standings, Need(exact_version=5), NOW) and not is_hopeless(standings, Need(exact_version=6), NOW)
    assert not is_hopeless(standings, Need(min_version=9), NOW) and not is_hopeless([], Need(exact_version=4), NOW)
    assert not is_hopeless(standings, Need(exact_version=4), NOW + VERSION_KNOWN_S + 0.1), "old news"
    standings[0].version = None
    assert not is_hopeless(standings, Need(exact_version=4), NOW)
