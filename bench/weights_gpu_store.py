"""Prints as JSON what a version costs from a trainer's CUDA memory through a store to a replica's, with everything real in between.

    python bench/weights_gpu_store.py [--models 1b,8b] [--steps 6] [--store DIR] [--output FILE]

Trainer and replica share one device, so the two compete; the store is a directory. `stall` is what `submit` takes from the trainer,
`publish` the background work until replicas may take the version, `prepare` the replica's work while it serves, `pause` the swap.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import triton
from weights_gpu import llama_shapes, make_step, make_weights

from rollmill.weights import Follower, Publisher, open_store
from rollmill.weights.cuda.live import CudaWeights


def measure(size: str, num_steps: int, where: Path) -> dict[str, Any]:
    trained = make_weights(llama_shapes(size))
    live = {name: torch.zeros_like(tensor) for name, tensor in trained.items()}
    store, generator = open_store(where), torch.Generator("cuda").manual_seed(1)
    follower = Follower(store, CudaWeights(live))
    rows: list[dict[str, float]] = []
    with Publisher(store, run_id="bench") as publisher:
        began = time.perf_counter()
        publisher.resume(trained, step=0)
        published = time.perf_counter()
        follower.swap(follower.bootstrap())
        joined = time.perf_counter()
        for step in range(1, num_steps + 1):
            for tensor in trained.values():
                positions, codes = make_step(tensor, generator)
                tensor.view(torch.int16).view(-1)[positions] = codes
            torch.cuda.synchronize()
            times = [time.perf_counter()]
            publisher.submit(trained, step=step)
            times.append(time.perf_counter())
            publisher.flush()
            times.append(time.perf_counter())
            staged = follower.poll()
            assert staged is not None, follower.stats().problem
            torch.cuda.synchronize()
            times.append(time.perf_counter())
            follower.swap(staged)
            times.append(time.perf_counter())
            names = ("stall_ms", "publish_ms", "prepare_ms", "pause_ms")
            rows.append({name: 1e3 * (b - a) for name, a, b in zip(names, times, times[1:], strict=False)} | {"bytes": staged.bytes_read})
    assert all(torch.equal(live[name], trained[name]) for name in trained), "the replica holds other weights than the trainer"
    # The first step compiles kernels.
    warm = rows[1:]
    return {
        "raw_bytes": sum(tensor.nbytes for tensor in trained.values()),
        "publish_full_s": round(published - began, 2),
        "join_from_full_s": round(joined - published, 2),
        "first_step": {name: round(value, 2) for name, value in rows[0].items()},
        "median": {name: round(statistics.median(row[name] for row in warm), 2) for name in warm[0]},
        "worst": {name: round(max(row[name] for row in warm), 2) for name in warm[0]},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="1b,8b")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {
        "command": "python bench/weights_gpu_store.py",
        "hardware": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "models": {},
    }
    for size in options.models.split(","):
        where = Path(tempfile.mkdtemp(dir=options.store))
        found["models"][size] = measure(size, options.steps, where)
        shutil.rmtree(where)
        torch.cuda.empty_cache()
        text = json.dumps(found, indent=2)
        if options.output:
            options.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
