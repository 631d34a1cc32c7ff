"""Names and options of the losses, corrections and advantages: what a run file may choose; knows neither torch nor the formulas.

`rollmill.trainer.losses` and `rollmill.trainer.advantages` hold the functions, docs/losses.md the formulas.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Cap = Annotated[float, msgspec.Meta(ge=1)]
Anchor = Literal["sampler", "proximal"]
"""What a ratio divides by: the probability that the token was sampled with, or the policy's before the first update of the step."""
Aggregation = Literal["constant", "token_mean", "sequence_mean"]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of one algorithm; every field has a default."""


class LossOptions(Options, frozen=True, kw_only=True):
    """What every loss says of itself besides its numbers."""

    aggregation: ClassVar[Aggregation] = "constant"
    """How its authors sum it up."""

    @property
    def needs_proximal(self) -> bool:
        """Whether it wants the policy's logprobs from before the first update of the step."""
        return getattr(self, "anchor", "sampler") == "proximal"

    @property
    def weighs_sampler(self) -> bool:
        """Whether it weighs tokens by their ratio to the sampler itself, so that a correction by the same ratio would count twice."""
        return getattr(self, "anchor", "sampler") == "sampler"


class DppoTv(LossOptions, frozen=True, kw_only=True):
    tv_delta: Share = 0.2
    """A token stops pushing once its probability moved this far in the advantage's direction."""
    kl_tau: NotNegative = 2e-3
    """Weight of the pull towards the sampling policy."""
    ratio_cap: Cap = 20.0
    """The importance ratio is cut here, one-sided."""


class DppoKl(LossOptions, frozen=True, kw_only=True):
    kl_delta: Positive = 0.05
    """A token stops pushing once the divergence of "this token or another" exceeds this, in nats, in the advantage's direction."""
    kl_tau: NotNegative = 2e-3
    """Weight of the pull towards the sampling policy."""
    ratio_cap: Cap = 20.0
    """The importance ratio is cut here, one-sided."""


class Ppo(LossOptions, frozen=True, kw_only=True):
    eps_low: Share = 0.2
    """A failure stops pushing below the ratio 1 - eps_low."""
    eps_high: Positive = 0.28
    """A success stops pushing above the ratio 1 + eps_high."""
    dual_clip: Annotated[float, msgspec.Meta(gt=1)] = 3.0
    """A failure also stops pushing above this ratio."""
    anchor: Anchor = "sampler"
    """What the ratio divides by."""


class Grpo(LossOptions, frozen=True, kw_only=True):
    eps_low: Share = 0.2
    """A failure stops pushing below the ratio 1 - eps_low."""
    eps_high: Positive = 0.2
    """A success stops pushing above the ratio 1 + eps_high."""
    anchor: Anchor = "sampler"
    """What the ratio divides by."""

    aggregation: ClassVar[Aggregation] = "sequence_mean"


class DecoupledPpo(LossOptions, frozen=True, kw_only=True):
    eps_low: Share = 0.2
    """A failure stops pushing below the ratio 1 - eps_low."""
    eps_high: Positive = 0.2
    """A success stops pushing above the ratio 1 + eps_high."""
    behaviour_cap: Cap = 2.0
    """The proximal policy's ratio to the sampler is cut here, one-sided."""
    proximal: Literal["recompute", "interpolate"] = "recompute"
    """recompute: the policy before the first update of the step; interpolate: between sampler and policy by the token's lag, no pass."""

    @property
    def needs_proximal(self) -> bool:
        return self.proximal == "recompute"

    @property
    def weighs_sampler(self) -> bool:
        return True


class Cispo(LossOptions, frozen=True, kw_only=True):
    ratio_floor: NotNegative = 0.0
    """The weight is at least this; 0: no floor."""
    ratio_cap: Cap = 5.0
    """The weight is at most this."""
    anchor: Anchor = "sampler"
    """What the ratio divides by."""

    aggregation: ClassVar[Aggregation] = "token_mean"


class Gspo(LossOptions, frozen=True, kw_only=True):
    eps_low: Share = 3e-4
    """A failed window stops pushing below the mean ratio 1 - eps_low."""
    eps_high: Positive = 4e-4
    """A successful window stops pushing above the mean ratio 1 + eps_high."""
    anchor: Anchor = "sampler"
    """What the ratio divides by."""

    aggregation: ClassVar[Aggregation] = "sequence_mean"


class MiniRl(LossOptions, frozen=True, kw_only=True):
    eps_low: Share = 0.2
    """A failure stops pushing below the ratio 1 - eps_low."""
    eps_high: Positive = 0.27
    """A success stops pushing above the ratio 1 + eps_high."""
    ratio_cap: Cap = 5.0
    """The weight, the ratio to the sampler, is cut here, one-sided."""
    anchor: Anchor = "sampler"
    """What the ratio of the mask divides by."""

    @property
    def weighs_sampler(self) -> bool:
        return True


class IcePop(LossOptions, frozen=True, kw_only=True):
    low: Positive = 0.5
    """A token whose proximal ratio to the sampler is below this teaches nothing."""
    high: Positive = 5.0
    """A token whose proximal ratio to the sampler is above this teaches nothing."""
    eps_low: Share = 0.2
    """A failure stops pushing below the ratio 1 - eps_low."""
    eps_high: Positive = 0.28
    """A success stops pushing above the ratio 1 + eps_high."""

    @property
    def needs_proximal(self) -> bool:
        return True

    @property
    def weighs_sampler(self) -> bool:
        return True


class Mis(LossOptions, frozen=True, kw_only=True):
    level: Literal["token", "sequence", "geometric"] = "token"
    """Whose ratio is weighed and judged: the token's, its window's product, or its window's geometric mean."""
    low: Positive = 0.5
    """Below this ratio nothing is learnt."""
    high: Positive = 2.0
    """Above this ratio nothing is learnt."""


class M2po(LossOptions, frozen=True, kw_only=True):
    max_m2: Positive = 0.04
    """The tokens with the largest squared log ratios are left out until the mean of the squares is no more than this."""


class Sapo(LossOptions, frozen=True, kw_only=True):
    tau_positive: Positive = 1.0
    """How fast a success fades with its distance from the ratio 1."""
    tau_negative: Positive = 1.05
    """How fast a failure fades."""
    anchor: Anchor = "sampler"
    """What the ratio divides by."""

    aggregation: ClassVar[Aggregation] = "sequence_mean"


class Reinforce(LossOptions, frozen=True, kw_only=True):
    """No ratio and no mask: right only on-policy, or with the correction `tis`."""

    @property
    def weighs_sampler(self) -> bool:
        return False


class Tis(Options, frozen=True, kw_only=True):
    cap: Cap = 2.0
    """The weight is min(ratio, cap)."""


class TokenBand(Options, frozen=True, kw_only=True):
    low: Positive = 0.5
    """A token with a ratio below this teaches nothing."""
    high: Positive = 5.0
    """A token with a ratio above this teaches nothing."""


class SequenceBand(Options, frozen=True, kw_only=True):
    low: Positive = 0.99
    """A window whose geometric mean ratio is below this teaches nothing."""
    high: Positive = 1.01
    """A window whose geometric mean ratio is above this teaches nothing."""


class SequenceMax(Options, frozen=True, kw_only=True):
    max_k3: Positive = 10.0
    """A window in which a token's w - 1 - log w exceeds this, in nats, teaches nothing."""


class Veto(Options, frozen=True, kw_only=True):
    min_ratio: Positive = 1e-4
    """A window with a token below this ratio teaches nothing."""


class Opsm(Options, frozen=True, kw_only=True):
    limit: NotNegative = 0.2
    """A failed window whose mean log ratio is below minus this, in nats, teaches nothing."""


class LeaveOneOut(Options, frozen=True, kw_only=True):
    """The reward minus the mean of the others."""


class GroupStd(Options, frozen=True, kw_only=True):
    eps: Positive = 1e-6
    """Added to the spread of the group."""


class DrGrpo(Options, frozen=True, kw_only=True):
    """The reward minus the mean."""


class BatchStd(Options, frozen=True, kw_only=True):
    eps: Positive = 1e-6
    """Added to the spread of the batch."""


class MaxRl(Options, frozen=True, kw_only=True):
    eps: Positive = 1e-6
    """Added to the mean of the group."""


class Gdpo(Options, frozen=True, kw_only=True):
    weights: dict[str, float] = {}
    """Weight of each part of the grade; empty: every part that the grades have, with weight 1."""
    eps: Positive = 1e-6
    """Added to every spread."""


class GdpoEma(Options, frozen=True, kw_only=True):
    weights: dict[str, float] = {}
    """Weight of each part of the grade; empty: every part that the grades have, with weight 1."""
    decay: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.99
    """How much of a part's spread so far is kept with each batch."""
    min_spread: Positive = 0.05
    """A part whose spread is smaller counts as if it were this."""


class Effort(Options, frozen=True, kw_only=True):
    """What an episode costs: `scale` * ((1 + k x)^(1 - q) - 1) / (k (1 - q)), x the weighted sum of what it used."""

    scale: NotNegative = 0.0
    """Reward that one unit of cost takes away; 0: no penalty and no trace is read for it."""
    k: Positive = 1e-3
    """How soon the cost bends, per unit of x."""
    q: Annotated[float, msgspec.Meta(ge=0)] = 0.5
    """How much it bends; 0: not at all."""
    thinking_tokens: NotNegative = 1.0
    """Weight of a sampled token of reasoning."""
    answer_tokens: NotNegative = 1.0
    """Weight of a sampled token of what is said."""
    call_tokens: NotNegative = 1.0
    """Weight of a sampled token of a tool call."""
    output_tokens: NotNegative = 0.0
    """Weight of a token that came back between the agent's turns."""
    calls: NotNegative = 0.0
    """Weight of a tool call."""
    turns: NotNegative = 0.0
    """Weight of a turn of the model."""


LOSSES: dict[str, type[LossOptions]] = {
    "dppo_tv": DppoTv,
    "dppo_kl": DppoKl,
    "ppo": Ppo,
    "decoupled_ppo": DecoupledPpo,
    "grpo": Grpo,
    "cispo": Cispo,
    "gspo": Gspo,
    "minirl": MiniRl,
    "icepop": IcePop,
    "mis": Mis,
    "m2po": M2po,
    "sapo": Sapo,
    "reinforce": Reinforce,
}
CORRECTIONS: dict[str, type[Options]] = {
    "tis": Tis,
    "token_band": TokenBand,
    "sequence_band": SequenceBand,
    "sequence_max": SequenceMax,
    "veto": Veto,
    "opsm": Opsm,
}
ADVANTAGES: dict[str, type[Options]] = {
    "leave_one_out": LeaveOneOut,
    "grpo": GroupStd,
    "dr_grpo": DrGrpo,
    "batch_std": BatchStd,
    "max_rl": MaxRl,
    "gdpo": Gdpo,
    "gdpo_ema": GdpoEma,
}
USUAL_CORRECTIONS: tuple[Options, ...] = (Veto(), Opsm())


def loss_options(name: str, table: Mapping[str, Any]) -> LossOptions:
    """The options of `trainer.loss`.

    >>> loss_options("ppo", {"eps_high": 0.3}).eps_high
    0.3
    """
    found = options_of(_known(name, LOSSES, "trainer.loss"), table, "trainer.loss_options", f"the loss {name!r}")
    assert isinstance(found, LossOptions)
    return found


def corrections_of(names: Sequence[str], tables: Mapping[str, Mapping[str, Any]], loss: LossOptions) -> tuple[Options, ...]:
    """The options of each of `trainer.corrections`, in that order; refuses what would count a ratio twice."""
    for name in tables:
        _known(name, CORRECTIONS, "trainer.correction_options")
        if name not in names:
            raise ValueError(f"trainer.correction_options.{name} means nothing: trainer.corrections is {list(names)}; add {name!r} to it")
    if len(set(names)) < len(names):
        raise ValueError(f"trainer.corrections names one twice: {list(names)}")
    found = tuple(
        options_of(
            _known(n, CORRECTIONS, "trainer.corrections"), tables.get(n, {}), f"trainer.correction_options.{n}", f"the correction {n!r}"
        )
        for n in names
    )
    if any(isinstance(c, Tis) for c in found) and loss.weighs_sampler:
        hint = 'set anchor = "proximal" in trainer.loss_options or leave it out' if hasattr(loss, "anchor") else "leave it out"
        raise ValueError(f"trainer.corrections: 'tis' would weigh tokens by a ratio that this loss already weighs them by; {hint}")
    return found


def advantage_options(name: str, table: Mapping[str, Any]) -> Options:
    """The options of `trainer.advantage`."""
    return options_of(_known(name, ADVANTAGES, "trainer.advantage"), table, "trainer.advantage_options", f"the advantage {name!r}")


def effort_options(table: Mapping[str, Any]) -> Effort:
    """The options of `trainer.effort`."""
    found = options_of(Effort, table, "trainer.effort", "the effort penalty")
    assert isinstance(found, Effort)
    return found


def options_of(kind: type[Options], table: Mapping[str, Any], where: str, whose: str) -> Options:
    """A table as a record; a key that does not exist is an error that names the nearest, a value that does not fit one that says why."""
    known = kind.__struct_fields__
    for key, value in table.items():
        if key not in known:
            has = f"the nearest is {difflib.get_close_matches(key, known, 1, 0.0)[0]!r} of {', '.join(known)}" if known else "it has none"
            raise ValueError(f"{where}.{key} is no option of {whose}; {has}")
        numbers = list(value.values()) if isinstance(value, Mapping) else [value]
        if any(isinstance(x, float) and not math.isfinite(x) for x in numbers):
            raise ValueError(f"{where}.{key} = {value} is not usable; give a finite number")
        try:
            msgspec.convert({key: value}, kind)
        except msgspec.ValidationError as error:
            why = str(error).partition(" - at ")[0]
            raise ValueError(f"{where}.{key} = {value!r} is not usable for {whose}: {why[0].lower()}{why[1:]}") from error
    found = msgspec.convert(dict(table), kind)
    low, high = getattr(found, "low", None), getattr(found, "high", None)
    if low is not None and high is not None and low >= high:
        raise ValueError(f"{where}: low = {low} is not below high = {high}, so nothing would be learnt")
    return found


def _known(name: str, registry: Mapping[str, type[Any]], where: str) -> Any:
    if name not in registry:
        near = difflib.get_close_matches(name, registry, 1, 0.0)[0]
        raise ValueError(f"{where}: {name!r} is unknown; the nearest is {near!r} of {', '.join(registry)}")
    return registry[name]
