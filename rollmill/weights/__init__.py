"""Weights back: numbered snapshots from the trainer through a store to replicas, bit for bit and proved on the live weights."""

from rollmill.weights.errors import CorruptSnapshot, LatestMoved, PublishFailed, UnknownFormat, WrongBase, WrongWeights
from rollmill.weights.fingerprint import Fingerprint, fingerprint
from rollmill.weights.follower import Follower, FollowerStats, Staged
from rollmill.weights.fsck import log, verify
from rollmill.weights.manifest import Kind, Manifest
from rollmill.weights.publisher import Published, Publisher, PublisherStats
from rollmill.weights.store import DirectoryStore, SnapshotStore

__all__ = [
    "CorruptSnapshot",
    "DirectoryStore",
    "Fingerprint",
    "Follower",
    "FollowerStats",
    "Kind",
    "LatestMoved",
    "Manifest",
    "PublishFailed",
    "Published",
    "Publisher",
    "PublisherStats",
    "SnapshotStore",
    "Staged",
    "UnknownFormat",
    "WrongBase",
    "WrongWeights",
    "fingerprint",
    "log",
    "verify",
]
