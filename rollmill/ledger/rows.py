"""The frozen records the ledger hands out: rows as they were at one moment, never live views."""

from __future__ import annotations

import msgspec

from rollmill.records import BlobRef, Boundary, CancelReason, DropReason, EpisodeState, Grade, GroupState, Role, StopReason


class GroupRow(msgspec.Struct, frozen=True, kw_only=True):
    """One group. `Ledger.task_of(group_id)` gives its task, which may be large and is therefore not carried here."""

    group_id: str
    """`g000017` for seq 17."""
    seq: int
    """Order of opening within the run, from 0, without gaps."""
    task_id: str
    group_size: int
    """Number of slots; each needs one graded episode to count."""
    state: GroupState
    num_graded: int
    """Slots with a graded episode."""
    reward_sum: float
    """Sum of the graded rewards."""
    num_success: int
    min_version: int | None
    """Oldest weight version over the graded episodes so far; None while none of them has a sampled token."""
    opened_at: float
    opened_steps_cut: int
    """How many batches had been cut when the group was opened."""
    num_overtaken: int
    """How many younger groups went into a batch while this one was live."""
    ready_at: float | None
    step: int | None
    """The batch it was admitted to."""
    version: int | None
    """The trainer's version when that batch was cut."""
    staleness: int | None
    """version - min_version at the cut."""
    age: int | None
    """Batches cut between opening and its own cut; never above `worst_case_age`."""
    drop_reason: DropReason | None
    ended_at: float | None
    """When it became TRAINED or DROPPED."""
    stats: dict[str, float] | None
    """What the trainer reported about it at the commit."""


class GroupResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a group ended. `num_graded` 0: it was dropped before it was ready, and says nothing."""

    seq: int
    num_graded: int = 0
    num_success: int = 0
    is_flat: bool = False
    """All rewards are equal: it taught nothing."""


class EpisodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at one slot of a group."""

    episode_id: str
    """`g000017.3.0`: group, slot, attempt."""
    group_id: str
    slot: int
    attempt: int
    state: EpisodeState
    queued_at: float
    started_at: float | None
    ended_at: float | None
    grade: Grade | None
    stop: StopReason | None
    blob: BlobRef | None
    """The encoded Trace."""
    versions: tuple[int, int] | None
    """(oldest, newest) version over its sampled tokens; (-1, -1) when nothing was sampled."""
    num_tokens: int
    num_sampled: int
    boundary: Boundary | None
    cancel_reason: CancelReason | None
    message: str
    """Why it failed, in one line."""

    @property
    def is_live(self) -> bool:
        return self.state in (EpisodeState.QUEUED, EpisodeState.RUNNING)


class CheckpointRow(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer checkpoint; its row is the one commit point of consumption."""

    step: int
    """The last batch whose gradient is inside."""
    version: int
    """The weight version the checkpoint holds."""
    path: str
    """Relative to the run directory."""
    digest: str
    """Of the checkpoint's manifest, hex."""
    wall_s: float
    """Seconds of training up to here, over all restarts."""
    committed_at: float = 0.0
    """Filled in by the ledger."""


class VersionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A published snapshot."""

    version: int
    step: int
    kind: str
    """`full`, `delta` or `fold`."""
    num_bytes: int
    published_at: float


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What the graded episodes inside a set of groups achieved.

    >>> Outcome(num_graded=4, reward_sum=2.0, num_success=1).mean_reward
    0.5
    """

    num_graded: int = 0
    reward_sum: float = 0.0
    num_success: int = 0

    @property
    def mean_reward(self) -> float:
        return self.reward_sum / self.num_graded if self.num_graded else 0.0

    @property
    def mean_success(self) -> float:
        return self.num_success / self.num_graded if self.num_graded else 0.0

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(
            num_graded=self.num_graded + other.num_graded,
            reward_sum=self.reward_sum + other.reward_sum,
            num_success=self.num_success + other.num_success,
        )


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Counts over the whole run, read from maintained counters: the cost does not grow with the run."""

    num_opened: int
    num_open: int
    num_ready: int
    num_admitted: int
    num_trained: int
    num_dropped_by_reason: dict[DropReason, int]
    num_dropped_admitted: int
    """Of the dropped groups, those already in a batch; they keep their place in it."""
    num_steps_cut: int
    num_steps_committed: int
    version: int
    """The newest published version; -1 before the first."""
    num_episodes_by_state: dict[EpisodeState, int]
    num_failed_by_boundary: dict[Boundary, int]
    num_cancelled_by_reason: dict[CancelReason, int]
    trained_outcome: Outcome
    dropped_outcome_by_reason: dict[DropReason, Outcome]

    @property
    def num_dropped(self) -> int:
        return sum(self.num_dropped_by_reason.values())

    @property
    def num_opened_live(self) -> int:
        """Opened minus dropped before admission: what the pacing gate counts."""
        return self.num_opened - self.num_dropped + self.num_dropped_admitted

    @property
    def dropped_outcome(self) -> Outcome:
        return sum(self.dropped_outcome_by_reason.values(), start=Outcome())


class EvalSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out results of one label at one weight version."""

    label: str
    version: int
    num_episodes: int
    num_success: int
    mean_reward: float
    last_at: float

    @property
    def mean_success(self) -> float:
        return self.num_success / self.num_episodes


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the append-only history."""

    event_id: int
    time: float
    role: Role
    kind: str
    """`group.admitted`, `episode.graded`, ..."""
    subject: str
    """The id of the group, episode, step or version it is about."""
    detail: dict[str, object]
