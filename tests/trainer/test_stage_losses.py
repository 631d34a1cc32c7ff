"""Losses of the stages: packing changes nothing, micro-batches add up, and preferences follow an independent reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_worlds import CHATS, DEMO, tiny_model

from rollmill.model import Model, load_model
from rollmill.trainer.datasets.rows import Layout, RowEncoder
from rollmill.trainer.datasets.shards import TokenSequence
from rollmill.trainer.stages import packed as packing
from rollmill.trainer.stages.packed import attention_share, mean_loss, micro_batches, pack, token_losses, weighted_losses
from rollmill.trainer.stages.preference import Pairs, implicit_rewards, preference_losses
from rollmill.trainer.stages.settings import DpoLoss

SEQUENCES = [s for row in CHATS for s in RowEncoder(DEMO, Layout.CHAT)(row)]


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.set_num_threads(1)
    return load_model(tiny_model(tmp_path_factory.mktemp("m") / "tiny"), numerics="exact")[0]


def test_packed_losses_are_those_of_each_sequence_alone_bit_for_bit(exact: Model) -> None:
    with torch.no_grad():
        together = token_losses(exact, pack(SEQUENCES))
        alone = torch.cat([token_losses(exact, pack([s])) for s in SEQUENCES])
    assert together.numpy().tobytes() == alone.numpy().tobytes()


def test_another_conversation_in_the_pack_changes_no_loss(exact: Model) -> None:
    with torch.no_grad():
        one = token_losses(exact, pack([SEQUENCES[0], SEQUENCES[1]]))
        other = token_losses(exact, pack([SEQUENCES[0], SEQUENCES[2]]))
    num = len(pack([SEQUENCES[0]]).rows_N)
    assert one[:num].tolist() == other[:num].tolist()


def test_gradients_of_micro_batches_add_up_to_those_of_the_whole(exact: Model) -> None:
    """Sums of the same float32 terms in another order: with n terms they differ by at most about n eps of the sum of magnitudes."""

    def gradient(max_tokens: int) -> torch.Tensor:
        exact.zero_grad()
        batch = micro_batches(SEQUENCES, max_tokens=max_tokens, attention_share=attention_share(exact))
        for loss, _ in weighted_losses(exact, batch, divisor=sum(p.weight for p in batch)):
            loss.backward()
        assert exact.embed.grad is not None
        return exact.embed.grad.clone()

    whole, cut = gradient(10_000), gradient(64)
    num_terms = sum(len(s.tokens_T) for s in SEQUENCES)
    assert (whole - cut).abs().max() <= num_terms * torch.finfo(torch.float32).eps * whole.abs().max()


def test_logits_in_blocks_give_the_same_losses_and_gradients(exact: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, found = pack(SEQUENCES[:6]), []
    for at_once in (2**27, 5 * exact.config.vocab_size):
        monkeypatch.setattr(packing, "LOGITS_AT_ONCE", at_once)
        exact.zero_grad()
        losses = token_losses(exact, packed)
        losses.sum().backward()
        assert exact.embed.grad is not None
        found.append((losses.detach().numpy().tobytes(), exact.embed.grad.clone()))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=1e-6)


def test_weights_scale_tokens_in_the_mean(exact: Model) -> None:
    tokens = SEQUENCES[0].tokens_T
    weights = np.zeros(len(tokens), np.float32)
    weights[2], weights[3] = 1.0, 3.0
    with torch.no_grad():
        each = token_losses(exact, pack([TokenSequence(tokens_T=tokens)])).numpy()
    expected = (each[1] * 1.0 + each[2] * 3.0) / 4.0
    assert mean_loss(exact, [pack([TokenSequence(tokens_T=tokens, weights_T=weights)])]) == pytest.approx(expected, rel=1e-6)


def reference_loss(kind: DpoLoss, v: np.ndarray, beta: float, smoothing: float, gamma: float) -> np.ndarray:
    """In float64 and other words than the code under test: probabilities instead of their logs."""
    c, r, nc, nr, rc, rr = v
    if kind is DpoLoss.IPO:
        return np.square(c / nc - rc / nc - r / nr + rr / nr - 0.5 / beta)
    if kind is DpoLoss.SIMPO:
        odds = np.exp(beta * c / nc - beta * r / nr - gamma)
    else:
        odds = np.exp(beta * (c - r)) * np.exp(beta * (rr - rc))
    chance = odds / (1 + odds)
    return -(1 - smoothing) * np.log(chance) - smoothing * np.log(1 - chance)


def pairs_of(v: np.ndarray) -> Pairs:
    c, r, nc, nr, rc, rr = (torch.tensor(x, dtype=torch.float64, requires_grad=i < 2) for i, x in enumerate(v))
    return Pairs(chosen_N=c, rejected_N=r, num_chosen_N=nc, num_rejected_N=nr, ref_chosen_N=rc, ref_rejected_N=rr)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    st.sampled_from(list(DpoLoss)),
    st.lists(st.tuples(*[st.floats(-5, -0.1)] * 2, *[st.integers(1, 20)] * 2, *[st.floats(-5, -0.1)] * 2), min_size=1, max_size=5),
    st.floats(0.01, 1.0),
    st.floats(0.0, 0.4),
    st.floats(0.0, 2.0),
)
def test_preference_losses_follow_the_reference_in_value_and_gradient(
    kind: DpoLoss, rows: list[tuple[float, ...]], beta: float, smoothing: float, gamma: float
) -> None:
    values = np.array(rows, np.float64).T
    smoothing = 0.0 if kind is DpoLoss.IPO else smoothing
    pairs = pairs_of(values)
    found = preference_losses(pairs, loss=kind, beta=beta, label_smoothing=smoothing, gamma=gamma)
    expected = reference_loss(kind, values, beta, smoothing, gamma)
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-6, atol=1e-9)
    found.sum().backward()
    for i, grad in enumerate((pairs.chosen_N.grad, pairs.rejected_N.grad)):
        step = 1e-5
        up, down = values.copy(), values.copy()
        up[i] += step
        down[i] -= step
        slope = (reference_loss(kind, up, beta, smoothing, gamma) - reference_loss(kind, down, beta, smoothing, gamma)) / (2 * step)
        assert grad is not None
        np.testing.assert_allclose(grad.numpy(), slope, rtol=1e-4, atol=1e-6)


def test_a_policy_that_is_the_reference_has_loss_log_two_and_no_margin() -> None:
    values = np.array([[-3.0], [-5.0], [2.0], [3.0], [-3.0], [-5.0]])
    loss = preference_losses(pairs_of(values), loss=DpoLoss.SIGMOID, beta=0.1, label_smoothing=0.0, gamma=0.0)
    assert loss.tolist() == pytest.approx([np.log(2)])
    assert [r.tolist() for r in implicit_rewards(pairs_of(values), loss=DpoLoss.SIGMOID, beta=0.1)] == [[0.0], [0.0]]


def stops(kind: DpoLoss, values: np.ndarray, **options: float) -> float:
    pairs = pairs_of(values)
    preference_losses(pairs, loss=kind, **{"beta": 0.5, "label_smoothing": 0.0, "gamma": 0.0} | options).sum().backward()
    assert pairs.chosen_N.grad is not None
    return float(pairs.chosen_N.grad[0])


def test_each_loss_stops_where_its_docstring_says() -> None:
    at: Callable[[float], np.ndarray] = lambda lead: np.array([[lead], [0.0], [1.0], [1.0], [0.0], [0.0]])  # noqa: E731
    assert stops(DpoLoss.IPO, at(1.0)) == pytest.approx(0.0)
    assert stops(DpoLoss.IPO, at(2.0)) > 0 > stops(DpoLoss.IPO, at(0.0))
    settled = np.log(0.8 / 0.2) / 0.5
    assert stops(DpoLoss.SIGMOID, at(settled), label_smoothing=0.2) == pytest.approx(0.0, abs=1e-12)
    assert stops(DpoLoss.SIGMOID, at(50.0)) < 0 and stops(DpoLoss.SIGMOID, at(-1e4)) == pytest.approx(-0.5)


def test_hopeless_logprobs_stay_finite() -> None:
    for kind in DpoLoss:
        values = np.array([[-1e6], [-1.0], [1.0], [1.0], [-1.0], [-1e6]])
        assert torch.isfinite(
            preference_losses(pairs_of(values), loss=kind, beta=0.1, label_smoothing=0.1 * (kind != DpoLoss.IPO), gamma=1.0)
        ).all()


def test_attention_share_counts_multiplications(tmp_path: Path) -> None:
    model, config = load_model(tiny_model(tmp_path / "m"))
    assert attention_share(model) == config.num_layers * config.num_heads * config.head_dim / model.num_parameters
