"""The SGLang adapter against a fake that was written from SGLang's public documentation; no real server has been met."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from server_fakes import SglangFake, serving

from rollmill.adapters.protocol import RolloutEngine
from rollmill.adapters.records import PauseMode
from rollmill.adapters.sglang import SglangEngine
from rollmill.engine.client import EngineRejected, EngineUnavailable
from rollmill.engine.protocol import FinishReason, GenerateRequest, ScoreRequest, SwapMode, VersionSpan
from rollmill.model.route_record import RouteRecord, RouteShape
from rollmill.weights import Publisher, WrongWeights, open_store

SHAPE = RouteShape(num_layers=2, layers=(0, 1), num_experts=4, top_k=2)
ASK = GenerateRequest(prompt_ids=[1, 2, 3], max_tokens=4, seed=7)


def weights_at(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(64).reshape(8, 8).bfloat16() + version}


def against(tmp_path: Path, fake: SglangFake, claim: Callable[[SglangEngine], Awaitable[None]], **options: Any) -> None:
    with Publisher(open_store(tmp_path / "store"), run_id="t") as publisher:
        publisher.resume(weights_at(0), step=0)
        for version in (1, 2):
            publisher.submit(weights_at(version), step=version)
        publisher.flush()

    async def main() -> None:
        where = {"store": str(tmp_path / "store"), "exchange": tmp_path / "exchange", "vocab_size": 100}
        async with serving(fake.routes()) as url, await SglangEngine.connect(url, **where, **options) as engine:
            await engine.apply(1)
            fake.calls.clear()
            await asyncio.wait_for(claim(engine), 30)

    asyncio.run(main())


def test_adapter_satisfies_the_protocol(tmp_path: Path) -> None:
    async def claim(engine: SglangEngine) -> None:
        checked: RolloutEngine = engine
        assert checked.caps.engine == "sglang 0.6.0"
        assert PauseMode.WAIT not in checked.caps.pause_modes

    against(tmp_path, SglangFake(), claim)


def test_reply_carries_tokens_float32_logprobs_and_version(tmp_path: Path) -> None:
    fake = SglangFake()

    async def claim(engine: SglangEngine) -> None:
        reply = await engine.generate(ASK)
        assert reply.token_ids == [0, 3, 6, 9]
        assert np.array_equal(reply.logprobs_T, np.array([-0.3 * (i + 1) for i in range(4)], np.float32))
        assert reply.spans == [VersionSpan(start=0, end=4, version=1)]
        assert (reply.finish_reason, reply.num_reused) == (FinishReason.LENGTH, 2)

    against(tmp_path, fake, claim)
    assert fake.bodies[-1]["sampling_params"]["sampling_seed"] == 7
    assert fake.bodies[-1]["return_logprob"] is True


def test_stop_tokens_switch_off_ignore_eos_because_it_would_switch_them_off(tmp_path: Path) -> None:
    fake = SglangFake()

    async def claim(engine: SglangEngine) -> None:
        await engine.generate(GenerateRequest(prompt_ids=[1], max_tokens=2, stop_ids=[5]))
        await engine.generate(GenerateRequest(prompt_ids=[1], max_tokens=2))

    against(tmp_path, fake, claim)
    assert [body["sampling_params"]["ignore_eos"] for body in fake.bodies] == [False, True]


@pytest.mark.parametrize(("mode", "pause"), [(SwapMode.RE_PREFILL, "retract"), (SwapMode.KEEP_KV, "in_place")])
def test_swap_writes_a_proved_directory_then_pauses_loads_and_continues(tmp_path: Path, mode: SwapMode, pause: str) -> None:
    fake = SglangFake()

    async def claim(engine: SglangEngine) -> None:
        shown = await engine.apply(2)
        assert shown.version == 2
        assert shown.unproven
        (file,) = fake.loaded[-1].glob("*.safetensors")
        assert torch.equal(load_file(file)["w"], weights_at(2)["w"])

    against(tmp_path, fake, claim, swap_mode=mode)
    assert fake.calls == [f"pause {pause}", f"load 2 flush={pause == 'retract'}", "continue"]


def test_refused_load_leaves_the_old_version_serving(tmp_path: Path) -> None:
    fake = SglangFake()

    async def claim(engine: SglangEngine) -> None:
        fake.refuse_load = "Failed to update weights"
        with pytest.raises(WrongWeights, match="the old one serves on"):
            await engine.apply(2)
        assert fake.calls[-1] == "continue"
        assert (await engine.generate(ASK)).spans[0].version == 1

    against(tmp_path, fake, claim)


def test_version_that_is_not_in_the_store_never_reaches_the_server(tmp_path: Path) -> None:
    fake = SglangFake()

    async def claim(engine: SglangEngine) -> None:
        with pytest.raises(WrongWeights, match="version 9 was refused"):
            await engine.apply(9)
        assert fake.calls == []

    against(tmp_path, fake, claim)


@pytest.mark.parametrize("has_spans", [True, False])
def test_request_in_flight_over_a_swap_is_split_where_the_server_says_or_refused(tmp_path: Path, has_spans: bool) -> None:
    fake = SglangFake(has_spans=has_spans)

    async def claim(engine: SglangEngine) -> None:
        fake.hold = asyncio.Event()
        running = asyncio.create_task(engine.generate(ASK))
        await fake.started.wait()
        await engine.apply(2)
        fake.hold.set()
        if has_spans:
            assert (await running).spans == [VersionSpan(start=0, end=1, version=1), VersionSpan(start=1, end=4, version=2)]
        else:
            with pytest.raises(EngineUnavailable, match="does not say at which token"):
                await running

    against(tmp_path, fake, claim)


def test_deadline_ends_the_request_with_the_tokens_it_has(tmp_path: Path) -> None:
    fake = SglangFake()

    async def claim(engine: SglangEngine) -> None:
        fake.hold = asyncio.Event()
        reply = await engine.generate(GenerateRequest(prompt_ids=[1], max_tokens=9, deadline_s=0.05))
        assert (reply.finish_reason, len(reply.token_ids)) == (FinishReason.DEADLINE, 2)

    against(tmp_path, fake, claim)


def test_score_skips_the_first_entry_that_has_no_logprob(tmp_path: Path) -> None:
    async def claim(engine: SglangEngine) -> None:
        reply = await engine.score(ScoreRequest(token_ids=[4, 8, 2, 6], start=2))
        assert (reply.logprobs_T.tolist(), reply.version, reply.start) == ([-1.0, -1.5], 1, 2)

    against(tmp_path, SglangFake(), claim)


@pytest.mark.parametrize("ignores_start", [False, True])
def test_routed_experts_are_cut_to_the_asked_rows(tmp_path: Path, ignores_start: bool) -> None:
    fake = SglangFake()
    ids = np.array([[[0, 1], [2, 3]], [[1, 3], [0, 2]], [[0, 3], [1, 2]], [[2, 3], [0, 1]], [[0, 2], [0, 3]], [[1, 2], [1, 3]]])

    async def claim(engine: SglangEngine) -> None:
        fake.routed_rows = ids if ignores_start else ids[1:]
        reply = await engine.generate(GenerateRequest(prompt_ids=[1, 2, 3], max_tokens=4, routes_from=1))
        assert np.array_equal(RouteRecord.from_bytes(reply.routes).ids_TLK(), ids[1:])

    against(tmp_path, fake, claim, routes=SHAPE)


def test_pause_mode_that_the_server_lacks_is_refused(tmp_path: Path) -> None:
    async def claim(engine: SglangEngine) -> None:
        with pytest.raises(EngineRejected, match="it has keep, abort"):
            await engine.pause(PauseMode.WAIT)

    against(tmp_path, SglangFake(), claim)


def test_digest_says_that_and_why_it_proves_nothing(tmp_path: Path) -> None:
    async def claim(engine: SglangEngine) -> None:
        shown = await engine.digest()
        assert (shown.version, shown.total, shown.tensors) == (1, "", {})
        assert "checksums of its own layout" in shown.unproven

    against(tmp_path, SglangFake(), claim)
