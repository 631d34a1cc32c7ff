"""Weight swaps under load: a real publisher, store and follower, an engine that is never idle, and a count of every request and token.

Publisher, follower and engine share this machine; unless told to wait, versions follow one another as fast as they can be published.
"""

from __future__ import annotations

import logging
import math
import queue
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from rollmill.bench.report import Row, result, rounded, say
from rollmill.bench.shapes import random_model, shape_of
from rollmill.engine.engine import Engine, EnginePhase
from rollmill.engine.protocol import FinishReason, GenerateReply, GenerateRequest, SwapMode
from rollmill.engine.replies import reply_of
from rollmill.engine.swap import WeightWatch, follower_of
from rollmill.model import Model, compute_dtype, load_model
from rollmill.weights import Publisher, fingerprint, open_store

DEADLINE_S = 600.0
POLL_S = 0.005
CHANGED = 0.01
"""Share of the weights that a version changes, each by the smallest step that its dtype knows."""


class SwapLog(logging.Handler):
    """The engine's own log of its swaps, as numbers."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.served: list[int] = []
        self.pauses_s: list[float] = []
        self._news = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("swap to version") and isinstance(record.args, tuple):
            version, outcome, pause_ms = record.args
            assert isinstance(version, int) and isinstance(pause_ms, float)
            with self._news:
                if outcome == "confirmed":
                    self.served.append(version)
                    self.pauses_s.append(pause_ms / 1e3)
                self._news.notify_all()

    def await_version(self, version: int) -> None:
        with self._news:
            if not self._news.wait_for(lambda: version in self.served[-1:], DEADLINE_S):
                raise RuntimeError(f"version {version} was not served within {DEADLINE_S:.0f} s; served so far: {self.served[-3:]}")


class Load:
    """Keeps `num_running` requests in the engine; whenever one ends, another is sent. Only its own thread submits."""

    def __init__(self, engine: Engine, *, num_running: int, num_prompt: int, num_new: int) -> None:
        self._engine, self._num_running, self._num_prompt, self._num_new = engine, num_running, num_prompt, num_new
        self._ended: queue.SimpleQueue[tuple[int, GenerateRequest, GenerateReply]] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)
        self.num_submitted = 0
        self.ends: Counter[int] = Counter()
        self.replies: list[tuple[GenerateRequest, GenerateReply]] = []

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Send nothing more and wait for what runs."""
        self._stop.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "requests are still in the engine"

    def _run(self) -> None:
        for _ in range(self._num_running):
            self._submit()
        while sum(self.ends.values()) < self.num_submitted:
            number, request, reply = self._ended.get(timeout=DEADLINE_S)
            self.ends[number] += 1
            self.replies.append((request, reply))
            if not self._stop.is_set():
                self._submit()

    def _submit(self) -> None:
        number = self.num_submitted
        rng = np.random.default_rng(number)
        prompt = rng.integers(0, self._engine.config.vocab_size, self._num_prompt).tolist()
        # Half of them shorter, so that requests do not all begin and end together.
        num_new = self._num_new if number % 2 else max(1, self._num_new // 2)
        request = GenerateRequest(prompt_ids=prompt, max_tokens=num_new, seed=number)
        self.num_submitted += 1
        self._engine.submit(request, lambda seq, update: self._ended.put((number, request, reply_of(seq))))


class SmallSteps:
    """A trainer that moves one weight in a hundred by one step of its dtype, and publishes."""

    def __init__(self, publisher: Publisher, tensors: dict[str, torch.Tensor]) -> None:
        self._publisher, self.tensors = publisher, tensors
        self._rng = np.random.default_rng(0)
        self._step = 0

    def publish(self) -> int:
        if self._step:
            for tensor in self.tensors.values():
                codes = tensor.view(-1).view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
                at = torch.from_numpy(self._rng.integers(0, len(codes), math.ceil(CHANGED * len(codes))))
                # Back and forth, so that a thousand versions do not walk anywhere.
                codes[at] ^= 1
        version = self._publisher.submit(self.tensors, step=self._step)
        self._publisher.flush(DEADLINE_S)
        self._step += 1
        return version


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one mode."""

    num_swaps: int
    num_submitted: int
    num_lost: int
    """Submitted and never ended."""
    num_repeated: int
    """Ended more than once."""
    num_odd: int
    """Ended for another reason than their length, or with another number of tokens."""
    num_wrong_stamps: int
    """Replies with a token of a version that was not served, spans that do not cover it, or versions that go back."""
    num_across: int
    """Replies with tokens of more than one version."""
    num_tokens: int
    pauses_s: list[float]
    """Of every swap but the first, which brings the weights that serving starts with."""
    rate_quiet: float
    """Tokens per second without swaps, before and after."""
    rate_swapping: float
    swaps_per_s: float
    is_proved: bool
    """Whether the engine's fingerprint at the end is that of the tensors last published."""


def swap_under_load(
    model: Model, mode: SwapMode, *, num_swaps: int, num_running: int, num_prompt: int, num_new: int, threads: int, quiet_s: float,
    every_s: float,
) -> Outcome:  # fmt: skip
    engine_log, log = logging.getLogger("rollmill.engine.engine"), SwapLog()
    level_before, passes_on = engine_log.level, engine_log.propagate
    engine_log.addHandler(log)
    engine_log.setLevel(logging.INFO)
    engine_log.propagate = False
    tensors = {name: t.cpu() for name, t in model.serving_tensors().items()}
    try:
        with tempfile.TemporaryDirectory() as folder:
            store = open_store(Path(folder) / "store")
            engine = Engine(
                model, model.config, num_slots=num_running, max_len=num_prompt + num_new + 1, swap_mode=mode, num_threads=threads
            )
            watch = WeightWatch(engine, follower_of(store, model), poll_s=POLL_S)
            load = Load(engine, num_running=num_running, num_prompt=num_prompt, num_new=num_new)
            with Publisher(store, run_id="bench") as publisher:
                trainer = SmallSteps(publisher, tensors)
                engine.start()
                watch.start()
                try:
                    log.await_version(trainer.publish())
                    assert engine.phase is EnginePhase.SERVING
                    load.start()
                    before = _rate(engine, quiet_s)
                    rate, per_s = _swaps(engine, trainer, log, num_swaps, every_s, str(mode))
                    after = _rate(engine, quiet_s)
                    load.close()
                    is_proved = engine.fingerprint == fingerprint(tensors).total
                finally:
                    engine.close()
                    watch.close()
    finally:
        engine_log.removeHandler(log)
        engine_log.setLevel(level_before)
        engine_log.propagate = passes_on
    return _judged(load, log, rates=((before + after) / 2, rate, per_s), is_proved=is_proved)


def _rate(engine: Engine, seconds: float) -> float:
    first, began = engine.metrics.num_tokens, time.perf_counter()
    time.sleep(seconds)
    return (engine.metrics.num_tokens - first) / (time.perf_counter() - began)


def _swaps(engine: Engine, trainer: SmallSteps, log: SwapLog, num_swaps: int, every_s: float, mode: str) -> tuple[float, float]:
    """Tokens and swaps per second while versions come one after the other, none sooner than `every_s` after the last."""
    first, began = engine.metrics.num_tokens, time.perf_counter()
    for i in range(num_swaps):
        log.await_version(trainer.publish())
        time.sleep(max(0.0, began + (i + 1) * every_s - time.perf_counter()))
        if (i + 1) % max(1, num_swaps // 10) == 0:
            say(f"{mode}: {i + 1} of {num_swaps} swaps, {engine.metrics.num_tokens - first:,} tokens meanwhile")
    took = time.perf_counter() - began
    return (engine.metrics.num_tokens - first) / took, num_swaps / took


def _judged(load: Load, log: SwapLog, *, rates: tuple[float, float, float], is_proved: bool) -> Outcome:
    served = set(log.served)
    return Outcome(
        num_swaps=len(log.pauses_s) - 1,
        num_submitted=load.num_submitted,
        num_lost=sum(load.ends[n] == 0 for n in range(load.num_submitted)),
        num_repeated=sum(count > 1 for count in load.ends.values()),
        num_odd=sum(r.finish_reason is not FinishReason.LENGTH or len(r.token_ids) != q.max_tokens for q, r in load.replies),
        num_wrong_stamps=sum(not _is_stamped(r, served) for _, r in load.replies),
        num_across=sum(len(r.spans) > 1 for _, r in load.replies),
        num_tokens=sum(len(r.token_ids) for _, r in load.replies),
        pauses_s=log.pauses_s[1:],
        rate_quiet=rates[0],
        rate_swapping=rates[1],
        swaps_per_s=rates[2],
        is_proved=is_proved,
    )


def _is_stamped(reply: GenerateReply, served: set[int]) -> bool:
    ends = [0, *(s.end for s in reply.spans)]
    versions = [s.version for s in reply.spans]
    return (
        [s.start for s in reply.spans] == ends[:-1]
        and ends[-1] == len(reply.token_ids)
        and set(versions) <= served
        and versions == sorted(set(versions))
    )


def bench_swaps(
    *,
    command: str,
    num_swaps: int,
    model_dir: Path | None = None,
    shape: str = "demo",
    device: str = "cpu",
    threads: int = 1,
    num_running: int = 32,
    num_prompt: int = 128,
    num_new: int = 128,
    quiet_s: float = 5.0,
    every_s: float = 0.0,
    modes: Sequence[SwapMode] = tuple(SwapMode),
) -> dict[str, Any]:
    """Both modes one after the other, each with a fresh store and engine."""
    if min(num_swaps, num_running, num_prompt, num_new, threads) < 1:
        raise ValueError("swaps, sequences, prompt, new and threads must all be at least 1")
    if model_dir is not None:
        model, _ = load_model(model_dir, device=device, compute_dtype=compute_dtype(device))
    else:
        model = random_model(shape_of(shape), device=device)
    rows: list[Row] = []
    pauses: dict[str, list[float]] = {}
    for mode in modes:
        found = swap_under_load(
            model, mode, num_swaps=num_swaps, num_running=num_running, num_prompt=num_prompt, num_new=num_new, threads=threads,
            quiet_s=quiet_s, every_s=every_s,
        )  # fmt: skip
        rows += _rows(mode, found)
        pauses[mode] = [rounded(p) for p in found.pauses_s]
    return result(
        command, rows, model=str(model_dir or shape), num_parameters=model.num_parameters, device=device, threads=threads,
        changed_fraction=CHANGED, num_running=num_running, num_prompt=num_prompt, num_new=num_new, every_s=every_s, pauses_s=pauses,
    )  # fmt: skip


def _rows(mode: SwapMode, found: Outcome) -> Iterator[Row]:
    def row(name: str, value: float, unit: str, ratio: float | None = None) -> Row:
        return Row(name=name, peer=mode, value=rounded(value), unit=unit, ratio=ratio)

    yield row("swaps confirmed under load", found.num_swaps, "swaps")
    yield row("requests submitted", found.num_submitted, "requests")
    yield row("requests lost", found.num_lost, "requests")
    yield row("requests ended twice", found.num_repeated, "requests")
    yield row("requests that ended short or in error", found.num_odd, "requests")
    yield row("replies with a token of a version that was not served", found.num_wrong_stamps, "requests")
    yield row("requests that lived through a swap", found.num_across, "requests")
    yield row("live weights proved equal to the last published", float(found.is_proved), "yes = 1")
    pauses_ms = np.array(found.pauses_s) * 1e3
    for name, value in (("p50", np.median(pauses_ms)), ("p99", np.percentile(pauses_ms, 99)), ("max", pauses_ms.max())):
        yield row(f"pause, {name}", float(value), "ms")
    yield row("share of the time paused", statistics.fmean(found.pauses_s) * found.swaps_per_s, "fraction")
    yield row("swaps per second", found.swaps_per_s, "1/s")
    yield row("sampled tokens per second without swaps", found.rate_quiet, "tokens/s")
    yield row("sampled tokens per second during swaps", found.rate_swapping, "tokens/s", rounded(found.rate_swapping / found.rate_quiet, 3))
