"""The book of chains: one flattening at a time, nobody loses a layer in use, nothing is freed twice or kept for ever."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollmill.sandbox.snapshots.chains import KEEP_LAST, MAX_DEPTH, ChainBook, Flattening


def test_chain_up_to_the_limit_is_left_alone() -> None:
    book = ChainBook[int]()
    book.add("s", tuple(range(MAX_DEPTH)))
    assert book.next() is None


def test_all_but_the_last_few_of_a_deep_chain_become_one() -> None:
    book = ChainBook[int]()
    depth = MAX_DEPTH + 1
    book.add("s", tuple(range(depth)))
    work = book.next()
    assert work == Flattening(tuple(range(depth - KEEP_LAST)))
    replaced = book.done(work, 100)
    assert replaced.chains == {"s": (100, *range(depth - KEEP_LAST, depth))} and book.chain("s") == replaced.chains["s"]
    assert replaced.free == tuple(range(depth - KEEP_LAST))
    assert book.next() is None


def test_one_flattening_at_a_time_and_the_deepest_first() -> None:
    book = ChainBook[str](max_depth=3, keep_last=1)
    book.add("s", ("a", "b", "c", "d"))
    book.add("t", ("p", "q", "r", "s", "t"))
    first = book.next()
    assert first == Flattening(("p", "q", "r", "s"))
    assert book.next() is None
    book.done(first, "P")
    assert book.next() == Flattening(("a", "b", "c"))


def test_snapshot_that_shares_the_bottom_is_replaced_too_and_one_that_does_not_keeps_its_layers() -> None:
    book = ChainBook[str](max_depth=3, keep_last=1)
    book.add("deep", ("a", "b", "c", "d"))
    book.add("sibling", ("a", "b", "c", "x"))
    book.add("short", ("a", "b"))
    work = book.next()
    assert work is not None
    replaced = book.done(work, "W")
    assert replaced.chains == {"deep": ("W", "d"), "sibling": ("W", "x")}
    assert replaced.free == ("c",)
    assert book.drop("short") == ("a", "b")


def test_running_box_keeps_its_layers_until_it_is_dropped() -> None:
    book = ChainBook[str](max_depth=3, keep_last=1)
    book.add("box", ("a", "b", "c", "d"), is_fixed=True)
    assert book.next() is None
    book.add("snapshot", ("a", "b", "c", "d", "e"))
    work = book.next()
    assert work == Flattening(("a", "b", "c", "d"))
    replaced = book.done(work, "W")
    assert replaced.free == () and book.chain("box") == ("a", "b", "c", "d")
    assert book.drop("box") == ("a", "b", "c", "d")


def test_snapshot_dropped_while_flattened_frees_everything_at_the_end() -> None:
    book = ChainBook[str](max_depth=2, keep_last=1)
    book.add("s", ("a", "b", "c"))
    work = book.next()
    assert work is not None
    assert book.drop("s") == ("c",)
    assert set(book.done(work, "W").free) == {"a", "b", "W"}


def test_flattening_that_failed_is_not_tried_again_until_the_chain_differs() -> None:
    book = ChainBook[str](max_depth=2, keep_last=1)
    book.add("s", ("a", "b", "c"))
    work = book.next()
    assert work is not None
    assert book.failed(work) == ()
    assert book.next() is None
    book.add("t", ("a", "b", "c", "d"))
    assert book.next() == Flattening(("a", "b", "c"))


def test_limits_that_cannot_shorten_a_chain_are_refused() -> None:
    with pytest.raises(ValueError, match="keep_last"):
        ChainBook[int](max_depth=3, keep_last=3)


class Life(RuleBasedStateMachine):
    """Snapshots branch from one another while flattenings come and go; a model knows what every owner must see."""

    def __init__(self) -> None:
        super().__init__()
        self.book = ChainBook[int](max_depth=4, keep_last=2)
        self.meaning: dict[int, tuple[int, ...]] = {}
        self.must_see: dict[int, tuple[int, ...]] = {}
        self.fixed: dict[int, tuple[int, ...]] = {}
        self.free: set[int] = set()
        self.running: Flattening[int] | None = None
        self.num = 0

    def new_layer(self, meaning: tuple[int, ...] | None = None) -> int:
        self.num += 1
        self.meaning[self.num] = (self.num,) if meaning is None else meaning
        return self.num

    def released(self, layers: tuple[int, ...]) -> None:
        assert not self.free & {*layers} and len({*layers}) == len(layers)
        self.free |= {*layers}

    def saw(self, owner: int) -> tuple[int, ...]:
        return sum((self.meaning[layer] for layer in self.book.chain(owner)), ())

    @rule(pick=st.integers(0, 99), is_fixed=st.booleans())
    def branch(self, pick: int, is_fixed: bool) -> None:
        base = self.book.chain([*self.must_see][pick % len(self.must_see)]) if self.must_see else ()
        owner, chain = self.num + 1000, (*base, self.new_layer())
        self.book.add(owner, chain, is_fixed=is_fixed)
        self.must_see[owner] = self.saw(owner)
        if is_fixed:
            self.fixed[owner] = chain

    @precondition(lambda self: self.must_see)
    @rule(pick=st.integers(0, 99))
    def drop(self, pick: int) -> None:
        owner = [*self.must_see][pick % len(self.must_see)]
        del self.must_see[owner]
        self.fixed.pop(owner, None)
        self.released(self.book.drop(owner))

    @rule()
    def begin(self) -> None:
        work = self.book.next()
        assert work is None or self.running is None
        self.running = work or self.running

    @precondition(lambda self: self.running is not None)
    @rule(is_good=st.booleans())
    def end(self, is_good: bool) -> None:
        assert self.running is not None
        assert not self.free & {*self.running.layers}
        if is_good:
            whole = self.new_layer(sum((self.meaning[layer] for layer in self.running.layers), ()))
            self.released(self.book.done(self.running, whole).free)
        else:
            self.released(self.book.failed(self.running))
        self.running = None

    @invariant()
    def every_owner_sees_its_state_through_layers_that_live(self) -> None:
        used = {*(self.running.layers if self.running else ())}
        for owner, meaning in self.must_see.items():
            assert self.saw(owner) == meaning
            used |= {*self.book.chain(owner)}
        for owner, chain in self.fixed.items():
            assert self.book.chain(owner) == chain
        assert used == {*self.meaning} - self.free


Life.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
TestLife = Life.TestCase
