"""How many logprobs differ in any bit when the trainer's packed forward scores what the engine sampled: exact, fast and noisy profiles.

Shapes: N sampled tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from rollmill.bench.report import Row, rounded, say
from rollmill.bench.shapes import twin
from rollmill.engine.engine import Engine
from rollmill.engine.protocol import GenerateReply, GenerateRequest
from rollmill.model import Model
from rollmill.numerics.gates import packed_logprobs
from rollmill.ops import PAGE

DEADLINE_S = 3600.0
PACK_TOKENS = 16_384
"""Tokens of one packed forward."""
OTHERS_TOKENS = 1 << 16
PAIRS = (("exact", "exact"), ("fast", "fast"), ("noisy", "exact"))
"""(engine's profile, trainer's profile)."""


def sample(
    model: Model, *, num_tokens: int, num_new: int, num_slots: int, threads: int, routes: bool = False
) -> list[tuple[list[int], GenerateReply]]:
    """At least `num_tokens` tokens through the real engine, from prompts of different lengths, a third with a shared beginning."""
    rng = np.random.default_rng(0)
    count = -(-num_tokens // num_new)
    shared = rng.integers(0, model.config.vocab_size, PAGE + 5).tolist()
    prompts = []
    for i in range(count):
        own = rng.integers(0, model.config.vocab_size, int(rng.integers(1, 100))).tolist()
        prompts.append(shared + own if i % 3 == 0 else own)
    max_len = max(map(len, prompts)) + num_new + 1
    engine = Engine(model, model.config, version=0, num_slots=num_slots, max_len=max_len, max_waiting=count + 1, num_threads=threads)
    engine.start()
    try:
        futures = [
            engine.generate(GenerateRequest(prompt_ids=p, max_tokens=num_new, seed=i, routes_from=0 if routes else None))
            for i, p in enumerate(prompts)
        ]
        return [(p, f.result(DEADLINE_S)) for p, f in zip(prompts, futures, strict=True)]
    finally:
        engine.close()


def packs(sampled: Sequence[tuple[list[int], GenerateReply]]) -> Iterator[list[tuple[list[int], GenerateReply]]]:
    """Sequences in order, as many as a packed forward takes."""
    pack: list[tuple[list[int], GenerateReply]] = []
    size = 0
    for prompt, reply in sampled:
        length = len(prompt) + len(reply.token_ids)
        if pack and size + length > PACK_TOKENS:
            yield pack
            pack, size = [], 0
        pack.append((prompt, reply))
        size += length
    yield pack


@torch.no_grad()
def rescored(model: Model, sampled: Sequence[tuple[list[int], GenerateReply]]) -> np.ndarray:
    """float32[N]: what the trainer's forward says of the sampled tokens."""
    parts = []
    for pack in packs(sampled):
        texts = [prompt + reply.token_ids for prompt, reply in pack]
        parts += [p.float().cpu().numpy() for p in packed_logprobs(model, texts, [len(prompt) for prompt, _ in pack])]
    return np.concatenate(parts)


def mismatch_rows(model: Model, *, num_tokens: int, threads: int) -> Iterator[Row]:
    num_new = min(512, max(16, num_tokens // 8))
    num_slots = 256 if model.embed.is_cuda else 32
    for engine_side, trainer_side in PAIRS:
        # The others differ in most tokens: a sample of them tells as much.
        if engine_side != "exact":
            num_tokens = min(num_tokens, OTHERS_TOKENS)
        say(f"mismatch: sampling {num_tokens:,} tokens by the {engine_side} profile ...")
        sampled = sample(twin(model, engine_side), num_tokens=num_tokens, num_new=num_new, num_slots=num_slots, threads=threads)
        engine_N = np.concatenate([reply.logprobs_T for _, reply in sampled])
        trainer_N = rescored(twin(model, trainer_side), sampled)
        num_apart = int((engine_N.view(np.int32) != trainer_N.view(np.int32)).sum())
        peer = f"{engine_side} engine, {trainer_side} trainer"
        say(f"mismatch: {peer}: {num_apart:,} of {len(engine_N):,} differ")
        name, most = f"logprobs that differ in any bit, of {len(engine_N):,} sampled", float(np.abs(engine_N - trainer_N).max())
        yield Row(name=name, peer=peer, value=num_apart, unit="tokens", ratio=rounded(num_apart / len(engine_N)))
        yield Row(name=f"largest difference, of {len(engine_N):,} sampled", peer=peer, value=rounded(most), unit="nats")
