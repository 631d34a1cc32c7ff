"""The best experts of a token: by score, ties to the lower id, listed in ascending id; one program a token.

Shapes: T tokens, X experts, K chosen.
"""

# Kernel arguments are pointers and numbers on the device; they have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _top_ids(scores, ids, X, NUM: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    left = tl.load(scores + token * X + expert, mask=expert < X, other=float("-inf")).to(tl.float32)
    # What is no number is ruled out too: without a best score nothing would be found, and the ids would be whatever memory held.
    left = tl.where(left == left, left, float("-inf"))
    # Scores of -inf are ruled out, but a token needs NUM experts all the same: places that do not exist come after them.
    is_open = expert < X
    chosen = expert < 0
    for _ in range(NUM):
        best = tl.max(tl.where(is_open, left, float("-inf")), 0)
        found = tl.min(tl.where(is_open & (left == best), expert, BLOCK), 0)
        chosen = chosen | (expert == found)
        is_open = is_open & (expert != found)
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(ids + token * NUM + place, expert.to(tl.int64), mask=chosen)


def top_ids(scores_TX: torch.Tensor, k: int) -> torch.Tensor:
    """int64[T, K]: what a stable descending sort puts first, sorted by id. What is no number counts as -inf."""
    tokens, experts = scores_TX.shape
    assert k <= experts
    ids_TK = torch.empty((tokens, k), dtype=torch.int64, device=scores_TX.device)
    if tokens:
        _top_ids[(tokens,)](scores_TX.contiguous(), ids_TK, experts, NUM=k, BLOCK=triton.next_power_of_2(experts), num_warps=1)
    return ids_TK
