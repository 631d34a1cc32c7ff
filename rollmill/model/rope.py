"""Rotary positions: the frequencies of each scaling rule as one table per model; a token's angle depends on its position alone.

That is why rules whose frequencies follow the length of the running sequence are refused: keys already cached would be wrong.
Shapes: P positions, E head size.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import torch

RULES = ("default", "linear", "llama3", "yarn")
_KEYS = {
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}
_WHY_NOT = {
    "dynamic": (
        ": its frequencies change with the length of the sequence, so keys already cached would be wrong; "
        "up to max_position_embeddings tokens it equals 'default', which you can set instead"
    ),
    "longrope": ": it switches frequencies when a sequence grows long, so keys already cached would be wrong",
}


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """How a context longer than the pretrained one is squeezed into known angles."""

    rule: str
    """One of linear, llama3, yarn."""
    factor: float
    original_max_position: int = 0
    """Context of the pretraining in tokens; linear does not use it."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Multiplies cosine and sine, so attention logits by its square."""
    truncate: bool = True
    """Whether yarn's ramp starts and ends at whole dimensions."""

    @classmethod
    def from_hf(cls, raw: dict[str, Any], *, max_position: int) -> RopeScaling | None:
        """None for unscaled positions; `raw` is `rope_parameters`, or `rope_scaling` of older files."""
        rule = raw.get("rope_type", raw.get("type", "default"))
        if rule not in RULES:
            raise ValueError(
                f"config.json asks for rope_scaling {rule!r}; this version computes {', '.join(RULES)}{_WHY_NOT.get(rule, '')}"
            )
        asked = {k: v for k, v in raw.items() if k not in ("rope_type", "type", "rope_theta") and v is not None}
        if asked.get("partial_rotary_factor") == 1:
            del asked["partial_rotary_factor"]
        if foreign := sorted(asked.keys() - _KEYS.get(rule, set())):
            known = ", ".join(sorted(_KEYS.get(rule, set()))) or "rope_theta only"
            raise ValueError(f"rope_scaling {rule!r} has {foreign[0]} = {asked[foreign[0]]!r}; this version knows {known}")
        if rule == "default":
            return None
        original = int(asked.get("original_max_position_embeddings") or max_position)
        if rule == "yarn" and "factor" not in asked:
            asked["factor"] = max_position / original
        factor = float(asked["factor"])
        if not factor >= 1:
            raise ValueError(f"rope_scaling factor is {factor}; a context can only be stretched: give 1 or more")
        if rule == "linear":
            return cls(rule=rule, factor=factor)
        if rule == "llama3":
            low, high = float(asked["low_freq_factor"]), float(asked["high_freq_factor"])
            if not low < high:
                raise ValueError(f"rope_scaling low_freq_factor {low} must lie below high_freq_factor {high}")
            return cls(rule=rule, factor=factor, original_max_position=original, low_freq_factor=low, high_freq_factor=high)
        return cls(
            rule=rule,
            factor=factor,
            original_max_position=original,
            beta_fast=float(asked.get("beta_fast") or 32),
            beta_slow=float(asked.get("beta_slow") or 1),
            attention_factor=_yarn_attention_factor(factor, asked),
            truncate=bool(asked.get("truncate", True)),
        )

    def to_hf(self) -> dict[str, Any]:
        out: dict[str, Any] = {"rope_type": self.rule, "factor": self.factor}
        if self.rule == "linear":
            return out
        out["original_max_position_embeddings"] = self.original_max_position
        if self.rule == "llama3":
            return out | {"low_freq_factor": self.low_freq_factor, "high_freq_factor": self.high_freq_factor}
        return out | {
            "attention_factor": self.attention_factor,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            "truncate": self.truncate,
        }


def _yarn_attention_factor(factor: float, asked: dict[str, Any]) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if "attention_factor" in asked:
        return float(asked["attention_factor"])
    if asked.get("mscale") and asked.get("mscale_all_dim"):
        return mscale(asked["mscale"]) / mscale(asked["mscale_all_dim"])
    return mscale(1.0)


def frequencies(*, head_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """Radians per position for each pair of dimensions, in float64."""
    half = head_dim // 2
    freq = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    if scaling is None:
        return freq
    s = scaling
    if s.rule == "linear":
        return freq / s.factor
    if s.rule == "llama3":
        # Turns within the pretrained context: many are kept, few are squeezed, between them a straight blend.
        turns = s.original_max_position * freq / (2 * math.pi)
        keep = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0, 1)
        return freq * keep + freq / s.factor * (1 - keep)
    low, high = (_dimension_with_turns(t, head_dim, theta, s.original_max_position) for t in (s.beta_fast, s.beta_slow))
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    squeeze = ((torch.arange(half, dtype=torch.float64) - low) / (high - low or 0.001)).clamp(0, 1)
    return freq * (1 - squeeze) + freq / s.factor * squeeze


def _dimension_with_turns(num_turns: float, head_dim: int, theta: float, context: int) -> float:
    """The (fractional) pair of dimensions that turns `num_turns` times within `context` positions."""
    return head_dim * math.log(context / (num_turns * 2 * math.pi)) / (2 * math.log(theta))


def rope_tables(*, head_dim: int, theta: float, max_position: int, scaling: RopeScaling | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine as [P, 1, E]: both halves of a head turn by the same angles."""
    freq = frequencies(head_dim=head_dim, theta=theta, scaling=scaling)
    angle = torch.outer(torch.arange(max_position, dtype=torch.float64), freq).float()
    by = 1.0 if scaling is None else scaling.attention_factor
    cos, sin = angle.cos() * by, angle.sin() * by
    return torch.cat([cos, cos], -1)[:, None], torch.cat([sin, sin], -1)[:, None]
