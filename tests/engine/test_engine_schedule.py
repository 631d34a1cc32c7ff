"""Claims about rows and the schedule, with a fake cache that holds the tokens themselves."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.engine.protocol import FinishReason, GenerateRequest
from rollmill.engine.scheduler import QueueFull, Scheduler, Sequence, SequenceState
from rollmill.engine.slots import Slots


class TokenRows:
    """A cache whose 'keys' are the tokens, so that a wrong move shows as a wrong token."""

    def __init__(self, num_rows: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(num_rows)]

    def copy_row(self, source: int, target: int, num_tokens: int) -> None:
        self.rows[target] = self.rows[source][:num_tokens] + self.rows[target][num_tokens:]

    def swap_rows(self, a: int, b: int, num_a: int, num_b: int) -> None:
        held = self.rows[a][:num_a]
        self.copy_row(b, a, num_b)
        self.rows[b] = held + self.rows[b][num_a:]

    def write(self, row: int, start: int, tokens: list[int]) -> None:
        self.rows[row] = self.rows[row][:start] + tokens + self.rows[row][start + len(tokens) :]


def make(key: int, prompt: list[int], *, session: str | None = None, deadline_s: float | None = None, now: float = 0.0) -> Sequence:
    request = GenerateRequest(prompt_ids=prompt, max_tokens=100, session=session, deadline_s=deadline_s)
    return Sequence(key=key, request=request, seed=0, arrived_at=now, on_update=lambda seq, update: None, streams=False)


def step(scheduler: Scheduler, cache: TokenRows, now: float, token: int) -> list[Sequence]:
    """What the engine does, without a model. Returns whom it sampled for."""
    plan = scheduler.plan(now)
    running = scheduler.running
    sampled = running[: plan.num_decode]
    for seq in sampled:
        assert seq.is_decoding and seq.num_computed == len(seq.tokens) - 1
        cache.write(seq.row, seq.num_computed, [seq.tokens[-1]])
        seq.num_computed += 1
    for chunk in plan.chunks:
        seq = running[chunk.row]
        assert chunk.start == seq.num_computed
        cache.write(chunk.row, chunk.start, seq.tokens[chunk.start : chunk.end])
        seq.num_computed = chunk.end
        if chunk.end == seq.num_prompt:
            sampled.append(seq)
    for seq in sampled:
        seq.tokens.append(token)
    return sampled


def check(scheduler: Scheduler, cache: TokenRows) -> None:
    slots = scheduler.slots
    for row, seq in enumerate(slots.active):
        assert seq.row == row and seq.state is SequenceState.RUNNING
        assert cache.rows[row][: seq.num_computed] == seq.tokens[: seq.num_computed]
    flags = [seq.is_decoding for seq in slots.active]
    assert flags == sorted(flags, reverse=True), "decoding rows come first"
    rows = [r.row for r in slots.retained.values()]
    assert len(set(rows)) == len(rows) and all(len(slots.active) <= row < slots.num_rows for row in rows)
    for kept in slots.retained.values():
        assert cache.rows[kept.row][: len(kept.tokens_T)] == kept.tokens_T.tolist()


actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 30), st.one_of(st.none(), st.integers(0, 4))),
        st.tuples(st.just("continue"), st.integers(1, 9), st.integers(0, 4)),
        st.tuples(st.just("step"), st.integers(1, 4), st.none()),
        st.tuples(st.just("finish"), st.integers(0, 30), st.booleans()),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(num_rows=st.integers(1, 6), step_tokens=st.integers(1, 40), script=actions)
def test_rows_always_hold_their_owners_tokens(num_rows: int, step_tokens: int, script: list) -> None:
    cache = TokenRows(num_rows)
    scheduler = Scheduler(Slots(num_rows, cache), max_waiting=5, step_tokens=step_tokens)
    key, live, history = 0, [], {}
    for kind, a, b in script:
        if kind in ("submit", "continue"):
            session = None if b is None else f"s{b}"
            prompt = [(7 * key + i) % 97 for i in range(a)]
            if kind == "continue":
                prompt = history.get(session, []) + prompt
            seq = make(key, prompt, session=session)
            key += 1
            try:
                scheduler.submit(seq)
                live.append(seq)
            except QueueFull:
                assert len(scheduler.waiting) >= 5
        elif kind == "step":
            for _ in range(a):
                step(scheduler, cache, 0.0, token=key % 97)
                check(scheduler, cache)
        elif live:
            seq = live.pop(a % len(live))
            scheduler.finish(seq, FinishReason.STOP, version=1, now=1.0, retain=bool(b))
            if seq.session:
                history[seq.session] = list(seq.tokens)
        check(scheduler, cache)
    for _ in range(400):
        if not scheduler.running and not scheduler.waiting:
            break
        for seq in step(scheduler, cache, 0.0, token=1):
            scheduler.finish(seq, FinishReason.LENGTH, version=1, now=1.0, retain=True)
            live.remove(seq)
            check(scheduler, cache)
    assert not live, "everyone is served in the end"


def test_requests_are_admitted_in_order_of_arrival() -> None:
    cache = TokenRows(2)
    scheduler = Scheduler(Slots(2, cache), max_waiting=9, step_tokens=100)
    seqs = [make(i, [1, 2, 3]) for i in range(6)]
    for seq in seqs:
        scheduler.submit(seq)
    admitted = []
    while scheduler.waiting or scheduler.running:
        before = set(scheduler.waiting)
        done = step(scheduler, cache, 0.0, token=5)
        admitted += sorted(before - set(scheduler.waiting))
        for seq in list(done):
            scheduler.finish(seq, FinishReason.LENGTH, version=1, now=0.0, retain=False)
    assert admitted == [0, 1, 2, 3, 4, 5]


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_rows() -> None:
    cache = TokenRows(4)
    scheduler = Scheduler(Slots(4, cache), max_waiting=9, step_tokens=32)
    scheduler.submit(make(0, [1, 2]))
    step(scheduler, cache, 0.0, token=3)
    scheduler.submit(make(1, list(range(90))))
    plans = []
    while not scheduler.running[-1].is_decoding or len(scheduler.running) < 2:
        sampled = step(scheduler, cache, 0.0, token=3)
        plans.append((len(sampled), scheduler.running[1].num_computed))
    assert [computed for _, computed in plans] == [31, 62, 90]
    assert all(num >= 1 for num, _ in plans), "the first request decodes in every step"


def test_deadlines_are_reported_once_whether_waiting_or_running() -> None:
    cache = TokenRows(1)
    scheduler = Scheduler(Slots(1, cache), max_waiting=9, step_tokens=32)
    runs, waits, done = make(0, [1], deadline_s=5), make(1, [1], deadline_s=3), make(2, [1], deadline_s=1)
    for seq in (runs, waits, done):
        scheduler.submit(seq)
    scheduler.finish(done, FinishReason.CANCELLED, version=1, now=0.5, retain=False)
    step(scheduler, cache, 0.0, token=3)
    assert scheduler.overdue(2.0) == []
    assert scheduler.overdue(10.0) == [waits, runs]
    assert scheduler.overdue(10.0) == []


def test_least_recently_used_session_gives_way_first() -> None:
    cache = TokenRows(2)
    scheduler = Scheduler(Slots(2, cache), max_waiting=9, step_tokens=32)
    for key, session in enumerate("abc"):
        scheduler.submit(make(key, [key, 1, 2], session=session))
        (seq,) = step(scheduler, cache, 0.0, token=3)
        scheduler.finish(seq, FinishReason.LENGTH, version=1, now=0.0, retain=True)
    assert list(scheduler.slots.retained) == ["b", "c"]
