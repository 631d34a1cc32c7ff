"""Activations of the quantised profiles: each token as the weights' quantiser would treat it alone, whatever stands beside it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.ops import CpuOps, ops_for
from rollmill.ops.activations import fp8_rows, nvfp4_rows
from rollmill.weights.quant import Scheme, dequantise, quantise

Rounding = Callable[[torch.Tensor], torch.Tensor]
SCHEMES: list[tuple[Rounding, Scheme]] = [(fp8_rows, Scheme.FP8_BLOCK), (nvfp4_rows, Scheme.NVFP4)]
every_scheme = pytest.mark.parametrize(("rounding", "scheme"), SCHEMES, ids=["fp8", "nvfp4"])


def alone(x_TD: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """The reference: every token a matrix of one row."""
    rows = [dequantise("x", quantise("x", row[None], scheme), scheme, dtype=torch.float32) for row in x_TD]
    return torch.cat(rows) if rows else x_TD


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@every_scheme
@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    num_rows=st.integers(0, 4),
    half_cols=st.integers(1, 140),
    exponents=st.lists(st.integers(-149, 99), min_size=1, max_size=6),
    seed=st.integers(0, 2**20),
)
def test_a_token_is_rounded_as_a_weight_of_one_row(
    rounding: Rounding, scheme: Scheme, num_rows: int, half_cols: int, exponents: list[int], seed: int
) -> None:
    gen = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([2.0**e for e in exponents])
    picked = sizes[torch.randint(len(exponents), (num_rows, 2 * half_cols), generator=gen)]
    x = (torch.randn(num_rows, 2 * half_cols, generator=gen) * picked).clamp(-(2.0**99), 2.0**99)
    assert same_bits(rounding(x), alone(x, scheme))


@every_scheme
def test_borders_and_their_neighbours_are_rounded_as_weights_are(rounding: Rounding, scheme: Scheme) -> None:
    """Half-way points of e4m3 and e2m1, and six times those of e4m3 for the scales, one step of float32 below, at and above them."""
    # The subnormal numbers, one doubling among the normal ones, and the last: the others repeat these.
    e4m3 = torch.tensor([*range(0x12), *range(0x38, 0x42), *range(0x74, 0x7F)], dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    e2m1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    halves = torch.cat([(g[1:] + g[:-1]) / 2 for g in (e4m3, e2m1)])
    points = torch.cat([halves, 6 * halves, torch.tensor([232.0, 448.0, 464.0, 6 * 464.0])])
    points = torch.cat([torch.nextafter(points, torch.zeros(())), points, torch.nextafter(points, torch.tensor(1e9))])
    for top in (6.0, 464.0, 2784.0, 1e-3):
        block = torch.stack([points, -points, torch.full_like(points, top), torch.zeros_like(points)], 1)
        assert same_bits(rounding(block), alone(block, scheme))
    # Small blocks in a token with one large value: scales at the low end of e4m3.
    wide = torch.cat([points[:, None].expand(-1, 16) * 2.0**-12, torch.full((len(points), 16), 2000.0)], 1)
    assert same_bits(rounding(wide), alone(wide, scheme))


def test_dividing_gives_the_codes_that_exact_borders_give() -> None:
    """x / s for every normal e4m3 scale s, next to every border: one correctly rounded division never crosses it."""
    scales = torch.arange(0x08, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()[:, None]
    borders = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    exact = scales * borders
    assert torch.equal(exact / scales, borders.expand_as(exact))
    assert (torch.nextafter(exact, torch.tensor(1e9)) / scales > borders).all()
    assert (torch.nextafter(exact, torch.zeros(())) / scales < borders).all()


@every_scheme
def test_bfloat16_rows_keep_every_bit_of_their_values(rounding: Rounding, scheme: Scheme) -> None:
    x = torch.randn(40, 300, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert rounding(x).dtype == torch.bfloat16
    assert torch.equal(rounding(x).float(), rounding(x.float()))


@every_scheme
def test_what_is_no_number_stays_none_in_its_own_row_alone(rounding: Rounding, scheme: Scheme) -> None:
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(2))
    clean = rounding(x)
    for row, bad in enumerate([float("nan"), float("inf"), float("-inf")]):
        x[row, 70] = bad
    found = rounding(x)
    assert not torch.isfinite(found[:3, 70]).any()
    assert same_bits(found[3:], clean[3:])


def test_numbers_of_a_model_that_has_diverged_become_nan_rather_than_wrong() -> None:
    x = torch.tensor([[2.0**107, 1.0], [2.0**108, 1.0], [3e38, -3e38]])
    assert fp8_rows(x)[0].tolist() == [2.0**107, 0.0]
    assert fp8_rows(x)[1:].isnan().sum(1).tolist() == [1, 2]
    assert same_bits(nvfp4_rows(x[:2]), alone(x[:2], Scheme.NVFP4))


@every_scheme
def test_zeros_and_vanishing_rows_are_plus_zero(rounding: Rounding, scheme: Scheme) -> None:
    for x in (torch.zeros(2, 130), -torch.zeros(2, 130), torch.full((2, 130), -1e-42)):
        assert not rounding(x).view(torch.int32).any()


def per_tensor(x_TD: torch.Tensor) -> torch.Tensor:
    """What must not be done: one float32 scale for whatever happens to be in the batch, as weights may have it."""
    scale = x_TD.abs().amax() / torch.tensor(2688.0)
    blocks = (x_TD / scale).unflatten(1, (-1, 16))
    block_scale = (blocks.abs().amax(-1, keepdim=True) / torch.tensor(6.0)).to(torch.float8_e4m3fn).float().clamp(min=2.0**-6)
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    nearest = ((blocks / block_scale).abs()[..., None] - grid).abs().argmin(-1)
    return (grid[nearest] * blocks.sign() * block_scale).flatten(1) * scale


def test_a_later_token_cannot_be_felt_by_an_earlier_one_though_with_a_scale_per_tensor_it_would() -> None:
    gen = torch.Generator().manual_seed(3)
    x, weight = torch.randn(9, 64, generator=gen), torch.nn.Parameter(torch.randn(32, 64, generator=gen))
    louder = x.clone()
    louder[8] *= 1.7
    ops, exact = ops_for("nvfp4", "cpu"), CpuOps()
    with torch.inference_mode():
        assert torch.equal(ops.linear(x, weight)[:8], ops.linear(louder, weight)[:8])
        assert torch.equal(ops.linear(x, weight)[:8], ops.linear(x[:8], weight))
        assert not torch.equal(exact.linear(per_tensor(x), weight)[:8], exact.linear(per_tensor(louder), weight)[:8])
        # Even a power of two: its e4m3 scales run out of range beside a token that is 2^15 times larger.
        huge = x.clone()
        huge[8] *= 2.0**17
        two, shared = (dequantise("x", quantise("x", t, Scheme.NVFP4), Scheme.NVFP4, dtype=torch.float32) for t in (huge, x))
        assert not torch.equal(two[:8], shared[:8])
        assert torch.equal(ops.linear(x, weight)[:8], ops.linear(huge, weight)[:8])
