"""What the codecs know of a dtype: the width of its codes, what to condition on and how neighbouring values are ordered; knows no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MAX_ELEMENTS = 1 << 20
"""Elements (bytes for 4-bit dtypes) in a chunk."""
MAX_CODES = 1 << 21
"""Codes in a chunk: two a byte for 4-bit dtypes, two an element for complex128."""


class Order(StrEnum):
    PLAIN = "plain"
    """Neighbouring values have neighbouring codes, modulo the width (integers of either kind, power-of-two scales)."""
    SIGN_MAGNITUDE = "sign-magnitude"
    """Floats: the top bit is the sign, the rest grows away from zero."""


@dataclass(frozen=True, kw_only=True)
class Elements:
    """How one dtype is coded, e.g. `Elements(dtype="bfloat16", bits=16, shift=7, mask=255, order=Order.SIGN_MAGNITUDE, is_float=True)`."""

    dtype: str
    """torch's name without `torch.`, or `packed_uint4`."""
    bits: int
    """Of one code: 4, 8, 16, 32 or 64."""
    shift: int = 0
    """The raw class of a code is `(code >> shift) & mask`."""
    mask: int = 0
    """0: one class."""
    order: Order = Order.PLAIN
    is_float: bool = False
    """Sign, exponent, mantissa: FULL rotates it so that the exponent fills the top byte."""
    element_bytes: int = 0
    """Of one element as torch counts them; derived from `bits` unless an element is two codes."""

    def __post_init__(self) -> None:
        if not self.element_bytes:
            object.__setattr__(self, "element_bytes", max(self.bits // 8, 1))

    @property
    def code_bytes(self) -> int:
        """Of one addressable code: 4-bit codes are addressed by the byte."""
        return max(self.bits // 8, 1)

    @property
    def has_cgr(self) -> bool:
        return self.bits <= 16


def _float(dtype: str, bits: int, mantissa: int, mask: int) -> Elements:
    return Elements(dtype=dtype, bits=bits, shift=mantissa, mask=mask, order=Order.SIGN_MAGNITUDE, is_float=True)


# One class where the grid is uniform: conditioning int8 on its top bits, or int4 on its code, gains less than its header costs.
# e4m3 on five bits instead of its four of exponent loses 0.1 % to 0.6 % for the same reason.
_ALL = (
    _float("bfloat16", 16, 7, 255),
    _float("float16", 16, 10, 31),
    _float("float8_e4m3fn", 8, 3, 15),
    _float("float8_e4m3fnuz", 8, 3, 15),
    _float("float8_e5m2", 8, 2, 31),
    _float("float8_e5m2fnuz", 8, 2, 31),
    _float("float4_e2m1fn_x2", 4, 0, 7),
    Elements(dtype="packed_uint4", bits=4),
    *(Elements(dtype=dtype, bits=8) for dtype in ("uint8", "int8", "bool", "float8_e8m0fnu")),
    *(Elements(dtype=dtype, bits=16) for dtype in ("int16", "uint16")),
    *(Elements(dtype=dtype, bits=32) for dtype in ("int32", "uint32", "complex32")),
    *(Elements(dtype=dtype, bits=64) for dtype in ("int64", "uint64", "complex64")),
    Elements(dtype="complex128", bits=64, element_bytes=16),
    Elements(dtype="float32", bits=32, is_float=True),
    Elements(dtype="float64", bits=64, is_float=True),
)
_BY_DTYPE = {elements.dtype: elements for elements in _ALL}


def elements_of(dtype: str) -> Elements:
    """How `dtype` is coded; a ValueError names the dtypes there are."""
    try:
        return _BY_DTYPE[dtype]
    except KeyError:
        raise ValueError(f"no codec for dtype {dtype!r}; known are {', '.join(_BY_DTYPE)}") from None
