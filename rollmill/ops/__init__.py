"""Operations of a forward in several numerics profiles, one per model; importing this asks the CPU's matrix library for its strict mode."""

from __future__ import annotations

import torch

from rollmill.ops.base import PAGE, Ops, Pages, Spans, tempered
from rollmill.ops.cpu.exact import CpuOps
from rollmill.ops.cpu.strict import ask_for_strict
from rollmill.ops.noisy import NoisyOps
from rollmill.ops.quantised import QUANTISED, NativeLinear, QuantisedOps
from rollmill.ops.torch_ops import TorchOps

__all__ = ["PAGE", "PROFILES", "CpuOps", "Ops", "Pages", "QuantisedOps", "Spans", "TorchOps", "ops_for", "tempered"]

PROFILES = ("exact", "fast", "noisy", *QUANTISED)

ask_for_strict()


def ops_for(profile: str, device: torch.device | str) -> Ops:
    """The operations of a profile on a device."""
    device = torch.device(device)
    if profile == "fast":
        return TorchOps(device)
    if profile in QUANTISED:
        return QuantisedOps(profile, ops_for("exact", device), native=_native(profile, device))
    if profile == "noisy":
        return NoisyOps(device)
    if profile != "exact":
        raise ValueError(f"there is no numerics profile {profile!r}; choose one of {', '.join(PROFILES)}")
    if device.type == "cpu":
        return CpuOps()
    if device.type == "cuda":
        from rollmill.ops.cuda import CudaOps

        return CudaOps(device)
    raise ValueError(f"the exact profile runs on cpu and cuda, not on {device.type!r}; choose the numerics profile 'fast'")


def _native(profile: str, device: torch.device) -> NativeLinear | None:
    """The device's own product of quantised operands: e4m3 from compute capability 8.9 on; everything else is emulated."""
    if profile == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        from rollmill.ops.cuda.fp8 import linear_fp8

        return linear_fp8
    return None
