"""The loss functions against numpy written from the formulas, and what is not finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.tinker.losses import LOSSES, loss_named, settings_of, summed

logprob = st.floats(-30, 0, width=32)
rows = st.lists(st.tuples(logprob, logprob, st.floats(-3, 3, width=32), st.floats(0, 2, width=32)), min_size=1, max_size=12)


def reference(name: str, p: np.ndarray, q: np.ndarray, adv: np.ndarray, w: np.ndarray) -> float:
    r = np.exp(np.clip(p - q, -20, 20))
    clipped = np.clip(r, 0.8, 1.2)
    terms = {
        "cross_entropy": -w * p,
        "importance_sampling": -r * adv,
        "ppo": -np.minimum(r * adv, clipped * adv),
        "cispo": -clipped * adv * p,
        "dro": -(adv * p - 0.025 * (p - q) ** 2),
    }
    return float(terms[name].sum())


def inputs_of(name: str, q: np.ndarray, adv: np.ndarray, w: np.ndarray) -> dict[str, torch.Tensor]:
    if name == "cross_entropy":
        return {"weights": torch.from_numpy(w)}
    return {"logprobs": torch.from_numpy(q), "advantages": torch.from_numpy(adv)}


@pytest.mark.parametrize("name", LOSSES)
@settings(derandomize=True, max_examples=40, deadline=None)
@given(rows=rows)
def test_loss_is_its_formula(name: str, rows: list[tuple[float, float, float, float]]) -> None:
    p, q, adv, w = np.array(rows, np.float64).T.copy()
    loss = loss_named(name)
    found, num_left_out = summed(loss, torch.from_numpy(p), inputs_of(name, q, adv, w), settings_of(loss, {}))
    assert float(found) == pytest.approx(reference(name, p, q, adv, w), rel=1e-12, abs=1e-12)
    assert int(num_left_out) == 0


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", range(3))
def test_what_is_not_finite_is_left_out_and_reaches_no_gradient(name: str, bad: float, where: int) -> None:
    columns = np.array([[-1.0, -2.0], [-1.5, -1.0], [1.0, -1.0]])
    columns[where, 1] = bad
    logprobs_M = torch.from_numpy(columns[0]).requires_grad_()
    loss = loss_named(name)
    if name == "cross_entropy" and where == 1:
        return
    inputs = inputs_of(name, columns[1], columns[2], columns[2])
    found, num_left_out = summed(loss, logprobs_M, inputs, settings_of(loss, {}))
    found.backward()
    assert int(num_left_out) == 1
    assert found.item() == pytest.approx(reference(name, columns[0, :1], columns[1, :1], columns[2, :1], columns[2, :1]))
    assert logprobs_M.grad is not None and bool(torch.isfinite(logprobs_M.grad).all()) and float(logprobs_M.grad[1]) == 0.0


def test_thresholds_may_come_with_the_request_or_with_each_position() -> None:
    p, q, adv = torch.tensor([0.0, 0.0]), torch.tensor([-1.0, -1.0]), torch.tensor([1.0, 1.0])
    loss = loss_named("ppo")
    inputs = {"logprobs": q, "advantages": adv}
    assert float(summed(loss, p, inputs, settings_of(loss, {"clip_high_threshold": 2.0}))[0]) == -4.0
    each = inputs | {"clip_high_threshold": torch.tensor([1.5, 2.0])}
    assert float(summed(loss, p, each, settings_of(loss, {}))[0]) == -3.5


def test_unknown_losses_and_settings_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="cross_entropy, importance_sampling, ppo, cispo, dro"):
        loss_named("sft")
    with pytest.raises(ValueError, match="takes beta"):
        settings_of(loss_named("dro"), {"clip": 1.0})
    with pytest.raises(ValueError, match="must be a number"):
        settings_of(loss_named("dro"), {"beta": "high"})
