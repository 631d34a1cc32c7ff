"""`python -m rollmill.ops.warm` compiles the CPU loops of a forward into the cache of numba, so that no run waits for it."""

from __future__ import annotations

import time

import torch

from rollmill.ops import CpuOps, Spans


def warm() -> None:
    ops = CpuOps()
    x = torch.randn(2, 2, 8)
    with torch.inference_mode():
        ops.rms_norm(x.flatten(1), torch.ones(16), 1e-5)
        ops.add_rms_norm(x.flatten(1), x.flatten(1), torch.ones(16), 1e-5)
        ops.score(x.flatten(1), torch.zeros(2, dtype=torch.int64))
        ops.pick(x.flatten(1), torch.zeros(2, dtype=torch.float64))
        ops.swiglu(x.flatten(1))
        q = ops.rotate(x, torch.ones(2, 1, 8), torch.zeros(2, 1, 8))
        pages = ops.new_pages(1, num_layers=1, num_kv_heads=2, head_dim=8, dtype=torch.float32)
        spans = Spans.of(new=[2], before=[0], pages=[[0]])
        pages.write(0, x, x, spans)
        pages.attend(0, q, spans)


if __name__ == "__main__":
    began = time.monotonic()
    warm()
    print(f"loops of the model's operations compiled in {time.monotonic() - began:.0f} s")
