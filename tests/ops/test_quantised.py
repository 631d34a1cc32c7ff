"""The quantised profiles: rows stay exact, weights are those of the quantiser that publishes them, never stale; gradients pass."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))
from test_exact_rows import check_rows, rows

from rollmill.ops import CpuOps, QuantisedOps, ops_for
from rollmill.ops.activations import fp8_rows
from rollmill.ops.quantised import QUANTISED
from rollmill.weights.quant import QuantisedCopy, Scheme, dequantise, quantise, restored

EXACT = CpuOps()
both = pytest.mark.parametrize("profile", list(QUANTISED))
SHAPES = [(160, 480), (576, 960), (40, 100), (128, 256)]


def parameter(num_inputs: int, num_outputs: int, seed: int = 1) -> torch.nn.Parameter:
    return torch.nn.Parameter(rows(num_inputs, seed, num_outputs) * 0.05)


def stacked(num_experts: int, num_inputs: int, num_outputs: int, seed: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(rows(num_inputs, seed, num_experts * num_outputs).view(num_experts, num_outputs, num_inputs) * 0.05)


def values(weight: torch.Tensor, profile: str) -> torch.Tensor:
    scheme = QUANTISED[profile][0]
    return dequantise("w", quantise("w", weight, scheme), scheme, dtype=weight.dtype)


def expected(profile: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What a fresh look at the weights gives."""
    return EXACT.linear(QUANTISED[profile][1](x), values(weight.detach(), profile), bias)


def routed(num_tokens: int, num_experts: int = 8, k: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(num_experts, generator=gen)[:k].sort().values for _ in range(num_tokens)])
    return ids, torch.rand(num_tokens, k, generator=gen)


@both
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_gives_a_row_the_same_bits_among_any_neighbours(profile: str, shape: tuple[int, int]) -> None:
    ops, weight = ops_for(profile, "cpu"), parameter(*shape)
    check_rows(lambda x: ops.linear(x, weight), rows(shape[0], count=400))
    check_rows(lambda x: ops.linear(x, weight, weight[:, 0]), rows(shape[0], count=300))


@both
def test_experts_give_a_token_the_same_bits_whatever_the_others_choose(profile: str) -> None:
    ops, gate_up, down = ops_for(profile, "cpu"), stacked(8, 64, 96, 1), stacked(8, 48, 64, 2)
    ids, gates = routed(300)
    keyed = torch.cat([rows(64, count=300), ids.float(), gates], 1)
    check_rows(lambda x: ops.experts(x[:, :64], x[:, 64:67].long(), x[:, 67:], gate_up, down), keyed)


@both
def test_each_expert_is_a_quantised_linear_layer(profile: str) -> None:
    ops, gate_up, down = ops_for(profile, "cpu"), stacked(4, 64, 96, 1), stacked(4, 48, 64, 2)
    x, ids = rows(64, count=5), torch.tensor([[0, 2], [1, 2], [0, 3], [2, 3], [0, 1]])
    gates = torch.rand(5, 2, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        found = ops.experts(x, ids, gates, gate_up, down)
        for t in range(5):
            a, b = (ops.linear(ops.swiglu(ops.linear(x[t : t + 1], gate_up[e])), down[e]) for e in ids[t].tolist())
            assert torch.equal(found[t], (a * gates[t, 0] + b * gates[t, 1])[0])


@both
def test_head_and_router_are_not_quantised(profile: str) -> None:
    ops, weight, x = ops_for(profile, "cpu"), parameter(160, 96), rows(160, count=9)
    assert torch.equal(ops.linear_fp32(x, weight), EXACT.linear_fp32(x, weight))
    assert not torch.equal(ops.linear(x, weight), EXACT.linear(x, weight))
    assert ops.profile == profile and ops.is_exact


@both
def test_products_of_the_dequantised_operands_are_exact_in_float32(profile: str) -> None:
    """So only the sum rounds: at most 12 significant bits each, compared with float64."""
    x, w = QUANTISED[profile][1](rows(160, count=50)), values(rows(160, 1, 50), profile)
    assert torch.equal((x * w).double(), x.double() * w.double())
    assert torch.equal(x.bfloat16().float(), x) and torch.equal(w.bfloat16().float(), w)


@pytest.mark.parametrize(("profile", "sizes"), [("fp8", (256, 128, 128)), ("nvfp4", (96, 40, 40))])
def test_a_fused_matrix_holds_the_values_of_the_published_copy(profile: str, sizes: tuple[int, int, int]) -> None:
    """q, k and v published apart, as `QuantisedCopy` does, and quantised as one here. FP8 needs parts of whole 128-row blocks for that."""
    parts = {f"l.{n}_proj.weight": rows(160, i, size) * 0.02 * 3**i for i, (n, size) in enumerate(zip("qkv", sizes, strict=True))}
    copy = QuantisedCopy(scheme=QUANTISED[profile][0])
    published = restored(copy(parts), copy.quantiser, dtype=torch.float32)
    fused, x = torch.nn.Parameter(torch.cat(list(parts.values()))), rows(160, count=7)
    with torch.inference_mode():
        found = ops_for(profile, "cpu").linear(x, fused)
        assert torch.equal(found, EXACT.linear(QUANTISED[profile][1](x), torch.cat(list(published.values()))))


def halve(weight: torch.nn.Parameter) -> None:
    weight.mul_(0.5)


def through_a_view(weight: torch.nn.Parameter) -> None:
    weight.detach().chunk(2)[1].view(-1)[torch.tensor([3, 8])] = torch.tensor([9.0, -7.0])


def in_inference_mode(weight: torch.nn.Parameter) -> None:
    with torch.inference_mode():
        weight.chunk(2)[0].copy_(torch.ones(len(weight) // 2, weight.shape[1]))


def an_optimizer_step(weight: torch.nn.Parameter) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=0.1).step()


def other_memory(weight: torch.nn.Parameter) -> None:
    weight.data = weight.data * 3


def other_memory_at_the_old_address(weight: torch.nn.Parameter) -> None:
    """Freed and asked for again, the allocator may give the same address: not a proof that nothing changed."""
    shape, address = weight.shape, weight.data_ptr()
    for _ in range(50):
        weight.data = torch.empty(0)
        weight.data = torch.full(shape, 2.0)
        if weight.data_ptr() == address:
            return


@both
@pytest.mark.parametrize(
    "change", [halve, through_a_view, in_inference_mode, an_optimizer_step, other_memory, other_memory_at_the_old_address]
)
@pytest.mark.parametrize("is_inference", [False, True], ids=["with gradients", "inference"])
def test_changed_weights_are_quantised_again(profile: str, change: Callable[[torch.nn.Parameter], None], is_inference: bool) -> None:
    ops, weight, x = ops_for(profile, "cpu"), parameter(64, 48), rows(64, count=5)
    with torch.inference_mode(is_inference):
        before = ops.linear(x, weight)
    with torch.no_grad():
        change(weight)
    with torch.inference_mode(is_inference):
        after = ops.linear(x, weight)
    assert not torch.equal(before, after)
    assert torch.equal(after, expected(profile, x, weight))


@both
def test_one_changed_expert_is_quantised_again(profile: str) -> None:
    ops, gate_up, down = ops_for(profile, "cpu"), stacked(4, 64, 96, 1), stacked(4, 48, 64, 2)
    x, ids, gates = rows(64, count=2), torch.tensor([[0, 2], [1, 2]]), torch.ones(2, 2)
    with torch.inference_mode():
        before = ops.experts(x, ids, gates, gate_up, down)
        down.detach()[0].mul_(-2)
        after = ops.experts(x, ids, gates, gate_up, down)
    assert not torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])


def by_numpy(weight: torch.nn.Parameter) -> None:
    weight.detach().numpy()[:] *= 3


def by_data(weight: torch.nn.Parameter) -> None:
    weight.data.mul_(3)


def a_fused_optimizer_step(weight: torch.nn.Parameter) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=0.1, fused=True).step()


@both
@pytest.mark.parametrize("change", [by_numpy, by_data, a_fused_optimizer_step])
def test_writes_that_torch_does_not_count_are_seen_by_refresh_and_land_in_the_same_memory(
    profile: str, change: Callable[[torch.nn.Parameter], None]
) -> None:
    ops, weight, x = ops_for(profile, "cpu"), parameter(64, 48), rows(64, count=5)
    with torch.inference_mode():
        ops.linear(x, weight)
        held = ops._product.weights.of(weight)
    change(weight)
    ops.refresh()
    with torch.inference_mode():
        assert torch.equal(ops.linear(x, weight), expected(profile, x, weight))
        assert all(a is b for a, b in zip(ops._product.weights.of(weight), held, strict=True))


@both
def test_unchanged_weights_are_quantised_once(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("rollmill.ops.quantised.quantise", lambda *a: asked.append(a) or quantise(*a))
    ops, weight, gate_up, down = ops_for(profile, "cpu"), parameter(64, 48), stacked(3, 64, 96, 1), stacked(3, 48, 64, 2)
    for grads in (False, True):
        for _ in range(3):
            with torch.inference_mode(not grads):
                ops.linear(rows(64, count=5), weight)
                ops.experts(rows(64, count=2), torch.tensor([[0, 2], [1, 2]]), torch.ones(2, 2), gate_up, down)
    assert len(asked) == 1 + 3 + 3


@both
def test_a_weight_that_counts_no_writes_is_never_kept(profile: str) -> None:
    ops, x = ops_for(profile, "cpu"), rows(64, count=5)
    with torch.inference_mode():
        weight = rows(64, 1, 48)
        ops.linear(x, weight)
        weight.mul_(3)
        assert weight.is_inference() and torch.equal(ops.linear(x, weight), expected(profile, x, weight))


@both
def test_dead_weights_leave_nothing_behind(profile: str) -> None:
    ops = ops_for(profile, "cpu")
    for seed in range(4):
        weight = parameter(64, 48, seed)
        ops.linear(rows(64, count=2), weight)
    del weight
    assert len(ops._product.weights._held) == 0


@both
def test_gradients_are_those_of_the_dequantised_product(profile: str) -> None:
    """Central differences in float64 of sum(silu(x w + b) * r) at the dequantised operands. Their own error is h^2 / 6 of a third
    derivative, below 1e-8 at h = 1e-4; float32 sums of at most 48 terms of about 1 err by less than 48 * 2^-23 * 8 = 5e-5."""
    ops, weight, bias, x = ops_for(profile, "cpu"), parameter(48, 40), parameter(40, 1), rows(48, count=6).requires_grad_()
    weight.data *= 4
    r = rows(40, 5, 6)
    (torch.nn.functional.silu(ops.linear(x, weight, bias[0])) * r).sum().backward()
    x_hat, w_hat, b = QUANTISED[profile][1](x.detach()).double(), values(weight.detach(), profile).double(), bias.detach()[0].double()

    def loss(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> float:
        return float((torch.nn.functional.silu(torch.nn.functional.linear(x, w, b)) * r.double()).sum())

    gen = torch.Generator().manual_seed(9)
    h = 1e-4
    for live, at in ((x, 0), (weight, 1), (bias, 2)):
        operands = [x_hat, w_hat, b]
        assert live.grad is not None
        flat = live.grad.flatten()
        for i in torch.randint(flat.numel(), (25,), generator=gen).tolist():
            shifted = []
            for sign in (1, -1):
                moved = [o.clone() for o in operands]
                moved[at].view(-1)[i] += sign * h
                shifted.append(loss(*moved))
            assert float(flat[i]) == pytest.approx((shifted[0] - shifted[1]) / (2 * h), abs=1e-4)


@both
def test_expert_gradients_are_those_of_the_same_sum_written_out(profile: str) -> None:
    """The same products by plain autograd over values that need no rounding again; sums of at most 96 float32 terms in another order."""
    ops, rounding = ops_for(profile, "cpu"), QUANTISED[profile][1]
    gate_up, down, x = stacked(3, 64, 96, 1), stacked(3, 48, 64, 2), rows(64, count=4).requires_grad_()
    ids, gates = torch.tensor([[0, 2], [1, 2], [0, 1], [0, 2]]), torch.rand(4, 2, generator=torch.Generator().manual_seed(1))
    ops.experts(x, ids, gates, gate_up, down).square().sum().backward()
    found = [p.grad for p in (x, gate_up, down)]
    u = rounding(x.detach()).requires_grad_()
    wide, narrow = (torch.stack([values(w, profile) for w in p.detach()]).requires_grad_() for p in (gate_up, down))
    out = []
    for t in range(4):
        total = torch.zeros(64)
        for e, g in zip(ids[t].tolist(), gates[t], strict=True):
            inner = ops.swiglu((u[t] @ wide[e].T)[None])
            total = total + ((inner + (rounding(inner) - inner).detach()) @ narrow[e].T)[0] * g
        out.append(total)
    torch.stack(out).square().sum().backward()
    for mine, theirs in zip(found, (u.grad, wide.grad, narrow.grad), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-4 * float(theirs.abs().max()))


@both
def test_a_backward_over_weights_that_changed_meanwhile_is_refused(profile: str) -> None:
    ops, weight, x = ops_for(profile, "cpu"), parameter(64, 48), rows(64, count=5).requires_grad_()
    y = ops.linear(x, weight)
    with torch.no_grad():
        weight.mul_(2)
    ops.linear(x, weight)
    with pytest.raises(RuntimeError, match=r"modified inplace|modified by an inplace"):
        y.sum().backward()


class DeviceProduct:
    """Plays a device that multiplies codes itself: its own rounding of x, one row after the other."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        assert codes.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
        weight = dequantise("w", {"w": codes, "w_scale_inv": scales}, Scheme.FP8_BLOCK, dtype=torch.float32)
        return EXACT.linear(fp8_rows(x), weight)


def test_a_product_of_the_device_takes_the_place_of_the_emulation() -> None:
    """Forward, experts, gradients and refresh, with codes instead of values kept for each weight."""
    device = DeviceProduct()
    native, emulated = QuantisedOps("fp8", CpuOps(), native=device), ops_for("fp8", "cpu")
    weight, gate_up, down = parameter(160, 96), stacked(3, 160, 96, 1), stacked(3, 48, 160, 2)
    ids, gates = torch.tensor([[0, 2], [1, 2]]), torch.rand(2, 2, generator=torch.Generator().manual_seed(1))
    grads = []
    for ops in (native, emulated):
        x = rows(160, count=2).requires_grad_()
        y = ops.linear(x, weight, weight[:, 0].detach())
        z = ops.experts(x, ids, gates, gate_up, down)
        (y.square().sum() + z.square().sum()).backward()
        grads.append([y.detach(), z.detach(), x.grad, *(p.grad for p in (weight, gate_up, down))])
        weight.grad = gate_up.grad = down.grad = None
    assert device.num_calls == 1 + 3 + 3
    for mine, theirs in zip(*grads, strict=True):
        # Another order of the bias and of the backward's sums: some 200 float32 terms.
        assert torch.allclose(mine, theirs, atol=200 * 2**-24 * float(theirs.abs().max()) * 8)
    weight.detach().numpy()[:] *= 3
    native.refresh()
    with torch.inference_mode():
        assert torch.equal(native.linear(rows(160, count=2), weight), expected("fp8", rows(160, count=2), weight))


@both
def test_weights_that_are_no_numbers_are_refused(profile: str) -> None:
    ops, gate_up = ops_for(profile, "cpu"), stacked(3, 64, 96, 1)
    with torch.no_grad():
        gate_up[1, 2, 3] = float("nan")
    with pytest.raises(ValueError, match=r"expert 1's weight of 96 x 64 has 1 values that are NaN"):
        ops.experts(rows(64, count=1), torch.tensor([[0, 1]]), torch.ones(1, 2), gate_up, stacked(3, 48, 64, 2))


def test_an_unknown_profile_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no numerics profile 'fp6'; choose one of .*fp8, nvfp4"):
        ops_for("fp6", "cpu")
