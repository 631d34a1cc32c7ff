"""Advantages within a group: pure functions from rewards to one number per episode."""

from __future__ import annotations

import numpy as np

ZERO_SPREAD = 1e-6


def leave_one_out(rewards_G: np.ndarray) -> np.ndarray:
    """A_i = R_i - mean of the other rewards: an unbiased baseline, not divided by the group's spread.

    >>> leave_one_out(np.array([1.0, 0.0, 0.0])).tolist()
    [1.0, -0.5, -0.5]
    """
    rewards = np.asarray(rewards_G, np.float64)
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite, got {rewards.tolist()}")
    if len(rewards) < 2:
        return np.zeros(len(rewards))
    return (rewards - rewards.mean()) * len(rewards) / (len(rewards) - 1)


def has_signal(rewards_G: np.ndarray) -> bool:
    """Whether the group's rewards differ at all; without that every advantage is 0 and the forward pass is wasted."""
    rewards = np.asarray(rewards_G, np.float64)
    return len(rewards) > 1 and float(rewards.max() - rewards.min()) > ZERO_SPREAD
