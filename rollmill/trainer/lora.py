"""Low-rank adapters: for a linear layer's weight W [O, I] the pair A [R, I], B [O, R] in fp32, whose weight is W + alpha / R * B A.

The model computes with the merged weight, rounded once to the serving dtype, instead of adding (x A) B beside it: so trainer and engine
compute the same bits, whatever fused layer or expert the weight lies in. With G the gradient of the merged weight,

    dA = alpha / R * B^T G          dB = alpha / R * G A^T

which are the gradients of the unmerged form too. Shapes: R rank, I inputs, O outputs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
import torch

from rollmill.model import Model

_ATTN = re.compile(r"\.self_attn\.[qkvo]_proj\.weight$")
_MLP = re.compile(r"\.(?:gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$")
_UNEMBED = re.compile(r"^lm_head\.weight$")


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which layers get an adapter, and how large.

    >>> LoraConfig(rank=16).scale
    2.0
    """

    rank: int
    """R, from 1."""
    alpha: float = 32.0
    """The adapter's product is multiplied by alpha / rank."""
    seed: int = 0
    """Of the initial A; B starts at 0, so that a new adapter changes nothing."""
    train_attn: bool = True
    """Query, key, value and output projections."""
    train_mlp: bool = True
    """Gate, up and down projections, those of experts included; never a router."""
    train_unembed: bool = True
    """The output layer. A model whose output layer is its embedding table has none of its own, and none is adapted."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def targets(model: Model, config: LoraConfig) -> dict[str, torch.Size]:
    """Name and shape of the stored tensors that get an adapter, in the model's order."""
    wanted = [p for p, is_on in ((_ATTN, config.train_attn), (_MLP, config.train_mlp), (_UNEMBED, config.train_unembed)) if is_on]
    found = {name: live.shape for name, live in model.slices().items() if any(p.search(name) for p in wanted)}
    if not found:
        raise ValueError("no layer of this model would get an adapter; set at least one of train_attn, train_mlp and train_unembed")
    return found


class Lora:
    """The adapters of one model; an `Overlay`, see `Attached`."""

    def __init__(self, config: LoraConfig, shapes: Mapping[str, torch.Size], device: torch.device | str = "cpu") -> None:
        if config.rank < 1:
            raise ValueError(f"rank is {config.rank}, it must be at least 1")
        if not config.alpha > 0:
            raise ValueError(f"alpha is {config.alpha}, it must be above 0")
        self.config, self.names = config, tuple(shapes)
        gen = torch.Generator().manual_seed(config.seed)
        self._params: dict[str, torch.Tensor] = {}
        for name, (num_out, num_in) in shapes.items():
            bound = num_in**-0.5
            a_RI = torch.empty(config.rank, num_in).uniform_(-bound, bound, generator=gen)
            self._params[f"{name}.A"] = a_RI.to(device)
            self._params[f"{name}.B"] = torch.zeros(num_out, config.rank, device=device)

    @classmethod
    def of(cls, model: Model, config: LoraConfig) -> Lora:
        """Fresh adapters for a model, where it lies."""
        return cls(config, targets(model, config), model.embed.device)

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """`NAME.A` and `NAME.B` for every adapted tensor."""
        return self._params

    def take(self, name: str, gradient: torch.Tensor) -> None:
        a_RI, b_OR, g_OI = self._params[f"{name}.A"], self._params[f"{name}.B"], gradient.float()
        _add_grad(a_RI, (b_OR.T @ g_OI).mul_(self.config.scale))
        _add_grad(b_OR, (g_OI @ a_RI.T).mul_(self.config.scale))

    def value(self, name: str, base: torch.Tensor) -> torch.Tensor:
        return torch.addmm(base.float(), self._params[f"{name}.B"], self._params[f"{name}.A"], alpha=self.config.scale)

    def copy(self) -> Lora:
        """The same values in memory of their own, without gradients."""
        other = object.__new__(Lora)
        other.config, other.names = self.config, self.names
        other._params = {key: p.detach().clone() for key, p in self._params.items()}
        return other

    @torch.no_grad()
    def load(self, params: Mapping[str, torch.Tensor]) -> None:
        """Take over values; they must be of the same layers and rank."""
        if params.keys() != self._params.keys():
            odd = min(params.keys() ^ self._params.keys())
            raise ValueError(f"the adapters do not fit: {odd!r} is on one side only; make them with the same train_* settings")
        for key, mine in self._params.items():
            if mine.shape != params[key].shape:
                raise ValueError(f"adapter {key!r} has shape {tuple(params[key].shape)}, this one {tuple(mine.shape)}; use the same rank")
        for key, mine in self._params.items():
            mine.copy_(params[key])


def _add_grad(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
