"""Masters and moments: live weights are the rounded masters, a bad gradient changes nothing, a checkpoint continues bit for bit."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from rollmill.model import Model, ModelConfig
from rollmill.trainer.checkpoint import CheckpointDamaged, load_checkpoint, prune_checkpoints, save_checkpoint
from rollmill.trainer.optimizer import MasterAdamW


def fresh(**changes: int) -> Model:
    facts = dict(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8, max_position=32
    )
    model = Model(ModelConfig(**(facts | changes)))
    model.init_weights(1)
    return model


def push(optimizer: MasterAdamW, seed: int, bad: float | None = None) -> bool:
    gen = torch.Generator().manual_seed(seed)
    for p in optimizer.live:
        p.grad = torch.randn(p.shape, generator=gen)
    if bad is not None:
        assert optimizer.live[0].grad is not None
        optimizer.live[0].grad.view(-1)[3] = bad
    return optimizer.step().is_applied


def state_bits(optimizer: MasterAdamW) -> list[bytes]:
    slots = optimizer.state_dict()["adam"]["state"]
    tensors = [*optimizer.masters, *(slots[i][k] for i in sorted(slots) for k in sorted(slots[i])), *optimizer.live]
    return [t.detach().float().numpy().tobytes() for t in tensors]


def test_live_weights_are_the_masters_rounded_once() -> None:
    optimizer = MasterAdamW(fresh(), lr=1e-3)
    for seed in range(5):
        assert push(optimizer, seed)
        for master, live in zip(optimizer.masters, optimizer.live, strict=True):
            assert torch.equal(live, master.to(torch.bfloat16).float())
    assert any(not torch.equal(m, p) for m, p in zip(optimizer.masters, optimizer.live, strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_gradient_that_is_no_number_is_dropped_whole(bad: float) -> None:
    optimizer = MasterAdamW(fresh(), lr=1e-3, warmup_steps=4)
    push(optimizer, 0)
    before = state_bits(optimizer)
    assert not push(optimizer, 1, bad)
    assert state_bits(optimizer) == before and optimizer.num_steps == 1
    assert all(p.grad is None for p in optimizer.live)
    undisturbed = MasterAdamW(fresh(), lr=1e-3, warmup_steps=4)
    push(undisturbed, 0)
    push(undisturbed, 2)
    assert push(optimizer, 2) and state_bits(optimizer) == state_bits(undisturbed)


def test_warm_up_and_clipping() -> None:
    optimizer = MasterAdamW(fresh(), lr=1.0, warmup_steps=4)
    rates = []
    for seed in range(6):
        push(optimizer, seed)
        rates.append(optimizer._adam.param_groups[0]["lr"])
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_checkpoint_continues_bit_for_bit(tmp_path: Path) -> None:
    straight, saved, loaded = (MasterAdamW(fresh(), lr=1e-3, warmup_steps=4) for _ in range(3))
    for seed in range(3):
        push(straight, seed)
        push(saved, seed)
    path, digest = save_checkpoint(tmp_path, step=2, optimizer=saved)
    load_checkpoint(tmp_path, path, digest, loaded)
    assert state_bits(loaded) == state_bits(straight)
    for seed in range(3, 6):
        push(straight, seed)
        push(loaded, seed)
    assert state_bits(loaded) == state_bits(straight) and loaded.num_steps == straight.num_steps == 6


def test_checkpoint_before_the_first_step_loads(tmp_path: Path) -> None:
    path, digest = save_checkpoint(tmp_path, step=0, optimizer=MasterAdamW(fresh(), lr=1e-3))
    load_checkpoint(tmp_path, path, digest, MasterAdamW(fresh(), lr=1e-3))


def test_damaged_checkpoints_are_told_apart_and_leave_the_optimiser_alone(tmp_path: Path) -> None:
    optimizer = MasterAdamW(fresh(), lr=1e-3)
    push(optimizer, 0)
    path, digest = save_checkpoint(tmp_path, step=7, optimizer=optimizer)
    state, manifest = tmp_path / path / "state.safetensors", tmp_path / path / "manifest.json"
    body, text = state.read_bytes(), manifest.read_bytes()
    before = state_bits(optimizer)

    def refused(about: str, digest: str = digest) -> None:
        with pytest.raises(CheckpointDamaged, match=about) as caught:
            load_checkpoint(tmp_path, path, digest, optimizer)
        assert "restore it from a copy" in str(caught.value)
        assert state_bits(optimizer) == before

    state.write_bytes(body[:-50])
    refused("altered or torn")
    flipped = bytearray(body)
    flipped[len(body) // 2] ^= 1
    state.write_bytes(bytes(flipped))
    refused("altered or torn")
    state.write_bytes(body)
    manifest.write_bytes(json.dumps(json.loads(text) | {"num_steps": 9}).encode())
    refused("not the one the ledger committed")
    manifest.unlink()
    refused("cannot be read")
    manifest.write_bytes(text)
    state.unlink()
    refused("cannot be read")


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    path, digest = save_checkpoint(tmp_path, step=0, optimizer=MasterAdamW(fresh(), lr=1e-3))
    with pytest.raises(ValueError, match="it is another model's"):
        load_checkpoint(tmp_path, path, digest, MasterAdamW(fresh(num_layers=2), lr=1e-3))
    with pytest.raises(ValueError, match="a tensor of shape"):
        load_checkpoint(tmp_path, path, digest, MasterAdamW(fresh(vocab_size=48), lr=1e-3))


def test_half_written_checkpoint_is_replaced_and_old_ones_are_pruned(tmp_path: Path) -> None:
    optimizer = MasterAdamW(fresh(), lr=1e-3)
    (tmp_path / "checkpoints" / "step_00000001.tmp").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_00000001.tmp" / "state.safetensors").write_bytes(b"half")
    for step in range(5):
        save_checkpoint(tmp_path, step=step, optimizer=optimizer)
    (tmp_path / "checkpoints" / "step_00000009.tmp").mkdir()
    prune_checkpoints(tmp_path, 3)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_00000002", "step_00000003"]
