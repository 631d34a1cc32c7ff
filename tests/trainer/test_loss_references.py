"""Every loss equals its formula, its gradient the formula's finite differences; nothing that is not a number gets through any of them."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_references import REFERENCES, Case

from rollmill.algorithms import CORRECTIONS, LOSSES, DppoTv, LossOptions, Mis, Options, loss_options
from rollmill.trainer.losses import FUNCTIONS, LossInputs, LossParts, policy_loss

VARIANTS: list[tuple[str, dict[str, object]]] = [
    *((name, {}) for name in LOSSES),
    ("dppo_tv", {"tv_delta": 0.1, "kl_tau": 0.3, "ratio_cap": 1.5}),
    ("dppo_kl", {"kl_delta": 0.01, "kl_tau": 0.3}),
    *((name, {"anchor": "proximal"}) for name in ("ppo", "grpo", "cispo", "gspo", "minirl", "sapo")),
    ("ppo", {"dual_clip": 1.3, "eps_low": 0.1, "eps_high": 0.4}),
    ("decoupled_ppo", {"proximal": "interpolate"}),
    ("cispo", {"ratio_floor": 0.8, "ratio_cap": 1.2}),
    ("gspo", {"eps_low": 0.2, "eps_high": 0.3}),
    ("mis", {"level": "sequence"}),
    ("mis", {"level": "geometric", "low": 0.8, "high": 1.2}),
    ("m2po", {"max_m2": 0.5}),
]
every_variant = pytest.mark.parametrize(("name", "table"), VARIANTS, ids=lambda v: str(v))
every_loss = pytest.mark.parametrize("name", list(LOSSES))
seeds = st.integers(0, 2**32 - 1)


def drawn(seed: int, *, spread: float = 0.5, num: int = 9, uniform_advantage: bool = False) -> tuple[Case, np.ndarray]:
    """(case, the policy's logprobs): three windows, ratios from near 1 to far off, sometimes beyond the clamp."""
    rng = np.random.default_rng(seed)
    mu = -rng.exponential(1.5, num) - 1e-3
    logp, prox = (np.minimum(mu + rng.normal(0, spread, num), -1e-3) for _ in range(2))
    if rng.random() < 0.2:
        logp[0] = mu[0] - 25.0
    sequence = np.sort(rng.integers(0, 3, num))
    by_window = rng.normal(0, 1, 3)
    return Case(mu=mu, prox=prox, advantage=by_window[sequence], sequence=sequence, lag=rng.integers(0, 5, num)), logp


def inputs_of(case: Case, logp: torch.Tensor, options: LossOptions, dtype: torch.dtype = torch.float64) -> LossInputs:
    windows = np.zeros(3)
    windows[case.sequence] = case.advantage
    return LossInputs(
        logprobs_N=logp,
        sampler_N=torch.tensor(case.mu, dtype=dtype),
        advantages_S=torch.tensor(windows, dtype=dtype),
        sequence_N=torch.tensor(case.sequence),
        lag_N=torch.tensor(case.lag),
        proximal_N=torch.tensor(case.prox, dtype=dtype) if options.needs_proximal else None,
    )


def run(case: Case, logp: np.ndarray, options: LossOptions, corrections: tuple[Options, ...] = ()) -> tuple[LossParts, np.ndarray]:
    live = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    parts = policy_loss(inputs_of(case, live, options), options, corrections)
    parts.total.backward()
    assert live.grad is not None
    return parts, live.grad.numpy()


@every_variant
@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=seeds)
def test_value_and_gradient_equal_the_formula(name: str, table: dict[str, object], seed: int) -> None:
    case, logp = drawn(seed)
    options = loss_options(name, table)
    case.options = msgspec.structs.asdict(options)
    parts, gradient = run(case, logp, options)
    formula = REFERENCES[name]
    assert float(parts.total.detach()) == pytest.approx(formula(case, logp, logp), rel=1e-9, abs=1e-9)
    step = 1e-6
    for i in range(len(logp)):
        up, down = logp.copy(), logp.copy()
        up[i] += step
        down[i] -= step
        slope = (formula(case, up, logp) - formula(case, down, logp)) / (2 * step)
        # Central differences: rounding costs eps |f| / step, here some 1e-9, and the third derivative step^2 / 6, less.
        assert gradient[i] == pytest.approx(slope, rel=1e-5, abs=1e-5), i


def test_every_loss_has_a_function_a_reference_and_a_docstring_with_its_rule() -> None:
    assert set(FUNCTIONS) == set(LOSSES.values()) and set(REFERENCES) == set(LOSSES)
    assert all(
        f.__name__ == name and "stop" in (f.__doc__ or "") for name, f in zip(LOSSES, (FUNCTIONS[k] for k in LOSSES.values()), strict=True)
    )


@every_loss
@settings(max_examples=10, deadline=None, derandomize=True)
@given(seed=seeds)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name: str, seed: int) -> None:
    case, _ = drawn(seed)
    case.prox = case.mu.copy()
    _, gradient = run(case, case.mu, LOSSES[name]())
    # d/d log pi of -A log pi, for every loss: ratios are 1, nothing has moved, every soft term is flat at 0.
    assert gradient == pytest.approx(-case.advantage, rel=1e-12, abs=1e-12)


@every_loss
def test_zero_advantage_pushes_nothing(name: str) -> None:
    case, logp = drawn(3)
    case.advantage = np.zeros_like(case.advantage)
    options = loss_options(name, {"kl_tau": 0.0} if name.startswith("dppo") else {})
    parts, gradient = run(case, logp, options)
    assert float(parts.total) == 0.0 and not gradient.any()


@every_loss
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["policy", "sampler", "proximal", "advantage"])
def test_numbers_that_are_none_are_masked_counted_and_change_no_other_token(name: str, bad: float, side: str) -> None:
    """The rest must be as if the token had not been there: the value, and every gradient, bit for bit up to the order of a sum."""
    options = LOSSES[name]()
    case, logp = drawn(5, spread=0.1)
    case.sequence = np.array([0, 0, 0, 0, 1, 1, 1, 1, 2])
    case.advantage = np.array([1.0, -0.5, 0.7])[case.sequence]
    at, keep = 8, np.arange(9) != 8
    if side != "advantage":
        at, keep = 1, np.arange(9) != 1
    without = Case(**{k: v[keep] for k, v in vars(case).items() if k != "options"})
    wanted, wanted_gradient = run(without, logp[keep], options, everything(name))
    {"policy": logp, "sampler": case.mu, "proximal": case.prox, "advantage": case.advantage}[side][at] = bad
    parts, gradient = run(case, logp, options, everything(name))
    if side == "proximal" and not options.needs_proximal:
        assert parts.is_finite_N.all()
        return
    assert gradient[at] == 0.0 and gradient[keep].tolist() == pytest.approx(wanted_gradient.tolist(), rel=1e-12)
    assert float(parts.total.detach()) == pytest.approx(float(wanted.total.detach()), rel=1e-12)
    assert parts.is_finite_N.tolist() == keep.tolist() and not parts.is_kept_N[at] and not parts.is_stopped_N[at]


def everything(name: str) -> tuple[Options, ...]:
    """All corrections that go with a loss."""
    return tuple(kind() for key, kind in CORRECTIONS.items() if key != "tis" or not LOSSES[name]().weighs_sampler)


@every_loss
def test_ratios_of_any_size_give_finite_numbers(name: str) -> None:
    """In float32, where exp overflows at 88: logprobs of -3e38 and differences of any sign stay harmless."""
    huge = 3e38
    logp = torch.tensor([-huge, -1e-7, -200.0, -0.5, -huge], requires_grad=True)
    mu = torch.tensor([-0.5, -huge, -0.5, -200.0, -huge])
    for sign in (1.0, -1.0):
        inputs = LossInputs(
            logprobs_N=logp,
            sampler_N=mu,
            proximal_N=mu.flip(0) if LOSSES[name]().needs_proximal else None,
            advantages_S=torch.tensor([sign]),
            sequence_N=torch.zeros(5, dtype=torch.long),
        )
        parts = policy_loss(inputs, LOSSES[name](), everything(name))
        [gradient] = torch.autograd.grad(parts.total, logp)
        assert torch.isfinite(gradient).all()


@every_loss
@settings(max_examples=10, deadline=None, derandomize=True)
@given(seed=seeds)
def test_corrections_only_take_away(name: str, seed: int) -> None:
    case, logp = drawn(seed, spread=2.0)
    options = LOSSES[name]()
    parts, plain = run(case, logp, options)
    for kind in CORRECTIONS.values():
        if kind in [type(c) for c in everything(name)] and name != "m2po" and kind is not CORRECTIONS["tis"]:
            masked, gradient = run(case, logp, options, (kind(),))
            assert ((gradient == plain) | (gradient == 0)).all()
            assert not (masked.is_kept_N & ~parts.is_kept_N).any()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=seeds, max_m2=st.floats(1e-3, 2.0))
def test_m2po_leaves_out_the_farthest_tokens_and_no_more_than_it_must(seed: int, max_m2: float) -> None:
    case, logp = drawn(seed)
    parts, _ = run(case, logp, loss_options("m2po", {"max_m2": max_m2}))
    squares = np.clip(logp - case.mu, -20, 20) ** 2
    kept = parts.is_kept_N.numpy()
    if kept.any():
        assert squares[kept].mean() <= max_m2 * (1 + 1e-12)
    if not kept.all():
        nearest_out = squares[~kept].min()
        assert nearest_out >= squares[kept].max(initial=0) and np.append(squares[kept], nearest_out).mean() > max_m2


def test_kl_to_a_reference_is_taken_from_the_advantage_of_each_token() -> None:
    logp = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    reference = torch.tensor([-1.5, -1.0, -0.5])
    inputs = LossInputs(
        logprobs_N=logp,
        sampler_N=logp.detach(),
        reference_N=reference,
        kl_ref=0.1,
        advantages_S=torch.tensor([1.0, -1.0]),
        sequence_N=torch.tensor([0, 0, 1]),
    )
    parts = policy_loss(inputs, DppoTv(), ())
    parts.total.backward()
    assert logp.grad is not None and logp.grad.tolist() == pytest.approx([-(1.0 - 0.05), -(1.0 + 0.1), 1.0])
    assert parts.reference_ratio_N is not None and parts.reference_ratio_N.tolist() == [0.5, -1.0, 0.0]


def test_k1_in_the_advantage_has_the_gradient_of_the_divergence() -> None:
    """Over a whole vocabulary, each token weighted by its probability, the push by k1 is minus the gradient of KL(policy, reference)."""
    gen = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=gen, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(7, generator=gen, dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    [wanted] = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits, retain_graph=True)
    push = torch.zeros_like(logits)
    for token in range(7):
        inputs = LossInputs(
            logprobs_N=logp[token : token + 1],
            sampler_N=logp[token : token + 1].detach(),
            reference_N=reference[token : token + 1],
            kl_ref=1.0,
            advantages_S=torch.zeros(1, dtype=torch.float64),
            sequence_N=torch.zeros(1, dtype=torch.long),
        )
        [one] = torch.autograd.grad(policy_loss(inputs, DppoTv(), ()).total, logits, retain_graph=True)
        push += logp[token].exp().detach() * one
    assert push.tolist() == pytest.approx(wanted.tolist(), abs=1e-12)


def test_sequence_mean_divides_by_the_episode_before_any_mask() -> None:
    case, logp = drawn(11, num=6)
    case.sequence = np.array([0, 0, 0, 0, 1, 1])
    case.advantage = np.array([1.0, -1.0])[case.sequence]
    inputs = msgspec.structs.replace(
        inputs_of(case, torch.tensor(logp), Mis()), advantages_S=torch.tensor([1.0, -1.0], dtype=torch.float64)
    )
    whole, tokens = policy_loss(inputs, LOSSES["reinforce"](), (), "sequence_mean"), -case.advantage * logp
    assert float(whole.total) == pytest.approx(tokens[:4].sum() / 4 + tokens[4:].sum() / 2)
    inputs = msgspec.structs.replace(inputs, length_S=torch.tensor([8, 2]))
    longer = policy_loss(inputs, LOSSES["reinforce"](), (), "sequence_mean")
    assert float(longer.total) == pytest.approx(tokens[:4].sum() / 8 + tokens[4:].sum() / 2)
