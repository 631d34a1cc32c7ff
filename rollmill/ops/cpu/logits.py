"""Scoring and drawing tokens on the CPU by compiled loops over rows of logits, with a gradient for the score.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rollmill.ops.cpu.kernels import pick_rows, score_rows
from rollmill.ops.cpu.threads import share_rows

# Operations for one logit: an exponential and a few sums.
_COST = 24


def score(logits_NV: torch.Tensor, ids_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if not (torch.is_grad_enabled() and logits_NV.requires_grad):
        return _score(logits_NV, ids_N)
    return Score.apply(logits_NV, ids_N)


def _score(logits_NV: torch.Tensor, ids_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = logits_NV.detach().float().contiguous().numpy()
    logprob, entropy = np.empty((2, len(rows)), np.float32)
    ids = ids_N.detach().long().contiguous().numpy()
    share_rows(score_rows, rows, ids, logprob, entropy, num_rows=len(rows), work=_COST * rows.size)
    return torch.from_numpy(logprob), torch.from_numpy(entropy)


class Score(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: torch.Tensor, ids_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logprob_N, entropy_N = _score(logits_NV, ids_N)
        ctx.save_for_backward(logits_NV, ids_N)
        ctx.mark_non_differentiable(entropy_N)
        return logprob_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits_NV, ids_N = ctx.saved_tensors
        by_logits_NV = logits_NV.softmax(-1).mul_(-grads[0][:, None])
        return by_logits_NV.scatter_add_(1, ids_N[:, None], grads[0][:, None].to(by_logits_NV.dtype)), None


def pick(logits_NV: torch.Tensor, uniform_N: torch.Tensor) -> torch.Tensor:
    rows, uniform = logits_NV.detach().float().contiguous().numpy(), uniform_N.numpy()
    picked = np.empty(len(rows), np.int64)
    share_rows(pick_rows, rows, uniform, picked, num_rows=len(rows), work=_COST * rows.size)
    return torch.from_numpy(picked)
