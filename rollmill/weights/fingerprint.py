"""A commutative fingerprint of live weights, equal for equal values whatever their layout, device or order; not cryptographic.

A tensor's value is the sum, mod 2^64, over its elements of mix(seed xor-ed with index and bits); the total is the sum over tensors.
`mix` is a bijection of 64-bit words, so one changed element always changes the sum; two swapped ones change it but for 2^-64.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch
from blake3 import blake3

from rollmill.weights.bits import dtype_name, words_of

_MASK = (1 << 64) - 1
# 64 Ki words keep the rows in a core's cache: 2 Mi bf16 parameters took 8.5 ms on one core, 12 ms in chunks of 16 Ki, 13 ms of 256 Ki.
_CPU_CHUNK = 1 << 16
# A GPU wants few launches: 16 Mi words, 256 MB of scratch.
_GPU_CHUNK = 1 << 24
_GOLDEN = 0x9E3779B97F4A7C15
_MUL_1 = 0xBF58476D1CE4E5B9
_MUL_2 = 0x94D049BB133111EB


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What a set of weights is, in 64 bits in all and 64 bits per tensor.

    >>> fingerprint({"w": torch.zeros(2)}).total == fingerprint({"w": torch.zeros(2, 2)[0]}).total
    True
    """

    total: str
    """16 hex digits: the sum of the tensors' values."""
    tensors: dict[str, str]
    """name -> 16 hex digits."""

    def differing(self, other: Fingerprint) -> tuple[str, ...]:
        """Names whose value differs, or that only one side has."""
        names = sorted(self.tensors.keys() | other.tensors.keys())
        return tuple(name for name in names if self.tensors.get(name) != other.tensors.get(name))


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> Fingerprint:
    rows: dict[torch.device, _Rows] = {}
    values = {}
    for name, tensor in tensors.items():
        # Made once per device and call: for a model of many small tensors they cost as much as the mixing.
        if tensor.device not in rows:
            rows[tensor.device] = _Rows(tensor.device, max(2 * t.numel() for t in tensors.values() if t.device == tensor.device))
        values[name] = f"{_sum(name, tensor, rows[tensor.device]):016x}"
    return combine(values)


def combine(values: Mapping[str, str]) -> Fingerprint:
    """The fingerprint of a set whose tensors' values are known."""
    return Fingerprint(total=f"{sum(int(value, 16) for value in values.values()) & _MASK:016x}", tensors=dict(values))


def tensor_fingerprint(name: str, tensor: torch.Tensor) -> str:
    """The value of one tensor as 16 hex digits."""
    return fingerprint({name: tensor}).tensors[name]


class _Rows:
    """The working memory of one pass: index * golden, which every chunk shifts by its own offset, and two scratch rows."""

    def __init__(self, device: torch.device, num_words: int) -> None:
        size = max(1, min(num_words, _CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK))
        self.stride = torch.arange(size, dtype=torch.int64, device=device).mul_(_signed(_GOLDEN))
        self.mixed, self.scratch = torch.empty_like(self.stride), torch.empty_like(self.stride)


def _sum(name: str, tensor: torch.Tensor, rows: _Rows) -> int:
    words = words_of(tensor)
    seed = _seed(name, dtype_name(tensor.dtype), tuple(tensor.shape))
    sums = []
    for start in range(0, words.numel(), len(rows.stride)):
        chunk = words[start : start + len(rows.stride)]
        x, y = rows.mixed[: len(chunk)], rows.scratch[: len(chunk)]
        torch.add(rows.stride[: len(chunk)], _signed(seed + start * _GOLDEN), out=x)
        x.bitwise_xor_(y.copy_(chunk))
        _mix(x, y)
        sums.append(x.sum())
    # Read only now, so that a GPU works through all chunks without waiting for the host.
    return sum(int(part) for part in sums) & _MASK


def _mix(x: torch.Tensor, y: torch.Tensor) -> None:
    """Two rounds of multiply and xor-shift in place; the mask turns torch's arithmetic shift into a logical one."""
    x.mul_(_signed(_MUL_1))
    torch.bitwise_right_shift(x, 32, out=y)
    x.bitwise_xor_(y.bitwise_and_((1 << 32) - 1))
    x.mul_(_signed(_MUL_2))
    torch.bitwise_right_shift(x, 29, out=y)
    x.bitwise_xor_(y.bitwise_and_((1 << 35) - 1))


def _seed(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    # The shape belongs to the identity: the same bytes in another shape are other weights.
    return int.from_bytes(blake3(repr((name, dtype, shape)).encode()).digest(length=8), "little")


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value
