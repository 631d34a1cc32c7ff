"""Chunks to code: special codes of every dtype, changes of every kind, and a training run in miniature."""

from __future__ import annotations

import numpy as np

from rollmill.weights.chunk import elements_of

CGR_DTYPES = (
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "packed_uint4",
    "uint8",
    "int8",
    "bool",
    "int16",
    "uint16",
)
WIDE_DTYPES = ("float32", "float64", "int32", "int64", "uint32", "uint64", "complex32", "complex64", "complex128")
DTYPES = CGR_DTYPES + WIDE_DTYPES


def codes_of(dtype: str, rng: np.random.Generator, size: int, kind: str) -> np.ndarray:
    """`weights` look like those of a model; `any` is every bit pattern; `special` is zeros of either sign, infinities, NaNs, denormals."""
    elements = elements_of(dtype)
    width = elements.code_bytes
    size = size * elements.element_bytes // width
    anything = (
        rng.integers(0, 1 << (8 * width), size, dtype=np.uint64, endpoint=False) if width < 8 else rng.integers(0, 2**64, size, np.uint64)
    )
    if kind == "any":
        return anything.astype(f"<u{width}")
    if kind == "special":
        ones, top = (1 << (8 * width)) - 1, 1 << (8 * width - 1)
        special = np.array(
            [0, 1, 2, top - 1, top, top + 1, ones, ones >> 1, top >> 1, 0x7F80 & ones, 0xFF80 & ones, 0x7FC1 & ones], np.uint64
        )
        return rng.choice(special, size).astype(f"<u{width}")
    if dtype == "bfloat16":
        return bfloat16_of(rng.normal(0, 0.02, size).astype(np.float32))
    if dtype in ("float16", "float32", "float64"):
        return rng.normal(0, 0.02, size).astype(f"<f{width}").view(f"<u{width}")
    return rng.binomial(16, 0.5, size).astype(f"<u{width}") * 5


def changed(codes: np.ndarray, rng: np.random.Generator, density: float, kind: str) -> np.ndarray:
    """`step` moves a code to a neighbour, `jump` anywhere, `mixed` mostly to a neighbour, `copy` to the same code everywhere."""
    new = codes.copy()
    where = np.flatnonzero(rng.random(len(codes)) < density)
    near = (codes[where].astype(np.uint64) + rng.choice(np.array([1, 2**64 - 1], np.uint64), len(where))).astype(codes.dtype)
    far = rng.integers(0, 2**63, len(where), np.uint64).astype(codes.dtype)
    if kind == "step":
        new[where] = near
    elif kind == "jump":
        new[where] = far
    elif kind == "mixed":
        new[where] = np.where(rng.random(len(where)) < 0.05, far, near)
    else:
        new[where] = 3
    return new


def bfloat16_of(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def adamw_steps(size: int, lr: float, num_steps: int, seed: int = 0) -> list[np.ndarray]:
    """bf16 copies of fp32 masters after steps of lr times an update that, as Adam's first moment does, keeps 0.9 of itself."""
    rng = np.random.default_rng(seed)
    master = rng.normal(0, 0.02, size).astype(np.float32)
    update = rng.normal(0, 0.23, size).astype(np.float32)
    copies = [bfloat16_of(master)]
    for _ in range(num_steps):
        update = 0.9 * update + rng.normal(0, 0.1, size).astype(np.float32)
        master = master - np.float32(lr) * update
        copies.append(bfloat16_of(master))
    return copies
