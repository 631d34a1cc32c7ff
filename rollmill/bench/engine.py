"""Sampled tokens per second of the engine at several numbers of sequences, beside other engines over the same weights in the same run.

Everybody gets the same prompts, new ones each round so that no cache of an earlier round helps, and takes turns, so that a busy minute of
the machine is everybody's. Prefill is part of the time. A row's ratio is the exact profile's rate over its own.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from rollmill.bench.beside import Beside, PeerFailed
from rollmill.bench.report import Row, result, rounded, say
from rollmill.bench.shapes import random_model, shape_of, twin
from rollmill.bench.vllm_peer import vllm_peer
from rollmill.engine.engine import Engine
from rollmill.engine.protocol import GenerateRequest
from rollmill.model import Model, ModelConfig, compute_dtype, load_model, save_model
from rollmill.ops import PAGE

PEERS = ("transformers", "transformers-cb", "vllm")
OURS = "rollmill exact"
DEADLINE_S = 3600.0
WARM_TOKENS = 4
COPY_BYTES = 1 << 30


class Contender(Protocol):
    def ask(self, *, prompts: list[list[int]], num_new: int) -> dict[str, Any]:
        """`seconds` and `num_tokens` of one batch."""
        ...


class OwnEngine:
    """Our engine in this process, without its server."""

    def __init__(self, model: Model, *, num_slots: int, max_len: int, threads: int) -> None:
        num_pages = num_slots * -(-max_len // PAGE)
        self._engine = Engine(
            model, model.config, version=0, num_slots=num_slots, max_len=max_len, num_pages=num_pages, num_threads=threads
        )
        self._engine.start()

    def ask(self, *, prompts: list[list[int]], num_new: int) -> dict[str, Any]:
        requests = [GenerateRequest(prompt_ids=p, max_tokens=num_new, seed=i) for i, p in enumerate(prompts)]
        began = time.perf_counter()
        replies = [f.result(DEADLINE_S) for f in [self._engine.generate(r) for r in requests]]
        return {"seconds": time.perf_counter() - began, "num_tokens": sum(len(r.token_ids) for r in replies)}

    def close(self) -> None:
        self._engine.close()


def bench_engine(
    *,
    command: str,
    model_dir: Path | None = None,
    shape: str = "smollm2",
    device: str = "cpu",
    threads: int = 1,
    sequences: Sequence[int] = (1, 8, 32, 128),
    num_prompt: int = 128,
    num_new: int = 128,
    rounds: int = 3,
    peers: Sequence[str] = PEERS,
) -> dict[str, Any]:
    """One JSON object; a peer that does not run here has rows without a value that say why."""
    if foreign := set(peers) - set(PEERS):
        raise ValueError(f"there is no peer {min(foreign)!r}; choose from {', '.join(PEERS)}")
    if not sequences or min(*sequences, num_prompt, num_new, rounds, threads) < 1:
        raise ValueError("sequences, prompt, new, rounds and threads must all be at least 1")
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as temp, contextlib.ExitStack() as stack:
        model, config, path = _model(model_dir, shape, device, Path(temp))
        room = {"max_len": num_prompt + num_new + 1, "num_slots": max(sequences), "threads": threads}
        contenders: dict[str, Contender] = {}
        for profile in ("exact", "fast"):
            engine = contenders[f"rollmill {profile}"] = OwnEngine(twin(model, profile), **room)
            stack.callback(engine.close)
        missing: dict[str, str] = {}
        for peer in peers:
            say(f"starting {peer} ...")
            try:
                contenders[peer] = stack.enter_context(_peer(peer, path, config, device=device, folder=Path(temp), **room))
            except PeerFailed as error:
                missing[peer] = str(error)
        rates = {count: _rates(contenders, missing, config, count, num_prompt, num_new, rounds) for count in sequences}
        rows = [row for count, found in rates.items() for row in _rows(count, found, missing, peers)]
        facts: dict[str, Any] = {}
        if device == "cuda":
            facts["copy_bytes_per_s"] = bandwidth = copy_bandwidth(device)
            rows += _floor_rows(rates, model, bandwidth, context=num_prompt + num_new / 2)
    return result(
        command, rows, model=str(model_dir or shape), num_parameters=model.num_parameters, device=device, threads=threads,
        dtype=str(compute_dtype(device)), num_prompt=num_prompt, num_new=num_new, rounds=rounds,
        all_rates={str(n): found for n, found in rates.items()}, **facts,
    )  # fmt: skip


def _model(model_dir: Path | None, shape: str, device: str, folder: Path) -> tuple[Model, ModelConfig, Path]:
    """The model and a directory where peers find the same weights."""
    if model_dir is not None:
        model, config = load_model(model_dir, device=device, compute_dtype=compute_dtype(device))
        # Another process may look for it from another folder.
        return model, config, model_dir.resolve()
    model = random_model(shape_of(shape), device=device)
    save_model(model, folder / shape)
    return model, model.config, folder / shape


@contextlib.contextmanager
def _peer(
    name: str, path: Path, config: ModelConfig, *, device: str, folder: Path, max_len: int, num_slots: int, threads: int
) -> Iterator[Contender]:
    if name == "vllm":
        if device != "cpu":
            raise PeerFailed("vLLM is measured on the CPU only")
        kv_bytes = 8 * config.num_layers * config.num_kv_heads * config.head_dim * num_slots * (max_len + PAGE)
        with vllm_peer(
            path, folder=folder, threads=threads, max_len=max_len, num_seqs=num_slots, kv_gib=1 + (kv_bytes >> 30)
        ) as peer:  # fmt: skip
            yield peer
        return
    options: dict[str, Any] = {"path": str(path), "device": device, "dtype": str(compute_dtype(device)).removeprefix("torch.")}
    maker = "generate"
    if name == "transformers-cb":
        maker, options["num_tokens"] = "batching", num_slots * (max_len + PAGE)
    with Beside(f"rollmill.bench.transformers_peer:{maker}", threads=threads, **options) as child:
        yield child


def prompts_of(config: ModelConfig, count: int, length: int, seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, config.vocab_size, (count, length)).tolist()


def _rates(
    contenders: dict[str, Contender], missing: dict[str, str], config: ModelConfig, count: int, num_prompt: int, num_new: int, rounds: int
) -> dict[str, list[float]]:
    """Tokens per second of every round; who fails is out from there on."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}

    def ask(name: str, new: int, seed: int) -> None:
        if name in missing:
            return
        try:
            found = contenders[name].ask(prompts=prompts_of(config, count, num_prompt, seed), num_new=new)
        except PeerFailed as error:
            missing[name] = str(error)
            return
        if found["num_tokens"] != count * new:
            missing[name] = f"it gave {found['num_tokens']} tokens where {count * new} were asked for"
        elif new == num_new:
            rates[name].append(rounded(found["num_tokens"] / found["seconds"]))

    for name in contenders:
        ask(name, min(WARM_TOKENS, num_new - 1) or 1, seed=count * 1000)
    for turn in range(rounds):
        # Forth and back: nobody is always the one who starts.
        for name in list(contenders)[:: 1 if turn % 2 == 0 else -1]:
            ask(name, num_new, seed=count * 1000 + turn + 1)
            if rates[name]:
                say(f"{count:4d} sequences, round {turn + 1}: {name} {rates[name][-1]:,.0f} tokens/s")
    return rates


def _rows(count: int, rates: dict[str, list[float]], missing: dict[str, str], peers: Sequence[str]) -> Iterator[Row]:
    ours = statistics.median(rates[OURS])
    for name in (*(n for n in rates if n not in peers), *peers):
        what = f"sampled tokens per second, {count} sequences"
        if name in missing or not rates.get(name):
            yield Row(name=what, peer=name, value=None, unit="tokens/s", note=missing.get(name, "no round ended"))
            continue
        rate = statistics.median(rates[name])
        yield Row(name=what, peer=name, value=rounded(rate), unit="tokens/s", ratio=rounded(ours / rate, 3))


def step_bytes(model: Model, count: int, context: float) -> float:
    """Bytes that a decode step of `count` sequences must read: the weights once, of experts those it is expected to touch, and the keys."""
    c, size = model.config, model.embed.element_size()
    expert = 0
    if c.moe:
        sparse = sum(c.is_sparse(i) for i in range(c.num_layers))
        expert = 3 * sparse * c.moe.num_experts * c.moe.expert_size * c.hidden_size
    # An untied embedding is read row by row.
    dense = model.num_parameters - expert - (0 if c.tied else c.vocab_size * c.hidden_size)
    share = 1 - (1 - c.moe.top_k / c.moe.num_experts) ** count if c.moe else 0.0
    return size * (dense + share * expert + 2 * count * context * c.num_layers * c.num_kv_heads * c.head_dim)


def copy_bandwidth(device: str) -> float:
    """Bytes read and written per second by a copy within the device: what memory gives at best."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * COPY_BYTES / statistics.median(times)


def _floor_rows(rates: dict[int, dict[str, list[float]]], model: Model, bandwidth: float, context: float) -> Iterator[Row]:
    for count, found in rates.items():
        floor_s = step_bytes(model, count, context) / bandwidth
        for name in (n for n in found if n.startswith("rollmill")):
            share = statistics.median(found[name]) * floor_s / count
            yield Row(name=f"fraction of the memory-bandwidth floor, {count} sequences", peer=name, value=rounded(share), unit="fraction")
