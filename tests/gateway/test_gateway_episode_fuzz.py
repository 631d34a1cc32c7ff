"""Whatever agents do with an episode, what is trained is what was sampled, once, on what it was sampled on: by invariants over
thousands of conversations, and against the same rules written a second time."""

from __future__ import annotations

import numpy as np
import pytest
from episode_reference import Reference
from episode_world import World, check_windows


def judge(seed: int, num_steps: int) -> World:
    world = World(seed, realign_tokens=seed % 20, wants_routes=seed % 2 == 0)
    world.play(num_steps)
    windows = world.episode.windows()
    check_windows(windows, world.policy.said, has_routes=world.episode.wants_routes)
    reference = Reference(realign_tokens=world.episode.realign_tokens)
    reference.read(world.log)
    trained = [(-np.where(w.sampled_T, w.logprobs_T, 0)).astype(int).tolist() for w in windows]
    assert [list(zip(w.tokens_T.tolist(), t, strict=True)) for w, t in zip(windows, trained, strict=True)] == reference.windows()
    assert world.episode.tally["orphaned"] == reference.num_orphans()
    untrained = world.episode.untrained()
    # Of abandoned ones this policy knows nothing: it was never asked.
    accounted = sum(len(set(t) - {0}) for t in trained) + untrained.total() - untrained["abandoned"]
    assert accounted == world.policy.num_tokens, "a sampled token is neither trained nor counted"
    return world


@pytest.mark.parametrize("block", range(4))
def test_trained_tokens_are_the_sampled_ones_whatever_agents_do(block: int) -> None:
    worlds = [judge(seed, num_steps=4 + seed % 5) for seed in range(400 * block, 400 * (block + 1))]
    tally = sum((w.episode.tally for w in worlds), start=worlds[0].episode.tally.copy())
    assert all(tally[kind] > 20 for kind in ("first", "appended", "realigned", "forked", "retried", "orphaned", "abandoned"))


def test_long_episodes_too() -> None:
    for seed in range(20_000, 20_020):
        judge(seed, num_steps=60)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(50))
def test_trained_tokens_are_the_sampled_ones_over_fifty_thousand_conversations(block: int) -> None:
    for seed in range(100_000 + 1000 * block, 101_000 + 1000 * block):
        judge(seed, num_steps=4 + seed % 7)
