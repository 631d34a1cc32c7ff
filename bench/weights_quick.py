"""Prints as JSON what one weight update costs: delta, full pack, zstd-1 of the raw bytes and the raw bytes, on a synthetic AdamW step.

    python bench/weights_quick.py [--num-params 8000000] [--lr 1e-6] [--steps FILE.npz]

The synthetic step: fp32 masters from N(0, 0.02^2), uniformly placed in their bf16 cells; Adam's direction as the AR(1) noise that
zero-mean gradients give at beta1 = 0.9 (rms 0.23); both sides rounded to bf16. `--steps` takes the last of
recorded steps instead: uint16 array `base` of bf16 bits, then per step NNN flat indices `iNNN` and their new bits `vNNN`.
Speeds are medians of five, of raw bytes, one thread, on whatever else the machine does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
import zstandard

from rollmill.weights import DirectoryStore, Follower, Publisher, fingerprint, pack
from rollmill.weights.bits import bits_of

RMS_U = 0.23


def adamw_pair(num_params: int, lr: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(num_params, generator=generator) * 0.02
    step = torch.randn(num_params, generator=generator) * RMS_U * lr
    return master.bfloat16(), (master - step).bfloat16()


def recorded_pair(path: str) -> tuple[torch.Tensor, torch.Tensor]:
    arrays = np.load(path)
    now = arrays["base"].copy()
    for step in sorted(name[1:] for name in arrays if name.startswith("i")):
        before = now.copy()
        now[arrays[f"i{step}"]] = arrays[f"v{step}"]
    old, new = (torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16) for bits in (before, now))
    return old, new


def seconds(work: Callable[[], object]) -> float:
    def once() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return statistics.median(once() for _ in range(5))


def measure(old: torch.Tensor, new: torch.Tensor) -> dict[str, float]:
    before, after = {"w": bits_of(old)}, {"w": bits_of(new)}
    raw = after["w"].data.nbytes
    delta = pack.build(version=1, new=after, base_version=0, old=before)
    full = pack.build(version=1, new=after)
    data = b"".join(delta.chunks)
    plain = len(zstandard.ZstdCompressor(level=1).compress(after["w"].data.data))
    xor_plain = len(zstandard.ZstdCompressor(level=1).compress((after["w"].data ^ before["w"].data).data))
    encode_s = seconds(lambda: pack.build(version=1, new=after, base_version=0, old=before))
    decode_s = seconds(lambda: pack.read(data, digest=delta.digest, old=before))
    fingerprint_s = seconds(lambda: fingerprint({"w": new}))
    return {
        "num_params": new.numel(),
        "changed_percent": round(100 * float((old.view(torch.int16) != new.view(torch.int16)).float().mean()), 4),
        "raw_bytes": raw,
        "full_zstd1_bytes": plain,
        "full_pack_bytes": full.num_bytes,
        "xor_zstd1_bytes": xor_plain,
        "delta_bytes": delta.num_bytes,
        "raw_over_delta": round(raw / delta.num_bytes, 1),
        "full_zstd1_over_delta": round(plain / delta.num_bytes, 1),
        "delta_encode_mb_per_s": round(raw / encode_s / 1e6),
        "delta_decode_mb_per_s": round(raw / decode_s / 1e6),
        "fingerprint_ms_per_2m_params": round(fingerprint_s * 2e6 / new.numel() * 1e3, 2),
        **loop(old, new),
    }


def loop(old: torch.Tensor, new: torch.Tensor) -> dict[str, float]:
    """One update through a real store: submit, publish, stage, swap."""
    live: dict[str, torch.Tensor] = {"w": torch.zeros_like(old)}

    def apply(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, tensor in tensors.items():
            live[name].copy_(tensor)
        return live

    with tempfile.TemporaryDirectory() as folder:
        store = DirectoryStore(folder)
        follower = Follower(store, apply=apply)  # type: ignore[arg-type]
        with Publisher(store, run_id="bench") as publisher:
            publisher.resume({"w": old}, step=0)
            follower.swap(follower.bootstrap())
            start = time.perf_counter()
            publisher.submit({"w": new}, step=1)
            submitted = time.perf_counter()
            publisher.flush()
            published = time.perf_counter()
        staged = follower.poll()
        assert staged is not None
        ready = time.perf_counter()
        follower.swap(staged)
        swapped = time.perf_counter()
    return {
        "submit_ms": round((submitted - start) * 1e3, 1),
        "publish_ms": round((published - submitted) * 1e3, 1),
        "stage_ms": round(staged.prepare_s * 1e3, 1),
        "swap_ms": round((swapped - ready) * 1e3, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-params", type=int, default=8_000_000)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--steps", help="an .npz of recorded steps")
    args = parser.parse_args()
    torch.set_num_threads(1)
    old, new = recorded_pair(args.steps) if args.steps else adamw_pair(args.num_params, args.lr)
    print(json.dumps(measure(old, new), indent=2))


if __name__ == "__main__":
    main()
