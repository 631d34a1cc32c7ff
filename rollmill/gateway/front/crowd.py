"""How much runs in each episode at one time, and who must wait when it is too much; no I/O.

A call counts from its arrival, its choices once its body has told how many: an agent that floods the gateway waits for itself, and for
nobody else.
"""

from __future__ import annotations

from rollmill.web import ApiError

RETRY_AFTER_S = 1


class _Load:
    """Of one episode."""

    __slots__ = ("num_calls", "num_choices")

    def __init__(self) -> None:
        self.num_calls = self.num_choices = 0


class Crowd:
    """All model calls of one gateway. Calls without an episode count together alone: their keys have quotas."""

    def __init__(self, *, max_running: int, max_per_episode: int) -> None:
        self._max_running, self._max_per_episode = max_running, max_per_episode
        self._loads: dict[str, _Load] = {}
        self.num_running = 0

    def enter(self, episode: str) -> None:
        """A call has come. ApiError 429: its episode is to wait for its own calls; 503: all of them together are too many."""
        load = self._loads.get(episode)
        mine = load.num_calls if load is not None else 0
        if mine >= self._max_per_episode:
            raise self._refusal(episode, f"{mine} calls")
        if self.num_running >= self._max_running:
            # Whoever has more than its part of a full house is why it is full.
            if mine * len(self._loads) > self._max_running:
                raise self._refusal(episode, f"{mine} calls")
            text = f"{self.num_running} calls are running, which is the limit"
            raise ApiError(503, text, headers={"retry-after": str(RETRY_AFTER_S)}, extra={"retryable": True})
        self.num_running += 1
        if episode:
            if load is None:
                load = self._loads[episode] = _Load()
            load.num_calls += 1

    def sample(self, episode: str, num_choices: int) -> None:
        """It asks for so many choices; ApiError 429. One call alone may have as many as its dialect allows."""
        if not episode:
            return
        load = self._loads[episode]
        if load.num_choices and load.num_choices + num_choices > self._max_per_episode:
            raise self._refusal(episode, f"{load.num_choices} choices")
        load.num_choices += num_choices

    def leave(self, episode: str, num_choices: int) -> None:
        """It has ended. `num_choices`: those that `sample` let in."""
        self.num_running -= 1
        if not episode:
            return
        load = self._loads[episode]
        load.num_calls -= 1
        load.num_choices -= num_choices
        if not load.num_calls:
            del self._loads[episode]

    def _refusal(self, episode: str, running: str) -> ApiError:
        text = f"{running} of episode {episode!r} are running, at most {self._max_per_episode} may; wait for some of them"
        return ApiError(429, text, headers={"retry-after": str(RETRY_AFTER_S)}, extra={"retryable": True})
