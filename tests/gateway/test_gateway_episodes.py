"""The registry of episodes: each key once, the idle ones closed by a sweep, the ended ones remembered for a while."""

from __future__ import annotations

import pytest
from gateway_fakes import CHAT, user

from rollmill.gateway.sessions.episodes import Episodes


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_key_is_opened_once_and_closed_once() -> None:
    episodes = Episodes(CHAT, wants_routes=True)
    episode = episodes.open("a", seed=3, realign_tokens=5)
    assert episodes.get("a") is episode and (episode.seed, episode.realign_tokens, episode.wants_routes) == (3, 5, True)
    with pytest.raises(ValueError, match="a is open already"):
        episodes.open("a")
    assert episodes.close("a") is episode and episode.is_closed
    assert episodes.close("a") is None and episodes.get("a") is None
    assert episodes.is_closed("a") and not episodes.is_closed("b")
    with pytest.raises(ValueError, match="a has ended"):
        episodes.open("a")
    with pytest.raises(ValueError, match="1 to 256 characters"):
        episodes.open("")


def test_sweep_closes_what_nobody_has_used_and_nobody_owns() -> None:
    clock = Clock()
    episodes = Episodes(CHAT, idle_s=10, clock=clock)
    for key in ("a", "b", "c"):
        episodes.open(key)
        clock.now += 1
    episodes.open("owned", is_owned=True)
    clock.now = 9
    assert episodes.get("a") is not None
    assert [e.key for e in episodes.sweep(12)] == ["b", "c"] and len(episodes) == 2
    assert episodes.sweep(18) == [] and [e.key for e in episodes.sweep(19)] == ["a"]
    assert [e.key for e in episodes] == ["owned"] and episodes.sweep(1e9) == [] and episodes.num_swept == 3


def test_open_ones_are_limited_and_old_ends_are_forgotten() -> None:
    episodes = Episodes(CHAT, max_open=2, max_closed=2)
    episodes.open("a")
    episodes.open("b")
    with pytest.raises(ValueError, match="2 episodes are open, which is the limit"):
        episodes.open("c")
    for key in ("a", "b"):
        episodes.close(key)
    episodes.open("c")
    episodes.close("c")
    assert [episodes.is_closed(k) for k in "abc"] == [False, True, True]


def test_swept_episode_takes_nothing_more() -> None:
    episodes = Episodes(CHAT, idle_s=0, clock=lambda: 0.0)
    episode = episodes.open("a")
    episodes.sweep(1)
    with pytest.raises(ValueError, match="a has ended"):
        episode.place([user("u")])
