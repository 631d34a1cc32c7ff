"""Which state may follow which, and which role may say so; pure tables that know nothing of how states are stored."""

from __future__ import annotations

from rollmill.records import DropReason, EpisodeState, GroupState, Role

EPISODE_MOVES: dict[tuple[EpisodeState, EpisodeState], frozenset[Role]] = {
    (EpisodeState.QUEUED, EpisodeState.RUNNING): frozenset({Role.ROLLOUT}),
    (EpisodeState.QUEUED, EpisodeState.CANCELLED): frozenset({Role.ROLLOUT}),
    (EpisodeState.RUNNING, EpisodeState.GRADED): frozenset({Role.ROLLOUT}),
    (EpisodeState.RUNNING, EpisodeState.FAILED): frozenset({Role.ROLLOUT}),
    (EpisodeState.RUNNING, EpisodeState.CANCELLED): frozenset({Role.ROLLOUT}),
}

GROUP_MOVES: dict[tuple[GroupState, GroupState], frozenset[Role]] = {
    (GroupState.OPEN, GroupState.READY): frozenset({Role.ROLLOUT}),
    (GroupState.OPEN, GroupState.DROPPED): frozenset({Role.ROLLOUT}),
    (GroupState.READY, GroupState.ADMITTED): frozenset({Role.TRAINER}),
    (GroupState.READY, GroupState.DROPPED): frozenset({Role.TRAINER, Role.ROLLOUT}),
    (GroupState.ADMITTED, GroupState.TRAINED): frozenset({Role.TRAINER}),
    (GroupState.ADMITTED, GroupState.DROPPED): frozenset({Role.TRAINER}),
}

LIVE_EPISODE = (EpisodeState.QUEUED, EpisodeState.RUNNING)
LIVE_GROUP = (GroupState.OPEN, GroupState.READY)


class IllegalTransition(RuntimeError):
    """A state change that the life cycle or the role's ownership forbids; nothing was written."""

    def __init__(self, subject: str, current: str, wanted: str, role: Role, why: str) -> None:
        super().__init__(f"{subject} is {current}; role {role} may not make it {wanted}: {why}")
        self.subject = subject
        self.current = current
        self.wanted = wanted
        self.role = role


def check_episode_move(episode_id: str, current: EpisodeState, wanted: EpisodeState, role: Role) -> None:
    """Raise IllegalTransition unless `role` may move an episode from `current` to `wanted`."""
    owners = EPISODE_MOVES.get((current, wanted))
    if owners is None:
        raise IllegalTransition(episode_id, current, wanted, role, "the episode life cycle has no such step")
    if role not in owners:
        raise IllegalTransition(episode_id, current, wanted, role, f"only {_names(owners)} owns this step")


def check_group_move(group_id: str, current: GroupState, wanted: GroupState, role: Role, reason: DropReason | None = None) -> None:
    """Raise IllegalTransition unless `role` may move a group from `current` to `wanted` (for `reason`, when it is dropped)."""
    owners = GROUP_MOVES.get((current, wanted))
    if owners is None:
        raise IllegalTransition(group_id, current, wanted, role, "the group life cycle has no such step")
    if role not in owners:
        raise IllegalTransition(group_id, current, wanted, role, f"only {_names(owners)} owns this step")
    if (current, wanted) == (GroupState.READY, GroupState.DROPPED) and role is Role.ROLLOUT and reason is not DropReason.STALE:
        raise IllegalTransition(group_id, current, wanted, role, f"rollout may drop a ready group only as stale, not as {reason}")
    # A group already in a batch is replayed after a crash; only unreadable data may take it out, or replay would not be exact.
    if (current, wanted) == (GroupState.ADMITTED, GroupState.DROPPED) and reason is not DropReason.CORRUPT_BLOB:
        why = f"an admitted group may be dropped only for a corrupt blob, not as {reason}"
        raise IllegalTransition(group_id, current, wanted, role, why)


def _names(owners: frozenset[Role]) -> str:
    return " or ".join(sorted(owners))
