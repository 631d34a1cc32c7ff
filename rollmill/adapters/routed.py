"""Routed experts as other engines send them, checked and turned into our routing record; pure.

Shapes: T tokens, L layers, K experts per token.
"""

from __future__ import annotations

import base64
import binascii
import io

import numpy as np

from rollmill.model.route_record import RouteRecord, RouteShape


def from_npy(text: str) -> np.ndarray:
    """[T, L, K] of any integer dtype, out of base64 of an .npy file: vLLM's way."""
    try:
        return np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (binascii.Error, ValueError, EOFError) as error:
        raise ValueError(f"routed experts are not a base64 .npy file: {error}") from error


def from_int32(text: str, shape: RouteShape) -> np.ndarray:
    """[T, L, K] out of base64 of flat little-endian int32: SGLang's way."""
    try:
        flat = np.frombuffer(base64.b64decode(text, validate=True), "<i4")
        return flat.reshape(-1, shape.num_layers, shape.top_k)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"routed experts are not base64 of int32 rows of {shape.num_layers} layers x {shape.top_k}: {error}") from error


def record_of(ids_TLK: np.ndarray, shape: RouteShape, *, num_prompt: int, num_sampled: int, start: int) -> bytes:
    """Our record of tokens `start` on. The last sampled token was never computed and has no row.

    Some builds ignore the start and send every row, which is told from the count and cut. Any other count is refused, since rows
    shifted by one would replay the wrong experts without a sign.
    """
    num_all = num_prompt + num_sampled - 1
    if not 0 <= start <= num_all:
        raise ValueError(f"routes_from is {start}, the sequence has {num_all} computed tokens")
    if ids_TLK.ndim != 3 or ids_TLK.shape[1:] != (shape.num_layers, shape.top_k) or ids_TLK.dtype.kind not in "iu":
        raise ValueError(
            f"routed experts are {ids_TLK.dtype} {ids_TLK.shape}, the model has {shape.num_layers} layers and {shape.top_k} experts a token"
        )
    if len(ids_TLK) not in (num_all - start, num_all):
        raise ValueError(f"{len(ids_TLK)} rows of routed experts for {num_all} computed tokens from {start} on; expected {num_all - start}")
    ids = ids_TLK[len(ids_TLK) - (num_all - start) :].astype(np.int64)
    if ids.size and (ids.min() < -1 or ids.max() >= shape.num_experts):
        raise ValueError(f"routed experts name {ids.min()}..{ids.max()}, the model has 0..{shape.num_experts - 1}")
    # Engines fill the columns of dense layers with anything.
    dense = np.setdiff1d(np.arange(shape.num_layers), shape.layers)
    ids[:, dense] = -1
    return RouteRecord.of(ids.astype(np.int16), shape).to_bytes()
