"""The compiled loops of the CPU give the right numbers and gradients, and say so when a number is none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.ops import CpuOps, TorchOps

OPS, PLAIN = CpuOps(), TorchOps()


def rows(count: int, dim: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("vocab", [5, 64, 307, 4096])
def test_logprob_and_entropy_are_right_to_float32_rounding(vocab: int, scale: float) -> None:
    """Both are about log(mass) at most: a few units of 2**-23 of the largest logit or of log(vocab)."""
    logits, ids = rows(40, vocab, scale=scale), torch.arange(40) % vocab
    logprob, entropy = OPS.score(logits, ids)
    wanted = logits.double().log_softmax(-1)
    bound = 4 * 2**-23 * float(logits.abs().max() * 2 + np.log(vocab))
    assert (logprob - wanted.gather(1, ids[:, None])[:, 0]).abs().max() < bound
    assert (entropy + (wanted.exp() * wanted).sum(-1)).abs().max() < 8 * bound


def test_gradients_of_the_compiled_loops_are_those_of_plain_torch() -> None:
    """Against float64 autograd of the plain formulas; the loops' own forward is float32, hence 1e-5 of values about one."""
    weight = rows(1, 48, 1)[0]
    cos, sin = rows(9, 12, 2)[:, None], rows(9, 12, 3)[:, None]
    ids = torch.arange(9)
    cases = {
        "rms_norm": (lambda ops, x, w: ops.rms_norm(x, w, 1e-5), [rows(9, 48), weight]),
        "add_rms_norm": (lambda ops, x, r, w: torch.cat(ops.add_rms_norm(x, r, w, 1e-5)), [rows(9, 48), rows(9, 48, 5), weight]),
        "swiglu": (lambda ops, x: ops.swiglu(x), [rows(9, 48, 4, 3.0)]),
        "rotate": (lambda ops, x: ops.rotate(x.view(9, 4, 12), cos.to(x.dtype), sin.to(x.dtype)), [rows(9, 48)]),
        "score": (lambda ops, x: ops.score(x, ids)[0], [rows(9, 48, 6, 3.0)]),
    }
    for name, (run, inputs) in cases.items():
        mine = [x.clone().requires_grad_() for x in inputs]
        theirs = [x.double().requires_grad_() for x in inputs]
        out, wanted = run(OPS, *mine), run(PLAIN, *theirs)
        assert torch.allclose(out.double(), wanted, atol=1e-5), name
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(8))
        out.backward(grad)
        wanted.backward(grad.double())
        for a, b in zip(mine, theirs, strict=True):
            assert torch.allclose(a.grad.double(), b.grad, atol=1e-5), name


def test_a_loop_with_gradient_gives_the_bits_of_the_one_without() -> None:
    x, r, weight = rows(50, 48), rows(50, 48, 5), rows(1, 48, 1)[0]
    for run in (
        lambda a: OPS.rms_norm(a, weight, 1e-5),
        lambda a: torch.cat(OPS.add_rms_norm(a, r, weight, 1e-5)),
        OPS.swiglu,
        lambda a: OPS.score(a, torch.arange(50) % 48)[0],
    ):
        with torch.no_grad():
            without = run(x)
        assert torch.equal(run(x.clone().requires_grad_()).detach(), without)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 300), st.integers(0, 2**31), st.floats(0.1, 20), st.floats(0, 1, exclude_max=True))
def test_pick_takes_the_token_at_which_the_running_sum_passes(vocab: int, seed: int, scale: float, uniform: float) -> None:
    logits = rows(1, vocab, seed % 10_000, scale)
    token = int(OPS.pick(logits, torch.tensor([uniform], dtype=torch.float64))[0])
    running = logits.double().softmax(-1).cumsum(-1)[0]
    # The loop's exponentials are float32: the running sum is right to 2**-22 of the whole.
    assert running[token] >= uniform - 2**-22
    assert token == 0 or running[token - 1] <= uniform + 2**-22


def test_what_is_cut_off_is_never_picked_and_the_ends_are_reached() -> None:
    logits = torch.full((4, 200), float("-inf"))
    logits[:, [3, 70, 199]] = torch.tensor([0.0, 1.0, 2.0])
    almost_one = float(np.nextafter(1.0, 0.0))
    uniform = torch.tensor([0.0, 0.1, 0.3, almost_one], dtype=torch.float64)
    assert OPS.pick(logits, uniform).tolist() == [3, 70, 70, 199]


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_row_with_a_number_that_is_none_scores_none_and_spoils_no_neighbour(odd: float) -> None:
    logits = rows(3, 100)
    fine = OPS.score(logits, torch.tensor([1, 2, 3]))[0]
    logits[1, 77] = odd
    logprob, entropy = OPS.score(logits, torch.tensor([1, 2, 3]))
    assert torch.isnan(logprob[1]) and torch.isnan(entropy[1])
    assert torch.equal(logprob[[0, 2]], fine[[0, 2]])


def test_numbers_that_are_none_pass_through_norm_and_swiglu() -> None:
    x = rows(3, 48)
    x[1, 5] = float("nan")
    for out in (OPS.rms_norm(x, torch.ones(48), 1e-5), OPS.swiglu(x)):
        assert torch.isnan(out[1]).any() and not torch.isnan(out[[0, 2]]).any()
