"""Sampled tokens per second of the embedded engine at 1, 8 and 32 sequences, beside transformers' `generate` on the same weights.

Prints one JSON object. Both sides run in this process, one after the other, on the same number of threads and the same prompts.
    python bench/engine_quick.py [--threads 1] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from rollmill.engine.engine import Engine
from rollmill.engine.protocol import GenerateRequest
from rollmill.model import Model, ModelConfig, save_model
from rollmill.weights import fingerprint

NUM_PROMPT, NUM_NEW = 40, 150
CONFIG = ModelConfig(
    vocab_size=512, hidden_size=160, intermediate_size=432, num_layers=4, num_heads=4, num_kv_heads=4, head_dim=40, max_position=1024
)


def prompts(count: int) -> list[list[int]]:
    return [[(13 * i + 7 * j) % CONFIG.vocab_size for j in range(NUM_PROMPT)] for i in range(count)]


def best_rate(work: Callable[[], int], rounds: int) -> dict[str, float]:
    """Median and best tokens per second over `rounds` after one warm-up."""
    work()
    rates = []
    for _ in range(rounds):
        began = time.perf_counter()
        num_tokens = work()
        rates.append(num_tokens / (time.perf_counter() - began))
    return {"median": round(statistics.median(rates), 1), "best": round(max(rates), 1)}


def engine_rates(model: Model, counts: list[int], threads: int, rounds: int) -> dict[int, dict[str, float]]:
    engine = Engine(model, CONFIG, version=1, num_slots=max(counts), max_len=NUM_PROMPT + NUM_NEW, num_threads=threads)
    engine.start()

    def work(count: int) -> int:
        requests = [GenerateRequest(prompt_ids=p, max_tokens=NUM_NEW, seed=i) for i, p in enumerate(prompts(count))]
        return sum(len(future.result(600).token_ids) for future in [engine.generate(r) for r in requests])

    rates = {count: best_rate(lambda c=count: work(c), rounds) for count in counts}
    engine.close()
    return rates


def peer_rates(path: Path, counts: list[int], rounds: int) -> dict[int, dict[str, float]]:
    from transformers import LlamaForCausalLM

    peer = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    # Neither side may stop early, and both draw from the full distribution.
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": NUM_NEW, "min_new_tokens": NUM_NEW, "pad_token_id": 0, "eos_token_id": None}

    @torch.inference_mode()
    def work(count: int) -> int:
        ids = torch.tensor(prompts(count))
        return peer.generate(ids, attention_mask=torch.ones_like(ids), **options).numel() - ids.numel()

    return {count: best_rate(lambda c=count: work(c), rounds) for count in counts}


def swap_pause_s(model: Model, rounds: int) -> float:
    """Median seconds of what the engine does between two steps of a swap: copy every tensor in, fingerprint the live weights."""
    tensors, pauses = model.serving_tensors(), []
    for _ in range(rounds):
        began = time.perf_counter()
        model.load_serving(tensors)
        fingerprint(model.serving_tensors())
        pauses.append(time.perf_counter() - began)
    return statistics.median(pauses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    counts = [1, 8, 32]
    model = Model(CONFIG)
    model.init_weights(0)
    result = {
        "what": f"sampled tokens/s, {NUM_PROMPT} prompt + {NUM_NEW} sampled tokens per sequence, prefill included",
        "num_parameters": model.num_parameters,
        "threads": args.threads,
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "load_average_before": os.getloadavg()[0],
        "engine": engine_rates(model, counts, args.threads, args.rounds),
        "swap_pause_ms": round(1e3 * swap_pause_s(model, 5), 2),
    }
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, Path(folder))
        try:
            result["transformers_generate"] = peer_rates(Path(folder), counts, args.rounds)
        except ImportError:
            result["transformers_generate"] = "not installed"
    result["load_average_after"] = os.getloadavg()[0]
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
