"""What an engine can do, how it is stopped and what it shows of its weights, as records; imports no torch."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class PauseMode(StrEnum):
    """What becomes of requests in flight."""

    KEEP = "keep"
    """They stop between two tokens and go on after `resume`."""
    WAIT = "wait"
    """They run to their end first."""
    ABORT = "abort"
    """They end with the tokens they have."""


class EngineCaps(msgspec.Struct, frozen=True, kw_only=True):
    """What can be asked of an engine, found out when it is connected to.

    >>> EngineCaps(engine="own", pause_modes=(), sparse_updates=True, routed_experts=True, exact_stamps=True).bitwise_profile
    ''
    """

    engine: str
    """Name and version, e.g. `vllm 0.32.0`."""
    pause_modes: tuple[PauseMode, ...]
    sparse_updates: bool
    """`apply` reads and writes only what changed."""
    routed_experts: bool
    """`routes_from` is served."""
    exact_stamps: bool
    """Version spans come from the step that sampled each token; otherwise a request that was in flight over a swap is refused."""
    cuts_tail: bool = False
    """top_p and top_k are served, with logprobs from before the cut."""
    score_temperatures: bool = False
    """`score` serves temperatures other than 1."""
    bitwise_profile: str = ""
    """The profile in which the trainer's forward gives the same bits; empty when it does not."""


class Digest(msgspec.Struct, frozen=True, kw_only=True):
    """Fingerprints recomputed from what the engine computes with."""

    version: int
    """-1 when no version of the store is served."""
    total: str
    """32 hex digits, comparable with the version's in the store; empty when unproven."""
    tensors: dict[str, str]
    """Checkpoint name -> 32 hex digits; empty when the engine tells only the total."""
    unproven: str = ""
    """Why the engine cannot show what it serves; empty when it can."""
