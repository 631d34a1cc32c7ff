"""The losses once more, token by token in float64 without torch: what the tests compare with. Written from the formulas, not from the code.

Each takes `live`, the logprobs that have a gradient, and `fixed`, the same numbers behind every stop-gradient and mask, so that a finite
difference over `live` is the gradient that the formula means.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Case:
    """A micro-batch: per token the sampler's and the proximal logprob, the advantage, the window and the lag."""

    mu: np.ndarray
    prox: np.ndarray
    advantage: np.ndarray
    sequence: np.ndarray
    lag: np.ndarray
    options: dict[str, object] = field(default_factory=dict)


def bound(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ratio(a: float, b: float) -> float:
    return math.exp(bound(a - b, -20.0, 20.0))


def clip_objective(r: float, adv: float, low: float, high: float) -> float:
    return min(r * adv, bound(r, 1 - low, 1 + high) * adv)


def anchored(case: Case, t: int) -> float:
    return float((case.prox if case.options.get("anchor") == "proximal" else case.mu)[t])


def dppo_tv(case: Case, live: np.ndarray, fixed: np.ndarray) -> float:
    o, total = case.options, 0.0
    for t, adv in enumerate(case.advantage):
        moved = math.exp(fixed[t]) - math.exp(case.mu[t])
        keep = moved <= o["tv_delta"] if adv > 0 else moved >= -o["tv_delta"]
        total -= keep * min(ratio(fixed[t], case.mu[t]), o["ratio_cap"]) * adv * live[t]
        total += o["kl_tau"] / 2 * bound(live[t] - case.mu[t], -20, 20) ** 2
    return total


def dppo_kl(case: Case, live: np.ndarray, fixed: np.ndarray) -> float:
    o, total = case.options, 0.0
    for t, adv in enumerate(case.advantage):
        q, p = math.exp(case.mu[t]), math.exp(fixed[t])
        divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        own_way = p > q if adv > 0 else p < q
        keep = not (own_way and divergence > o["kl_delta"])
        total -= keep * min(ratio(fixed[t], case.mu[t]), o["ratio_cap"]) * adv * live[t]
        total += o["kl_tau"] / 2 * bound(live[t] - case.mu[t], -20, 20) ** 2
    return total


def ppo(case: Case, live: np.ndarray, fixed: np.ndarray) -> float:
    o, total = case.options, 0.0
    for t, adv in enumerate(case.advantage):
        gain = clip_objective(ratio(live[t], anchored(case, t)), adv, o["eps_low"], o["eps_high"])
        total -= max(gain, o["dual_clip"] * adv) if adv < 0 else gain
    return total


def grpo(case: Case, live: np.ndarray, fixed: np.ndarray) -> float:
    o = case.options
    gains = [clip_objective(ratio(live[t], anchored(case, t)), adv, o["eps_low"], o["eps_high"]) for t, adv in enumerate(case.advantage)]
    return -sum(gains)


def decoupled_ppo(case: Case, live: np.ndarray, fixed: np.ndarray) -> float:
    o, total = case.options, 0.0
    for t, adv in enumerate(case.advantage):
        prox = case.prox[t]
        if o["proximal"] == "interpolate":
            alpha = case.lag[t] / (case.lag[t] + 1)
            prox = case.mu[t] + alpha * bound(fixed[t] - case.mu[t], -20, 20)
        weight = min(ratio(prox, case.mu[t]), o["behaviour_cap"])
        total -= weight * clip_objective(ratio(live[t], prox), adv, o["eps_low"], o["eps_high"])
    return total


def icepop(case: Case, live: np.ndarray, fixed: np.ndarray) -> float:
    o, total = case.options, 0.0
    for t, adv in enumerate(case.advantage):
        rho = ratio(case.prox[t], case.mu[t])
        if o["low"] <= rho <= o["high"]:
            total -= rho * clip_objective(ratio(live[t], case.prox[t]), adv, o["eps_low"], o["eps_high"])
    return total


def gspo(case: Case, live: np.ndarray, fixed: np.ndarray) -> float:
    """As published: the window's ratio with its whole gradient, once for each token."""
    o, total = case.options, 0.0
    for s in np.unique(case.sequence):
        at = np.flatnonzero(case.sequence == s)
        mean = sum(bound(live[t] - anchored(case, t), -20, 20) for t in at) / len(at)
        total -= sum(clip_objective(math.exp(mean), case.advantage[t], o["eps_low"], o["eps_high"]) for t in at)
    return total


def sapo(case: Case, live: np.ndarray, fixed: np.ndarray) -> float:
    total = 0.0
    for t, adv in enumerate(case.advantage):
        tau = case.options["tau_positive"] if adv > 0 else case.options["tau_negative"]
        total -= 4 / tau / (1 + math.exp(bound(-tau * (ratio(live[t], anchored(case, t)) - 1), -700, 700))) * adv
    return total


def reinforce(case: Case, live: np.ndarray, fixed: np.ndarray) -> float:
    return -float(np.dot(case.advantage, live))


def cispo(case: Case, live: np.ndarray, fixed: np.ndarray) -> float:
    o = case.options
    return -sum(
        bound(ratio(fixed[t], anchored(case, t)), o["ratio_floor"], o["ratio_cap"]) * adv * live[t] for t, adv in enumerate(case.advantage)
    )


def minirl(case: Case, live: np.ndarray, fixed: np.ndarray) -> float:
    o, total = case.options, 0.0
    for t, adv in enumerate(case.advantage):
        r = ratio(fixed[t], anchored(case, t))
        if (adv > 0 and r > 1 + o["eps_high"]) or (adv < 0 and r < 1 - o["eps_low"]):
            continue
        total -= min(ratio(fixed[t], case.mu[t]), o["ratio_cap"]) * adv * live[t]
    return total


def mis(case: Case, live: np.ndarray, fixed: np.ndarray) -> float:
    o, total = case.options, 0.0
    logs = [bound(fixed[t] - case.mu[t], -20, 20) for t in range(len(fixed))]
    for t, adv in enumerate(case.advantage):
        mine = [logs[u] for u in range(len(logs)) if case.sequence[u] == case.sequence[t]]
        log_rho = {"token": logs[t], "sequence": bound(sum(mine), -20, 20), "geometric": sum(mine) / len(mine)}[o["level"]]
        rho = math.exp(log_rho)
        if o["low"] <= rho <= o["high"]:
            total -= rho * adv * live[t]
    return total


def m2po(case: Case, live: np.ndarray, fixed: np.ndarray) -> float:
    squares = {t: bound(fixed[t] - case.mu[t], -20, 20) ** 2 for t in range(len(fixed))}
    kept = sorted(squares, key=lambda t: squares[t])
    while kept and sum(squares[t] for t in kept) / len(kept) > case.options["max_m2"]:
        kept.pop()
    return -sum(ratio(live[t], case.mu[t]) * case.advantage[t] for t in kept)


REFERENCES = {f.__name__: f for f in (dppo_tv, dppo_kl, ppo, grpo, decoupled_ppo, icepop, gspo, sapo, reinforce, cispo, minirl, mis, m2po)}
