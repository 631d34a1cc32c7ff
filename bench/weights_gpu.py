"""Prints as JSON what a weight update costs on a CUDA device, with the bandwidth of a device-to-device copy measured in the same run.

    python bench/weights_gpu.py [--models 1b,8b] [--repeats 40] [--output FILE]

Weights are bf16 from N(0, 0.02^2) in the shapes of a Llama model; 1.2 % of them change, with odds that fall as 1/ulp, by one ulp
nine times in ten. The pause is what an engine must stand still for: swap the changes in, recompute the fingerprint over the live
memory, compare on the host.
Copy bandwidth counts bytes read and written; the fingerprint counts the bytes it reads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from rollmill.weights.cuda.cells import CellEncoder
from rollmill.weights.cuda.live import CudaWeights
from rollmill.weights.cuda.patch import StagedPatch
from rollmill.weights.live import TensorPatch
from rollmill.weights.schema import TensorSpec
from rollmill.weights.shard import whole

DENSITY = 0.012
MODELS = {
    "1b": {"hidden": 2048, "layers": 16, "mlp": 8192, "kv": 512, "vocab": 128256, "tied": True},
    "8b": {"hidden": 4096, "layers": 32, "mlp": 14336, "kv": 1024, "vocab": 128256, "tied": False},
}


def llama_shapes(size: str) -> dict[str, tuple[int, ...]]:
    c = MODELS[size]
    hidden, mlp, kv, vocab = c["hidden"], c["mlp"], c["kv"], c["vocab"]
    shapes: dict[str, tuple[int, ...]] = {"embed": (vocab, hidden), "norm": (hidden,)}
    if not c["tied"]:
        shapes["head"] = (vocab, hidden)
    for layer in range(c["layers"]):
        shapes |= {
            f"{layer}.q": (hidden, hidden),
            f"{layer}.k": (kv, hidden),
            f"{layer}.v": (kv, hidden),
            f"{layer}.o": (hidden, hidden),
            f"{layer}.gate": (mlp, hidden),
            f"{layer}.up": (mlp, hidden),
            f"{layer}.down": (hidden, mlp),
            f"{layer}.norm1": (hidden,),
            f"{layer}.norm2": (hidden,),
        }
    return shapes


def make_weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return {name: (torch.randn(shape, device="cuda", generator=generator) * 0.02).bfloat16() for name, shape in shapes.items()}


def make_step(tensor: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and new codes (int16 bits) of one synthetic step."""
    codes = tensor.view(torch.int16).flatten()
    exponent = (codes.to(torch.int32) >> 7) & 255
    # ulp = 2^(exponent - 134); the factor gives 1.2 % for N(0, 0.02^2) and is found once, on a sample.
    odds = torch.exp2(121.0 - exponent.float())
    sample = odds[: 1 << 20]
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if float((sample * middle).clamp(max=1).mean()) < DENSITY else (low, middle)
    positions = torch.nonzero(torch.rand(odds.shape, device="cuda", generator=generator) < odds * low).flatten()
    draw = torch.rand(positions.shape, device="cuda", generator=generator)
    size = 1 + (draw > 0.9).int() + (draw > 0.98).int() + (draw > 0.996).int() * 3
    sign = torch.where(torch.rand(positions.shape, device="cuda", generator=generator) < 0.5, 1, -1)
    old = codes[positions].to(torch.int32) & 0xFFFF
    ordered = torch.where(old < 0x8000, old | 0x8000, ~old & 0xFFFF)
    ordered = (ordered + sign * size) & 0xFFFF
    new = torch.where(ordered >= 0x8000, ordered ^ 0x8000, ~ordered & 0xFFFF)
    return positions, new.to(torch.int16)


def make_patches(weights: dict[str, torch.Tensor]) -> list[TensorPatch]:
    generator = torch.Generator("cuda").manual_seed(1)
    patches = []
    for name, tensor in weights.items():
        held = whole(TensorSpec(name=name, dtype="bfloat16", shape=tuple(tensor.shape)))
        positions, codes = make_step(tensor, generator)
        before = tensor.view(torch.int16).view(-1)[positions]
        new, old = (bits.cpu().numpy().view(np.uint16) for bits in (codes, before))
        patches.append(TensorPatch(held=held, positions=positions.cpu().numpy(), codes=new, before=old))
    return patches


def device_ms(work: Callable[[], object], repeats: int) -> list[float]:
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def spread(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {"p50": round(statistics.median(ordered), 3), "p95": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))], 3)}


def copy_gb_s(repeats: int) -> float:
    source = torch.randint(-(2**62), 2**62, (1 << 29,), device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / statistics.median(device_ms(lambda: target.copy_(source), repeats)) / 1e6


def measure_model(size: str, copy: float, repeats: int) -> dict[str, Any]:
    tensors = make_weights(llama_shapes(size))
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    patches = make_patches(tensors)
    start = time.perf_counter()
    weights = CudaWeights(tensors)
    torch.cuda.synchronize()
    built = time.perf_counter()
    staged = weights.stage(patches)
    staged.ready.synchronize()
    stage_s = time.perf_counter() - built
    before = weights.lanes()
    weights.apply(staged)
    after = weights.lanes()
    assert after == weights.tracked_lanes() != before
    weights.revert(staged)
    assert weights.lanes() == before
    fingerprint = device_ms(weights._plan.launch, repeats)
    swap = device_ms(lambda: (weights.revert if staged.applied else weights.apply)(staged), repeats)
    pauses = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        (weights.revert if staged.applied else weights.apply)(staged)
        assert weights.lanes() == (after if staged.applied else before)
        pauses.append((time.perf_counter() - start) * 1e3)
    quick = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        (weights.revert if staged.applied else weights.apply)(staged)
        assert weights.tracked_lanes() == (after if staged.applied else before)
        quick.append((time.perf_counter() - start) * 1e3)
    if staged.applied:
        weights.revert(staged)
    rate = num_bytes / statistics.median(fingerprint) / 1e6
    coded = measure_codec(tensors, weights, staged, num_bytes, copy, repeats)
    return {
        "num_params": num_bytes // 2,
        "num_tensors": len(tensors),
        "raw_bytes": num_bytes,
        "changed_percent": round(100 * staged.num_changes / (num_bytes // 2), 4),
        "pause_ms": spread(pauses),
        "pause_tracked_only_ms": spread(quick),
        "swap_device_ms": spread(swap),
        "fingerprint_device_ms": spread(fingerprint),
        "fingerprint_gb_s": round(rate),
        "fingerprint_fraction_of_copy": round(rate / copy, 3),
        **coded,
        "stage_from_host_s": round(stage_s, 3),
        "patch_device_bytes": sum(part.positions.nbytes + part.codes.nbytes + part.tiles.nbytes for part in staged.changes),
        "key_table_bytes": weights.keys.rows.nbytes,
    }


def measure_codec(
    tensors: dict[str, torch.Tensor], weights: CudaWeights, staged: StagedPatch, num_bytes: int, copy: float, repeats: int
) -> dict[str, Any]:
    """Encode and decode of the same step: the whole call on the host's clock, and the time that kernels ran."""
    old = {name: tensor.clone() for name, tensor in tensors.items()}
    weights.apply(staged)
    new = {name: tensor.clone() for name, tensor in tensors.items()}
    weights.revert(staged)
    after = weights.tracked_lanes
    encoder = CellEncoder(old, new)
    cells = encoder.encode()
    decoded = weights.stage_cells(cells)
    weights.apply(decoded)
    assert all(torch.equal(tensors[name].view(torch.int16), new[name].view(torch.int16)) for name in new)
    assert weights.lanes() == after()
    weights.revert(decoded)
    payload = sum(len(coded.payload) for coded in cells)
    result: dict[str, Any] = {"num_cells": len(cells), "delta_bytes": payload, "raw_over_delta": round(num_bytes / payload, 1)}
    for what, work in (("encode", encoder.encode), ("decode", lambda: weights.stage_cells(cells))):
        wall, device = wall_ms(work, max(5, repeats // 4)), kernel_ms(work)
        result |= {
            f"{what}_ms": spread(wall),
            f"{what}_gb_s": round(num_bytes / statistics.median(wall) / 1e6),
            f"{what}_kernels_ms": round(device, 2),
            f"{what}_kernels_gb_s": round(num_bytes / device / 1e6),
            f"{what}_kernels_fraction_of_copy": round(num_bytes / device / 1e6 / copy, 3),
        }
    return result


def wall_ms(work: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def kernel_ms(work: Callable[[], object]) -> float:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_device_time_total)
    for row in rows[:12]:
        print(f"  {row.key[:60]:60} {row.self_device_time_total / 1e3:8.3f} ms x{row.count}", file=sys.stderr)
    return sum(row.self_device_time_total for row in rows) / 1e3


def scaled(model: dict[str, Any], num_params: float) -> dict[str, float]:
    """What the largest model says of a larger one: every part of the pause is linear in the parameters."""
    factor = num_params / model["num_params"]
    return {
        f"{name}_p50": round(model[name]["p50"] * factor, 1) for name in ("pause_ms", "pause_tracked_only_ms", "encode_ms", "decode_ms")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="1b,8b")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    copy = copy_gb_s(args.repeats)
    models = {size: measure_model(size, copy, args.repeats) for size in args.models.split(",")}
    result: dict[str, Any] = {
        "command": "python bench/weights_gpu.py",
        "hardware": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_gb_s": round(copy),
        "models": models,
        "scaled_to_30_b": scaled(list(models.values())[-1], 30e9),
    }
    text = json.dumps(result, indent=2)
    if args.output:
        args.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
