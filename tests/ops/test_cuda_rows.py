"""Norms, activations, rotary positions, scores and picks on the device: rows stand alone, and the numbers are right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from rollmill.ops.cuda import CudaOps

DEVICE = torch.device("cuda", 0)
OPS = CudaOps()
ROWS = (1, 2, 7, 8, 16, 31, 64, 257, 2048)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed))


def angles(tokens: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    half = random(tokens, 1, size // 2, seed=9) * 100
    both = torch.cat([half, half], -1)
    return both.cos(), both.sin()


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def assert_rows_stand_alone(run: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    want = run(*inputs)
    for m in ROWS:
        for start in {0, min(5, 2048 - m), 2048 - m}:
            assert torch.equal(run(*(x[start : start + m] for x in inputs)), want[start : start + m]), (m, start)
    return want


def off(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("width", [576, 2048, 4096, 5120])
def test_norm(width: int) -> None:
    x, w = random(2048, width).bfloat16(), random(width, seed=1).bfloat16()
    got = assert_rows_stand_alone(lambda x: OPS.rms_norm(x, w, 1e-6), x)
    # One rounding to bfloat16 is off by at most 2^-9.
    assert off(got, F.rms_norm(x.double(), (width,), w.double(), 1e-6)) < 2**-9


def test_norm_of_heads_reads_a_slice_in_place() -> None:
    qkv, w = random(2048, 32, 128).bfloat16(), random(128, seed=1).bfloat16()
    got = assert_rows_stand_alone(lambda x: OPS.rms_norm(x[:, 3:19], w, 1e-6), qkv)
    assert torch.equal(got, OPS.rms_norm(qkv[:, 3:19].reshape(-1, 128), w, 1e-6).view_as(got))


def test_adding_and_norming_at_once_has_the_bits_of_two_steps() -> None:
    x, r, w = random(2048, 2048).bfloat16(), random(2048, 2048, seed=1).bfloat16(), random(2048, seed=2).bfloat16()
    assert_rows_stand_alone(lambda x, r: OPS.add_rms_norm(x, r, w, 1e-6)[0], x, r)
    y, total = OPS.add_rms_norm(x, r, w, 1e-6)
    assert torch.equal(total, x + r) and torch.equal(y, OPS.rms_norm(x + r, w, 1e-6))


def test_swiglu() -> None:
    x = random(2048, 2 * 768).bfloat16() * 3
    got = assert_rows_stand_alone(OPS.swiglu, x)
    assert off(got, F.silu(x[:, :768].double()) * x[:, 768:].double()) < 2**-9


def test_rotate() -> None:
    x, (cos, sin) = random(2048, 20, 128).bfloat16(), angles(2048, 128)
    got = assert_rows_stand_alone(OPS.rotate, x, cos, sin)
    assert off(got, turned(x.double(), cos.double(), sin.double())) < 2**-9
    assert torch.equal(OPS.rotate(x[:, 3:10], cos, sin), got[:, 3:10])


def test_gradients_are_those_of_the_formulas() -> None:
    x, r = (random(70, 256, seed=s).bfloat16().requires_grad_() for s in (0, 1))
    w = random(256, seed=2).bfloat16().requires_grad_()
    heads, (cos, sin) = random(70, 4, 64, seed=3).bfloat16().requires_grad_(), angles(70, 64)
    xd, rd, wd, hd = (t.detach().double().requires_grad_() for t in (x, r, w, heads))
    g, g2 = random(70, 256, seed=4).bfloat16(), random(70, 256, seed=5).bfloat16()
    cases = [
        (
            torch.autograd.grad(OPS.rms_norm(x, w, 1e-6), (x, w), g),
            torch.autograd.grad(F.rms_norm(xd, (256,), wd, 1e-6), (xd, wd), g.double()),
        ),
        (
            torch.autograd.grad(OPS.add_rms_norm(x, r, w, 1e-6), (x, r, w), (g, g2)),
            torch.autograd.grad((F.rms_norm(xd + rd, (256,), wd, 1e-6), xd + rd), (xd, rd, wd), (g.double(), g2.double())),
        ),
        (
            torch.autograd.grad(OPS.swiglu(x), (x,), g[:, :128]),
            torch.autograd.grad(F.silu(xd[:, :128]) * xd[:, 128:], (xd,), g[:, :128].double()),
        ),
        (
            torch.autograd.grad(OPS.rotate(heads, cos, sin), (heads,), g.view(70, 4, 64)),
            torch.autograd.grad(turned(hd, cos.double(), sin.double()), (hd,), g.view(70, 4, 64).double()),
        ),
    ]
    for got, want in cases:
        for a, b in zip(got, want, strict=True):
            assert off(a, b) < 1e-2


@pytest.mark.parametrize("vocabulary", [50, 49152, 151936])
def test_score(vocabulary: int) -> None:
    logits, ids = random(300, vocabulary) * 4, torch.randint(vocabulary, (300,), device=DEVICE)
    logprobs, entropies = OPS.score(logits, ids)
    for m in (1, 7, 64):
        got = OPS.score(logits[11 : 11 + m], ids[11 : 11 + m])
        assert torch.equal(got[0], logprobs[11 : 11 + m]) and torch.equal(got[1], entropies[11 : 11 + m])
    exact = logits.double().log_softmax(-1)
    # The sum is in float64 over exponentials good to 2^-21; the result is rounded once to float32.
    assert float((logprobs - exact.gather(1, ids[:, None])[:, 0]).abs().max()) < 3e-6
    assert float((entropies + (exact.exp() * exact).sum(-1)).abs().max()) < 1e-5


def test_score_of_tokens_ruled_out_and_its_gradient() -> None:
    logits = (random(9, 20000) * 3).masked_fill(random(9, 20000, seed=1) > 0.5, float("-inf"))
    ids = logits.argmax(-1)
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    logprobs, entropies = OPS.score(leaf, ids)
    assert bool(logprobs.isfinite().all() and entropies.isfinite().all()) and not entropies.requires_grad
    g = random(9, seed=2)
    logprobs.backward(g)
    exact.log_softmax(-1).gather(1, ids[:, None])[:, 0].backward(g.double())
    assert leaf.grad is not None and off(leaf.grad, exact.grad) < 1e-5


def test_pick_inverts_the_cumulative_distribution() -> None:
    logits = random(257, 151936) * 3
    logits[:, 70000:90000] = float("-inf")
    uniform = torch.rand(257, dtype=torch.float64, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
    uniform[0], uniform[1] = 0.0, 1.0 - 2**-53
    picked = OPS.pick(logits, uniform)
    assert picked.dtype == torch.int64
    for m in (1, 7, 64):
        assert torch.equal(OPS.pick(logits[20 : 20 + m], uniform[20 : 20 + m]), picked[20 : 20 + m])
    upto = logits.double().softmax(-1).cumsum(-1)
    after = upto.gather(1, picked[:, None])[:, 0]
    before = torch.where(picked > 0, upto.gather(1, (picked - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    # Exponentials in float32 move a border by at most 2^-21 of the mass before it.
    assert bool(((before - 2**-21 <= uniform) & (uniform <= after + 2**-21)).all())
    assert bool(logits.gather(1, picked[:, None]).isfinite().all())


def test_a_captured_step_has_the_bits_of_the_eager_one() -> None:
    x, r, w = random(8, 2048).bfloat16(), random(8, 2048, seed=1).bfloat16(), random(2048, seed=2).bfloat16()
    logits, uniform = random(8, 151936) * 4, torch.rand(8, dtype=torch.float64, device=DEVICE)

    def step() -> list[torch.Tensor]:
        y, total = OPS.add_rms_norm(x, r, w, 1e-6)
        picked = OPS.pick(logits, uniform)
        return [y, total, OPS.swiglu(y), picked, *OPS.score(logits, picked)]

    want = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for t in got:
        t.zero_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
