"""The durable life cycle of episodes, groups and snapshots, and the pure rules that admit groups to batches."""

from rollmill.ledger.admission import Cut, Pacing, cut, is_stale, may_open, worst_case_age
from rollmill.ledger.blobs import BlobStore, CorruptBlob
from rollmill.ledger.ledger import Ledger
from rollmill.ledger.rows import CheckpointRow, EpisodeRow, EvalSummary, EventRow, GroupResult, GroupRow, Outcome, Progress, VersionRow
from rollmill.ledger.transitions import IllegalTransition

__all__ = [
    "BlobStore",
    "CheckpointRow",
    "CorruptBlob",
    "Cut",
    "EpisodeRow",
    "EvalSummary",
    "EventRow",
    "GroupResult",
    "GroupRow",
    "IllegalTransition",
    "Ledger",
    "Outcome",
    "Pacing",
    "Progress",
    "VersionRow",
    "cut",
    "is_stale",
    "may_open",
    "worst_case_age",
]
