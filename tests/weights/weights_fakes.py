"""Named stand-ins for the tests of the weight path: an engine with live weights, a crowd of tensors, a publisher to be killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection

import torch

from rollmill.weights import DirectoryStore, Publisher


class EngineFake:
    """Live weights that are written in place, as an engine's are; `drop` names a tensor its loader forgets."""

    def __init__(self) -> None:
        self.live: dict[str, torch.Tensor] = {}
        self.drop: str | None = None

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        for name, tensor in tensors.items():
            if name == self.drop and name in self.live:
                continue
            if name in self.live and self.live[name].shape == tensor.shape and self.live[name].dtype == tensor.dtype:
                self.live[name].copy_(tensor)
            else:
                self.live[name] = tensor.clone()
        return self.live


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


def publish_steps(path: str, first_step: int, num_steps: int, heard: Connection) -> None:
    """The body of a trainer process: says each version as it is assigned and as it is published."""
    torch.set_num_threads(1)
    store = DirectoryStore(path)
    with Publisher(store, run_id="crash", anchor_every=5, on_published=lambda p: heard.send(("published", p.version))) as publisher:
        heard.send(("assigned", publisher.resume(weights_at(first_step), step=first_step)))
        for step in range(first_step + 1, first_step + num_steps):
            heard.send(("assigned", publisher.submit(weights_at(step), step=step)))


def publish_and_die(path: str, first_step: int, die_at: int, heard: Connection) -> None:
    """The same, but killed with -9 just before its `die_at`-th write becomes durable or visible."""
    count = 0

    def dying(real: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object) -> None:
            nonlocal count
            count += 1
            if count == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            real(*args)

        return call

    os.fsync, os.replace = dying(os.fsync), dying(os.replace)
    publish_steps(path, first_step, 4, heard)
