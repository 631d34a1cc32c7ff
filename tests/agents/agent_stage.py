"""A run in small for foreign agents: a scripted policy behind a real gateway, real boxes or folders, the repo family's grader, a learner.

The policy says what it is told to and weighs it with a real tiny model, so that what is trained can be compared with what was sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))
from stub_replica import DEMO, StubReplica

from rollmill.algorithms import DppoTv
from rollmill.chat.format import ChatFormat
from rollmill.engine.protocol import GenerateReply, GenerateRequest
from rollmill.gateway import Gateway
from rollmill.gateway.front.model_call import Limits as FrontLimits
from rollmill.gateway.front.run import start_gateway
from rollmill.gateway.routing.replicas import Replicas
from rollmill.harness import Limits
from rollmill.harness.program import Program
from rollmill.model import Model, PackedAttention, load_model
from rollmill.model.build import new_model
from rollmill.records import Task, Trace
from rollmill.rollout.cast import HttpDoor
from rollmill.rollout.episode import EpisodeRunner, Finished
from rollmill.rollout.foreign import ProgramAgent
from rollmill.sandbox.namespace import NamespaceBackend
from rollmill.tasks import open_family
from rollmill.tasks.repo import script
from rollmill.telemetry import Waits
from rollmill.trainer.batch import GradedEpisode, make_batch
from rollmill.trainer.learn import Learner
from rollmill.trainer.optimizer import MasterAdamW

DEADLINE_S = 120.0
EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
SITE = sysconfig.get_path("purelib")
LIMITS = Limits(max_turns=4, max_tokens_per_turn=64, max_context=8192, tool_s=5.0)
FAMILY = open_family("repo")
TASK: Task = FAMILY.make(kind="aggregate", level=1, seed=3, split="train")
SOLUTION = str(next(p.arguments["command"] for p in script(TASK, expert=True) if p.tool == "bash"))
Say = Callable[[str, int], str]
"""(episode, how many answers it has had in this conversation) -> what the policy says."""


def call(command: str, words: str = "") -> str:
    """A tool call as the model writes it."""
    return f"{words}<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>"


def solves(*endings: str) -> Say:
    """Looks, then solves the task in the episodes that are told, else does something of no use; then says `endings`, one per turn."""

    def say(episode: str, turn: int) -> str:
        useful = SOLUTION if episode.endswith("good") else "true"
        return [call("ls", "let me look: "), call(useful), *endings][turn]

    return say


def tiny_model(folder: Path, *, max_position: int = 8192) -> Path:
    """Fresh weights with a long context, for the demo model's tokenizer."""
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    new_model(folder, hidden_size=32, num_layers=1, head_dim=16, max_position=max_position, seed=0)
    return folder


class ScriptedPolicy(StubReplica):
    """Says what the script says, with the logprobs that its model gives to it."""

    def __init__(self, model_dir: Path, say: Say, **options: object) -> None:
        super().__init__(self._speak, model=model_dir, piece_size=8, **options)  # type: ignore[arg-type]
        self._script = say
        self._model: Model = load_model(model_dir)[0]

    def _speak(self, request: GenerateRequest) -> str:
        num = self.tokenizer.decode(request.prompt_ids).count("<|im_start|>assistant") - 1
        return self._script(request.session or "", num)

    def _reply(self, request: GenerateRequest) -> GenerateReply:
        reply = super()._reply(request)
        ids = torch.tensor([*request.prompt_ids, *reply.token_ids])
        attention = PackedAttention([len(ids)])
        with torch.no_grad():
            hidden = self._model(ids, attention.positions_T, attention)
            at = torch.arange(len(request.prompt_ids), len(ids))
            logprobs, _ = self._model.score(hidden[at - 1], ids[at], 1.0)
        return msgspec.structs.replace(reply, logprobs=logprobs.numpy().astype("<f4").tobytes())

    def said(self, episode: str) -> list[tuple[int, float]]:
        """Every token and logprob that was sampled for an episode, in order."""
        replies = [(s, self._reply(s.request)) for s in self.sampled if s.request.session == episode]
        return [pair for s, r in replies for pair in zip(s.token_ids, r.logprobs_T.tolist(), strict=True)]


class Stage:
    """Plays attempts at `TASK` with one program."""

    def __init__(self, runner: EpisodeRunner, policy: ScriptedPolicy, gateway: Gateway) -> None:
        self.runner, self.policy, self.gateway = runner, policy, gateway

    async def play(self, key: str, *, within_s: float = DEADLINE_S, task: Task = TASK) -> Finished:
        seat = self.runner.open_session(key, seed=0, temperature=1.0, min_version=None)
        return await self.runner.run(task, key, seat, seed=0, deadline=time.monotonic() + within_s)


@contextlib.asynccontextmanager
async def stage(
    policy: ScriptedPolicy, program: Program, *, is_inside: bool = False, front: FrontLimits = FrontLimits(), **options: object
) -> AsyncIterator[Stage]:
    """`front`: the limits of the gateway's server."""
    waits, backend = Waits(), NamespaceBackend(num_prepared=2)
    gateway = Gateway(ChatFormat(policy.tokenizer), Replicas(lambda: [policy.url], waits))
    server = await start_gateway(gateway, graceful_s=1.0, limits=front)
    door = HttpDoor(server, "127.0.0.1")
    player = ProgramAgent(program, FAMILY, gateway, door, backend, waits, is_inside=is_inside, **options)  # type: ignore[arg-type]
    runner = EpisodeRunner(FAMILY, gateway, backend, LIMITS, waits, player=player)
    try:
        yield Stage(runner, policy, gateway)
    finally:
        await runner.close()
        await server.close()
        await backend.close()


def trained(trace: Trace) -> list[tuple[int, float]]:
    """Every token that is trained, with its logprob."""
    found: list[tuple[int, float]] = []
    for window in trace.windows:
        window.check()
        mask = window.sampled_T != 0
        found += zip(window.tokens_T[mask].tolist(), window.logprobs_T[mask].tolist(), strict=True)
    return found


def check_exact(done: Finished, policy: ScriptedPolicy, episode: str) -> None:
    """What is trained is what was sampled: each token once, with its own logprob."""
    assert Counter(trained(done.trace)) == Counter(policy.said(episode)) != Counter()


def learn(model_dir: Path, attempts: Sequence[Finished]) -> dict[str, float]:
    """One real optimiser step on these attempts as one group; its numbers, after the weights have changed."""
    model, _ = load_model(model_dir)
    before = {name: t.clone() for name, t in model.serving_tensors().items()}
    optimizer = MasterAdamW(model, lr=1e-2, warmup_steps=0)
    learner = Learner(model, optimizer, DppoTv(), temperature=1.0, length_norm=64.0, tokens_per_microbatch=16384)
    group = [GradedEpisode(episode_id=d.trace.episode_id, reward=d.grade.reward, load=lambda d=d: d.trace) for d in attempts]  # type: ignore[misc]
    batch = make_batch([group])
    numbers, is_changed = learner.step(batch, version=0)
    assert is_changed and any(not torch.equal(before[n], t) for n, t in model.serving_tensors().items())
    assert np.isfinite(list(numbers.values())).all()
    return numbers


def prove(tmp_path: Path, program: Program, say: Say, *, is_inside: bool = False, **options: object) -> list[Finished]:
    """A good and a bad attempt by this agent: graded apart, trained as sampled, learnt from."""
    model_dir = tiny_model(tmp_path / "model")

    async def scene(policy: ScriptedPolicy) -> list[Finished]:
        async with asyncio.timeout(DEADLINE_S), stage(policy, program, is_inside=is_inside, **options) as played:
            done = list(await asyncio.gather(played.play("g.good"), played.play("g.bad")))
            assert len(played.gateway.episodes) == 0, "nothing is left open"
            return done

    with ScriptedPolicy(model_dir, say) as policy:
        done = asyncio.run(scene(policy))
        for attempt, episode in zip(done, ("g.good", "g.bad"), strict=True):
            check_exact(attempt, policy, episode)
    assert [(d.grade.reward, d.grade.success) for d in done] == [(1.0, True), (0.0, False)]
    numbers = learn(model_dir, done)
    assert numbers["mm/abs_diff_max"] < 1e-5, "the learner finds the sampler's own logprobs"
    return done
