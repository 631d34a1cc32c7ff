"""A trainer and a replica that both live on a CUDA device, over a real store: coded there, decoded there, proved there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from rollmill.weights import Follower, HostWeights, Publisher, WrongWeights, fingerprint, open_store, verify
from rollmill.weights.cuda.live import CudaWeights
from rollmill.weights.cuda.snapshot import CudaSnapshot

DEVICE = torch.device("cuda", 0)


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, device=DEVICE, generator=generator) * 0.02  # noqa: E731
    return {
        "wide": normal(1500, 2048).bfloat16(),
        "norm": torch.ones(2048, device=DEVICE).bfloat16(),
        "codes": normal(300, 512).to(torch.float8_e4m3fn),
        "scales": normal(12, 4),
        "count": torch.zeros(3, dtype=torch.int64, device=DEVICE),
    }


def step(weights: dict[str, torch.Tensor], seed: int) -> None:
    """A few per cent of the bf16 weights move by about one unit in the last place; everything else a little."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    wide = weights["wide"]
    moves = torch.rand(wide.shape, device=DEVICE, generator=generator) < 0.012
    wide.copy_(torch.where(moves, (wide.float() * 1.005).bfloat16(), wide))
    codes = weights["codes"].view(torch.uint8)
    codes[seed % 300, :5] ^= 1
    weights["scales"][seed % 12] += 1.0
    weights["count"] += 1


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[n].cpu().view(torch.uint8), right[n].cpu().view(torch.uint8)) for n in left)


def test_versions_go_from_device_to_device_and_pointers_stay(tmp_path: Path) -> None:
    store, trained = open_store(tmp_path), model()
    live = {name: torch.zeros_like(tensor) for name, tensor in trained.items()}
    on_host = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in trained.items()}
    pointers = {name: tensor.data_ptr() for name, tensor in live.items()}
    followers = [Follower(store, CudaWeights(live)), Follower(store, HostWeights(on_host))]
    with Publisher(store, run_id="r") as publisher:
        assert publisher.resume(trained, step=0) == 0
        for follower in followers:
            follower.swap(follower.bootstrap())
        for number in range(1, 6):
            step(trained, number)
            version = publisher.submit(trained, step=number)
            publisher.flush()
            assert isinstance(publisher._base.snapshot, CudaSnapshot)  # type: ignore[union-attr]
            if number == 3:
                continue  # the next poll takes two hops at once
            for follower in followers:
                staged = follower.poll()
                assert staged is not None and staged.version == version, follower.stats().problem
                follower.swap(staged)
                follower.swap(staged)
            assert same(live, trained) and same(on_host, trained), f"version {version}"
            assert followers[0].fingerprint == followers[1].fingerprint == fingerprint(trained)
    assert pointers == {name: tensor.data_ptr() for name, tensor in live.items()}
    assert verify(store) == []
    with Publisher(store, run_id="r") as publisher:
        assert publisher.resume(trained, step=5) == 5


def test_a_flipped_bit_of_device_memory_is_found_and_mended_or_the_old_version_serves_on(tmp_path: Path) -> None:
    store, trained = open_store(tmp_path), model()
    live = {name: torch.zeros_like(tensor) for name, tensor in trained.items()}
    follower = Follower(store, CudaWeights(live))
    with Publisher(store, run_id="r") as publisher:
        publisher.resume(trained, step=0)
        follower.swap(follower.bootstrap())
        live["wide"].view(torch.int16)[7, 9] ^= 1
        mended = follower.scrub()
        assert mended is not None and mended.num_changed == 1
        follower.swap(mended)
        assert same(live, trained) and follower.scrub() is None
        before = {name: tensor.clone() for name, tensor in live.items()}
        step(trained, 1)
        publisher.submit(trained, step=1)
        publisher.flush()
        staged = follower.poll()
        assert staged is not None
        real = follower.live.lanes
        follower.live.lanes = lambda: (
            {**real(), "wide": (1, 2)} if follower.live.held() and torch.equal(live["count"], trained["count"]) else real()
        )  # type: ignore[method-assign]
        with pytest.raises(WrongWeights, match="first wide"):
            follower.swap(staged)
        follower.live.lanes = real  # type: ignore[method-assign]
        assert same(live, before) and follower.version == 0


def test_live_weights_that_are_not_the_base_are_refused_or_found_by_the_proof(tmp_path: Path) -> None:
    store, trained = open_store(tmp_path), model()
    live = {name: torch.zeros_like(tensor) for name, tensor in trained.items()}
    follower = Follower(store, CudaWeights(live))
    with Publisher(store, run_id="r") as publisher:
        publisher.resume(trained, step=0)
        follower.swap(follower.bootstrap())
        live["wide"].zero_()
        step(trained, 1)
        publisher.submit(trained, step=1)
        publisher.flush()
    staged = follower.poll()
    assert staged is not None and follower.stats().num_wrong_base == 1, "a delta on other old values does not decode"
    follower.swap(staged)
    assert same(live, trained) and follower.version == 1
