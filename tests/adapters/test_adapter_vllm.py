"""The vLLM adapter against a stand-in server: what it sends, what it refuses, and the order in which it swaps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from server_fakes import VllmFake, serving

from rollmill.adapters.protocol import RolloutEngine
from rollmill.adapters.records import PauseMode
from rollmill.adapters.vllm import VllmEngine
from rollmill.engine.client import EngineRejected, EngineUnavailable, VersionUnmet
from rollmill.engine.protocol import FinishReason, GenerateRequest, ScoreRequest, SwapMode, VersionSpan
from rollmill.model.route_record import RouteRecord, RouteShape
from rollmill.weights import WrongWeights

SHAPE = RouteShape(num_layers=3, layers=(1, 2), num_experts=8, top_k=2)
ASK = GenerateRequest(prompt_ids=[1, 2, 3], max_tokens=4, seed=7)


def against(fake: VllmFake, claim: Callable[[VllmEngine], Awaitable[None]], *, applied: bool = True, **options: Any) -> None:
    async def main() -> None:
        async with serving(fake.routes()) as url, await VllmEngine.connect(url, store="store", **options) as engine:
            if applied:
                await engine.apply(5)
            fake.calls.clear()
            await asyncio.wait_for(claim(engine), 30)

    asyncio.run(main())


def test_adapter_satisfies_the_protocol() -> None:
    async def claim(engine: VllmEngine) -> None:
        checked: RolloutEngine = engine
        assert checked.caps.engine == "vllm 0.32.0"
        assert checked.caps.exact_stamps

    against(VllmFake(), claim)


def test_reply_carries_tokens_float32_logprobs_and_the_stamped_version() -> None:
    fake = VllmFake()

    async def claim(engine: VllmEngine) -> None:
        reply = await engine.generate(ASK)
        assert reply.token_ids == [0, 7, 14, 21]
        assert np.array_equal(reply.logprobs_T, np.array([-0.1, -0.2, -0.3, -0.4], np.float32) * np.float32(1))
        assert reply.spans == [VersionSpan(start=0, end=4, version=5)]
        assert (reply.finish_reason, reply.seed, reply.num_reused) == (FinishReason.LENGTH, 7, 3)

    against(fake, claim)
    params = fake.bodies[-1]["sampling_params"]
    assert params["ignore_eos"] is True
    assert params["logprobs"] == 0
    assert params["stop_token_ids"] == []


def test_swap_pauses_stamps_swaps_stamps_and_resumes_in_this_order() -> None:
    fake = VllmFake()

    async def claim(engine: VllmEngine) -> None:
        shown = await engine.apply(6)
        assert (shown.version, shown.total) == (6, f"{6:032x}")

    against(fake, claim)
    steps = ["pause keep clear=true", "stamp rollmill-swapping", "swap", "stamp 6", "resume"]
    assert fake.calls == ["stage", "staged", *steps]


def test_version_that_is_served_already_costs_no_pause() -> None:
    fake = VllmFake()

    async def claim(engine: VllmEngine) -> None:
        assert (await engine.apply(5)).total == f"{5:032x}"
        assert fake.calls == ["stage", "staged"]

    against(fake, claim)


def test_keys_and_values_are_kept_on_request_and_then_not_shared_between_versions() -> None:
    fake = VllmFake()

    async def claim(engine: VllmEngine) -> None:
        await engine.apply(6)
        await engine.generate(ASK)

    against(fake, claim, swap_mode=SwapMode.KEEP_KV)
    assert "pause keep clear=false" in fake.calls
    assert fake.bodies[-1]["cache_salt"] == "version-6"


def test_request_in_flight_over_a_swap_gets_both_versions() -> None:
    fake = VllmFake()

    async def claim(engine: VllmEngine) -> None:
        fake.hold = asyncio.Event()
        running = asyncio.create_task(engine.generate(ASK))
        await fake.started.wait()
        await engine.apply(6)
        fake.hold.set()
        assert (await running).spans == [VersionSpan(start=0, end=1, version=5), VersionSpan(start=1, end=4, version=6)]

    against(fake, claim)


def test_refused_version_leaves_the_old_one_stamped_and_serving() -> None:
    fake = VllmFake()

    async def claim(engine: VllmEngine) -> None:
        fake.swap_answer = {"error": "3 tensors differ", "is_lost": False, "version": 5}
        with pytest.raises(WrongWeights, match=r"version 6 was refused, version 5 serves on: 3 tensors differ"):
            await engine.apply(6)
        assert (fake.stamp, fake.is_paused) == ("5", False)
        assert (await engine.generate(ASK)).spans[0].version == 5

    against(fake, claim)


def test_version_that_cannot_be_staged_never_pauses_the_server() -> None:
    fake = VllmFake()

    async def claim(engine: VllmEngine) -> None:
        fake.stage_problem = "pack is damaged"
        with pytest.raises(WrongWeights, match="pack is damaged"):
            await engine.apply(6)
        assert fake.calls == ["stage", "staged"]

    against(fake, claim)


def test_lost_weights_keep_the_server_paused_and_unnamed() -> None:
    fake = VllmFake()

    async def claim(engine: VllmEngine) -> None:
        fake.swap_answer = {"error": "memory is bad", "is_lost": True, "version": 5}
        with pytest.raises(WrongWeights) as lost:
            await engine.apply(6)
        assert lost.value.is_lost
        assert fake.is_paused
        assert not fake.stamp.isdecimal()

    against(fake, claim)


def test_swap_cut_off_half_way_is_mended_by_the_next_apply() -> None:
    fake = VllmFake()

    async def claim(engine: VllmEngine) -> None:
        fake.stamp, fake.is_paused = "rollmill-swapping", True
        with pytest.raises(EngineUnavailable, match="an unfinished swap"):
            await engine.generate(ASK)
        await engine.apply(6)
        assert (fake.stamp, fake.is_paused) == ("6", False)

    against(fake, claim)


def test_restarted_server_is_not_taken_for_the_version_it_had() -> None:
    fake = VllmFake()

    async def claim(engine: VllmEngine) -> None:
        fake.stamp, fake.held = "default", -1
        with pytest.raises(EngineUnavailable, match="a checkpoint of its own"):
            await engine.generate(ASK)
        assert (await engine.health()).version == -1
        await engine.apply(5)
        assert (await engine.generate(ASK)).spans[0].version == 5

    against(fake, claim)


def test_pause_survives_a_swap_until_it_is_ended() -> None:
    fake = VllmFake()

    async def claim(engine: VllmEngine) -> None:
        await engine.pause(PauseMode.WAIT)
        await engine.apply(6)
        assert fake.is_paused
        assert (await engine.health()).note == "paused"
        await engine.resume()
        assert not fake.is_paused

    against(fake, claim)


def test_deadline_ends_the_request_with_the_tokens_it_has() -> None:
    fake = VllmFake()

    async def claim(engine: VllmEngine) -> None:
        fake.hold = asyncio.Event()
        reply = await engine.generate(GenerateRequest(prompt_ids=[1], max_tokens=9, deadline_s=0.05))
        assert (reply.finish_reason, len(reply.token_ids)) == (FinishReason.DEADLINE, 2)

    against(fake, claim)


@pytest.mark.parametrize(
    "changed", [{"top_p": 0.9}, {"top_k": 5}, {"routes_from": 0}, {"num_top": 1}, {"prompt_ids": []}, {"prompt_ids": [100]}]
)
def test_request_that_would_be_served_as_another_is_refused_before_it_is_sent(changed: dict[str, Any]) -> None:
    fake = VllmFake()

    async def claim(engine: VllmEngine) -> None:
        with pytest.raises(EngineRejected):
            await engine.generate(GenerateRequest(**{"prompt_ids": [1], "max_tokens": 2, **changed}))

    against(fake, claim)
    assert fake.bodies == []


def test_versions_that_a_request_does_not_want_are_refused() -> None:
    fake = VllmFake()

    async def claim(engine: VllmEngine) -> None:
        for wrong in ({"exact_version": 4}, {"min_version": 6}):
            with pytest.raises(VersionUnmet) as unmet:
                await engine.generate(GenerateRequest(prompt_ids=[1], max_tokens=2, **wrong))
            assert unmet.value.version == 5
        assert (await engine.generate(GenerateRequest(prompt_ids=[1], max_tokens=2, exact_version=5))).spans[0].version == 5

    against(fake, claim)


def test_score_gives_the_logprobs_of_the_tokens_from_start_on() -> None:
    async def claim(engine: VllmEngine) -> None:
        reply = await engine.score(ScoreRequest(token_ids=[4, 8, 2, 6], start=2))
        assert (reply.logprobs_T.tolist(), reply.version, reply.start) == ([-0.5, -1.5], 5, 2)
        with pytest.raises(EngineRejected, match="temperature 1 only"):
            await engine.score(ScoreRequest(token_ids=[4, 8], temperature=0.7))

    against(VllmFake(), claim)


def test_routed_experts_become_a_routing_record_of_the_asked_rows() -> None:
    fake, rng = VllmFake(), np.random.default_rng(0)
    ids = np.sort(np.stack([rng.permutation(8)[:2] for _ in range(6 * 3)]).reshape(6, 3, 2), axis=-1).astype(np.uint8)
    fake.routed_rows = ids

    async def claim(engine: VllmEngine) -> None:
        fake.routed_rows = ids[2:]
        reply = await engine.generate(GenerateRequest(prompt_ids=[1, 2, 3], max_tokens=4, routes_from=2))
        found = RouteRecord.from_bytes(reply.routes).ids_TLK()
        assert np.array_equal(found[:, 1:], ids[2:, 1:])
        assert (found[:, 0] == -1).all()
        fake.routed_rows = ids[3:]
        with pytest.raises(EngineUnavailable, match="3 rows of routed experts for 6 computed tokens from 2 on; expected 4"):
            await engine.generate(GenerateRequest(prompt_ids=[1, 2, 3], max_tokens=4, routes_from=2))

    against(fake, claim, routes=SHAPE)
    assert fake.bodies[-1]["sampling_params"]["routed_experts_prompt_start"] == 2


def test_server_with_raw_logprobs_is_refused_with_the_command_to_start_it_by() -> None:
    fake = VllmFake()
    fake.facts["logprobs_mode"] = "raw_logprobs"
    with pytest.raises(ValueError, match="--logprobs-mode processed_logprobs"):
        against(fake, lambda engine: asyncio.sleep(0))


def test_health_tells_load_and_version() -> None:
    async def claim(engine: VllmEngine) -> None:
        health = await engine.health()
        assert (health.phase, health.version, health.running, health.waiting, health.note) == ("serving", 5, 2, 1, "")

    against(VllmFake(), claim)
