"""What a follower hands to its engine and says of itself: records only, they decide nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollmill.weights.proof import Fingerprint
from rollmill.weights.schema import Schema


@dataclass(frozen=True, kw_only=True, eq=False)
class Staged:
    """A version made ready beside the live weights. Its values are absolute: applying them twice is applying them once."""

    version: int
    step: int
    base_version: int | None
    """The version the live weights must have now; None: nothing is served, and the weights were loaded already."""
    schema: Schema
    fingerprint: Fingerprint
    """What the live weights must show after the swap."""
    num_changed: int
    """Elements that the swap changes; where nothing was served, all that were loaded."""
    bytes_read: int
    """From the store: what a peer gave is not among them."""
    num_packs: int
    timings_s: dict[str, float]
    """Seconds of planning, and of fetching and decoding."""
    patch: Any = field(repr=False)
    """What `LiveWeights.stage` gave."""

    @property
    def prepare_s(self) -> float:
        return sum(self.timings_s.values())


@dataclass(frozen=True, kw_only=True)
class FollowerStats:
    """Counts since the follower was made."""

    num_polls: int = 0
    num_staged: int = 0
    num_confirmed: int = 0
    num_wrong_weights: int = 0
    """Swaps refused because the live weights were not those of the version."""
    num_wrong_base: int = 0
    """Times the live weights were not what a delta was made from."""
    num_quarantined: int = 0
    """Objects this follower found damaged or missing."""
    num_repaired_cells: int = 0
    """Cells of live weights that had to be fetched again."""
    num_read_errors: int = 0
    """Reads that the system refused; tried again at the next poll."""
    num_lease_errors: int = 0
    """Times the lease could not be written; tried again after a third of its time."""
    num_from_peer: int = 0
    """Times the weights to start from came from another replica."""
    num_peers_failed: int = 0
    """Replicas that were asked for weights and could not give them."""
    bytes_read: int = 0
    problem: str = ""
    """Why the replica is behind `latest`, in plain words; empty when nothing is wrong."""
