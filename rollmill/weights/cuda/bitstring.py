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


@triton.jit
def put(words, at, value, wanted):
    """Sets the bits of a uint64 from bit `at` on, where zeros stand; neighbours may be written at the same time."""
    shift = (at & 63).to(tl.uint64)
    over = (value >> 1) >> (63 - shift)
    tl.atomic_or(words + (at >> 6), (value << shift).to(tl.int64, bitcast=True), mask=wanted, sem="relaxed")
    tl.atomic_or(words + (at >> 6) + 1, over.to(tl.int64, bitcast=True), mask=wanted & (over != 0), sem="relaxed")


@triton.jit
def rice_bits(value, k):
    """Length of `R(k)`."""
    quotient = value >> k
    return tl.where(quotient < 24, quotient + 1 + k, ESCAPE_BITS)


@triton.jit
def rice_field(value, k):
    """`R(k)` as a uint64; its length is `rice_bits`."""
    quotient = tl.minimum(value >> k, 24)
    low = (value & ((1 << k) - 1)).to(tl.uint64)
    one = tl.zeros_like(low) + 1
    coded = (one << quotient.to(tl.uint64)) | (low << (quotient + 1).to(tl.uint64))
    return tl.where(quotient < 24, coded, value.to(tl.uint64) << 24)


@triton.jit
def signed_bits(value):
    """Length of `S`."""
    return tl.where(value > 0, 2 * value, 1 - 2 * value)


@triton.jit
def bit_length(value):
    """Of a number from 0 to 2^31 - 1."""
    # In two halves, because a float rounds past 24 bits.
    high = value >> 16
    half = tl.where(high > 0, high, value)
    length = tl.where(half > 0, (half.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126, 0)
    return tl.where(high > 0, length + 16, length)


@triton.jit
def put_signed(words, at, value, wanted, WRITE: tl.constexpr):
    """`S`; the bit after it."""
    length = signed_bits(value)
    if WRITE:
        one = tl.zeros_like(at).to(tl.uint64) + 1
        put(words, at, one << (length - 1).to(tl.uint64), wanted)
    return tl.where(wanted, at + length, at)


@triton.jit
def put_natural(words, at, value, predicted, wanted, WRITE: tl.constexpr):
    """`W(p)`; the bit after it."""
    width = bit_length(value)
    at = put_signed(words, at, width - predicted, wanted, WRITE)
    long = wanted & (width > 1)
    low_width = tl.maximum(width - 1, 0)
    if WRITE:
        put(words, at, (value - (1 << low_width)).to(tl.uint64), long)
    return tl.where(long, at + low_width, at)
