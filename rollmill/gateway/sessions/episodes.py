"""The open episodes of a gateway by their keys, and the keys of those that have ended."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from rollmill.chat.format import ChatFormat
from rollmill.gateway.sessions.episode import Episode

IDLE_S = 3600.0
MAX_OPEN = 65_536
MAX_CLOSED = 262_144


class Episodes:
    """Each key is opened once and closed once, and every step takes the same time however many there are.

    An episode that somebody owns is closed by its owner alone; the others are closed when nobody has asked for them for `idle_s`.
    """

    def __init__(
        self,
        chat: ChatFormat,
        *,
        idle_s: float = IDLE_S,
        max_open: int = MAX_OPEN,
        max_closed: int = MAX_CLOSED,
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ) -> None:
        """`options` are those of every `Episode` that does not say otherwise."""
        self._chat, self._idle_s, self._max_open, self._max_closed, self._clock = chat, idle_s, max_open, max_closed, clock
        self._options = options
        self._open: dict[str, Episode] = {}
        # In order of their last use, so that the idle ones stand in front.
        self._used: OrderedDict[str, float] = OrderedDict()
        self._closed: OrderedDict[str, None] = OrderedDict()
        self.num_swept = 0

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Episode]:
        return iter(list(self._open.values()))

    def open(self, key: str, *, is_owned: bool = False, **options: Any) -> Episode:
        """A new episode; `options` are those of `Episode`. ValueError when the key was used before or too many are open."""
        if not 0 < len(key) <= 256:
            raise ValueError(f"an episode's key has 1 to 256 characters, this one has {len(key)}")
        if key in self._open:
            raise ValueError(f"episode {key} is open already; use another key")
        if key in self._closed:
            raise ValueError(f"episode {key} has ended; use another key")
        if len(self._open) >= self._max_open:
            raise ValueError(f"{len(self._open)} episodes are open, which is the limit; end some")
        episode = self._open[key] = Episode(key, self._chat, **self._options | options)
        if not is_owned:
            self._used[key] = self._clock()
        return episode

    def get(self, key: str) -> Episode | None:
        """The open episode of this key; asking for it is using it."""
        if key in self._used:
            self._used[key] = self._clock()
            self._used.move_to_end(key)
        return self._open.get(key)

    def is_closed(self, key: str) -> bool:
        """Whether it has ended; the oldest ends are forgotten."""
        return key in self._closed

    def close(self, key: str) -> Episode | None:
        episode = self._open.pop(key, None)
        if episode is not None:
            self._used.pop(key, None)
            self._closed[key] = None
            while len(self._closed) > self._max_closed:
                self._closed.popitem(last=False)
            episode.close()
        return episode

    def sweep(self, now: float) -> list[Episode]:
        """Close those that nobody has used since `now - idle_s`."""
        swept = []
        while self._used:
            key, used = next(iter(self._used.items()))
            if used > now - self._idle_s:
                break
            episode = self.close(key)
            assert episode is not None
            swept.append(episode)
        self.num_swept += len(swept)
        return swept
