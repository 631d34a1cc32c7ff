"""Quantised copies of weights as inference runs them: pure functions of the values, equal on every device, stable when repeated.

Scales are powers of two (times e4m3 in NVFP4), so scaling is exact; rounding is to nearest, ties to even, by comparing with exact
borders, and never divides. Quantising what was dequantised gives the same bits. Knows tensors and their names, no store.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from rollmill.weights.errors import UnknownFormat

Tensors = dict[str, torch.Tensor]


class Scheme(StrEnum):
    """What `Schema.quantiser` holds. The number after the slash grows when the same weights would give other bits."""

    FP8_BLOCK = "fp8_e4m3_block128_pow2/1"
    """X e4m3, X_scale_inv float32 for each 128 x 128 block."""
    FP8_TENSOR = "fp8_e4m3_tensor_pow2/1"
    """X e4m3, X_scale float32 for the tensor."""
    MXFP4 = "mxfp4_block32_even/1"
    """X e2m1 two a byte, X_scale e8m0 for each 32 columns of a row."""
    NVFP4 = "nvfp4_block16_pow2/1"
    """X e2m1 two a byte, X_scale e4m3 for each 16 columns of a row, X_scale_2 float32 for the tensor."""


_SUFFIXES = {
    Scheme.FP8_BLOCK: ("_scale_inv",),
    Scheme.FP8_TENSOR: ("_scale",),
    Scheme.MXFP4: ("_scale",),
    Scheme.NVFP4: ("_scale", "_scale_2"),
}
_BLOCK = {Scheme.MXFP4: 32, Scheme.NVFP4: 16}
_FP8_BLOCK = 128
_E4M3_MAX = 448.0
_E4M3_BORDER = 464.0
"""The largest number that rounds to 448 where e4m3 would go on with 480."""
_SCALE_CODES = (0x08, 0x7E)
"""The e4m3 codes that block scales use, all normal: below them steps are so coarse that quantising twice could differ from once."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_BORDERS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
"""Half-way points between neighbours, and whether the point itself goes up: ties go to the even code."""
_LEAST_EXPONENT = -100
"""Of any scale. Keeps every product a normal float32, so that flushing subnormals to zero, which devices do differently, cannot matter."""
_LARGEST = 2.0**126
"""From here on rounding up could reach infinity."""
_KEPT = re.compile(r"norm|embed|lm_head|output_layer|router|(^|\.)(gate|wte|wpe)\.weight$")
_FUSED = ((re.compile(r"\b[qkv]_proj\b"), "qkv_proj"), (re.compile(r"\b(gate|up)_proj\b"), "gate_up_proj"))


def scheme_of(quantiser: str) -> Scheme:
    """The scheme a schema names; UnknownFormat when this Rollmill cannot tell what its codes mean."""
    try:
        return Scheme(quantiser)
    except ValueError:
        known = ", ".join(Scheme)
        raise UnknownFormat(f"quantiser {quantiser!r} is not one of {known}; read it with the Rollmill that wrote it") from None


def stays(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor is left as it is: norms, embeddings, output head, router, and whatever is no matrix of a linear layer."""
    return tensor.dim() != 2 or not name.endswith("weight") or not tensor.is_floating_point() or _KEPT.search(name) is not None


def fused_with(name: str) -> str:
    """The matrix into which an engine fuses this one (q, k and v; gate and up); those of one name share the scale of the whole tensor."""
    for pattern, whole in _FUSED:
        name = pattern.sub(whole, name)
    return name


def quantise(name: str, tensor: torch.Tensor, scheme: Scheme, *, largest: torch.Tensor | None = None) -> Tensors:
    """Codes under the tensor's own name, scales beside it. `largest` is the largest magnitude of all that share the tensor's scale.

    >>> {name: tuple(t.shape) for name, t in quantise("w", torch.ones(3, 64), Scheme.MXFP4).items()}
    {'w': (3, 32), 'w_scale': (3, 2)}
    """
    values = _checked(name, tensor, scheme)
    if largest is None:
        largest = _largest(values)
    if scheme is Scheme.FP8_BLOCK:
        codes, scales = _fp8_blocks(values)
        return {name: codes, f"{name}_scale_inv": scales}
    if scheme is Scheme.FP8_TENSOR:
        exponent = _exponent(largest, _E4M3_BORDER)
        return {name: _e4m3(values * _pow2(-exponent)), f"{name}_scale": _pow2(exponent)}
    blocks = _row_blocks(values.abs(), _BLOCK[scheme])
    if scheme is Scheme.MXFP4:
        exponent = _exponent(blocks.amax(dim=2), 7.0, below=True)
        codes = _e2m1(blocks * _pow2(-exponent)[:, :, None], None, values)
        return {name: codes, f"{name}_scale": (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)}
    exponent = _exponent(largest, 6 * _E4M3_BORDER)
    blocks = blocks * _pow2(-exponent)
    scales = _sixth_as_e4m3(blocks.amax(dim=2))
    return {name: _e2m1(blocks, scales.float(), values), f"{name}_scale": scales, f"{name}_scale_2": _pow2(exponent)}


def dequantise(name: str, tensors: Mapping[str, torch.Tensor], scheme: Scheme, *, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The values that codes and scales stand for, exactly: they have at most six significant bits."""
    missing = [name + suffix for suffix in ("", *_SUFFIXES[scheme]) if name + suffix not in tensors]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing; {scheme} needs the codes and every scale of {name}")
    codes, scales = tensors[name], tensors[name + _SUFFIXES[scheme][0]]
    if scheme is Scheme.FP8_TENSOR:
        return (codes.float() * scales).to(dtype)
    if scheme is Scheme.FP8_BLOCK:
        rows, cols = codes.shape
        spread = scales.repeat_interleave(_FP8_BLOCK, 0)[:rows].repeat_interleave(_FP8_BLOCK, 1)[:, :cols]
        return (codes.float() * spread).to(dtype)
    packed = codes.view(torch.uint8)
    nibbles = torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=codes.device)
    factors = _pow2(scales.view(torch.uint8).int() - 127) if scheme is Scheme.MXFP4 else scales.float() * tensors[f"{name}_scale_2"]
    return (table[nibbles.long()] * factors.repeat_interleave(_BLOCK[scheme], 1)[:, : nibbles.shape[1]]).to(dtype)


@dataclass(frozen=True, kw_only=True)
class QuantisedCopy:
    """From the tensors of the trainer to those that are published; pass `quantiser` to the Publisher, and submit what a call returns.

    `QuantisedCopy(scheme=Scheme.FP8_BLOCK)({"a.weight": torch.randn(256, 256)})` has `a.weight` in e4m3 and `a.weight_scale_inv`.
    """

    scheme: Scheme
    keep: Callable[[str, torch.Tensor], bool] = stays
    """Which tensors pass as they are; they should come in the dtype that is served."""
    fuse: Callable[[str], str] = fused_with
    """Engines that fuse matrices read one whole-tensor scale for all parts, so parts of one name get one."""

    @property
    def quantiser(self) -> str:
        return str(self.scheme)

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        made: Tensors = {}
        largest = self._largest(tensors)
        for name, tensor in tensors.items():
            kept = self.keep(name, tensor)
            found = {name: tensor} if kept else quantise(name, tensor, self.scheme, largest=largest.get(self.fuse(name)))
            for key, value in found.items():
                if key in made or (key != name and key in tensors):
                    raise ValueError(
                        f"{key} is both a tensor of the model and a scale of {name}; rename the tensor or keep {name} as it is"
                    )
                made[key] = value
        return made

    def _largest(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        if self.scheme in (Scheme.FP8_TENSOR, Scheme.NVFP4):
            for name, tensor in tensors.items():
                if not self.keep(name, tensor):
                    whole, here = self.fuse(name), _largest(_checked(name, tensor, self.scheme))
                    found[whole] = torch.maximum(found[whole], here.to(found[whole].device)) if whole in found else here
        return found


def restored(tensors: Mapping[str, torch.Tensor], quantiser: str, *, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """A published set with its quantised tensors dequantised and the scales gone; refuses a quantiser it does not know."""
    if not quantiser:
        return dict(tensors)
    scheme = scheme_of(quantiser)
    suffixes = _SUFFIXES[scheme]
    quantised = [name for name in tensors if all(name + suffix in tensors for suffix in suffixes)]
    scales = {name + suffix for name in quantised for suffix in suffixes}
    return {
        name: dequantise(name, tensors, scheme, dtype=dtype) if name in quantised else t
        for name, t in tensors.items()
        if name not in scales
    }


def _checked(name: str, tensor: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    if tensor.dim() != 2 or tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; only float32, bfloat16 or float16 matrices are quantised: keep it"
        )
    if scheme in _BLOCK and tensor.shape[1] % 2:
        raise ValueError(f"{name} has {tensor.shape[1]} columns, and 4-bit codes lie two a byte; keep it or pad it to an even number")
    values = tensor.detach().float()
    held = values.abs() < _LARGEST
    if not bool(held.all()):
        count = int((~held).sum())
        raise ValueError(
            f"{name} has {count} values that are NaN, infinite or 2^126 and more; the trainer diverged: go back to an earlier step"
        )
    return values


def _largest(values: torch.Tensor) -> torch.Tensor:
    return values.abs().amax() if values.numel() else values.new_zeros(())


def _exponent(largest: torch.Tensor, limit: float, *, below: bool = False) -> torch.Tensor:
    """The least e (int32) with largest * 2^-e <= limit, or below it; read off the bits, since logarithms differ between devices."""
    bits, border = largest.view(torch.int32), int(torch.tensor(limit).view(torch.int32)) - below
    exponent = (bits >> 23) - (border >> 23) + ((bits & 0x7FFFFF) > (border & 0x7FFFFF)).int()
    return exponent.clamp(min=_LEAST_EXPONENT)


def _pow2(exponent: torch.Tensor) -> torch.Tensor:
    return ((exponent + 127) << 23).view(torch.float32)


def _e4m3(scaled: torch.Tensor) -> torch.Tensor:
    codes = scaled.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    # One zero: a weight that crosses it would change its code for nothing.
    return codes.masked_fill_(codes == 0x80, 0).view(torch.float8_e4m3fn)


def _fp8_blocks(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, cols = values.shape
    padded = torch.nn.functional.pad(values, (0, -cols % _FP8_BLOCK, 0, -rows % _FP8_BLOCK))
    blocks = padded.view(padded.shape[0] // _FP8_BLOCK, _FP8_BLOCK, padded.shape[1] // _FP8_BLOCK, _FP8_BLOCK)
    exponent = _exponent(blocks.abs().amax(dim=(1, 3)), _E4M3_BORDER)
    codes = _e4m3((blocks * _pow2(-exponent)[:, None, :, None]).view_as(padded)[:rows, :cols].contiguous())
    return codes, _pow2(exponent)


def _row_blocks(magnitudes: torch.Tensor, block: int) -> torch.Tensor:
    rows, cols = magnitudes.shape
    padding = -cols % block
    return torch.nn.functional.pad(magnitudes, (0, padding)).view(rows, (cols + padding) // block, block)


def _e2m1(blocks: torch.Tensor, scales: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
    """Packed codes of magnitudes over scales; a border times an e4m3 scale has at most seven significant bits, so comparing is exact."""
    codes = torch.zeros(blocks.shape, dtype=torch.uint8, device=blocks.device)
    for border, goes_up in _E2M1_BORDERS:
        against = border if scales is None else (scales * border)[:, :, None]
        codes += (blocks >= against) if goes_up else (blocks > against)
    flat = codes.flatten(1)[:, : values.shape[1]]
    flat = flat | (((values < 0) & (flat > 0)).to(torch.uint8) << 3)
    return (flat[:, 0::2] | flat[:, 1::2] << 4).contiguous().view(torch.float4_e2m1fn_x2)


def _sixth_as_e4m3(largest: torch.Tensor) -> torch.Tensor:
    """largest / 6 rounded to a normal e4m3 number without dividing: it is compared with six times every half-way point."""
    borders = torch.tensor(_sixfold_borders(), device=largest.device)
    return (torch.bucketize(largest, borders) + _SCALE_CODES[0]).to(torch.uint8).view(torch.float8_e4m3fn)


@functools.cache
def _sixfold_borders() -> tuple[float, ...]:
    first, last = _SCALE_CODES
    values = torch.arange(first, last + 1, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    borders = (3 * (values[:-1] + values[1:])).float()
    # `bucketize` counts borders below a value; one step down makes that "at or below", for ties that go up to an even code.
    goes_up = torch.arange(first, last) % 2 == 1
    return tuple(torch.where(goes_up, torch.nextafter(borders, torch.zeros_like(borders)), borders).tolist())
