"""A model name means a weight version, or is refused with the names that would do; the store is asked rarely and never on the loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rollmill.gateway.routing.pins import KEPT_S, MAX_KEPT, Pins
from rollmill.gateway.routing.replicas import NoAnswer


class Tags:
    """A weight store's tags, which counts how often it is asked and from where."""

    def __init__(self, **versions: int) -> None:
        self.versions: dict[str, int] = versions
        self.asked: list[str] = []
        self.error: OSError | None = None

    def __call__(self, tag: str) -> int | None:
        assert threading.current_thread() is not threading.main_thread(), "a store may block"
        self.asked.append(tag)
        if self.error is not None:
            raise self.error
        return self.versions.get(tag)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_names_mean_versions() -> None:
    pins = Pins("team/policy:small", Tags(best=7))
    found = [asyncio.run(pins.resolve(f"team/policy:small{rest}")) for rest in ("", ":0", ":12", "@best")]
    assert found == [None, 0, 12, 7]


@pytest.mark.parametrize("model", ["", "gpt-4o", "polic", "policyx", "policy:", "policy:x", "policy:-1", "policy:1.5", "policy:9999999999"])
@pytest.mark.parametrize("tags", [None, Tags()], ids=["no store", "store"])
def test_other_names_are_refused_with_the_known_ones(model: str, tags: Tags | None) -> None:
    known = "policy, policy:VERSION" + (", policy@TAG" if tags else "")
    with pytest.raises(ValueError, match=f"there is no model '{model}' here; known are {known}$"):
        asyncio.run(Pins("policy", tags).resolve(model))


@pytest.mark.parametrize("tag", ["", "../latest", "a/b", ".hidden", "a" * 101, "a\n", "ä"])
def test_tags_that_no_store_could_hold_never_reach_it(tag: str) -> None:
    tags = Tags()
    with pytest.raises(ValueError, match="there is no model"):
        asyncio.run(Pins("policy", tags).resolve(f"policy@{tag}"))
    assert tags.asked == []


def test_unknown_tag_is_refused_with_how_to_list_them() -> None:
    with pytest.raises(ValueError, match="no tag 'best'; `rollmill weights tag STORE` lists them"):
        asyncio.run(Pins("policy", Tags()).resolve("policy@best"))


def test_store_is_asked_once_a_second_however_many_want_to_know() -> None:
    async def work() -> None:
        tags, clock = Tags(best=7), Clock()
        pins = Pins("policy", tags, clock=clock)
        assert await asyncio.gather(*(pins.resolve("policy@best") for _ in range(50))) == [7] * 50
        tags.versions["best"] = 8
        clock.now += KEPT_S / 2
        assert await pins.resolve("policy@best") == 7 and tags.asked == ["best"]
        clock.now += KEPT_S / 2
        assert await pins.resolve("policy@best") == 8 and tags.asked == ["best"] * 2

    asyncio.run(work())


def test_strangers_tags_do_not_pile_up() -> None:
    async def work() -> None:
        tags = Tags()
        pins = Pins("policy", tags)
        for i in range(MAX_KEPT + 50):
            with pytest.raises(ValueError, match="no tag"):
                await pins.resolve(f"policy@t{i}")
        assert len(pins._kept) == MAX_KEPT

    asyncio.run(work())


def test_store_that_cannot_be_asked_is_no_answer_and_is_asked_again() -> None:
    async def work() -> None:
        tags = Tags(best=7)
        pins = Pins("policy", tags)
        tags.error = OSError("the bucket is away")
        with pytest.raises(NoAnswer, match="tag 'best': the bucket is away"):
            await pins.resolve("policy@best")
        tags.error = None
        assert await pins.resolve("policy@best") == 7

    asyncio.run(work())
