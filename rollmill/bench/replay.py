"""What a routing record weighs, and what replaying it buys when the engine is noisy and the trainer is not, on a small model with experts.

Shapes: T tokens, L layers, K experts per token, N sampled tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from rollmill.bench.report import Row, rounded
from rollmill.bench.sampled import packs, sample
from rollmill.bench.shapes import random_model, shape_of, twin
from rollmill.engine.protocol import GenerateReply
from rollmill.model import Model, PackedAttention
from rollmill.model.route_record import RouteRecord, RouteShape
from rollmill.model.routes import replayed
from rollmill.trainer.mismatch import TokenScores, mismatch, route_flips, to_floats

BIG = RouteShape(num_layers=48, layers=tuple(range(48)), num_experts=128, top_k=8)
MODES = ("off", "r3", "r3_plausible")
TOLD = (("mm/k3", "nats"), ("mm/abs_diff_mean", "nats"), ("mm/abs_diff_p99", "nats"), ("mm/abs_diff_max", "nats"))


def route_bytes_rows(num_tokens: int = 512) -> Iterator[Row]:
    """Routes drawn evenly, the worst case for every coding."""
    scores = np.random.default_rng(0).random((num_tokens * len(BIG.layers), BIG.num_experts), np.float32)
    ids_TLK = np.sort(np.argsort(scores, -1)[:, : BIG.top_k], -1).astype(np.int16).reshape(num_tokens, len(BIG.layers), BIG.top_k)
    data = RouteRecord.of(ids_TLK, BIG).to_bytes()
    assert np.array_equal(RouteRecord.from_bytes(data).ids_TLK(), ids_TLK), "a routing record gave other experts"
    ours = len(data) / num_tokens
    for peer, size in (("rollmill", ours), ("uint8 ids", 1.0 * ids_TLK[0].size), ("int32 ids", 4.0 * ids_TLK[0].size)):
        yield Row(
            name="routes, 48 layers x 8 of 128", peer=peer, value=rounded(size), unit="bytes/token", ratio=rounded(size / ours, 3)
        )  # fmt: skip


def replay_rows(*, device: str = "cpu", threads: int = 1, num_tokens: int = 4096, shape: str = "tiny-moe") -> Iterator[Row]:
    model = random_model(shape_of(shape), device=device)
    sampled = sample(twin(model, "noisy"), num_tokens=num_tokens, num_new=128, num_slots=32, threads=threads, routes=True)
    for mode in MODES:
        found = _replayed(model, sampled, mode)
        peer = f"replay {mode}"
        for name, unit in TOLD:
            yield Row(name=f"noisy engine, exact trainer: {name}", peer=peer, value=rounded(found[name]), unit=unit)
        if mode != "off":
            for name in ("route/any_flip_tok_frac", "route/plausible_replaced_frac"):
                yield Row(name=f"noisy engine, exact trainer: {name}", peer=peer, value=rounded(found[name]), unit="fraction")


@torch.no_grad()
def _replayed(model: Model, sampled: list[tuple[list[int], GenerateReply]], mode: str) -> dict[str, float]:
    """The trainer's numbers for these samples, as `rollmill.trainer` would log them."""
    device, scores, tallies = model.embed.device, [], []
    for pack in packs(sampled):
        texts = [prompt + reply.token_ids for prompt, reply in pack]
        routes = replayed(mode, torch.from_numpy(np.concatenate([_routes(model, reply) for _, reply in pack])), model.config)
        attention = PackedAttention([len(t) for t in texts], device)
        tokens_T = torch.tensor([t for text in texts for t in text], device=device)
        hidden_TD = model(tokens_T, attention.positions_T, attention, routes)
        starts = np.cumsum([0, *map(len, texts)])
        at_N = np.concatenate([np.arange(s + len(p), s + len(t)) for s, (p, _), t in zip(starts, pack, texts, strict=False)])
        rows_N = torch.from_numpy(at_N).to(device)
        logprobs_N, _ = model.ops.score(model.logits(hidden_TD[rows_N - 1]), tokens_T[rows_N])
        scores.append(_scores(logprobs_N, pack))
        if routes is not None:
            tallies.append(routes.tally())
    found = to_floats(mismatch(TokenScores.join(scores), ()))
    return found | (to_floats(route_flips(tallies, ())) if tallies else {})


def _routes(model: Model, reply: GenerateReply) -> np.ndarray:
    """int16[T, L, K] with a row for every token: the last sampled one was never computed and is routed live."""
    ids_TLK = RouteRecord.from_bytes(reply.routes).ids_TLK()
    return np.concatenate([ids_TLK, np.full((1, *ids_TLK.shape[1:]), -1, ids_TLK.dtype)])


def _scores(logprobs_N: torch.Tensor, pack: list[tuple[list[int], GenerateReply]]) -> TokenScores:
    device, counts = logprobs_N.device, [len(reply.token_ids) for _, reply in pack]
    sequence_N = torch.repeat_interleave(torch.arange(len(pack)), torch.tensor(counts)).to(device)
    position_N = torch.cat([torch.arange(len(p), len(p) + n) for (p, _), n in zip(pack, counts, strict=True)]).to(device)
    return TokenScores(
        logprobs_N=logprobs_N,
        sampler_N=torch.from_numpy(np.concatenate([reply.logprobs_T for _, reply in pack])).to(device),
        sequence_N=sequence_N,
        position_N=position_N,
        lag_N=torch.zeros_like(sequence_N),
        source_N=torch.full_like(sequence_N, -1),
        is_single_N=torch.ones_like(sequence_N, dtype=torch.bool),
    )
