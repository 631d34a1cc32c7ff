"""Draws one token per row of a logits batch, as a pure function of logits, parameters, seed and position.

A row's randomness is one uniform number hashed from (seed, position), turned into a token by the inverse of the cumulative
distribution: the neighbours in the batch cannot move it. Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from rollmill.ops import Ops

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)


def _mix64(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _MIX_A
    x = (x ^ (x >> np.uint64(27))) * _MIX_B
    return x ^ (x >> np.uint64(31))


def keyed_uniform(seed_N: np.ndarray, position_N: np.ndarray) -> np.ndarray:
    """float64[N] in [0, 1) with 53 random bits, by (seed, position) alone."""
    key_N = _mix64(seed_N.astype(np.uint64) + _GOLDEN)
    return (_mix64(key_N + (position_N.astype(np.uint64) + np.uint64(1)) * _GOLDEN) >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Lanes(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters of N rows."""

    temperature_N: np.ndarray
    top_p_N: np.ndarray
    top_k_N: np.ndarray
    seed_N: np.ndarray
    guided: list[int] = []
    """Rows that have a constraint."""
    topped: list[int] = []
    """Rows that want the most likely tokens told."""

    @property
    def cut_N(self) -> np.ndarray:
        """Which rows sample from less than the whole vocabulary."""
        return (self.top_p_N < 1) | (self.top_k_N > 0)

    @property
    def is_cut(self) -> bool:
        return bool(self.cut_N.any())


def _keep_mask(logits_NV: torch.Tensor, top_p_N: torch.Tensor, top_k_N: torch.Tensor) -> torch.Tensor:
    """The tokens that top_p and top_k leave; the most likely one always stays."""
    sorted_NV, order_NV = logits_NV.softmax(-1).sort(dim=-1, descending=True, stable=True)
    before_NV = sorted_NV.cumsum(-1, dtype=torch.float64) - sorted_NV
    rank_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    keep_NV = (before_NV < top_p_N[:, None]) | (top_p_N[:, None] >= 1)
    keep_NV &= (rank_V < top_k_N[:, None]) | (top_k_N[:, None] <= 0)
    keep_NV[:, 0] = True
    return torch.zeros_like(keep_NV).scatter_(1, order_NV, keep_NV)


def _bits(mask_RW: np.ndarray, num_tokens: int, device: torch.device) -> torch.Tensor:
    """bool[R, V] of words of 32 tokens, unpacked where they are used: an eighth of a byte per token travels."""
    mask_RW1 = torch.from_numpy(mask_RW.view(np.int32)).to(device)[:, :, None]
    bits_RW32 = (mask_RW1 >> torch.arange(32, dtype=torch.int32, device=device)) & 1
    return bits_RW32.flatten(1)[:, :num_tokens].bool()


def sample(
    ops: Ops, logits_NV: torch.Tensor, lanes: Lanes, position_N: np.ndarray, mask_RW: np.ndarray | None = None
) -> tuple[list[int], list[float]]:
    """Token and logprob per row of logits that are divided by the temperature already, with one transfer to the host.

    `mask_RW` holds the tokens that the `guided` rows may take, as bits. The logprob is the logits' float32 log-softmax, before
    masks, top_p and top_k; at temperature 0 that of the plain logits. A row whose logits are not numbers gives logprob nan.
    """
    device, greedy_N = logits_NV.device, lanes.temperature_N == 0
    allowed_NV = logits_NV
    if mask_RW is not None:
        rows_R = torch.tensor(lanes.guided, device=device)
        shut_RV = ~_bits(mask_RW, logits_NV.shape[1], device)
        allowed_NV = logits_NV.index_copy(0, rows_R, logits_NV[rows_R].masked_fill(shut_RV, float("-inf")))
    if greedy_N.all():
        picked_N = allowed_NV.argmax(-1)
    else:
        open_NV = allowed_NV
        if lanes.is_cut:
            # Only the rows that ask for it: sorting a vocabulary costs more than everything else here.
            rows = np.flatnonzero(lanes.cut_N)
            rows_R = torch.from_numpy(rows).to(device)
            top_p_R, top_k_R = (torch.from_numpy(x[rows]).to(device) for x in (lanes.top_p_N, lanes.top_k_N))
            keep_RV = _keep_mask(allowed_NV[rows_R], top_p_R, top_k_R)
            open_NV = allowed_NV.index_copy(0, rows_R, allowed_NV[rows_R].masked_fill(~keep_RV, float("-inf")))
        picked_N = ops.pick(open_NV, torch.from_numpy(keyed_uniform(lanes.seed_N, position_N)).to(device))
        if greedy_N.any():
            picked_N = torch.where(torch.from_numpy(greedy_N).to(device), allowed_NV.argmax(-1), picked_N)
    logprob_N, _ = ops.score(logits_NV, picked_N)
    return to_host(picked_N, logprob_N)


def most_likely(ops: Ops, logits_RV: torch.Tensor, num: int) -> list[list[tuple[int, float]]]:
    """The `num` likeliest tokens of each row with their logprobs, likeliest first: the bits that `sample` gives the one it draws."""
    ids_RK = logits_RV.topk(min(num, logits_RV.shape[1])).indices
    # Pass by pass over the same rows: a row per token would take `num` times the memory.
    logprobs_RK = torch.stack([ops.score(logits_RV, ids_R.contiguous())[0] for ids_R in ids_RK.unbind(1)], 1)
    ids, logprobs = torch.stack((ids_RK.double(), logprobs_RK.double())).tolist()
    return [[(int(i), lp) for i, lp in zip(*row, strict=True)] for row in zip(ids, logprobs, strict=True)]


def to_host(ids_N: torch.Tensor, logprobs_N: torch.Tensor) -> tuple[list[int], list[float]]:
    """One transfer: both fit float64 exactly (ids below 2**53)."""
    ids, logprobs = torch.stack((ids_N.double(), logprobs_N.double())).tolist()
    return [int(i) for i in ids], logprobs
