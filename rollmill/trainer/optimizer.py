"""AdamW on fp32 masters: the live weights are the masters rounded once to the serving dtype.

The trainer's forward therefore runs on exactly the values that are shipped, and the engine computes with the same.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from rollmill.model.transformer import Model


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    grad_norm: float
    """Global L2 norm before clipping."""
    is_applied: bool
    """False when the gradient was not finite: nothing changed."""


class MasterAdamW:
    """Owns the masters and moments; `step` turns gradients of the live weights into new live weights."""

    def __init__(
        self,
        model: Model,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-15,
        weight_decay: float = 0.0,
        clip_norm: float = 1.0,
        warmup_steps: int = 0,
        round_live: bool = True,
    ) -> None:
        self.model, self.lr, self.clip_norm, self.warmup_steps, self.round_live = model, lr, clip_norm, warmup_steps, round_live
        self.live = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach().float().clone() for p in self.live]
        self.num_steps = 0
        self._adam = torch.optim.AdamW(self.masters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)

    def step(self, lr_scale: float = 1.0) -> StepStats:
        """Apply the accumulated gradients. A non-finite gradient is dropped whole, so it can never reach the moments."""
        for master, live in zip(self.masters, self.live, strict=True):
            master.grad = None if live.grad is None else live.grad.detach().float()
        norm = float(torch.nn.utils.clip_grad_norm_(self.masters, self.clip_norm, foreach=True))
        is_finite = norm == norm and norm != float("inf")
        if is_finite:
            self.num_steps += 1
            warm = min(1.0, self.num_steps / self.warmup_steps) if self.warmup_steps else 1.0
            for group in self._adam.param_groups:
                group["lr"] = self.lr * warm * lr_scale
            self._adam.step()
            self.copy_to_live()
        for master, live in zip(self.masters, self.live, strict=True):
            master.grad = live.grad = None
        return StepStats(grad_norm=norm, is_applied=is_finite)

    @torch.no_grad()
    def copy_to_live(self) -> None:
        dtype = self.model.serving_dtype
        for master, live in zip(self.masters, self.live, strict=True):
            live.copy_(master.to(dtype) if self.round_live else master)

    def state_dict(self) -> dict[str, Any]:
        return {"masters": self.masters, "adam": self._adam.state_dict(), "num_steps": self.num_steps}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["masters"]) != len(self.masters):
            raise ValueError(f"this checkpoint has {len(state['masters'])} tensors, the model {len(self.masters)}; it is another model's")
        for mine, theirs in zip(self.masters, state["masters"], strict=True):
            if mine.shape != theirs.shape:
                raise ValueError(f"this checkpoint has a tensor of shape {tuple(theirs.shape)} where the model has {tuple(mine.shape)}")
            mine.copy_(theirs)
        self._adam.load_state_dict(state["adam"])
        self.num_steps = state["num_steps"]
        self.copy_to_live()
