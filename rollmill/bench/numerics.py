"""What equal bits cost: time of a decode step and of a forward by the exact profile, beside the best path that may give a row other bits.

Both compute the same random model in turns. On a CPU the peer is the fast profile in a process of its own; on a GPU the faster of torch's
own operations and of a mixture with our row kernels, each with either fused attention; a decode step is a CUDA graph on every side,
longer steps are launched one by one.
A row's ratio is its time over the best peer's, so the tax of the exact profile is its ratio less one.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from rollmill.bench.beside import Beside
from rollmill.bench.replay import replay_rows, route_bytes_rows
from rollmill.bench.report import Row, result, rounded, say
from rollmill.bench.sampled import mismatch_rows
from rollmill.bench.shapes import random_model, shape_of
from rollmill.bench.steps import made, seconds
from rollmill.model import Model

BATCHES = (1, 8, 32, 128, 256)
Timer = Callable[[], float]
"""Seconds of one turn."""
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
CPU_TURN = 3
CUDA_TURN = 10


def bench_numerics(
    *,
    command: str,
    shape: str = "smollm2",
    num_layers: int | None = None,
    device: str = "cpu",
    threads: int = 1,
    batches: Sequence[int] = BATCHES,
    context: int | None = None,
    forward: Sequence[tuple[int, int]] = (),
    rounds: int = 5,
    num_tokens: int | None = None,
) -> dict[str, Any]:
    """Times, then mismatch over `num_tokens` sampled tokens, then what router replay buys; `forward` is (sequences, tokens of each)."""
    is_cuda = device == "cuda"
    context = context or (2048 if is_cuda else 256)
    forward = forward or (((1, 4096), (4, 1024), (1, 8192)) if is_cuda else ((1, 512), (4, 128)))
    num_tokens = num_tokens if num_tokens is not None else (1 << 20 if is_cuda else 4096)
    if not batches or min(*batches, context, rounds, threads) < 1 or num_tokens < 0:
        raise ValueError("batches, context, rounds and threads must all be at least 1, and tokens at least 0")
    torch.set_num_threads(threads)
    model = random_model(shape_of(shape, num_layers), device=device)
    steps = [("decode", b, context) for b in batches] + [("prefill", 1, forward[0][1])] + [("packed", *f) for f in forward]
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        peer = None if is_cuda else stack.enter_context(
            Beside("rollmill.bench.steps:free_process", threads=threads, shape=shape, num_layers=num_layers)
        )  # fmt: skip
        for kind, first, second in steps:
            timers = _cuda_timers(model, kind, first, second) if peer is None else _cpu_timers(model, peer, kind, first, second)
            found = list(_time_rows(_named(kind, first, second), timers, rounds))
            rows += found
            del timers
            say("; ".join(f"{r.name}: {r.peer} {r.value} {r.unit}" for r in found))
    if num_tokens:
        rows += mismatch_rows(model, num_tokens=num_tokens, threads=threads)
    rows += route_bytes_rows()
    rows += replay_rows(device=device, threads=threads)
    return result(
        command, rows, shape=shape, num_layers=model.config.num_layers, all_layers=shape_of(shape).num_layers, device=device,
        threads=threads, num_parameters=model.num_parameters, rounds=rounds,
        how="decode: CUDA graphs on every side; the rest launched one by one" if is_cuda else "peer in a process of its own",
    )  # fmt: skip


def _named(kind: str, first: int, second: int) -> str:
    if kind == "decode":
        return f"decode step, batch {first}, {second} keys"
    if kind == "prefill":
        return f"prefill over pages, {second} tokens"
    return f"trainer's forward, {first} x {second} tokens"


def _time_rows(name: str, timers: dict[str, Timer], rounds: int) -> Iterator[Row]:
    """Everybody in turns, then medians; the tax is told by itself too."""
    took: dict[str, list[float]] = {peer: [] for peer in timers}
    for timer in timers.values():
        timer()
    for turn in range(rounds):
        for peer in list(timers)[:: 1 if turn % 2 == 0 else -1]:
            took[peer].append(timers[peer]())
    middle = {peer: statistics.median(values) for peer, values in took.items()}
    best = min(value for peer, value in middle.items() if peer != "exact")
    for peer, value in middle.items():
        yield Row(name=name, peer=peer, value=rounded(1e3 * value), unit="ms", ratio=rounded(value / best, 4))
    yield Row(name=f"tax of equal bits, {name}", peer="exact / best", value=round(100 * (middle["exact"] / best - 1), 2), unit="%")


def _cpu_timers(model: Model, peer: Beside, kind: str, first: int, second: int) -> dict[str, Timer]:
    step = made(model, kind, first, second)
    return {
        "exact": lambda: statistics.median(seconds(step, CPU_TURN)),
        "fast": lambda: peer.ask(kind=kind, first=first, second=second, repeats=CPU_TURN)["seconds"],
    }


def _cuda_timers(model: Model, kind: str, first: int, second: int) -> dict[str, Timer]:
    from rollmill.bench.free_ops import DensePages, FreeTorchOps, MixedOps
    from rollmill.bench.steps import new_pages

    device = model.embed.device
    pages: Any = None
    if kind != "packed":
        pages = new_pages(model, first, second)
        pages.memory_L2PKSE.normal_()
    turn = _graph_turn if kind == "decode" else _eager_turn
    timers = {"exact": turn(made(model, kind, first, second, pages=pages))}
    for ops in (MixedOps(device), FreeTorchOps(device)):
        for backend in BACKENDS:
            step = made(model, kind, first, second, ops, DensePages(pages) if pages is not None else None)
            # Which fused kernel is the fastest depends on the shape, so each is a peer.
            try:
                step = _attending_by(backend, step)
            except RuntimeError as error:
                say(f"{backend.name} does not take {_named(kind, first, second)}: {str(error).splitlines()[0][:120]}")
                continue
            timers[f"{ops.profile}, {backend.name.partition('_')[0].lower()}"] = turn(step)
    return timers


def _attending_by(backend: SDPBackend, step: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        with sdpa_kernel(backend):
            step()

    # A kernel that does not take the shape says so now.
    run()
    return run


def _graph_turn(step: Callable[[], None]) -> Timer:
    # Kernels are compiled and proved as shapes come up, which a capture must not see.
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay() -> None:
        # A graph reads its inputs where they were when it was captured: as long as `step` lives, nobody else gets that memory.
        assert step is not None
        graph.replay()

    return _eager_turn(replay)


def _eager_turn(step: Callable[[], None]) -> Timer:
    def turn() -> float:
        times = []
        for _ in range(CUDA_TURN):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return statistics.median(times)

    return turn
