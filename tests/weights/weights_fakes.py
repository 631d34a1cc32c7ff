"""Named stand-ins for the tests of the weight path: live weights that can go wrong, and weights that depend on the step only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rollmill.weights.live import HostWeights, TensorPatch


class ReplicaFake(HostWeights):
    """Live weights in host memory; `drop` names a tensor that its loader forgets."""

    def __init__(self) -> None:
        super().__init__({name: torch.zeros_like(tensor) for name, tensor in weights_at(0).items()})
        self.drop: str | None = None

    def apply(self, staged: Sequence[TensorPatch]) -> None:
        super().apply([patch for patch in staged if patch.held.spec.name != self.drop])

    def hurt(self, name: str, position: int) -> None:
        """A bit of live memory flips, as bad hardware does it."""
        self.read(name)[position] ^= 1


def weights_at(step: int) -> dict[str, torch.Tensor]:
    """Small weights that depend on nothing but the step: a few elements move each time, one tensor never does."""
    generator = torch.Generator().manual_seed(7)
    wide = torch.randn(24, 16, generator=generator)
    moves = torch.bincount(torch.arange(step + 1) * 37 % wide.numel(), minlength=wide.numel()).reshape(wide.shape)
    return {
        "wide": (wide + 0.5 * moves).bfloat16(),
        "gain": torch.full((9,), float(step)),
        "still": torch.arange(5, dtype=torch.int64),
        "empty": torch.empty(0, 4),
    }


def same_bits(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[n].dtype == right[n].dtype and left[n].shape == right[n].shape and raw(left[n]) == raw(right[n]) for n in left
    )


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
