"""Follows the weight store in the background and offers the engine what it has prepared; decides nothing about serving."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Mapping

import torch

from rollmill.engine.engine import Engine
from rollmill.model import Model
from rollmill.weights import Follower, SnapshotStore

log = logging.getLogger(__name__)
POLL_S = 0.1
# An engine that takes longer than this to reach a step boundary has stopped stepping.
SWAP_DEADLINE_S = 600.0


def follower_of(store: SnapshotStore, model: Model) -> Follower:
    """A follower whose live weights are this model's."""

    def apply(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        model.load_serving(tensors)
        return model.serving_tensors()

    return Follower(store, apply=apply)


class WeightWatch:
    """One thread: poll, stage on the side, offer, wait for the swap, poll again."""

    def __init__(self, engine: Engine, follower: Follower, *, poll_s: float = POLL_S) -> None:
        self._engine, self._follower, self._poll_s = engine, follower, poll_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weight-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = 10.0) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._follow_once()
                self._stop.wait(self._poll_s)
        finally:
            # An exception goes on to threading.excepthook; health must not look as if nothing had happened.
            if not self._stop.is_set():
                self._engine.follow_problem = "the thread that follows the weight store died; see its log and restart the engine"

    def _follow_once(self) -> None:
        failed_before = self._follower.stats().num_read_errors
        staged = self._follower.poll()
        if staged is not None:
            log.info("version %d staged: %d bytes read, %.0f ms", staged.version, staged.bytes_read, 1e3 * staged.prepare_s)
            self._engine.offer(staged, functools.partial(self._follower.confirm, staged)).result(SWAP_DEADLINE_S)
        stats = self._follower.stats()
        self._engine.follow_problem = stats.problem
        self._engine.metrics.follow_errors.inc(stats.num_read_errors - failed_before)
