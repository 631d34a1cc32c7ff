"""Experts on the device: a token's sum does not depend on who shares its experts, and each expert is a linear layer bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from rollmill.ops.cuda import CudaOps, experts

DEVICE = torch.device("cuda", 0)
OPS = CudaOps()


class World:
    def __init__(self, tokens: int, *, d: int = 2048, f: int = 768, num_experts: int = 32, k: int = 4, seed: int = 0) -> None:
        rng = torch.Generator(DEVICE).manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=DEVICE, generator=rng)

        self.h = random(tokens, d).bfloat16()
        # Skewed, so that some experts are crowded and some empty.
        favour = random(num_experts) * 2
        self.ids = (random(tokens, num_experts) + favour).topk(k, -1).indices.sort(-1).values
        self.gates = random(tokens, k).softmax(-1)
        self.gate_up = (random(num_experts, 2 * f, d) * d**-0.5).bfloat16()
        self.down = (random(num_experts, d, f) * f**-0.5).bfloat16()

    def run(self, at: slice | torch.Tensor = slice(None)) -> torch.Tensor:
        return OPS.experts(self.h[at], self.ids[at], self.gates[at], self.gate_up, self.down)


def test_a_token_is_the_same_in_any_company() -> None:
    world = World(2048)
    want = world.run()
    for m in (1, 2, 7, 8, 16, 31, 64, 257):
        for start in (0, 5, 2048 - m):
            at = slice(start, start + m)
            assert torch.equal(world.run(at), want[at]), (m, start)
    order = torch.randperm(2048, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert torch.equal(world.run(order), want[order])


def test_each_expert_is_a_linear_layer_bit_for_bit() -> None:
    world = World(40)
    total = torch.zeros(40, 2048, device=DEVICE)
    for k in range(4):
        y = torch.stack(
            [
                OPS.linear(OPS.swiglu(OPS.linear(h[None], world.gate_up[x])), world.down[x])[0]
                for h, x in zip(world.h, world.ids[:, k], strict=True)
            ]
        )
        total = y.float() * world.gates[:, k, None] if k == 0 else total + y.float() * world.gates[:, k, None]
    assert torch.equal(world.run(), total.bfloat16())


def test_large_and_small_tiles_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(500, f=200, d=1000)
    want = world.run()
    for few in (0, 10**9):
        monkeypatch.setattr(experts, "FEW_ROWS", few)
        assert torch.equal(world.run(), want)


def test_a_captured_step_follows_new_routes() -> None:
    world, other = World(8), World(8, seed=1)
    world.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = world.run()
    world.ids.copy_(other.ids)
    graph.replay()
    replayed = got.clone()
    assert torch.equal(world.run(), replayed)


def test_gradients_are_those_of_the_formula() -> None:
    world = World(60, d=128, f=64, num_experts=8, k=2)
    leaves = [t.requires_grad_() for t in (world.h, world.gates, world.gate_up, world.down)]
    g = torch.randn(60, 128, device=DEVICE).bfloat16()
    got = torch.autograd.grad(world.run(), leaves, g)
    h, gates, gate_up, down = (t.detach().double().requires_grad_() for t in leaves)
    total = 0
    for k in range(2):
        gate, up = torch.einsum("td,tfd->tf", h, gate_up[world.ids[:, k]]).chunk(2, -1)
        total = total + gates[:, k, None] * torch.einsum("tf,tdf->td", F.silu(gate) * up, down[world.ids[:, k]])
    want = torch.autograd.grad(total, (h, gates, gate_up, down), g.double())
    for a, b in zip(got, want, strict=True):
        assert float((a.double() - b).norm() / b.norm()) < 2e-2


def test_the_best_experts_are_those_of_a_stable_sort() -> None:
    scores = torch.randint(0, 12, (300, 60), device=DEVICE).float()
    scores[7, 5:] = float("-inf")
    want = scores.sort(dim=-1, descending=True, stable=True).indices[:, :8].sort(-1).values
    assert torch.equal(OPS.top_ids(scores, 8), want)
