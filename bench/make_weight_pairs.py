"""Writes consecutive bf16 snapshots of a Llama-shaped model under AdamW-like steps, as safetensors, for `rollmill weights bench`.

    python bench/make_weight_pairs.py OUT [--num-params 20e6] [--density 0.0117] [--num-steps 1] [--seed 0]

fp32 masters from N(0, 0.02^2), so that they lie anywhere in their bf16 cells (a warm run); the optimiser's direction is the AR(1) noise
that zero-mean gradients give Adam at beta1 = 0.9 (rms 0.229), in its stationary state. The learning rate is found such that `density` of
the weights change in one step. One tensor is in memory at a time; the same arguments give the same bytes with the same numpy.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

BETA1 = 0.9
RMS_U = ((1 - BETA1) / (1 + BETA1)) ** 0.5
WEIGHT_STD = 0.02
_SAMPLE = 1 << 18


def shapes_of(num_params: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of tensors that come to about `num_params` in all: the wider, the deeper, as such models are."""
    hidden = max(64, round((num_params * 12) ** (1 / 3) / 64) * 64)
    inner, kv, vocab = round(hidden * 8 / 3 / 64) * 64, max(64, hidden // 4), 4 * hidden
    of_layer = (
        ("self_attn.q_proj", (hidden, hidden)), ("self_attn.k_proj", (kv, hidden)), ("self_attn.v_proj", (kv, hidden)),
        ("self_attn.o_proj", (hidden, hidden)), ("mlp.gate_proj", (inner, hidden)), ("mlp.up_proj", (inner, hidden)),
        ("mlp.down_proj", (hidden, inner)), ("input_layernorm", (hidden,)), ("post_attention_layernorm", (hidden,)),
    )  # fmt: skip
    in_layer = sum(int(np.prod(shape)) for _, shape in of_layer)
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(max(1, round((num_params - vocab * hidden) / in_layer))):
        for name, shape in of_layer:
            yield f"model.layers.{layer}.{name}.weight", shape
    yield "model.norm.weight", (hidden,)


def bf16(values: np.ndarray) -> np.ndarray:
    """uint16, rounded to nearest even."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def learning_rate(density: float) -> float:
    """At which a weight changes its bf16 cell with this chance: the mean of min(1, lr |u| / ulp(w))."""
    rng = np.random.default_rng(0)
    cells = 2.0 ** (np.floor(np.log2(np.abs(rng.normal(0, WEIGHT_STD, _SAMPLE)))) - 7)
    moves = np.abs(rng.normal(0, RMS_U, _SAMPLE)) / cells
    low, high = -60.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(1, moves * 2.0**middle).mean() < density else (low, middle)
    return float(2.0**low)


def snapshots(shape: tuple[int, ...], *, lr: float, num_steps: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """The bf16 bits of one tensor before the first step and after each; vectors are norms and lie about one."""
    master = rng.standard_normal(shape, np.float32) * np.float32(WEIGHT_STD) + np.float32(len(shape) == 1)
    momentum = rng.standard_normal(shape, np.float32) * np.float32(RMS_U)
    yield bf16(master)
    for _ in range(num_steps):
        momentum = np.float32(BETA1) * momentum + np.float32(1 - BETA1) * rng.standard_normal(shape, np.float32)
        master -= np.float32(lr) * momentum
        yield bf16(master)


def write_states(out: Path, *, num_params: int, density: float, num_steps: int, seed: int) -> list[Path]:
    """`num_steps` + 1 files, oldest first."""
    shapes, lr = dict(shapes_of(num_params)), learning_rate(density)
    header, at = {}, 0
    for name, shape in shapes.items():
        num_bytes = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + num_bytes]}
        at += num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"step-{step:05d}.safetensors" for step in range(num_steps + 1)]
    files = [path.open("wb") for path in paths]
    for file in files:
        file.write(struct.pack("<Q", len(text)) + text)
    for number, shape in enumerate(shapes.values()):
        rng = np.random.default_rng([seed, number])
        for file, bits in zip(files, snapshots(shape, lr=lr, num_steps=num_steps, rng=rng), strict=True):
            file.write(bits.tobytes())
    for file in files:
        file.close()
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--num-params", type=float, default=20e6)
    parser.add_argument("--density", type=float, default=0.0117, help="share of weights that change in one step")
    parser.add_argument("--num-steps", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    paths = write_states(args.out, num_params=int(args.num_params), density=args.density, num_steps=args.num_steps, seed=args.seed)
    print(f"{len(paths)} snapshots of {paths[0].stat().st_size / 1e6:.1f} MB at lr {learning_rate(args.density):.3g} in {args.out}")
    print(f"rollmill weights bench {paths[0]} {paths[-1]}")


if __name__ == "__main__":
    main()
