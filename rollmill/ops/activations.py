"""Activations as a quantised product sees them: each token rounded on its own, as `rollmill.weights.quant` would a matrix of one row.

Nothing here looks beyond a row, so a token cannot tell its neighbours or what comes after it. Rounding adds and takes away a number so
large that only the wanted bits survive: to nearest, ties to even, the same on every device. Knows no weights.
Shapes: T packed tokens, D inputs, B blocks of a row, C columns of a block.
"""

from __future__ import annotations

import torch

FP8_COLUMNS, FP4_COLUMNS = 128, 16
_EXPONENT, _MANTISSA = 0x7F800000, 0x7FFFFF
_E4M3 = (3, -6)
_E2M1 = (1, 0)
"""Bits after the leading one, exponent of the least normal number."""
_E4M3_TOP, _E4M3_TOP_SIXFOLD = (int(torch.tensor(n * 464.0).view(torch.int32)) for n in (1, 6))
"""Bits of the largest number that rounds to 448, the end of e4m3, and of six times that."""
_E4M3_NORMAL, _E4M3_MAX = 2.0**-6, 448.0
_LEAST_EXPONENT = -100
"""Of a scale, so that no value here is a subnormal float32."""


def fp8_rows(x_TD: torch.Tensor) -> torch.Tensor:
    """The values of e4m3 codes with one power of two for each 128 columns of a token. Magnitudes from 2^108 on become NaN.

    >>> fp8_rows(torch.tensor([[448.0, 17.0, 19.0, 1e-6]]))
    tensor([[448.,  16.,  20.,   0.]])
    """
    blocks_TBC = _blocks(x_TD, FP8_COLUMNS)
    exponent_TB1 = _exponent(blocks_TBC.abs().amax(-1, keepdim=True), _E4M3_TOP)
    bits, least = _E4M3
    return _whole(_rounded(blocks_TBC, bits, exponent_TB1 + least), x_TD)


def nvfp4_rows(x_TD: torch.Tensor) -> torch.Tensor:
    """The values of e2m1 codes with an e4m3 scale for each 16 columns and a float32 one, a power of two, for the token.

    >>> nvfp4_rows(torch.tensor([[6.0, 2.4, 0.3, -0.2]]))
    tensor([[6.0000, 2.0000, 0.5000, 0.0000]])
    """
    blocks_TBC = _blocks(x_TD, FP4_COLUMNS)
    largest_TB1 = blocks_TBC.abs().amax(-1, keepdim=True)
    token_T11 = _pow2(_exponent(largest_TB1.amax(1, keepdim=True), _E4M3_TOP_SIXFOLD))
    # A tensor, never the number 6: a GPU would multiply by its reciprocal, which rounds otherwise.
    sixth_TB1 = largest_TB1 / token_T11 / torch.full((), 6.0, device=x_TD.device)
    scale_TB1 = _rounded(sixth_TB1, *_E4M3).clamp_(_E4M3_NORMAL, _E4M3_MAX) * token_T11
    return _whole(_rounded(blocks_TBC / scale_TB1, *_E2M1) * scale_TB1, x_TD)


def _blocks(x_TD: torch.Tensor, columns: int) -> torch.Tensor:
    padding = -x_TD.shape[1] % columns
    x_TD = x_TD.float()
    return (torch.nn.functional.pad(x_TD, (0, padding)) if padding else x_TD).unflatten(1, (-1, columns))


def _whole(blocks_TBC: torch.Tensor, like_TD: torch.Tensor) -> torch.Tensor:
    """Exact: the values have at most six significant bits, which every dtype of activations holds."""
    return blocks_TBC.flatten(1)[:, : like_TD.shape[1]].to(like_TD.dtype)


def _exponent(largest: torch.Tensor, limit: int) -> torch.Tensor:
    """The least e (int32) with largest / 2^e <= limit, which comes as its bits; read off the bits."""
    bits = largest.view(torch.int32)
    exponent = (bits >> 23) - (limit >> 23) + ((bits & _MANTISSA) > (limit & _MANTISSA))
    return exponent.clamp_(min=_LEAST_EXPONENT)


def _pow2(exponent: torch.Tensor) -> torch.Tensor:
    return ((exponent + 127) << 23).view(torch.float32)


def _rounded(y: torch.Tensor, bits: int, least: torch.Tensor | int) -> torch.Tensor:
    """To `bits` bits after the leading one, or for magnitudes under 2^least to the step that numbers have there; -0 becomes 0.

    1.5 * 2^(e + 23 - bits) added to a number of exponent e leaves a sum whose last bit is the step wanted. Where that would be too large
    for a float32 it is NaN, and so is the result: only a model that has diverged computes such numbers.
    """
    rise = 23 - bits
    floor, cap = (least + 127) << 23, (255 - rise) << 23
    field = y.view(torch.int32) & _EXPONENT
    field = field.clamp_(floor, cap) if isinstance(floor, int) else field.clamp_(floor, torch.full_like(floor, cap))
    anchor = field.add_((rise << 23) + 0x400000).view(torch.float32)
    return (y + anchor).sub_(anchor)
