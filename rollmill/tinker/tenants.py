"""What the server keeps of each client: its session, its training runs, its samplers; plain state that the service changes."""

from __future__ import annotations

from collections import deque
from datetime import datetime

from rollmill.tinker.requests import CreateSession
from rollmill.tinker.training import Run, Snapshot


class SeenNumbers:
    """Which numbers were seen, in little memory when they come almost in order.

    >>> seen = SeenNumbers()
    >>> [seen.add(n) for n in (0, 2, 1, 2, 0, 3)]
    [True, True, True, False, False, True]
    """

    def __init__(self) -> None:
        self._all_below, self._above = 0, set[int]()

    def add(self, number: int) -> bool:
        """False when it was seen before."""
        if number < self._all_below or number in self._above:
            return False
        self._above.add(number)
        while self._all_below in self._above:
            self._above.remove(self._all_below)
            self._all_below += 1
        return True


class Session:
    """One client's connection, as it counts it."""

    def __init__(self, session_id: str, body: CreateSession, now: datetime) -> None:
        self.id, self.display_name, self.last_seen = session_id, body.display_name, now
        self.user_metadata = {key: str(value) for key, value in (body.user_metadata or {}).items()}
        self.runs: list[str] = []
        self.samplers: list[str] = []


class TrainingRun:
    """A client's model: `run` is there once it was made."""

    def __init__(self, model_id: str, *, user_metadata: dict[str, str], now: datetime) -> None:
        self.id, self.user_metadata, self.last_request = model_id, user_metadata, now
        self.run: Run | None = None
        self.seen = SeenNumbers()
        """Of its requests."""
        self.unnamed: deque[str] = deque()
        """Its sampling sessions whose weights are only in memory, oldest first."""

    def made(self) -> Run:
        if self.run is None:
            raise ValueError(f"model {self.id} could not be made; see the error of that request")
        return self.run


class SamplingSession:
    def __init__(self, *, model_path: str | None, snapshot: Snapshot | None) -> None:
        self.model_path, self.snapshot = model_path, snapshot
        """No snapshot: it is read from `model_path` at the first sample."""
        self.num_clients = 1
