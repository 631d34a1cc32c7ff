"""The bit strings of docs/formats/chunk.md read inside kernels, a reader in every lane; ends are for the caller to check."""

# Kernel arguments are pointers and numbers on the device; they have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

ESCAPE_BITS = tl.constexpr(56)
# Any number that a chunk can hold is smaller; what an escape claims beyond it is cut, so that 32-bit sums cannot wrap.
TOO_MUCH = tl.constexpr(1 << 22)


@triton.jit
def window(words, at, last_word):
    """The 64 bits from bit `at` on, of int64 words as bits of uint64; `last_word` is the last index with a word after it."""
    index = tl.minimum(at >> 6, last_word)
    shift = (at & 63).to(tl.uint64)
    low = tl.load(words + index).to(tl.uint64, bitcast=True)
    high = tl.load(words + index + 1).to(tl.uint64, bitcast=True)
    # Two shifts, because one by 64 is undefined.
    return (low >> shift) | ((high << 1) << (63 - shift))


@triton.jit
def window_if(words, at, last_word, wanted, otherwise):
    """`window` for the lanes that want one."""
    index = tl.minimum(at >> 6, last_word)
    shift = (at & 63).to(tl.uint64)
    low = tl.load(words + index, mask=wanted, other=0).to(tl.uint64, bitcast=True)
    high = tl.load(words + index + 1, mask=wanted, other=0).to(tl.uint64, bitcast=True)
    return tl.where(wanted, (low >> shift) | ((high << 1) << (63 - shift)), otherwise)


@triton.jit
def rice(bits, k):
    """`R(k)` at the start of a window: value and length."""
    head = (bits & 0xFFFFFF).to(tl.int32)
    # The exponent of a power of two counts its zeros.
    zeros = ((head & -head).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    escaped = head == 0
    zeros = tl.where(escaped, 0, zeros)
    low = (bits >> (zeros + 1).to(tl.uint64)).to(tl.uint32).to(tl.int32, bitcast=True) & ((1 << k) - 1)
    claimed = tl.minimum((bits >> 24) & 0xFFFFFFFF, TOO_MUCH).to(tl.int32)
    return tl.where(escaped, claimed, (zeros << k) | low), tl.where(escaped, ESCAPE_BITS, zeros + 1 + k)


@triton.jit
def signed(bits):
    """`S` at the start of a window: value, length, and whether it is refused."""
    head = (bits & 0xFFFFFFFFFFFF).to(tl.int64)
    zeros = ((head & -head).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    refused = head == 0
    zeros = tl.where(refused, 0, zeros)
    value = tl.where(zeros % 2 == 1, (zeros + 1) // 2, -(zeros // 2))
    return value, zeros + 1, refused


@triton.jit
def natural(words, at, last_word, predicted, wanted):
    """`W(p)` at bit `at`, for the lanes that want one: value, its width, the bit after it, and whether it is refused."""
    bits = window(words, at, last_word)
    more, length, refused = signed(bits)
    width = predicted + more
    refused = refused | (width < 0) | (width > 31)
    width = tl.minimum(tl.maximum(width, 0), 31)
    after = at + length
    low_width = tl.maximum(width - 1, 0)
    low = window(words, after, last_word).to(tl.uint32).to(tl.int32, bitcast=True) & ((1 << low_width) - 1)
    value = tl.where(width > 0, (1 << low_width) | low, 0)
    return tl.where(wanted, value, 0), tl.where(wanted, width, 0), tl.where(wanted, after + low_width, at), wanted & refused
