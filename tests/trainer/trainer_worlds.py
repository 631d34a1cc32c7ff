"""A tiny world for the trainer: groups of hand-made traces in a real ledger, scored by the shipped model itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import torch

from rollmill.config import RunConfig, parse_config
from rollmill.ledger import Ledger
from rollmill.model import Model, PackedAttention, RecordedRoutes, load_model
from rollmill.model.route_record import RouteRecord
from rollmill.model.routes import route_shape
from rollmill.records import BlobRef, Grade, Role, SourceSpan, StopReason, Task, Trace, Window, encode

DEMO = Path(__file__).parents[2] / "models" / "demo"
TASK = Task(task_id="t/1", family="repo", kind="k", level=1, seed=0, split="train", instruction="x", files={})


def config_of(run_dir: Path, *, model_dir: Path = DEMO, **trainer: object) -> RunConfig:
    facts = {"groups_per_batch": 2, "lr": 1e-3, "warmup_steps": 0, "max_staleness": 40, "batch_s": 30.0} | trainer
    steps, mode = facts.pop("steps", 3), facts.pop("mode", "async")
    return parse_config(
        {"run": {"dir": str(run_dir), "steps": steps, "mode": mode}, "model": {"path": str(model_dir)}, "trainer": facts}, "test"
    )


def scored(model: Model, tokens: list[int], num_prompt: int, version: int) -> Window:
    """A window whose sampled part carries the logprobs that `model` gives it, and the experts that it took."""
    attention = PackedAttention([len(tokens)])
    ids = torch.tensor(tokens)
    seen = RecordedRoutes(model.config)
    with torch.no_grad():
        logits = model.logits(model(ids, attention.positions_T, attention, seen)).log_softmax(-1)
    routes = b""
    if model.config.moe:
        shape = route_shape(model.config)
        # The last token was sampled and never computed.
        rows = [RouteRecord.of(seen.ids_TLK()[:-1].numpy(), shape), RouteRecord.missing(shape, 1)]
        routes = RouteRecord.join(rows).to_bytes()
    logprobs = [0.0] * num_prompt + logits[torch.arange(num_prompt - 1, len(tokens) - 1), ids[num_prompt:]].tolist()
    sampled = [0] * num_prompt + [1] * (len(tokens) - num_prompt)
    sources = (SourceSpan(num_prompt, len(tokens), f"engine-{len(tokens) % 2}"),)
    versions = [version if s else -1 for s in sampled]
    return Window.of(tokens=tokens, sampled=sampled, logprobs=logprobs, versions=versions, routes=routes, sources=sources)


def fill(
    run_dir: Path,
    rewards_by_group: list[list[float]],
    *,
    version: int = 0,
    seed: int = 0,
    model_dir: Path = DEMO,
    edit: Callable[[Window], Window] = lambda window: window,
) -> list[list[BlobRef]]:
    """Open, play and settle one group per list of rewards; returns the blobs of each group."""
    rng, blobs = random.Random(seed), []
    model, shape = load_model(model_dir)
    with Ledger.create_or_open(run_dir, Role.ROLLOUT) as ledger:
        for rewards in rewards_by_group:
            group = ledger.open_group(TASK, len(rewards), 1.0)
            refs = []
            for episode, reward in zip(ledger.episodes_of(group.group_id), rewards, strict=True):
                tokens = [rng.randrange(min(1000, shape.vocab_size)) for _ in range(rng.randint(8, 20))]
                trace = Trace(episode_id=episode.episode_id, windows=(edit(scored(model, tokens, 5, version)),), stop=StopReason.SUBMITTED)
                ledger.start_episode(episode.episode_id, 2.0)
                refs.append(ledger.blobs.put(encode(trace)))
                ledger.finish_episode(
                    episode.episode_id,
                    grade=Grade(reward=reward, success=reward > 0.5),
                    stop=trace.stop,
                    blob=refs[-1],
                    versions=trace.version_range(),
                    num_tokens=len(tokens),
                    num_sampled=len(tokens) - 5,
                    now=3.0,
                )
            ledger.settle_group(group.group_id, 4.0)
            blobs.append(refs)
    return blobs


def bits(model: Model) -> dict[str, bytes]:
    return {name: t.view(torch.int16).numpy().tobytes() for name, t in model.serving_tensors().items()}
