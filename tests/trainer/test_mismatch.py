"""Mismatch numbers equal their formulas, written out again token by token in plain Python and numpy float64."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.algorithms import DppoTv
from rollmill.model.routes import RouteTally
from rollmill.trainer import mismatch as module
from rollmill.trainer.losses import LossInputs, policy_loss
from rollmill.trainer.mismatch import METRICS, SPLIT, TokenScores, corrections, mismatch, p99, route_flips, to_floats

SOURCES = ("east", "west")
# Both sides are float64 sums of the same terms in another order: n ulps of the sum, and exp and log of two libraries within an ulp or two.
CLOSE = dict(rel=1e-9, abs=1e-12)


def world(seed: int, num_tokens: int, *, spread: float, num_windows: int = 5) -> TokenScores:
    rng = np.random.default_rng(seed)
    sampler = -rng.exponential(1.5, num_tokens).astype(np.float32)
    logprobs = np.minimum(sampler + (rng.standard_t(2, num_tokens) * spread).astype(np.float32), 0).astype(np.float32)
    same = rng.random(num_tokens) < 0.3
    logprobs[same] = sampler[same]
    window = np.sort(rng.integers(0, num_windows, num_tokens))
    return TokenScores(
        logprobs_N=torch.from_numpy(logprobs),
        sampler_N=torch.from_numpy(sampler),
        sequence_N=torch.from_numpy(window),
        position_N=torch.from_numpy(rng.integers(1, 100_000, num_tokens)),
        lag_N=torch.from_numpy(rng.integers(0, 12, num_tokens)),
        source_N=torch.from_numpy(rng.integers(-1, 2, num_tokens)),
        is_single_N=torch.from_numpy(window == 2),
    )


def kl2(a: float, b: float) -> float:
    """KL of the coin a from the coin b."""
    return sum(x * math.log(x / y) for x, y in ((a, b), (1 - a, 1 - b)) if x > 0)


def k3_of(x: float) -> float:
    x = max(-20.0, min(20.0, x))
    return math.expm1(x) - x


def nearest_rank(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def by_hand(s: TokenScores) -> dict[str, float]:
    rows = zip(*(getattr(s, f).tolist() for f in TokenScores.__struct_fields__), strict=True)
    out: dict[str, float] = {}
    d, k3, ratio, pi, mu = [], [], [], [], []
    js, rev = [], []
    windows: dict[int, list[float]] = defaultdict(list)
    prob_bins: dict[int, list[float]] = defaultdict(list)
    position_bins: dict[int, list[float]] = defaultdict(list)
    lags: dict[str, list[float]] = defaultdict(list)
    sources: dict[int, list[float]] = defaultdict(list)
    single = [0.0]
    for logp, logq, window, position, lag, source, is_single in rows:
        x = logp - logq
        safe = max(-20.0, min(20.0, x))
        d.append(x)
        k3.append(k3_of(x))
        rev.append(k3_of(-x))
        ratio.append(math.exp(safe))
        pi.append(math.exp(logp))
        mu.append(math.exp(logq))
        middle = (pi[-1] + mu[-1]) / 2
        js.append((kl2(pi[-1], middle) + kl2(mu[-1], middle)) / 2)
        windows[window].append(x)
        prob_bins[min(9, int(mu[-1] * 10))].append(k3[-1])
        start = max(e for e in (0, 64, 256, 1024, 4096, 16384, 65536) if e <= position)
        position_bins[start].append(k3[-1])
        lags["0" if lag == 0 else "1" if lag == 1 else "2_3" if lag < 4 else "4_7" if lag < 8 else "8_up"].append(x)
        sources[source].append(x)
        single += [abs(x)] if is_single else []

    n = len(d)
    out["mm/num_tokens"] = n
    out["mm/abs_diff_mean"] = sum(map(abs, d)) / n
    out["mm/abs_diff_p99"] = nearest_rank([abs(x) for x in d])
    out["mm/abs_diff_max"] = max(map(abs, d))
    out["mm/single_version_abs_diff_max"] = max(single)
    out["mm/frac_nonzero"] = sum(x != 0 for x in d) / n
    out["mm/k1"] = -sum(d) / n
    out["mm/k3"] = sum(k3) / n
    out["mm/k3_rev"] = sum(rev) / n
    out["mm/js_token"] = sum(js) / n
    out["mm/token_mult_prob_error"] = sum(math.exp(min(20.0, abs(x))) for x in d) / n
    out["mm/ratio_mean"] = sum(ratio) / n
    out["mm/ess"] = sum(ratio) ** 2 / (n * sum(r * r for r in ratio))
    out["mm/chi2_token"] = sum(r * r for r in ratio) / n - 1
    out["mm/chi2_seq"] = sum(math.exp(2 * max(-20.0, min(20.0, sum(w)))) for w in windows.values()) / len(windows) - 1
    out["mm/tv_token_mean"] = sum(abs(a - b) for a, b in zip(pi, mu, strict=True)) / n
    out["mm/tv_token_max"] = max(abs(a - b) for a, b in zip(pi, mu, strict=True))
    for t in (2, 5, 10):
        out[f"mm/extreme_frac_{t}"] = sum(abs(x) > math.log(t) for x in d) / n
    out["mm/seq_mean_k1_p99"] = nearest_rank([-sum(w) / len(w) for w in windows.values()])
    out["mm/seq_max_k3_p99"] = nearest_rank([max(k3_of(x) for x in w) for w in windows.values()])
    out["mm/ppl_ratio"] = math.exp(-sum(max(-20.0, min(20.0, x)) for x in d) / n)
    out["mm/corr_prob"] = float(np.corrcoef(pi, mu)[0, 1]) if n > 1 else 1.0
    for i in range(10):
        out[f"mm/by_prob_decile/k3/{i}"] = float(np.mean(prob_bins[i])) if prob_bins[i] else 0.0
    for e in (0, 64, 256, 1024, 4096, 16384, 65536):
        out[f"mm/by_position/k3/{e}"] = float(np.mean(position_bins[e])) if position_bins[e] else 0.0
    groups = {f"mm/lag_{lag}": lags[lag] for lag in ("0", "1", "2_3", "4_7", "8_up")}
    groups |= {f"mm/engine_{name}": sources[i] for i, name in enumerate(SOURCES)}
    for name, xs in groups.items():
        out[f"{name}/token_frac"] = len(xs) / n
        out[f"{name}/abs_diff_mean"] = sum(map(abs, xs)) / len(xs) if xs else 0.0
        out[f"{name}/abs_diff_max"] = max(map(abs, xs), default=0.0)
        out[f"{name}/frac_nonzero"] = sum(x != 0 for x in xs) / len(xs) if xs else 0.0
        out[f"{name}/k3"] = sum(k3_of(x) for x in xs) / len(xs) if xs else 0.0
    return out


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.integers(1, 300), st.sampled_from([0.0, 1e-6, 0.05, 3.0]))
def test_every_number_equals_its_formula(seed: int, num_tokens: int, spread: float) -> None:
    scores = world(seed, num_tokens, spread=spread)
    found, wanted = to_floats(mismatch(scores, SOURCES)), by_hand(scores)
    assert found.keys() == wanted.keys()
    assert {n for n in METRICS if n.startswith("mm/")} == {n for n in found if not n.startswith("mm/engine_")}
    for name, value in wanted.items():
        # k3 of d is d^2 / 2 left over from two numbers of size d: for d = 1e-6 an ulp of these is 4e-10 of it.
        assert found[name] == pytest.approx(value, rel=1e-8 if "k3" in name else CLOSE["rel"], abs=1e-19 if "k3" in name else 1e-12), name


def test_equal_sides_give_exact_zeros_and_ones() -> None:
    scores = world(1, 200, spread=0.0)
    found = to_floats(mismatch(scores, SOURCES))
    ones = {"mm/ess", "mm/ratio_mean", "mm/token_mult_prob_error", "mm/ppl_ratio"}
    assert all(found[name] == 1.0 for name in ones) and found["mm/corr_prob"] == pytest.approx(1.0, abs=1e-12)
    rest = {n: v for n, v in found.items() if n not in ones | {"mm/corr_prob", "mm/num_tokens"} and not n.endswith("token_frac")}
    assert {n: v for n, v in rest.items() if v != 0.0} == {}


def test_one_changed_bit_is_seen() -> None:
    scores = world(2, 500, spread=0.0)
    scores.logprobs_N[scores.is_single_N.nonzero()[0, 0]] = torch.nextafter(
        scores.logprobs_N[scores.is_single_N.nonzero()[0, 0]], torch.tensor(-9.0)
    )
    found = to_floats(mismatch(scores, SOURCES))
    assert found["mm/frac_nonzero"] == 1 / 500 and found["mm/single_version_abs_diff_max"] == found["mm/abs_diff_max"] > 0


def test_tokens_without_a_finite_logprob_are_left_out() -> None:
    scores = world(3, 100, spread=0.1)
    scores.logprobs_N[::3] = float("nan")
    scores.sampler_N[1::3] = -float("inf")
    kept = TokenScores(**{f: getattr(scores, f)[2::3] for f in TokenScores.__struct_fields__})
    assert to_floats(mismatch(scores, SOURCES)) == to_floats(mismatch(kept, SOURCES))
    scores.logprobs_N[:] = float("nan")
    assert mismatch(scores, SOURCES) == {} and to_floats({}) == {}


def test_far_off_tokens_give_large_and_finite_numbers() -> None:
    scores = world(4, 50, spread=0.1)
    scores.logprobs_N[:5], scores.sampler_N[:5] = 0.0, -1e4
    scores.logprobs_N[5:9], scores.sampler_N[5:9] = -1e4, 0.0
    found = to_floats(mismatch(scores, SOURCES))
    assert all(math.isfinite(v) for v in found.values()) and found["mm/k3_rev"] > 1e6 and found["mm/tv_token_max"] == 1.0


def test_micro_batches_joined_are_one_batch() -> None:
    whole = world(5, 120, spread=0.2, num_windows=9)
    cuts = [0, *(int((whole.sequence_N < w).sum()) for w in (3, 4, 8)), 120]
    parts = []
    for a, b in pairwise(cuts):
        arrays = {f: getattr(whole, f)[a:b] for f in TokenScores.__struct_fields__}
        # Each micro-batch numbers its windows from 0.
        parts.append(TokenScores(**(arrays | {"sequence_N": arrays["sequence_N"] - arrays["sequence_N"].min()})))
    found, wanted = to_floats(mismatch(TokenScores.join(parts), SOURCES)), to_floats(mismatch(whole, SOURCES))
    assert found == pytest.approx(wanted, **CLOSE)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.floats(-9, 9), min_size=1, max_size=250))
def test_p99_is_the_nearest_rank(values: list[float]) -> None:
    assert float(p99(torch.tensor(values, dtype=torch.float64))) == nearest_rank(values)


def test_corrections_count_what_the_loss_masked() -> None:
    gen = torch.Generator().manual_seed(0)
    parts, positives, rows = [], [], []
    for _ in range(3):
        logp, mu = (-torch.rand(40, generator=gen) * 3 for _ in range(2))
        logp[0], mu[1], logp[2] = float("nan"), -float("inf"), -30.0
        advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])
        sequence = torch.arange(40) // 10
        inputs = LossInputs(logprobs_N=logp, sampler_N=mu, advantages_S=advantages, sequence_N=sequence)
        part = policy_loss(inputs, DppoTv(tv_delta=0.2, ratio_cap=2.0))
        parts.append(part)
        positives.append(advantages[sequence] > 0)
        rows += [
            (float(p), float(m), float(advantages[s]), bool(k), bool(t))
            for p, m, s, k, t in zip(logp, mu, sequence, part.is_kept_N, part.is_stopped_N, strict=True)
        ]
    found = to_floats(corrections(parts, torch.cat(positives)))
    finite = [r for r in rows if math.isfinite(r[0]) and math.isfinite(r[1])]
    assert found == pytest.approx(
        {
            "corr/kept_token_frac": sum(r[3] for r in rows) / 120,
            "corr/stopped_frac": sum(r[4] for r in rows) / 120,
            "corr/stopped_pos": sum(r[4] and r[2] > 0 for r in rows) / 120,
            "corr/stopped_neg": sum(r[4] and r[2] <= 0 for r in rows) / 120,
            "corr/w_clip_frac": sum((r[3] or r[4]) and math.exp(r[0] - r[1]) > 2.0 for r in rows) / 120,
            "corr/veto_frac": sum(bool(x) for p in parts for x in p.hits["veto"]) / 12,
            "corr/opsm_frac": sum(bool(x) for p in parts for x in p.hits["opsm"]) / 12,
            "kl/behav_k2": sum(min(abs(r[0] - r[1]), 20.0) ** 2 / 2 for r in finite) / len(finite),
            "corr/nonfinite_frac": 1 - len(finite) / 120,
        }
    )
    assert found["corr/stopped_pos"] > 0 and found["corr/stopped_neg"] > 0 and found["corr/veto_frac"] > 0


def test_route_numbers_are_shares_of_what_was_recorded() -> None:
    def tally(flipped: list[int], replaced: list[int], recorded: list[int], tokens: tuple[int, int]) -> RouteTally:
        return RouteTally(
            flipped_L=torch.tensor(flipped),
            replaced_L=torch.tensor(replaced),
            recorded_L=torch.tensor(recorded),
            num_flipped_tokens=torch.tensor(tokens[0]),
            num_recorded_tokens=torch.tensor(tokens[1]),
        )

    found = to_floats(
        route_flips([tally([0, 3, 1], [0, 1, 0], [0, 10, 10], (3, 5)), tally([0, 0, 0], [0] * 3, [0, 30, 10], (0, 15))], (1, 2))
    )
    assert found == {
        "route/any_flip_tok_frac": 3 / 20,
        "route/plausible_replaced_frac": 1 / 60,
        "route/flip_frac_layer_1": 3 / 40,
        "route/flip_frac_layer_2": 1 / 20,
    }
    # Nothing recorded: nothing flipped.
    assert set(to_floats(route_flips([tally([0] * 3, [0] * 3, [0] * 3, (0, 0))], (1, 2))).values()) == {0.0}


def test_a_step_waits_for_the_device_a_fixed_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """All numbers travel in one list, however many there are."""
    calls = []
    real = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: calls.append(self.shape) or real(self))
    for name in ("item", "__float__", "__int__", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, lambda self, name=name: pytest.fail(f"{name} waits for the device"))
    names = [f"r{i}" for i in range(30)]
    found = to_floats(mismatch(world(6, 300, spread=0.1), names))
    assert len(calls) == 1 and len(found) == calls[0][0] == len([n for n in METRICS if n.startswith("mm/")]) + 30 * len(SPLIT)


def test_names_are_listed_once() -> None:
    assert len(set(METRICS)) == len(METRICS) and module.SPLIT == SPLIT
