"""What a metric is called in a tracker: by role, or by the name that users of another framework chart already."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

ALIASES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "trl": {
            "trainer/reward/mean": "train/reward",
            "trainer/reward/std": "train/reward_std",
            "trainer/frac_reward_zero_std": "train/frac_reward_zero_std",
            "trainer/pol/entropy": "train/entropy",
            "trainer/grad/norm": "train/grad_norm",
            "trainer/timing_s/step": "train/step_time",
            "trainer/timing_s/wait_batch": "train/perf/rollout_wait_s",
            "trainer/staleness/mean": "train/sample/staleness_mean",
            "trainer/staleness/max": "train/sample/staleness_max",
            "trainer/mm/abs_diff_mean": "train/sampling/sampling_logp_difference/mean",
            "trainer/mm/abs_diff_max": "train/sampling/sampling_logp_difference/max",
            "trainer/mm/ratio_mean": "train/sampling/importance_sampling_ratio/mean",
            "rollout/num_running": "rollout/inflight",
            "rollout/engine/tokens_per_s": "rollout/generated_tok_s",
        },
        "verl": {
            "trainer/reward/mean": "critic/rewards/mean",
            "trainer/pol/entropy": "actor/entropy",
            "trainer/grad/norm": "actor/grad_norm",
            "trainer/mm/k1": "actor/ppo_kl",
            "trainer/mm/k3": "rollout_corr/k3_kl",
            "trainer/mm/ppl_ratio": "rollout_corr/ppl_ratio",
            "trainer/mm/chi2_token": "rollout_corr/chi2_token",
            "trainer/mm/chi2_seq": "rollout_corr/chi2_seq",
            "trainer/mm/ess": "rollout_corr/rollout_is_eff_sample_size",
            "trainer/mm/tv_token_mean": "training/rollout_probs_diff_mean",
            "trainer/mm/tv_token_max": "training/rollout_probs_diff_max",
            "trainer/mm/corr_prob": "training/rollout_actor_probs_pearson_corr",
            "trainer/staleness/mean": "training/off_policy/trajectory_staleness/mean",
            "trainer/staleness/max": "training/off_policy/trajectory_staleness/max",
            "trainer/timing_s/step": "timing_s/step",
            "trainer/timing_s/learn": "timing_s/update_actor",
            "trainer/timing_s/publish": "timing_s/update_weights",
            "trainer/timing_s/wait_batch": "timing_s/gen",
            "trainer/perf/tokens_per_s": "perf/throughput",
            "rollout/idle_frac": "rollouter/idle_ratio",
        },
    }
)
"""By the framework whose users know the name; only where both mean the same quantity."""

AXES: Mapping[str, str] = MappingProxyType({"trl": "train/global_step", "verl": "training/global_step"})
"""What the trainer's step is called."""


class Names:
    """`trainer/reward/mean` for `reward/mean` of the trainer; with aliases, the other framework's name where there is one."""

    def __init__(self, aliases: str = "") -> None:
        if aliases and aliases not in ALIASES:
            raise ValueError(f"there are no names {aliases!r}; choose {' or '.join(ALIASES)}, or leave it out for our own")
        self.aliases, self._known = aliases, dict(ALIASES.get(aliases, {}))

    def of(self, role: str, name: str) -> str:
        # A role's own numbers carry its name already: rollout/num_running.
        full = name if name.startswith(f"{role}/") else f"{role}/{name}"
        return self._known.get(full, full)

    def axis(self, role: str) -> str:
        """The step axis of a role: two roles never share one."""
        return AXES.get(self.aliases, f"{role}/step") if role == "trainer" else f"{role}/step"

    def aliases_of(self, role: str) -> list[str]:
        """The names of this role that do not begin with the role."""
        return [alias for full, alias in self._known.items() if full.startswith(f"{role}/") and not alias.startswith(f"{role}/")]
