"""One other sandbox in a process of its own, driven the cheapest way it offers: a JSON line in, seconds out.

Whatever interpreter has the peer's package runs `main`; so this, and what it loads, needs the standard library only. A peer that only
starts commands is *ready* when `cat` inside it has sent a byte back. Whatever a peer cannot do is answered with the reason.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

ANSWER_S = 60.0
NUM_STARTING = 16
"""Starts at once when many boxes are wanted: more only lengthens the slowest."""
HOME = "/home/dev"
PEERS = {
    "subprocess": "sandbox_programs:Plain",
    "bwrap": "sandbox_programs:Bubblewrap",
    "crun": "sandbox_programs:Oci",
    "runsc": "sandbox_programs:Oci",
    "cp": "sandbox_programs:Copy",
    "sandlock": "sandbox_packages:Sandlock",
    "swe-rex": "sandbox_packages:SweRex",
}


class Cannot(Exception):
    """What the peer has no way to do, or failed at."""


class Peer:
    """What every peer is asked; the base times it, a peer says how to start, end and run."""

    def __init__(self) -> None:
        self._held: list[Any] = []

    def close(self) -> None:
        """Leave nothing behind; every box has ended."""

    def start(self, state: str) -> Any:
        raise NotImplementedError

    def end(self, box: Any) -> None:
        box.close()

    def once(self) -> None:
        """Start, `true`, end."""
        raise NotImplementedError

    def run_in(self, box: Any) -> None:
        raise Cannot("it has no way to run a second command in a live box")

    def num_files(self, state: str) -> int:
        """How many files a box on this state shows."""
        raise NotImplementedError

    def ready(self, num: int, limit_s: float, state: str = "") -> dict[str, Any]:
        took = []
        for _ in turns_of(num, limit_s):
            begun = time.perf_counter()
            box = self.start(state)
            took.append(time.perf_counter() - begun)
            self.end(box)
        return {"seconds": took}

    def cycles(self, num: int, limit_s: float, at_once: int) -> dict[str, Any]:
        begun = time.perf_counter()
        num_done = together(self.once, num, limit_s, at_once)
        return {"num": num_done, "seconds": time.perf_counter() - begun}

    def execs(self, num: int, limit_s: float) -> dict[str, Any]:
        box = self.start("")
        took = []
        try:
            for _ in turns_of(num, limit_s):
                begun = time.perf_counter()
                self.run_in(box)
                took.append(time.perf_counter() - begun)
        finally:
            self.end(box)
        return {"seconds": took}

    def hold(self, num: int, limit_s: float, state: str = "") -> dict[str, Any]:
        begun = time.perf_counter()
        # Kept as they come: when one cannot start, the others are still dropped.
        together(lambda: self._held.append(self.start(state)), num, limit_s, NUM_STARTING)
        took = time.perf_counter() - begun
        if len(self._held) < num:
            held = len(self._held)
            self.drop()
            raise Cannot(f"only {held} of {num} boxes were ready after {limit_s:g} s")
        return {"seconds": took}

    def drop(self) -> dict[str, Any]:
        held, self._held = self._held, []
        begun = time.perf_counter()
        with ThreadPoolExecutor(NUM_STARTING) as pool:
            list(pool.map(self.end, held))
        return {"seconds": time.perf_counter() - begun}

    def files(self, state: str) -> dict[str, Any]:
        return {"num": self.num_files(state)}


def turns_of(num: int, limit_s: float) -> Iterator[int]:
    """At most `num` times, and none begun after the limit."""
    end = time.monotonic() + limit_s
    for index in range(num):
        if time.monotonic() > end:
            return
        yield index


def together(act: Callable[[], None], num: int, limit_s: float, at_once: int) -> int:
    """How many times it was done, in so many threads; the first failure is told once all of them stopped."""
    turns, lock = turns_of(num, limit_s), threading.Lock()

    def work() -> int:
        done = 0
        while True:
            with lock:
                if next(turns, None) is None:
                    return done
            act()
            done += 1

    with ThreadPoolExecutor(min(at_once, num)) as pool:
        return sum(worker.result() for worker in [pool.submit(work) for _ in range(min(at_once, num))])


def main(kind: str, options: dict[str, Any]) -> None:
    # Answers go out by a copy of standard output; what packages print there joins the log.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module, _, name = PEERS[kind].partition(":")
    peer: Peer = getattr(importlib.import_module(f"rollmill.bench.{module}"), name)(**options)
    print(json.dumps({"ready": True}), file=out, flush=True)
    try:
        for line in sys.stdin:
            question = json.loads(line)
            try:
                answer = getattr(peer, question.pop("ask"))(**question)
            except Cannot as error:
                answer = {"reason": str(error)}
            except Exception as error:  # noqa: BLE001 (whatever a peer's package raises is the reason of its row)
                answer = {"reason": f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"}
            print(json.dumps(answer), file=out, flush=True)
    finally:
        try:
            peer.drop()
        finally:
            peer.close()
    # Threads of a peer's package must not keep the process.
    os._exit(0)
