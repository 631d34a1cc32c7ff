"""SwiGLU on the CPU by a compiled loop: torch's own splits a row between threads, and the tail of a part takes another exponential.

Shapes: T packed tokens, F inner size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rollmill.ops.cpu.kernels import swiglu_rows
from rollmill.ops.cpu.threads import share_rows

# Operations for one element: an exponential, a division and two products.
_COST = 24


class Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up_T2F)
        rows = gate_up_T2F.detach().float().contiguous().numpy()
        out = np.empty((len(rows), rows.shape[1] // 2), np.float32)
        share_rows(lambda a, b: swiglu_rows(rows, out, a, b), np.full(len(rows), _COST * out.shape[1]))
        return torch.from_numpy(out).to(gate_up_T2F.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        gate, up = ctx.saved_tensors[0].chunk(2, -1)
        grad, sigmoid = grads[0], torch.sigmoid(gate)
        by_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
        return torch.cat((by_gate, grad * gate * sigmoid), -1)
