"""The compactor as a process: looks at the store now and then, makes what is due, and collects when it was asked to."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from rollmill.weights.compactor import Compactor
from rollmill.weights.errors import CorruptSnapshot, UnknownFormat
from rollmill.weights.gc import Seen, collect
from rollmill.weights.store import open_store

log = logging.getLogger(__name__)
_TICK_S = 0.2


def run_compactor(
    where: str, *, every_s: float, collect_after_s: float, should_stop: Callable[[], bool], say: Callable[[dict[str, float], int], None]
) -> None:
    """Until `should_stop`. A store that cannot be used now, be it full or gone, is tried again at the next look.

    `say` hears of every look.
    """
    store = open_store(where)
    compactor, seen = Compactor(store), Seen()
    next_look = time.monotonic() + every_s
    while not should_stop():
        if time.monotonic() < next_look:
            time.sleep(_TICK_S)
            continue
        began, made = time.monotonic(), []
        try:
            made = compactor.step(time.time())
            for done in made:
                log.info("%s", done)
            if collect_after_s:
                collect(store, time.time(), grace_s=collect_after_s, seen=seen)
        except (OSError, CorruptSnapshot, UnknownFormat) as error:
            log.warning("the weight store cannot be used now: %s", error)
        next_look = time.monotonic() + every_s
        say({"timing_s/compact": time.monotonic() - began, "weights/num_made": float(len(made))}, 0)
