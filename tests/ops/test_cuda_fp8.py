"""Block-scaled e4m3 on the device: codes and scales of the reference, rows that stand alone, and sums that are right."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("no e4m3 on this device", allow_module_level=True)

from rollmill.ops.activations import fp8_rows
from rollmill.ops.cuda import fp8
from rollmill.weights.quant import Scheme, dequantise, quantise

DEVICE = torch.device("cuda", 0)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(*shape, device=DEVICE, generator=rng)
    return (x * torch.exp2(torch.randint(-8, 8, (shape[0], 1), device=DEVICE, generator=rng))).bfloat16()


def weights(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    parts = quantise("w", random(n, k, seed=7).cpu(), Scheme.FP8_BLOCK)
    exact = dequantise("w", parts, Scheme.FP8_BLOCK, dtype=torch.float64)
    return parts["w"].to(DEVICE), parts["w_scale_inv"].to(DEVICE), exact.to(DEVICE)


def test_activations_get_the_codes_and_scales_of_the_reference() -> None:
    x = random(200, 1000)
    x[3, :128], x[4, 5] = 0, 2.0**90
    codes, scales = fp8.quantise_rows(x)
    spread = scales.repeat_interleave(128, 1)[:, :1000]
    assert torch.equal(codes.float() * spread, fp8_rows(x.float()))


@pytest.mark.parametrize("shape", [(2048, 6144), (4096, 2048), (200, 960)])
def test_a_row_has_the_same_bits_at_any_batch_size_and_place(shape: tuple[int, int]) -> None:
    codes, scales, exact = weights(*shape)
    x = random(600, shape[1], seed=1)
    want = fp8.linear_fp8(x, codes, scales)
    for m in (1, 2, 7, 8, 16, 31, 64, 257):
        for start in (0, 3, 600 - m):
            assert torch.equal(fp8.linear_fp8(x[start : start + m], codes, scales), want[start : start + m]), (m, start)
    true = fp8_rows(x.float()).double() @ exact.t()
    # Output rounding is 2^-9 in the mean; the tensor cores keep some 13 bits within a block of 128.
    assert float((want.double() - true).norm() / true.norm()) < 4e-3


def test_one_flipped_bit_of_a_code_shows() -> None:
    codes, scales, _ = weights(256, 512)
    x = random(8, 512, seed=1)
    want = fp8.linear_fp8(x, codes, scales)
    codes.view(torch.uint8)[17, 100] ^= 16
    got = fp8.linear_fp8(x, codes, scales)
    assert not torch.equal(got, want) and torch.equal(got[:, :17], want[:, :17])


def test_an_activation_that_is_no_number_or_infinite_spoils_its_row_and_no_other() -> None:
    codes, scales, _ = weights(256, 512)
    x = random(3, 512, seed=1)
    want = fp8.linear_fp8(x, codes, scales)
    for odd in (float("nan"), float("inf")):
        spoilt = x.clone()
        spoilt[1, 7] = odd
        got = fp8.linear_fp8(spoilt, codes, scales)
        assert not torch.isfinite(got[1]).any() and torch.equal(got[[0, 2]], want[[0, 2]])
