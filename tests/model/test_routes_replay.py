"""Router replay: what is imposed, what is replaced, what is counted, and that the router goes on learning."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_worlds import fresh, tiny

from rollmill.model import ForcedRoutes, Model, ModelConfig, MoEConfig, PackedAttention, RecordedRoutes
from rollmill.model.route_record import RouteRecord
from rollmill.model.router import SigmoidRouter, SoftmaxRouter
from rollmill.model.routes import LOGIT_NOISE, PlausibleRoutes, replayed, route_shape, top_ids
from rollmill.ops import TorchOps

EXPERTS = MoEConfig(num_experts=8, top_k=3, expert_size=16, norm_topk=True)
LENGTHS = (5, 20, 1, 14)
NUM_TOKENS = sum(LENGTHS)
TOKENS = torch.tensor([(7 * i + 3) % 64 for i in range(NUM_TOKENS)])


def sparse(**changes: Any) -> ModelConfig:
    return tiny(family="qwen3_moe", moe=msgspec.structs.replace(EXPERTS, **changes))


def sharp(config: ModelConfig, seed: int = 0) -> Model:
    """Fresh weights, far enough apart that tokens really take different experts."""
    model = fresh(config, seed)
    model.load_serving({name: t * 8 for name, t in model.serving_tensors().items() if t.dim() > 1})
    return model


def logprobs(model: Model, routes: Any = None) -> torch.Tensor:
    attention = PackedAttention(LENGTHS)
    return model.logits(model(TOKENS, attention.positions_T, attention, routes)).log_softmax(-1)


def recorded(model: Model) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprobs, routes) of a forward whose router chose freely; the routes went through a record."""
    seen = RecordedRoutes(model.config)
    with torch.no_grad():
        free = logprobs(model, seen)
    record = RouteRecord.of(seen.ids_TLK().numpy(), route_shape(model.config))
    return free, torch.from_numpy(RouteRecord.from_bytes(record.to_bytes()).ids_TLK())


def plausible_by_hand(scores: list[float], recorded_ids: list[int], k: int, delta: float, floor: float) -> tuple[list[int], int]:
    """The rule of PlausibleRoutes, one token at a time, on scores that are already in its domain."""
    live = sorted(range(len(scores)), key=lambda x: (-scores[x], x))[:k]
    best, worst = scores[live[0]], scores[live[-1]]
    kept = [e for e in recorded_ids if scores[e] >= worst - max(delta * (best - worst), floor)]
    fill = [e for e in sorted(range(len(scores)), key=lambda x: (-scores[x], x)) if e not in kept]
    return sorted(kept + fill[: k - len(kept)]), k - len(kept)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.booleans(),
    st.integers(1, 4),
    # Quarters make ties and exact margins common.
    st.lists(st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=8, max_size=8), min_size=1, max_size=6),
    st.sampled_from([0.0, 0.1, 0.5, 4.0]),
    st.integers(0, 2**32),
)
def test_plausible_routes_equal_the_rule_taken_token_by_token(
    is_sigmoid: bool, k: int, logits: list[list[float]], delta: float, seed: int
) -> None:
    config = sparse(top_k=k, is_sigmoid=is_sigmoid)
    rng = np.random.default_rng(seed)
    given_TK = np.stack([np.sort(rng.permutation(8)[:k]) for _ in logits])
    choice = torch.tensor(logits).exp() if not is_sigmoid else torch.tensor(logits)
    if is_sigmoid:
        # Half of the experts lie outside the best groups.
        choice = choice.masked_fill(torch.tensor([False, True] * 4), -math.inf)
    live = top_ids(choice, k)
    routes = PlausibleRoutes(torch.from_numpy(given_TK)[:, None].expand(-1, 2, -1), config, delta=delta)
    got = routes(1, live, choice)
    scores = choice.log().tolist() if not is_sigmoid else choice.tolist()
    floor = LOGIT_NOISE / (4 if is_sigmoid else 1)
    wanted = [plausible_by_hand(s, g.tolist(), k, delta, floor) for s, g in zip(scores, given_TK, strict=True)]
    # The log of an exp is off by an ulp or so: a score on the very edge of the margin may fall either way.
    edges = [_is_on_edge(s, g.tolist(), k, delta, floor) for s, g in zip(scores, given_TK, strict=True)]
    assert [g for g, e in zip(got.tolist(), edges, strict=True) if not e] == [w[0] for w, e in zip(wanted, edges, strict=True) if not e]
    if not any(edges):
        assert int(routes.tally().replaced_L[1]) == sum(w[1] for w in wanted)
    assert all(len(set(row)) == k and row == sorted(row) for row in got.tolist())


def _is_on_edge(scores: list[float], ids: list[int], k: int, delta: float, floor: float) -> bool:
    live = sorted(scores, reverse=True)[:k]
    edge = live[-1] - max(delta * (live[0] - live[-1]), floor)
    return any(abs(scores[e] - edge) < 1e-5 for e in ids)


def test_margin_is_a_share_of_the_spread_of_logits() -> None:
    config = sparse(top_k=2)
    logits = torch.tensor([[9.0, 5.0, 4.65, 4.55, 0.0, 0.0, 0.0, 0.0]])
    choice = logits.softmax(-1)
    # Spread 4, so with delta 0.1 the edge lies at 4.6. As probabilities the margin would span everything: 0.98 / 10 > 0.02.
    for expert, is_kept in ((2, True), (3, False)):
        routes = PlausibleRoutes(torch.tensor([[[0, expert]] * 2]), config)
        assert routes(0, top_ids(choice, 2), choice).tolist() == [[0, expert] if is_kept else [0, 1]]
        assert int(routes.tally().replaced_L[0]) == int(not is_kept)


def test_flat_or_single_choice_still_lets_a_near_tie_be_replayed() -> None:
    config = sparse(top_k=1)
    choice = torch.tensor([[1.0, 1.0 - LOGIT_NOISE / 2, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0]]).softmax(-1)
    for expert, taken in ((1, 1), (2, 0)):
        assert PlausibleRoutes(torch.tensor([[[expert]] * 2]), config)(0, top_ids(choice, 1), choice).tolist() == [[taken]]


@pytest.mark.parametrize("mode", ["r3", "r3_plausible"])
def test_own_routes_replayed_change_no_bit_and_flip_nothing(mode: str) -> None:
    model = sharp(sparse())
    free, ids = recorded(model)
    routes = replayed(mode, ids, model.config)
    assert routes is not None
    with torch.no_grad():
        assert torch.equal(logprobs(model, routes), free)
    tally = routes.tally()
    assert int(tally.flipped_L.sum()) == int(tally.replaced_L.sum()) == int(tally.num_flipped_tokens) == 0
    assert tally.recorded_L.tolist() == [3 * NUM_TOKENS] * 2 and int(tally.num_recorded_tokens) == NUM_TOKENS
    assert replayed("off", ids, model.config) is None


@pytest.mark.parametrize("mode", ["r3", "r3_plausible"])
def test_token_without_a_record_is_routed_by_the_live_router(mode: str) -> None:
    model = sharp(sparse())
    _, live = recorded(model)
    other = torch.roll(live, 1, 0)
    other[3:6] = -1
    other[10, 1] = -1
    routes, seen = replayed(mode, other, model.config), RecordedRoutes(model.config)
    assert routes is not None
    with torch.no_grad():
        logprobs(model, lambda layer, ids, choice: seen(layer, routes(layer, ids, choice), choice))
    assert torch.equal(seen.ids_TLK()[3:6, 0], live[3:6, 0])
    if mode == "r3":
        assert torch.equal(seen.ids_TLK()[other >= 0], other[other >= 0])
    tally = routes.tally()
    assert tally.recorded_L.tolist() == [3 * (NUM_TOKENS - 3), 3 * (NUM_TOKENS - 4)]


def test_tally_counts_flipped_experts_and_tokens_once_however_often_a_forward_runs() -> None:
    model = sharp(sparse())
    _, live = recorded(model)
    other = live.clone()
    # One expert of three tokens in layer 0 exchanged for one that the live router did not take.
    for t in (2, 9, 30):
        other[t, 0, 1] = next(x for x in range(8) if x not in live[t, 0].tolist())
    routes = ForcedRoutes(other, model.config)
    with torch.no_grad():
        for _ in range(2):
            logprobs(model, routes)
    tally = routes.tally()
    assert int(tally.flipped_L[0]) == 3 and int(tally.num_flipped_tokens) >= 3 and int(tally.replaced_L.sum()) == 0


@pytest.mark.parametrize("kind", ["softmax", "softmax_normed", "sigmoid", "sigmoid_normed_grouped"])
def test_gradient_of_the_router_under_replay_equals_finite_differences(kind: str) -> None:
    """Against a float64 router written out in numpy; what is left is float32 rounding: a few hundred terms of 6e-8 each."""
    is_sigmoid, is_normed = kind.startswith("sigmoid"), "normed" in kind
    config = msgspec.structs.replace(
        EXPERTS, norm_topk=is_normed, is_sigmoid=is_sigmoid, num_groups=2 if "grouped" in kind else 1, scale=2.5 if is_sigmoid else 1.0
    )
    rng = np.random.default_rng(0)
    h, weight, coefficients = rng.normal(size=(12, 6)), rng.normal(size=(8, 6)), rng.normal(size=(12, 3))
    ids = np.stack([np.sort(rng.permutation(8)[:3]) for _ in range(12)])

    def value(w: np.ndarray) -> float:
        z = h @ w.T
        scores = 1 / (1 + np.exp(-z)) if is_sigmoid else np.exp(z) / np.exp(z).sum(-1, keepdims=True)
        gates = np.take_along_axis(scores, ids, 1)
        gates = gates / gates.sum(-1, keepdims=True) if is_normed else gates
        return float((coefficients * gates).sum() * config.scale)

    router = (SigmoidRouter if is_sigmoid else SoftmaxRouter)(config, 6)
    with torch.no_grad():
        router.weight.copy_(torch.from_numpy(weight))
    routes = ForcedRoutes(torch.from_numpy(ids)[:, None].expand(-1, 2, -1), tiny(family="qwen3_moe", moe=config))
    taken, gates = router(torch.from_numpy(h).float(), 0, TorchOps(), routes)
    assert torch.equal(taken, torch.from_numpy(ids))
    (torch.from_numpy(coefficients).float() * gates).sum().backward()
    eps, wanted = 1e-6, np.empty_like(weight)
    for at in np.ndindex(*weight.shape):
        step = np.zeros_like(weight)
        step[at] = eps
        wanted[at] = (value(weight + step) - value(weight - step)) / (2 * eps)
    assert router.weight.grad is not None
    assert np.abs(router.weight.grad.numpy() - wanted).max() < 2e-5 and np.abs(wanted).max() > 0.1


def test_replay_shrinks_the_gap_to_an_engine_whose_router_is_off_by_rounding() -> None:
    """The engine here holds its router in bfloat16, the trainer in float32: some tokens take another expert."""
    trainer = sharp(sparse(num_experts=32, top_k=4), seed=3)
    engine = sharp(sparse(num_experts=32, top_k=4), seed=3)
    with torch.no_grad():
        for layer in engine.layers:
            router: Any = layer.mlp.router  # type: ignore[union-attr]
            router.weight.copy_(router.weight.bfloat16().float())
    sampled, ids = recorded(engine)
    gaps, flips = {}, {}
    for mode in ("off", "r3", "r3_plausible"):
        routes = replayed(mode, ids, trainer.config)
        with torch.no_grad():
            gaps[mode] = float((logprobs(trainer, routes) - sampled).abs().max())
        flips[mode] = int(routes.tally().num_flipped_tokens) if routes else None
    assert flips["r3"], "nothing flipped, so this shows nothing"
    assert gaps["r3"] < gaps["off"] / 4 and gaps["r3_plausible"] < gaps["off"] / 4


def test_dense_model_has_no_routes() -> None:
    with pytest.raises(ValueError, match="llama model without experts has no routes"):
        route_shape(tiny())
    with pytest.raises(ValueError, match=r"delta is -1\.0"):
        PlausibleRoutes(torch.zeros(1, 2, 3, dtype=torch.int16) - 1, sparse(), delta=-1.0)


def test_shape_of_a_model_keeps_absolute_layers() -> None:
    shape = route_shape(sparse(dense_layers=(0,)))
    assert (shape.num_layers, shape.layers, shape.num_experts, shape.top_k) == (2, (1,), 8, 3)
