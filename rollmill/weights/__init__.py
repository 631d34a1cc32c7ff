"""Weights back: numbered snapshots from the trainer through a store to replicas, bit for bit and proved on the live weights."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollmill.weights.check import fsck, verify
    from rollmill.weights.compactor import Compactor
    from rollmill.weights.errors import CorruptSnapshot, LatestMoved, PublishFailed, UnknownFormat, WrongBase, WrongWeights
    from rollmill.weights.follower import Follower
    from rollmill.weights.history import log
    from rollmill.weights.live import HostWeights, LiveWeights
    from rollmill.weights.manifest import Kind, Route, Version
    from rollmill.weights.proof import Fingerprint, fingerprint
    from rollmill.weights.publisher import Published, Publisher, PublisherStats
    from rollmill.weights.staged import FollowerStats, Staged
    from rollmill.weights.store import WeightStore, open_store

_HOME = {
    "Compactor": "compactor",
    "CorruptSnapshot": "errors",
    "LatestMoved": "errors",
    "PublishFailed": "errors",
    "UnknownFormat": "errors",
    "WrongBase": "errors",
    "WrongWeights": "errors",
    "Fingerprint": "proof",
    "fingerprint": "proof",
    "Follower": "follower",
    "FollowerStats": "staged",
    "Staged": "staged",
    "fsck": "check",
    "verify": "check",
    "log": "history",
    "HostWeights": "live",
    "LiveWeights": "live",
    "Kind": "manifest",
    "Route": "manifest",
    "Version": "manifest",
    "Published": "publisher",
    "Publisher": "publisher",
    "PublisherStats": "publisher",
    "WeightStore": "store",
    "open_store": "store",
}
__all__ = [
    "Compactor",
    "CorruptSnapshot",
    "Fingerprint",
    "Follower",
    "FollowerStats",
    "HostWeights",
    "Kind",
    "LatestMoved",
    "LiveWeights",
    "PublishFailed",
    "Published",
    "Publisher",
    "PublisherStats",
    "Route",
    "Staged",
    "UnknownFormat",
    "Version",
    "WeightStore",
    "WrongBase",
    "WrongWeights",
    "fingerprint",
    "fsck",
    "log",
    "open_store",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Loaded on first use: operations on a store need neither torch nor the compiled loops."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = found
    return found
