"""Prints as JSON how many codes of quantised copies one AdamW-like step changes, and what the delta costs beside XOR + zstd-1.

    python bench/weights_quant.py [--lr 1e-6] [--seed 0] [--output FILE]

fp32 masters from N(0, 0.02^2) in the shapes of a small model's linear layers; the step is learning rate times noise of rms 0.229, which is
what zero-mean gradients give Adam at beta1 = 0.9. Ratios are against the copy's own bytes, scales included.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard

from rollmill.weights import chunk
from rollmill.weights.bits import copied_bytes, dtype_name
from rollmill.weights.quant import QuantisedCopy, Scheme

RMS = 0.2294
SHAPES = {
    f"model.layers.{layer}.{name}.weight": shape
    for layer in range(3)
    for name, shape in (
        ("self_attn.q_proj", (768, 768)),
        ("self_attn.k_proj", (256, 768)),
        ("self_attn.v_proj", (256, 768)),
        ("self_attn.o_proj", (768, 768)),
        ("mlp.gate_proj", (2048, 768)),
        ("mlp.up_proj", (2048, 768)),
        ("mlp.down_proj", (768, 2048)),
    )
}


def measure(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> dict[str, Any]:
    raw = changed = codes = ours = xor = 0
    for name, tensor in new.items():
        before, after = copied_bytes(old[name]), copied_bytes(tensor)
        raw += after.nbytes
        if name in SHAPES:
            width = 1 if tensor.dtype.itemsize == 1 else 2
            codes += after.nbytes // width
            changed += int(np.count_nonzero(before.view(f"u{width}") != after.view(f"u{width}")))
        step = chunk.MAX_ELEMENTS * tensor.dtype.itemsize
        for at in range(0, after.nbytes, step):
            ours += len(chunk.encode(after[at : at + step], before[at : at + step], dtype_name(tensor.dtype)).data)
        xor += len(zstandard.ZstdCompressor(level=1).compress((before ^ after).data))
    return {
        "raw_bytes": raw,
        "changed_percent": round(100 * changed / codes, 4),
        "bytes": ours,
        "ratio": round(raw / ours, 1),
        "xor_zstd_1_ratio": round(raw / xor, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(options.seed)
    masters = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in SHAPES.items()}
    after = {name: w + options.lr * RMS * torch.randn(w.shape, generator=generator) for name, w in masters.items()}
    copies: dict[str, Any] = {"bf16": lambda tensors: {name: w.bfloat16() for name, w in tensors.items()}}
    copies |= {str(scheme): QuantisedCopy(scheme=scheme) for scheme in Scheme}
    found = {
        "command": f"python bench/weights_quant.py --lr {options.lr:g} --seed {options.seed}",
        "num_weights": sum(w.numel() for w in masters.values()),
        "torch": torch.__version__,
        "note": "4-bit copies are counted in bytes of two codes",
        "copies": {name: measure(copy(masters), copy(after)) for name, copy in copies.items()},
    }
    text = json.dumps(found, indent=2)
    if options.output:
        options.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
