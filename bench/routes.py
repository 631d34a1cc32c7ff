"""Bytes per token and speed of the routing record, beside the other ways to keep the same routes.

Prints one JSON object. Routes are drawn evenly, which is the worst case for every coding here; one thread.
    python bench/routes.py [--tokens 8192] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import zstandard

from rollmill.model.route_record import RouteRecord, RouteShape

MODELS = {
    "48 layers, 8 of 128": RouteShape(num_layers=48, layers=tuple(range(48)), num_experts=128, top_k=8),
    "61 layers (60 sparse), 8 of 384": RouteShape(num_layers=61, layers=tuple(range(1, 61)), num_experts=384, top_k=8),
    "32 layers, 2 of 8": RouteShape(num_layers=32, layers=tuple(range(32)), num_experts=8, top_k=2),
    "48 layers, 10 of 512": RouteShape(num_layers=48, layers=tuple(range(48)), num_experts=512, top_k=10),
}


def draw(shape: RouteShape, num_tokens: int, rng: np.random.Generator) -> np.ndarray:
    ids = np.full((num_tokens, shape.num_layers, shape.top_k), -1, np.int16)
    for layer in shape.layers:
        ids[:, layer] = np.sort(np.argsort(rng.random((num_tokens, shape.num_experts), np.float32), -1)[:, : shape.top_k], -1)
    return ids


def seconds(work: Callable[[], Any], rounds: int) -> float:
    """Median after one warm-up."""
    work()
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def measure(name: str, shape: RouteShape, num_tokens: int, rounds: int) -> list[dict[str, Any]]:
    ids = draw(shape, num_tokens, np.random.default_rng(0))
    record = RouteRecord.of(ids, shape)
    data = record.to_bytes()
    assert (RouteRecord.from_bytes(data).ids_TLK() == ids).all()
    plain = ids.astype(np.uint8 if shape.num_experts <= 256 else np.uint16).tobytes()
    packed = shape.top_k * (shape.num_experts - 1).bit_length() * len(shape.layers) / 8
    sizes = {
        "record": len(data) / num_tokens,
        "int32": ids.size * 4 / num_tokens,
        "uint8 or uint16": len(plain) / num_tokens,
        "uint8 or uint16, zstd-3": len(zstandard.compress(plain, 3)) / num_tokens,
        "bit-packed ids": packed,
    }
    rows = [{"name": f"{name}: size", "peer": peer, "value": round(v, 1), "unit": "bytes/token"} for peer, v in sizes.items()]
    for what, work in {
        "encode": lambda: RouteRecord.of(ids, shape).to_bytes(),
        "check": lambda: RouteRecord.from_bytes(data).check(),
        "decode": lambda: RouteRecord.from_bytes(data).ids_TLK(),
        "join of 64": lambda: RouteRecord.join([record] * 64).to_bytes(),
    }.items():
        took = seconds(work, rounds) / (64 if what.startswith("join") else 1)
        rows.append({"name": f"{name}: {what}", "peer": "record", "value": round(len(data) / took / 1e6, 1), "unit": "MB/s"})
        rows.append({"name": f"{name}: {what}", "peer": "record", "value": round(num_tokens / took), "unit": "tokens/s"})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rows = [row for name, shape in MODELS.items() for row in measure(name, shape, args.tokens, args.rounds)]
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    hardware = {"machine": platform.machine(), "num_cores": os.cpu_count(), "load_average": os.getloadavg()[0]}
    print(json.dumps({"command": "bench/routes.py", "rows": rows, "versions": versions, "hardware": hardware}, indent=2))


if __name__ == "__main__":
    main()
