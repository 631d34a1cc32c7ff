"""Claims about the sampler alone."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.engine.sampling import Lanes, keyed_uniform, sample
from rollmill.ops import CpuOps, tempered


def draw(
    logits: torch.Tensor, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, seeds: list[int] | None = None, position: int = 9
):
    n = len(logits)
    lanes = Lanes(
        temperature_N=np.full(n, temperature),
        top_p_N=np.full(n, top_p),
        top_k_N=np.full(n, top_k, np.int64),
        seed_N=np.array(seeds if seeds is not None else range(n), np.int64),
    )
    return sample(CpuOps(), tempered(logits, temperature), lanes, np.full(n, position, np.int64))


def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, -20.0])
    ids, _ = draw(logits.repeat(40_000, 1))
    freq = np.bincount(ids, minlength=5) / len(ids)
    # Three standard deviations of a frequency over 40,000 draws are at most 0.0075.
    assert np.abs(freq - logits.softmax(-1).numpy()).max() < 0.0075
    assert freq[4] < 1e-3


def test_uniforms_of_neighbouring_seeds_and_positions_are_uniform_and_uncorrelated() -> None:
    seeds, positions = np.meshgrid(np.arange(300), np.arange(300), indexing="ij")
    u = keyed_uniform(seeds.ravel(), positions.ravel()).reshape(300, 300)
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.004
    assert np.histogram(u, 16, (0, 1))[0].min() > 5_200
    assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 0.015
    assert abs(np.corrcoef(u[:, :-1].ravel(), u[:, 1:].ravel())[0, 1]) < 0.015


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**31), others=st.integers(0, 20), scale=st.floats(0.1, 8))
def test_a_row_does_not_depend_on_its_neighbours(seed: int, position: int, others: int, scale: float) -> None:
    gen = torch.Generator().manual_seed(others)
    logits = torch.randn(others + 1, 50, generator=gen) * scale
    alone = draw(logits[-1:], seeds=[seed], position=position)
    together = draw(logits, seeds=[*range(others), seed], position=position)
    assert alone[0][0] == together[0][-1]
    assert alone[1][0] == together[1][-1]


@settings(max_examples=40, deadline=None)
@given(top_k=st.integers(1, 60), top_p=st.floats(0.01, 1.0), data=st.integers(0, 1000))
def test_only_kept_tokens_are_drawn(top_k: int, top_p: float, data: int) -> None:
    logits = (torch.randn(50, generator=torch.Generator().manual_seed(data)) * 2).repeat(64, 1)
    ids, logprobs = draw(logits, top_k=top_k, top_p=top_p)
    probs, order = logits[0].softmax(-1).sort(descending=True)
    before = probs.double().cumsum(0) - probs
    allowed = {int(t) for rank, t in enumerate(order) if rank == 0 or (rank < top_k and (before[rank] < top_p + 1e-6))}
    assert set(ids) <= allowed
    assert logprobs == CpuOps().score(logits, torch.tensor(ids))[0].tolist(), "before anything is cut off"


def test_temperature_zero_takes_the_most_likely_token_and_one_row_may_be_greedy_alone() -> None:
    logits = torch.randn(8, 40, generator=torch.Generator().manual_seed(1))
    assert draw(logits, temperature=0.0)[0] == logits.argmax(-1).tolist()
    lanes = Lanes(temperature_N=np.array([0.0, 1.0] * 4), top_p_N=np.ones(8), top_k_N=np.zeros(8, np.int64), seed_N=np.arange(8))
    ids, _ = sample(CpuOps(), tempered(logits, lanes.temperature_N), lanes, np.arange(8))
    assert ids[0] == int(logits[0].argmax())


def test_logprob_is_that_of_the_tempered_distribution_in_float32() -> None:
    logits = torch.randn(16, 40, generator=torch.Generator().manual_seed(2))
    ids, logprobs = draw(logits, temperature=0.7)
    expected = (logits.double() / 0.7).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    # Two roundings, of the quotient (at most 6 here) and of the result: each at most half of 2**-21.
    assert (torch.tensor(logprobs) - expected).abs().max() < 2**-21


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((2000, 7), float("-inf"))
    logits[:, 3] = 0.0
    assert set(draw(logits)[0]) == {3}


def test_logits_that_are_not_numbers_give_a_logprob_that_is_not_one() -> None:
    logits = torch.zeros(2, 5)
    logits[1, 2] = float("nan")
    _, logprobs = draw(logits)
    assert logprobs[0] == logprobs[0] and logprobs[1] != logprobs[1]
