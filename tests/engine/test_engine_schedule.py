"""Claims about pages and the schedule, with fake pages that hold the tokens themselves."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.engine.book import PageBook
from rollmill.engine.protocol import FinishReason, GenerateRequest
from rollmill.engine.scheduler import Scheduler, Sequence, SequenceState, Step
from rollmill.ops import PAGE


class TokenPages:
    """Pages whose 'keys' are the tokens, so that a page in wrong hands shows as a wrong token."""

    def __init__(self, num_pages: int) -> None:
        self.slots = [-1] * (num_pages * PAGE)

    def write(self, pages: list[int], start: int, tokens: list[int]) -> None:
        for i, token in enumerate(tokens, start):
            self.slots[pages[i // PAGE] * PAGE + i % PAGE] = token

    def read(self, pages: list[int], num_tokens: int) -> list[int]:
        return [self.slots[pages[i // PAGE] * PAGE + i % PAGE] for i in range(num_tokens)]


def make(key: int, prompt: list[int], *, queue: str = "", deadline_s: float | None = None, score_from: int | None = None) -> Sequence:
    request = GenerateRequest(prompt_ids=prompt, max_tokens=1000, queue=queue, deadline_s=deadline_s)
    return Sequence(
        key=key, request=request, seed=0, arrived_at=0.0, on_update=lambda seq, update: None, streams=False, score_from=score_from
    )


def scheduler_of(num_pages: int, num_slots: int = 4, step_tokens: int = 100) -> tuple[Scheduler, TokenPages]:
    return Scheduler(PageBook(num_pages), num_slots=num_slots, step_tokens=step_tokens), TokenPages(num_pages)


def run(scheduler: Scheduler, pages: TokenPages, token: int) -> tuple[Step, list[Sequence]]:
    """What the engine does, without a model. Returns the plan and whom it sampled for."""
    step = scheduler.plan(0.0)
    assert step.chunks or not scheduler.running, "whoever runs gets on, or at least one of them"
    for chunk in step.chunks:
        seq = chunk.seq
        assert seq.holding is not None and chunk.start == seq.num_computed < chunk.end <= len(seq.tokens)
        assert pages.read(seq.holding.pages, chunk.start) == seq.tokens[: chunk.start]
        pages.write(seq.holding.pages, chunk.start, seq.tokens[chunk.start : chunk.end])
    for chunk in step.chunks:
        scheduler.computed(chunk)
    sampled = [c.seq for c in step.chunks if c.end == len(c.seq.tokens)]
    for seq in sampled:
        seq.tokens.append(token)
    return step, sampled


def check(scheduler: Scheduler, pages: TokenPages) -> None:
    book = scheduler.book
    assert len(scheduler.running) <= scheduler.num_slots
    held: dict[int, int] = {}
    for seq in scheduler.running:
        assert seq.state is SequenceState.RUNNING and seq.holding is not None
        assert pages.read(seq.holding.pages, seq.num_computed) == seq.tokens[: seq.num_computed]
        for page in seq.holding.pages:
            held[page] = held.get(page, 0) + 1
    assert [held.get(p, 0) for p in range(book.num_pages)] == book._holders, "every page knows how many hold it"
    assert len(held) + book.num_available == book.num_pages, "no page is lost or in two places"


actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 250), st.integers(0, 2)),
        st.tuples(st.just("continue"), st.integers(1, 9), st.integers(0, 2)),
        st.tuples(st.just("step"), st.integers(1, 40), st.none()),
        st.tuples(st.just("finish"), st.integers(0, 30), st.booleans()),
        st.tuples(st.just("swap"), st.integers(0, 1), st.none()),
    ),
    max_size=40,
)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(num_pages=st.integers(8, 20), num_slots=st.integers(1, 6), step_tokens=st.integers(1, 200), script=actions)
def test_pages_always_hold_their_owners_tokens_and_everyone_is_served(
    num_pages: int, num_slots: int, step_tokens: int, script: list
) -> None:
    """Contexts stay below 8 pages here, which is what the engine guarantees by refusing longer ones."""
    scheduler, pages = scheduler_of(num_pages, num_slots, step_tokens)
    key, live, history = 0, [], []
    for kind, a, b in script:
        if kind in ("submit", "continue"):
            # Few different prompts, so that pages are really shared.
            prompt = [(3 * (b + 1) + i) % 97 for i in range(a)]
            if kind == "continue" and history:
                prompt = (history[a % len(history)] + prompt)[: 6 * PAGE]
            seq = make(key, prompt, queue=f"q{b}", score_from=a // 2 + 1 if a % 7 == 6 and a > 2 else None)
            key += 1
            scheduler.submit(seq)
            live.append(seq)
        elif kind == "step":
            for _ in range(a):
                for seq in run(scheduler, pages, token=key % 97)[1]:
                    if len(seq.tokens) > 7 * PAGE or seq.score_from is not None:
                        scheduler.finish(seq, FinishReason.CONTEXT, version=1, now=1.0)
                        live.remove(seq)
                check(scheduler, pages)
        elif kind == "swap":
            for seq in scheduler.running:
                seq.is_clean = False
            scheduler.book.forget()
            scheduler.restart(only_scores=bool(a))
        elif live:
            seq = live.pop(a % len(live))
            scheduler.finish(seq, FinishReason.ERROR if b else FinishReason.STOP, version=1, now=1.0)
            history.append(list(seq.tokens))
        check(scheduler, pages)
    for _ in range(20_000):
        if not live:
            break
        for seq in run(scheduler, pages, token=1)[1]:
            scheduler.finish(seq, FinishReason.LENGTH, version=1, now=1.0)
            live.remove(seq)
        check(scheduler, pages)
    assert not live and not scheduler.running and not scheduler.waiting, "everyone is served in the end"
    assert scheduler.book.num_available == num_pages and not scheduler.book._pending


def test_requests_of_a_line_are_admitted_in_order_of_arrival_and_lines_take_turns() -> None:
    scheduler, pages = scheduler_of(20, num_slots=1)
    for key, queue in enumerate("aaabbc"):
        scheduler.submit(make(key, [key, 2, 3], queue=queue))
    admitted = []
    while scheduler.waiting or scheduler.running:
        step, done = run(scheduler, pages, token=5)
        admitted += [seq.key for seq in step.admitted]
        for seq in done:
            scheduler.finish(seq, FinishReason.LENGTH, version=1, now=0.0)
    assert admitted == [0, 3, 5, 1, 4, 2]


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_requests() -> None:
    scheduler, pages = scheduler_of(20, step_tokens=32)
    scheduler.submit(make(0, [1, 2]))
    run(scheduler, pages, token=3)
    scheduler.submit(make(1, list(range(90))))
    computed = []
    while len(scheduler.running) < 2 or scheduler.running[1].num_computed < 90:
        step, sampled = run(scheduler, pages, token=3)
        assert step.num_decode == 1 and sampled[0].key == 0, "the first request decodes in every step"
        computed.append(scheduler.running[1].num_computed)
    assert computed == [31, 62, 90]


def test_deadlines_are_reported_once_whether_waiting_or_running() -> None:
    scheduler, pages = scheduler_of(4, num_slots=1)
    runs, waits, done = make(0, [1], deadline_s=5), make(1, [1], deadline_s=3), make(2, [1], deadline_s=1)
    for seq in (runs, waits, done):
        scheduler.submit(seq)
    scheduler.finish(done, FinishReason.CANCELLED, version=1, now=0.5)
    run(scheduler, pages, token=3)
    assert scheduler.overdue(2.0) == []
    assert scheduler.overdue(10.0) == [waits, runs]
    assert scheduler.overdue(10.0) == []


def test_the_least_recently_used_context_gives_way_first_and_from_its_end() -> None:
    scheduler, pages = scheduler_of(6, step_tokens=1000)
    for key in range(3):
        scheduler.submit(make(key, [key] * (2 * PAGE + 1)))
        (seq,) = run(scheduler, pages, token=3)[1]
        scheduler.finish(seq, FinishReason.LENGTH, version=1, now=0.0)
    book = scheduler.book
    # Three contexts with two whole pages each, and a third page while they run, over six: one page had to go.
    shared = [len(book.open([key] * (2 * PAGE + 1), max_shared=2 * PAGE).pages) for key in range(3)]
    assert shared == [1, 2, 2]


def test_a_page_whose_keys_are_not_numbers_is_never_shared() -> None:
    scheduler, pages = scheduler_of(6, step_tokens=1000)
    scheduler.submit(make(0, [7] * (PAGE + 1)))
    (seq,) = run(scheduler, pages, token=3)[1]
    scheduler.finish(seq, FinishReason.ERROR, version=1, now=0.0)
    assert scheduler.book.open([7] * (PAGE + 1), max_shared=PAGE).pages == []


def test_after_new_weights_nothing_older_is_shared_and_kept_contexts_are_not_learnt() -> None:
    scheduler, pages = scheduler_of(9, step_tokens=1000)
    scheduler.submit(make(0, [7] * (PAGE + 1)))
    (seq,) = run(scheduler, pages, token=3)[1]
    seq.is_clean = False
    scheduler.book.forget()
    scheduler.restart(only_scores=True)
    for _ in range(2 * PAGE):
        run(scheduler, pages, token=3)
    assert scheduler.book.open([7] * (PAGE + 1), max_shared=PAGE).pages == []
    scheduler.finish(seq, FinishReason.LENGTH, version=1, now=0.0)
    assert scheduler.book.num_kept == 0
