"""The sparse feed-forward block of a decoder layer: norm, router, experts, and their sum in ascending expert id.

Nothing is added by atomics and no order depends on the batch, so a token's sum is a function of its own experts' outputs.
Shapes: T tokens, D hidden, K experts per token, X experts, F an expert's inner size, M = T * K rows sorted by expert.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from rollmill.model.config import MoEConfig
from rollmill.model.families import MoENames
from rollmill.model.mlp import swiglu
from rollmill.model.router import SigmoidRouter, SoftmaxRouter
from rollmill.model.routes import Routes


def run_experts(h_MD: torch.Tensor, counts_X: torch.Tensor, gate_up_X2FD: torch.Tensor, down_XDF: torch.Tensor) -> torch.Tensor:
    """Each expert on its run of rows: the first `counts_X[0]` rows belong to expert 0, and so on."""
    # Unbound once: indexing each expert would make autograd fill a gradient as large as all of them, once per expert.
    experts = zip(h_MD.split(counts_X.tolist()), gate_up_X2FD.unbind(), down_XDF.unbind(), strict=True)
    return torch.cat([swiglu(rows, gate_up, down) for rows, gate_up, down in experts if len(rows)])


def combine(y_TKD: torch.Tensor, gates_TK: torch.Tensor) -> torch.Tensor:
    """Weighted sum in the order of K, in float32: adding one expert after the other fixes the rounding."""
    out_TD = y_TKD[:, 0].float() * gates_TK[:, 0, None]
    for k in range(1, y_TKD.shape[1]):
        out_TD = out_TD + y_TKD[:, k].float() * gates_TK[:, k, None]
    return out_TD.to(y_TKD.dtype)


class MoE(nn.Module):
    def __init__(self, config: MoEConfig, *, hidden_size: int, norm_eps: float, names: MoENames, layer: int) -> None:
        super().__init__()
        c = config
        self.config, self.names, self.norm_eps, self.layer = config, names, norm_eps, layer
        self.norm = nn.Parameter(torch.ones(hidden_size))
        self.router = SigmoidRouter(c, hidden_size) if c.is_sigmoid else SoftmaxRouter(c, hidden_size)
        self.gate_up = nn.Parameter(torch.empty(c.num_experts, 2 * c.expert_size, hidden_size))
        self.down = nn.Parameter(torch.empty(c.num_experts, hidden_size, c.expert_size))
        if c.num_shared:
            self.shared_gate_up = nn.Parameter(torch.empty(2 * c.num_shared * c.expert_size, hidden_size))
            self.shared_down = nn.Parameter(torch.empty(hidden_size, c.num_shared * c.expert_size))

    def forward(self, x_TD: torch.Tensor, routes: Routes | None) -> torch.Tensor:
        return self.mix(F.rms_norm(x_TD, self.norm.shape, self.norm, self.norm_eps), routes)

    def mix(self, h_TD: torch.Tensor, routes: Routes | None) -> torch.Tensor:
        ids_TK, gates_TK = self.router(h_TD, self.layer, routes)
        num_tokens, k = ids_TK.shape
        order_M = ids_TK.flatten().argsort(stable=True)
        counts_X = torch.bincount(ids_TK.flatten(), minlength=self.config.num_experts)
        # Every (token, slot) is read once, so the backward writes each place once and then sums over K: no atomics there either.
        h_MD = h_TD[:, None].expand(-1, k, -1)[order_M // k, order_M % k]
        y_MD = run_experts(h_MD, counts_X, self.gate_up, self.down)
        place_M = torch.empty_like(order_M).scatter_(0, order_M, torch.arange(len(order_M), device=order_M.device))
        out_TD = combine(y_MD[place_M].view(num_tokens, k, -1), gates_TK)
        if self.config.num_shared:
            out_TD = out_TD + swiglu(h_TD, self.shared_gate_up, self.shared_down)
        return out_TD

    def named_slices(self) -> Iterator[tuple[str, torch.Tensor]]:
        n, block = self.names, self.names.block
        yield "post_attention_layernorm.weight", self.norm
        for name, live in self.router.named_slices():
            yield f"{block}.{name}", live
        for x, (gate_up, down) in enumerate(zip(self.gate_up.unbind(), self.down.unbind(), strict=True)):
            gate, up = gate_up.chunk(2)
            yield f"{block}.experts.{x}.{n.gate}.weight", gate
            yield f"{block}.experts.{x}.{n.up}.weight", up
            yield f"{block}.experts.{x}.{n.down}.weight", down
        if self.config.num_shared:
            gate, up = self.shared_gate_up.chunk(2)
            yield f"{block}.shared_experts.gate_proj.weight", gate
            yield f"{block}.shared_experts.up_proj.weight", up
            yield f"{block}.shared_experts.down_proj.weight", self.shared_down
