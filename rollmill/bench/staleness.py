"""What old samples cost: the same small task learnt from samplers that lag by a known number of versions, with correction and without.

A model of 21 thousand weights learns to count on from a token. Sampler and trainer are the real parts, the lag is imposed, so that
a cell depends on nothing but its lag, its loss and its seed. Shapes: N sequences, T tokens.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from rollmill.algorithms import USUAL_CORRECTIONS, DppoTv, LossOptions, Options, Reinforce
from rollmill.bench.report import Row, result, rounded, say
from rollmill.fleet.summary import summarise
from rollmill.model import Model, ModelConfig, PackedAttention
from rollmill.records import StopReason, Trace, Window
from rollmill.trainer.batch import GradedEpisode, StepBatch, held, make_batch
from rollmill.trainer.learn import Learner
from rollmill.trainer.optimizer import MasterAdamW

NUM_SYMBOLS = 8
ASK = NUM_SYMBOLS
"""The token that ends a prompt."""
WRONG_FRAC = 0.6
"""Of the answers' tokens before RL, replaced by any symbol."""
SHAPE = ModelConfig(
    vocab_size=16, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16, max_position=32
)
TAIL_STEPS = 10
"""Steps at the end whose mean reward is told."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much a cell does."""

    steps: int = 160
    num_groups: int = 8
    group_size: int = 8
    num_answer: int = 4
    """Tokens of an answer."""
    lr: float = 3e-3
    num_seeds: int = 3
    warm_steps: int = 60
    """Supervised steps before, on answers with many wrong tokens: RL begins where it usually does, at something."""


QUICK = Sizes(steps=8, num_seeds=1, warm_steps=5)


class Correction(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    loss: LossOptions
    corrections: tuple[Options, ...]


CORRECTIONS = (
    Correction(name="dppo_tv", loss=DppoTv(), corrections=USUAL_CORRECTIONS),
    Correction(name="no correction", loss=Reinforce(), corrections=()),
)


class Lag(msgspec.Struct, frozen=True, kw_only=True):
    """How old the sampler's weights are. Unbounded: they fall behind by one version every second step, for as long as the run lasts."""

    bound: int | None

    @property
    def name(self) -> str:
        return "unbounded" if self.bound is None else "0 (sync)" if self.bound == 0 else str(self.bound)

    def at(self, step: int) -> int:
        return step // 2 if self.bound is None else min(step, self.bound)


LAGS = tuple(Lag(bound=bound) for bound in (0, 1, 2, 4, 8, None))


class CellResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run: reward of the newest weights over the steps, and how far off the policy its tokens were."""

    seed: int
    rewards: list[float]
    ess: list[float]
    k3: list[float]

    @property
    def at_end(self) -> float:
        return sum(self.rewards[-TAIL_STEPS:]) / len(self.rewards[-TAIL_STEPS:])

    def steps_to(self, target: float) -> int | None:
        return next((i for i, reward in enumerate(self.rewards) if reward >= target), None)


class CountingOn:
    """Told a symbol s, say s + 1, s + 2, ... in a circle; the reward is the share of right tokens."""

    def __init__(self, sizes: Sizes, seed: int) -> None:
        self._sizes, self._rng = sizes, torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def sample(self, model: Model) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(tokens_NT, logprobs_NT of the answer, rewards_N) of whole groups, drawn with the weights of `model`."""
        s = self._sizes
        asked_N = torch.randint(NUM_SYMBOLS, (s.num_groups,), generator=self._rng).repeat_interleave(s.group_size)
        tokens_NT = torch.stack([asked_N, torch.full_like(asked_N, ASK)], 1)
        logprobs = []
        for _ in range(s.num_answer):
            num, length = tokens_NT.shape
            attention = PackedAttention([length] * num)
            hidden_TD = model(tokens_NT.flatten(), attention.positions_T, attention)
            logprobs_NV = model.logits(hidden_TD[length - 1 :: length]).float().log_softmax(-1)
            drawn_N = torch.multinomial(logprobs_NV.exp(), 1, generator=self._rng)
            logprobs.append(logprobs_NV.gather(1, drawn_N))
            tokens_NT = torch.cat([tokens_NT, drawn_N], 1)
        return tokens_NT, torch.cat(logprobs, 1), (tokens_NT[:, 2:] == self.right(asked_N)).float().mean(1)

    def right(self, asked_N: torch.Tensor) -> torch.Tensor:
        return (asked_N[:, None] + 1 + torch.arange(self._sizes.num_answer)) % NUM_SYMBOLS

    def warm_up(self, model: Model) -> None:
        optimizer = MasterAdamW(model, lr=1e-2, eps=1e-8)
        for _ in range(self._sizes.warm_steps):
            asked_N = torch.randint(NUM_SYMBOLS, (64,), generator=self._rng)
            right_NT = self.right(asked_N)
            other_NT = torch.randint(NUM_SYMBOLS, right_NT.shape, generator=self._rng)
            is_wrong_NT = torch.rand(right_NT.shape, generator=self._rng) < WRONG_FRAC
            tokens_NT = torch.cat(
                [asked_N[:, None], torch.full_like(asked_N[:, None], ASK), torch.where(is_wrong_NT, other_NT, right_NT)], 1
            )
            attention = PackedAttention([tokens_NT.shape[1]] * len(tokens_NT))
            logits_NTV = model.logits(model(tokens_NT.flatten(), attention.positions_T, attention)).unflatten(0, tokens_NT.shape)
            loss = torch.nn.functional.cross_entropy(logits_NTV[:, 1:-1].flatten(0, 1), tokens_NT[:, 2:].flatten())
            torch.autograd.backward(loss)
            optimizer.step()

    def batch(self, model: Model, version: int) -> StepBatch:
        s = self._sizes
        tokens_NT, logprobs_NT, rewards_N = self.sample(model)
        sampled = [0, 0] + [1] * s.num_answer
        versions = [version if x else -1 for x in sampled]
        attempts = [
            GradedEpisode(episode_id=str(i), reward=reward, load=held(_trace(tokens, sampled, [0.0, 0.0, *logprobs], versions)))
            for i, (tokens, logprobs, reward) in enumerate(
                zip(tokens_NT.tolist(), logprobs_NT.tolist(), rewards_N.tolist(), strict=True)
            )
        ]  # fmt: skip
        return make_batch([attempts[i : i + s.group_size] for i in range(0, len(attempts), s.group_size)])


def run_cell(lag: Lag, correction: Correction, sizes: Sizes, seed: int) -> CellResult:
    """Learn from a sampler that lags; the same arguments give the same numbers on the same machine."""
    model, sampler = _model(seed), _model(seed)
    task, judge = CountingOn(sizes, seed), CountingOn(sizes, seed + 1_000_003)
    task.warm_up(model)
    optimizer = MasterAdamW(model, lr=sizes.lr, warmup_steps=0, clip_norm=1.0, eps=1e-8)
    learner = Learner(
        model, optimizer, correction.loss, temperature=1.0, length_norm=float(sizes.num_answer), tokens_per_microbatch=1 << 14,
        corrections=correction.corrections,
    )  # fmt: skip
    published = [model.serving_tensors()]
    found = CellResult(seed=seed, rewards=[], ess=[], k3=[])
    for step in range(sizes.steps):
        version = step - lag.at(step)
        sampler.load_serving(published[version])
        metrics, _ = learner.step(task.batch(sampler, version), version=step)
        published.append(model.serving_tensors())
        found.rewards.append(float(judge.sample(model)[2].mean()))
        if metrics["mm/num_tokens"]:
            found.ess.append(metrics["mm/ess"])
            found.k3.append(metrics["mm/k3"])
    return found


def bench_staleness(*, command: str, sizes: Sizes, target: float = 0.8) -> dict[str, Any]:
    """The table: every lag with and without correction, over several seeds."""
    torch.set_num_threads(1)
    rows: list[Row] = []
    cells: dict[str, list[Any]] = {}
    for correction in CORRECTIONS:
        for lag in LAGS:
            runs = [run_cell(lag, correction, sizes, seed) for seed in range(sizes.num_seeds)]
            peer = f"staleness {lag.name}, {correction.name}"
            say(f"{peer}: {_mean([run.at_end for run in runs]):.2f}")
            rows += _rows(peer, runs, target)
            cells[peer] = [msgspec.to_builtins(run) for run in runs]
    return result(command, rows, task="counting on", sizes=msgspec.to_builtins(sizes), cells=cells)


def _rows(peer: str, runs: Sequence[CellResult], target: float) -> list[Row]:
    ends = [run.at_end for run in runs]
    reached = [n for run in runs if (n := run.steps_to(target)) is not None]
    # A mean over the seeds that got there would make a cell look the better the more of them fail.
    steps = rounded(_mean(reached)) if len(reached) == len(runs) else None
    return [
        Row(name="reward at the end", peer=peer, value=rounded(_mean(ends)), unit="fraction", note=f"{min(ends):.2f} to {max(ends):.2f}"),
        Row(
            name=f"steps to {target:.0%}",
            peer=peer,
            value=steps,
            unit="steps",
            note="" if steps is not None else f"{len(reached)} of {len(runs)} seeds reached it",
        ),
        Row(name="effective sample size", peer=peer, value=rounded(_mean([x for run in runs for x in run.ess])), unit="fraction"),
        Row(name="mismatch k3", peer=peer, value=rounded(_mean([x for run in runs for x in run.k3])), unit="nats"),
    ]


def bench_staleness_run(run_file: Path, work: Path, *, command: str, steps: int, seed: int) -> dict[str, Any]:
    """The same sweep of bounds over a real run: `rollmill train` with each, one after the other. The widest stands for no bound."""
    shutil.rmtree(work, ignore_errors=True)
    rows: list[Row] = []
    for bound in (0, 1, 2, 4, 8, 64):
        run_dir = work / f"staleness-{bound}"
        mode = "run.mode=sync" if bound == 0 else f"trainer.max_staleness={bound}"
        sets = [f"run.dir={run_dir}", f"run.steps={steps}", f"run.seed={seed}", mode]
        say(f"{run_file} with {mode} ...")
        done = [sys.executable, "-m", "rollmill.cli", "train", str(run_file), *(x for s in sets for x in ("--set", s))]
        subprocess.run(done, check=True, stdout=subprocess.DEVNULL)
        s, peer = summarise(run_dir), "sync" if bound == 0 else f"staleness {bound}"
        rows += [
            Row(name="held-out success at the end", peer=peer, value=s["heldout_success_after"], unit="fraction"),
            Row(name="wall time", peer=peer, value=s["wall_s"], unit="s"),
            Row(name="staleness, mean", peer=peer, value=s["staleness_mean"], unit="versions"),
            Row(name="trainer idle", peer=peer, value=s["trainer_idle_frac"], unit="fraction"),
            Row(name="rollout slots idle at the gate", peer=peer, value=s["rollout_idle_frac"], unit="fraction"),
        ]
    return result(command, rows, run_file=str(run_file))


def _model(seed: int) -> Model:
    model = Model(SHAPE, numerics="fast")
    model.init_weights(seed)
    return model


def _trace(tokens: list[int], sampled: list[int], logprobs: list[float], versions: list[int]) -> Trace:
    window = Window.of(tokens=tokens, sampled=sampled, logprobs=logprobs, versions=versions)
    return Trace(episode_id="", windows=(window,), stop=StopReason.ANSWERED)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
