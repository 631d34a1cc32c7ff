"""An attempt with many context windows is one attempt: in its group's baseline, in the loss's divisor, and in what its tokens weigh."""

from __future__ import annotations

import torch

from rollmill.algorithms import DppoTv
from rollmill.records import StopReason, Trace, Window
from rollmill.trainer.batch import GradedEpisode, make_batch
from rollmill.trainer.losses import LossInputs, policy_loss


def attempt(name: str, reward: float, num_windows: int) -> GradedEpisode:
    window = Window.of(tokens=[1, 2, 3], sampled=[0, 1, 1], logprobs=[0.0, -0.5, -0.5], versions=[-1, 0, 0])
    trace = Trace(episode_id=name, windows=(window,) * num_windows, stop=StopReason.EXITED)
    return GradedEpisode(episode_id=name, reward=reward, load=lambda: trace)


def test_windows_share_their_attempts_advantage_and_count_as_one_episode() -> None:
    batch = make_batch([[attempt("many", 1.0, 10), attempt("one", 0.0, 1), attempt("other", 0.0, 1)]])
    assert (batch.num_episodes, batch.rewards, len(batch.lessons)) == (3, [1.0, 0.0, 0.0], 12)
    assert [s.advantage for s in batch.lessons] == [1.0] * 10 + [-0.5] * 2


def test_tokens_weigh_the_same_however_they_are_cut_into_windows() -> None:
    logprobs = torch.linspace(-1.0, -0.1, 20, dtype=torch.float64)
    sampler = logprobs - 0.01

    def total(num_windows: int) -> torch.Tensor:
        advantages, sequence = torch.full((num_windows,), 0.7, dtype=torch.float64), torch.arange(20) * num_windows // 20
        return policy_loss(LossInputs(logprobs_N=logprobs, sampler_N=sampler, advantages_S=advantages, sequence_N=sequence), DppoTv()).total

    assert torch.equal(total(1), total(10))
