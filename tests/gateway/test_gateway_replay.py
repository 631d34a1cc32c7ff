"""From a real engine through sessions to the learner: routes arrive whole, and what replay is worth shows in the numbers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from gateway_fakes import TOKENIZER, open_session, soon, tool, user, with_replicas

from rollmill.algorithms import DppoTv
from rollmill.engine.engine import Engine
from rollmill.engine.protocol import GenerateReply, GenerateRequest, Piece, Pressure
from rollmill.gateway.routing.replicas import Replicas
from rollmill.model import Model, ModelConfig, MoEConfig
from rollmill.records import Window
from rollmill.trainer.batch import Lesson, StepBatch
from rollmill.trainer.learn import Learner
from rollmill.trainer.optimizer import MasterAdamW

CONFIG = ModelConfig(
    family="qwen3_moe",
    vocab_size=TOKENIZER.vocab_size,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=512,
    tied=False,
    moe=MoEConfig(num_experts=32, top_k=4, expert_size=16, norm_topk=True, dense_layers=(0,)),
)


def sharp(numerics: str) -> Model:
    """Fresh weights, far enough apart that tokens really take different experts."""
    model = Model(CONFIG, numerics=numerics)
    model.init_weights(0)
    model.load_serving({name: t * 4 for name, t in model.serving_tensors().items() if t.dim() > 1})
    return model


class LocalClient:
    """Stands in for an EngineClient: calls an engine of this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        return await asyncio.wrap_future(self._engine.generate(request))

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Piece | GenerateReply, None]:
        yield await self.generate(request)

    async def pressure(self) -> Pressure:
        return Pressure(running=0, waiting=0, slots=3, kv_used_frac=0.0, version=3, tokens_per_s=0.0)

    async def aclose(self) -> None:
        return


def windows_of(model: Model, *, num_at_once: int) -> list[Window]:
    """Six conversations of three turns."""

    async def talk(replicas: Replicas, key: int) -> Window:
        session = open_session(replicas, key=f"s{key}", seed=1, wants_routes=True)
        for turn in range(3):
            said = f"{key} and {turn} " * (key + 1)
            await session.reply([tool(said) if turn else user(said)], max_tokens=12, max_context=500, deadline=soon())
        return session.window()

    async def all_of_them(replicas: Replicas) -> list[Window]:
        found: list[Window] = []
        for first in range(0, 6, num_at_once):
            found += await asyncio.gather(*(talk(replicas, key) for key in range(first, first + num_at_once)))
        return found

    engine = Engine(model, CONFIG, version=3, num_slots=3, step_tokens=64, num_threads=1)
    engine.start()
    try:
        return with_replicas({"http://engine-0": LocalClient(engine)}, all_of_them)
    finally:
        engine.close()


def scored(windows: list[Window], mode: str) -> dict[str, float]:
    """The numbers of a learner at the engine's version that replays in this mode."""
    model = sharp("exact")
    optimizer = MasterAdamW(model, lr=1e-6, warmup_steps=0, clip_norm=1.0, eps=1e-8)
    learner = Learner(model, optimizer, DppoTv(), temperature=1.0, length_norm=8.0, tokens_per_microbatch=512, router_replay=mode)
    lessons = [Lesson(window=w, advantage=1.0) for w in windows]
    batch = StepBatch(lessons=lessons, num_episodes=5, rewards=[], num_groups=1, num_groups_without_signal=0, num_tokens=0)
    return learner.step(batch, version=3)[0]


@pytest.fixture(scope="module")
def exact_windows() -> list[Window]:
    # More than the engine has slots, and their turns fall beside each other as they may: no bit depends on it.
    return windows_of(sharp("exact"), num_at_once=6)


@pytest.fixture(scope="module")
def noisy_windows() -> list[Window]:
    # One by one, since this profile's bits depend on who else is in the batch and this test's outcome must not.
    return windows_of(sharp("noisy"), num_at_once=1)


@pytest.mark.parametrize("mode", ["off", "r3", "r3_plausible"])
def test_exact_engine_and_trainer_agree_on_every_bit_and_every_expert(exact_windows: list[Window], mode: str) -> None:
    for window in exact_windows:
        window.check()
    found = scored(exact_windows, mode)
    assert found["mm/num_tokens"] == sum(int(w.sampled_T.sum()) for w in exact_windows) > 50
    assert found["mm/frac_nonzero"] == found["mm/single_version_abs_diff_max"] == found["mm/engine_engine-0/abs_diff_max"] == 0.0
    assert found["route/any_flip_tok_frac"] == found["route/missing_row_frac"] == 0.0 and found["mm/engine_engine-0/token_frac"] == 1.0


def test_replay_takes_the_flipped_experts_out_of_the_gap_to_a_noisy_engine(noisy_windows: list[Window]) -> None:
    off, forced, plausible = (scored(noisy_windows, mode) for mode in ("off", "r3", "r3_plausible"))
    assert forced["route/any_flip_tok_frac"] > 0 and forced["route/missing_row_frac"] == 0.0
    assert forced["mm/k3"] < off["mm/k3"] and plausible["mm/k3"] < off["mm/k3"]
    assert forced["mm/abs_diff_max"] < off["mm/abs_diff_max"]
