"""How far trainer and sampler disagree: pure functions from flat token arrays to named numbers, taken before any mask.

With d = log pi - log mu on a sampled token, pi the trainer's probability and mu the sampler's; docs/metrics.md has every formula.
All in float64 on the device where the tokens are; a number stays a tensor until `to_floats` fetches all of them at once.
Shapes: N sampled tokens of S windows, B bins, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import torch

from rollmill.algorithms import CORRECTIONS
from rollmill.model.routes import RouteTally
from rollmill.trainer.losses import LOG_RATIO_CLAMP, LossParts

LAGS = ("0", "1", "2_3", "4_7", "8_up")
LAG_EDGES = (1, 2, 4, 8)
POSITION_EDGES = (64, 256, 1024, 4096, 16384, 65536)
NUM_PROB_BINS = 10
EXTREME = (2, 5, 10)
SPLIT = ("token_frac", "abs_diff_mean", "abs_diff_max", "frac_nonzero", "k3")
"""What is also given per version lag and per replica."""

METRICS = (
    *(
        "mm/num_tokens mm/abs_diff_mean mm/abs_diff_p99 mm/abs_diff_max mm/single_version_abs_diff_max mm/frac_nonzero mm/k1 mm/k3 "
        "mm/k3_rev mm/js_token mm/token_mult_prob_error mm/ratio_mean mm/ess mm/chi2_token mm/chi2_seq mm/tv_token_mean mm/tv_token_max "
        "mm/seq_mean_k1_p99 mm/seq_max_k3_p99 mm/ppl_ratio mm/corr_prob"
    ).split(),
    *(f"mm/extreme_frac_{t}" for t in EXTREME),
    *(f"mm/by_prob_decile/k3/{i}" for i in range(NUM_PROB_BINS)),
    *(f"mm/by_position/k3/{start}" for start in (0, *POSITION_EDGES)),
    *(f"mm/lag_{lag}/{name}" for lag in LAGS for name in SPLIT),
    *(
        "corr/kept_token_frac corr/stopped_frac corr/stopped_pos corr/stopped_neg corr/w_clip_frac corr/nonfinite_frac "
        "kl/behav_k2 kl/ref_k1 kl/ref_k3 route/any_flip_tok_frac route/plausible_replaced_frac route/missing_row_frac"
    ).split(),
    *(f"corr/{name}_frac" for name in CORRECTIONS),
)
"""Always written, as zeros when a step had nothing to compare. Per replica and per layer there are more, by name."""

Scalars = dict[str, torch.Tensor]


class TokenScores(msgspec.Struct, frozen=True, kw_only=True):
    """What both sides said of the sampled tokens of some windows, and where the tokens come from."""

    logprobs_N: torch.Tensor
    """The trainer's, detached."""
    sampler_N: torch.Tensor
    """The replica's."""
    sequence_N: torch.Tensor
    """Index of the window."""
    position_N: torch.Tensor
    """Index of the token in its window."""
    lag_N: torch.Tensor
    """Versions between the weights that sampled the token and those that score it."""
    source_N: torch.Tensor
    """Index of the replica; -1 when not known."""
    is_single_N: torch.Tensor
    """Whether the weights that score the token computed it and its whole context at the replica too."""

    @classmethod
    def join(cls, parts: Sequence[TokenScores]) -> TokenScores:
        """One after the other; the windows of each are numbered on from those before."""
        arrays = {name: torch.cat([getattr(p, name) for p in parts]) for name in cls.__struct_fields__ if name != "sequence_N"}
        first, sequences = torch.zeros_like(parts[0].sequence_N[:1]), []
        for part in parts:
            sequences.append(part.sequence_N + first)
            # Gaps do no harm: a window without tokens is no window here.
            first = sequences[-1].amax(0, keepdim=True) + 1
        return cls(sequence_N=torch.cat(sequences), **arrays)


def mismatch(scores: TokenScores, sources: Sequence[str]) -> Scalars:
    """Every `mm/*` number; `sources` names the replicas that `source_N` counts. Empty without a token finite on both sides."""
    is_finite = torch.isfinite(scores.logprobs_N) & torch.isfinite(scores.sampler_N)
    at_N = is_finite.nonzero()[:, 0]
    if not len(at_N):
        return {}
    logp, mu = scores.logprobs_N[at_N].double(), scores.sampler_N[at_N].double()
    d = logp - mu
    size, safe = d.abs(), d.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    ratio, k3 = safe.exp(), safe.expm1() - safe
    p, q = logp.exp(), mu.exp()
    tv = (p - q).abs()
    # A token of other weights says nothing here, and |d| >= 0.
    single = torch.where(scores.is_single_N[at_N], size, 0.0)
    out = {
        "mm/num_tokens": torch.full_like(d[0], len(d)),
        "mm/abs_diff_mean": size.mean(),
        "mm/abs_diff_p99": p99(size),
        "mm/abs_diff_max": size.max(),
        "mm/single_version_abs_diff_max": single.max(),
        "mm/frac_nonzero": (d != 0).double().mean(),
        "mm/k1": -d.mean(),
        "mm/k3": k3.mean(),
        "mm/k3_rev": ((-safe).expm1() + safe).mean(),
        "mm/js_token": _binary_js(logp, mu).mean(),
        "mm/token_mult_prob_error": safe.abs().exp().mean(),
        "mm/ratio_mean": ratio.mean(),
        "mm/ess": ratio.sum().square() / (len(ratio) * ratio.square().sum()),
        "mm/chi2_token": ratio.square().mean() - 1,
        "mm/tv_token_mean": tv.mean(),
        "mm/tv_token_max": tv.max(),
        "mm/ppl_ratio": (-safe.mean()).exp(),
        "mm/corr_prob": _pearson(p, q),
    }
    out |= {f"mm/extreme_frac_{t}": (size > math.log(t)).double().mean() for t in EXTREME}
    out |= _by_window(d, k3, scores.sequence_N[at_N])
    bins_N = (q * NUM_PROB_BINS).long().clamp(0, NUM_PROB_BINS - 1)
    for i, value in enumerate(_means(k3[None], bins_N, NUM_PROB_BINS)[0].unbind()):
        out[f"mm/by_prob_decile/k3/{i}"] = value
    bins_N = _bin(scores.position_N[at_N], POSITION_EDGES)
    for start, value in zip((0, *POSITION_EDGES), _means(k3[None], bins_N, 1 + len(POSITION_EDGES))[0].unbind(), strict=True):
        out[f"mm/by_position/k3/{start}"] = value
    out |= _split([f"mm/lag_{lag}" for lag in LAGS], _bin(scores.lag_N[at_N], LAG_EDGES), d, k3)
    # One bin more than there are names takes the tokens whose replica is not known.
    source_N = torch.where(scores.source_N[at_N] >= 0, scores.source_N[at_N], len(sources))
    return out | _split([f"mm/engine_{name}" for name in sources], source_N, d, k3)


def corrections(parts: Sequence[LossParts], is_positive_N: torch.Tensor) -> Scalars:
    """Every `corr/*` and `kl/*` number: what the loss and its corrections did. `is_positive_N`: tokens whose advantage is above 0."""
    is_finite = torch.cat([p.is_finite_N for p in parts])
    stopped = torch.cat([p.is_stopped_N for p in parts])
    num_finite = is_finite.sum().clamp(min=1)
    log_ratio = _safe(torch.cat([p.log_ratio_N for p in parts]), is_finite)
    out = {
        "corr/kept_token_frac": torch.cat([p.is_kept_N for p in parts]).double().mean(),
        "corr/stopped_frac": stopped.double().mean(),
        "corr/stopped_pos": (stopped & is_positive_N).double().mean(),
        "corr/stopped_neg": (stopped & ~is_positive_N).double().mean(),
        "corr/w_clip_frac": torch.cat([p.is_cut_N for p in parts]).double().mean(),
        "corr/nonfinite_frac": (~is_finite).double().mean(),
        "kl/behav_k2": 0.5 * log_ratio.square().sum() / num_finite,
    }
    for name in parts[0].hits:
        out[f"corr/{name}_frac"] = torch.cat([p.hits[name] for p in parts]).double().mean()
    references = [p.reference_ratio_N for p in parts if p.reference_ratio_N is not None]
    if references:
        k1 = _safe(torch.cat(references), is_finite)
        out |= {"kl/ref_k1": k1.sum() / num_finite, "kl/ref_k3": ((-k1).expm1() + k1).sum() / num_finite}
    return out


def route_flips(tallies: Sequence[RouteTally], layers: Sequence[int]) -> Scalars:
    """The `route/*` numbers of the live router against the record, over tokens that have one."""
    flipped_L, replaced_L, recorded_L = (
        torch.stack([getattr(t, name) for t in tallies]).sum(0).double() for name in ("flipped_L", "replaced_L", "recorded_L")
    )
    flips_L = flipped_L / recorded_L.clamp(min=1)
    num_tokens = torch.stack([t.num_recorded_tokens for t in tallies]).sum().clamp(min=1)
    return {
        "route/any_flip_tok_frac": torch.stack([t.num_flipped_tokens for t in tallies]).sum().double() / num_tokens,
        "route/plausible_replaced_frac": replaced_L.sum() / recorded_L.sum().clamp(min=1),
    } | {f"route/flip_frac_layer_{layer}": flips_L[layer] for layer in layers}


def to_floats(scalars: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """All numbers with one wait for the device."""
    if not scalars:
        return {}
    return dict(zip(scalars, torch.stack([value.double() for value in scalars.values()]).tolist(), strict=True))


def _safe(log_ratio_N: torch.Tensor, is_finite_N: torch.Tensor) -> torch.Tensor:
    """In float64, clamped as the loss does it; 0 for a token that is masked because one of its numbers is none."""
    return torch.where(is_finite_N, log_ratio_N.double(), 0.0).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


def p99(x_N: torch.Tensor) -> torch.Tensor:
    """The nearest-rank 99th percentile: the smallest value that at least 99 % do not exceed."""
    return x_N.kthvalue(-(-99 * len(x_N) // 100)).values


def _by_window(d_N: torch.Tensor, k3_N: torch.Tensor, sequence_N: torch.Tensor) -> Scalars:
    found_S, window_N = sequence_N.unique(return_inverse=True)
    zeros_S = torch.zeros(len(found_S), dtype=d_N.dtype, device=d_N.device)
    sums_S = zeros_S.index_add(0, window_N, d_N)
    counts_S = zeros_S.index_add(0, window_N, torch.ones_like(d_N))
    return {
        "mm/chi2_seq": (2 * sums_S.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)).exp().mean() - 1,
        "mm/seq_mean_k1_p99": p99(-sums_S / counts_S),
        "mm/seq_max_k3_p99": p99(zeros_S.scatter_reduce(0, window_N, k3_N, "amax")),
    }


def _split(names: Sequence[str], bin_N: torch.Tensor, d_N: torch.Tensor, k3_N: torch.Tensor) -> Scalars:
    """The SPLIT numbers of each bin; tokens in bins beyond the names count in no bin but in the whole."""
    num_bins = len(names) + 1
    size_N = d_N.abs()
    means = _means(torch.stack([size_N, (d_N != 0).double(), k3_N]), bin_N, num_bins)
    frac_B = torch.zeros_like(means[0]).index_add(0, bin_N, torch.ones_like(d_N)) / len(d_N)
    most_B = torch.zeros_like(means[0]).scatter_reduce(0, bin_N, size_N, "amax")
    columns = torch.stack([frac_B, means[0], most_B, means[1], means[2]], 1)
    return {f"{name}/{what}": columns[b, i] for b, name in enumerate(names) for i, what in enumerate(SPLIT)}


def _means(values_RN: torch.Tensor, bin_N: torch.Tensor, num_bins: int) -> torch.Tensor:
    """[R, B]: the mean of each row over each bin; 0 where a bin is empty."""
    sums_RB = values_RN.new_zeros(len(values_RN), num_bins).index_add(1, bin_N, values_RN)
    counts_B = values_RN.new_zeros(num_bins).index_add(0, bin_N, torch.ones_like(values_RN[0]))
    return sums_RB / counts_B.clamp(min=1)


def _bin(x_N: torch.Tensor, edges: Sequence[int]) -> torch.Tensor:
    """Bin i holds what is below edges[i] and not below the edge before."""
    return torch.bucketize(x_N, torch.tensor(edges, device=x_N.device), right=True)


def _binary_js(logp_N: torch.Tensor, logq_N: torch.Tensor) -> torch.Tensor:
    """Jensen-Shannon divergence in nats of "this token or another one" under both probabilities."""
    total = torch.zeros_like(logp_N)
    # 1 - p by expm1, which keeps its digits where p is nearly 1; logprobs of 1e-8 above 0 exist in float32.
    for a, b in ((logp_N.exp(), logq_N.exp()), (-logp_N.clamp(max=0).expm1(), -logq_N.clamp(max=0).expm1())):
        middle = (a + b) / 2
        total += torch.special.xlogy(a, a / middle.clamp(min=1e-300)) + torch.special.xlogy(b, b / middle.clamp(min=1e-300))
    return (total / 2).clamp(min=0)


def _pearson(x_N: torch.Tensor, y_N: torch.Tensor) -> torch.Tensor:
    """1 where one side does not vary: there is nothing to correlate."""
    x, y = x_N - x_N.mean(), y_N - y_N.mean()
    norm = (x.square().sum() * y.square().sum()).sqrt()
    return torch.where(norm > 0, (x * y).sum() / norm.clamp(min=1e-300), 1.0)
