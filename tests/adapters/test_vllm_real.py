"""The adapter against a real vLLM on a CPU (`make test-vllm`): what it samples, what it serves after a swap, and what it survives.

float32 runs with the packed multiplies that vLLM makes of its own accord, bfloat16 with plain matrices patched in place.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from vllm_worlds import MOE_CONFIG, TrainedStore, logprobs_of, tiny_model, write_checkpoint

from rollmill.adapters.vllm import VllmEngine
from rollmill.bench.vllm_server import PACKED, PLAIN, VllmServer, start_vllm
from rollmill.engine.client import EngineUnavailable
from rollmill.engine.protocol import FinishReason, GenerateReply, GenerateRequest, ScoreRequest, SwapMode
from rollmill.weights import Fingerprint, WrongWeights

pytestmark = pytest.mark.vllm
PROMPT = [5, 6, 7, 8]
# float32: two orders of summation over rows of up to 192 values differ by a few hundred ulps of the logits (about 2, so 2^-23 * 2
# each), measured 7.6e-6. bfloat16: activations keep 8 bits, so each of a dozen roundings moves a logit by up to 2^-9 of it.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.15}
# A step of `TrainedStore` moves logprobs by 0.5 and more somewhere in any dozen of tokens.
MOVED = 0.4
DEADLINE_S = 120.0
# Long enough that a version is staged and swapped in before a request of it ends, on a machine that has other work too.
LONG = 1200
MAX_LEN = 1536


@dataclass
class World:
    dtype: str
    server: VllmServer
    store: TrainedStore

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype]

    @contextlib.asynccontextmanager
    async def engine(self, swap_mode: SwapMode = SwapMode.RE_PREFILL) -> AsyncIterator[VllmEngine]:
        async with await VllmEngine.connect(self.server.url, store=self.store.where, replica="vllm", swap_mode=swap_mode) as engine:
            yield engine

    def published(self, version: int) -> Fingerprint:
        record = self.store.store.version(version)
        return record.print_of(self.store.store.schema(record.schema))

    def errors(self, reply: GenerateReply, version: int, temperature: float = 1.0) -> torch.Tensor:
        """|logprob told - logprob of our own model of this version|, per sampled token."""
        ours = logprobs_of(self.store.model_at(version), PROMPT + reply.token_ids, len(PROMPT), temperature)
        return (ours - torch.from_numpy(reply.logprobs_T.copy())).abs()


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder, dtype = tmp_path_factory.mktemp(request.param), request.param
    model = tiny_model()
    checkpoint, store = write_checkpoint(folder / "model", model), TrainedStore(folder / "store", model)
    with start_vllm(
        checkpoint, log=folder / "log", dtype=dtype, extension=PACKED if dtype == "float32" else PLAIN, max_len=MAX_LEN
    ) as server:
        yield World(dtype, server, store)
    store.close()


async def current(world: World, engine: VllmEngine) -> int:
    """Bring the server to the newest version, whatever the tests before this one did."""
    version = max(world.store.store.versions())
    await engine.apply(version)
    return version


async def in_flight(engine: VllmEngine, seed: int) -> asyncio.Task[GenerateReply]:
    """A long request that has begun to be sampled."""
    task = asyncio.create_task(engine.generate(GenerateRequest(prompt_ids=PROMPT, max_tokens=LONG, seed=seed)))
    async with asyncio.timeout(DEADLINE_S):
        while (await engine.health()).running == 0:
            assert not task.done(), "the request ended before anything could happen to it"
            await asyncio.sleep(0.01)
    return task


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_sampled_logprobs_are_those_of_our_model(world: World, temperature: float) -> None:
    async def main() -> None:
        async with world.engine() as engine:
            version = await current(world, engine)
            reply = await engine.generate(GenerateRequest(prompt_ids=PROMPT, max_tokens=64, seed=3, temperature=temperature))
            assert len(reply.token_ids) == 64
            assert {span.version for span in reply.spans} == {version}
            assert world.errors(reply, version, temperature or 1.0).max() < world.tolerance
            again = await engine.generate(GenerateRequest(prompt_ids=PROMPT, max_tokens=64, seed=3, temperature=temperature))
            assert again.token_ids == reply.token_ids

    asyncio.run(main())


def test_score_gives_the_same_logprobs(world: World) -> None:
    async def main() -> None:
        async with world.engine() as engine:
            version = await current(world, engine)
            tokens = list(range(20, 90))
            reply = await engine.score(ScoreRequest(token_ids=tokens, start=30))
            ours = logprobs_of(world.store.model_at(version), tokens, 30)
            assert (ours - torch.from_numpy(reply.logprobs_T.copy())).abs().max() < world.tolerance
            assert reply.version == version

    asyncio.run(main())


def test_requests_end_by_stop_token_and_by_deadline(world: World) -> None:
    async def main() -> None:
        async with world.engine() as engine:
            await current(world, engine)
            whole = await engine.generate(GenerateRequest(prompt_ids=PROMPT, max_tokens=32, seed=3))
            stop = whole.token_ids[20]
            reply = await engine.generate(GenerateRequest(prompt_ids=PROMPT, max_tokens=32, seed=3, stop_ids=[stop]))
            assert reply.finish_reason is FinishReason.STOP
            assert reply.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
            late = await engine.generate(GenerateRequest(prompt_ids=PROMPT, max_tokens=LONG, seed=3, deadline_s=0.3))
            assert late.finish_reason is FinishReason.DEADLINE
            assert 0 < len(late.token_ids) < LONG
            full = await engine.generate(GenerateRequest(prompt_ids=PROMPT * (MAX_LEN // 4 - 2), max_tokens=500, seed=3))
            assert full.finish_reason is FinishReason.CONTEXT

    asyncio.run(main())


def test_server_shows_the_fingerprint_of_the_published_version(world: World) -> None:
    async def main() -> None:
        async with world.engine() as engine:
            await current(world, engine)
            version = world.store.step()
            assert (await engine.apply(version)).total == world.published(version).total
            shown = await engine.digest()
            assert (shown.version, shown.tensors) == (version, world.published(version).tensors)
            assert not shown.unproven

    asyncio.run(main())


def test_request_in_flight_survives_a_delta_and_its_tokens_carry_the_right_version(world: World) -> None:
    """Re-prefilled: on each side of the border every token is a function of one version, and fits that one and not the other."""

    async def main() -> None:
        async with world.engine() as engine:
            old = await current(world, engine)
            new = world.store.step()
            running = await in_flight(engine, seed=11)
            await engine.apply(new)
            reply = await running
            assert len(reply.token_ids) == LONG
            assert [span.version for span in reply.spans] == [old, new]
            by_old, by_new, border = world.errors(reply, old), world.errors(reply, new), reply.spans[0].end
            assert by_old[:border].max() < world.tolerance
            assert by_new[border:].max() < world.tolerance
            assert by_new[:border].max() > MOVED
            assert by_old[border:].max() > MOVED

    asyncio.run(main())


def test_kept_keys_and_values_leave_the_old_context_to_the_new_weights(world: World) -> None:
    async def main() -> None:
        async with world.engine(SwapMode.KEEP_KV) as engine:
            old = await current(world, engine)
            new = world.store.step()
            running = await in_flight(engine, seed=12)
            await engine.pause()
            await engine.apply(new)
            assert (await engine.health()).note == "paused"
            await engine.resume()
            reply = await running
            assert [span.version for span in reply.spans] == [old, new]
            border = reply.spans[0].end
            assert world.errors(reply, old)[:border].max() < world.tolerance
            # Neither version alone gives these: the new weights read keys and values of the old ones.
            assert world.errors(reply, new)[border:].max() > world.tolerance
            fresh = await engine.generate(GenerateRequest(prompt_ids=PROMPT, max_tokens=64, seed=12))
            assert world.errors(fresh, new).max() < world.tolerance

    asyncio.run(main())


def test_damaged_delta_is_refused_and_the_old_weights_serve_on(world: World) -> None:
    async def main() -> None:
        async with world.engine() as engine:
            good = await current(world, engine)
            bad = world.store.step()
            for route in world.store.store.routes(after=good):
                for pack in world.store.store.route(route).packs:
                    path = Path(world.store.where) / pack.key
                    data = bytearray(path.read_bytes())
                    data[len(data) // 2] ^= 0x10
                    path.write_bytes(bytes(data))
            running = await in_flight(engine, seed=13)
            with pytest.raises(WrongWeights, match=f"version {bad} was refused, the old one serves on"):
                await engine.apply(bad)
            reply = await running
            assert [span.version for span in reply.spans] == [good]
            assert world.errors(reply, good).max() < world.tolerance
            assert (await engine.digest()).tensors == world.published(good).tensors
            # A publisher that sees the damage goes on with a whole version, and so does the replica.
            after = world.store.step()
            await engine.apply(after)
            assert (await engine.digest()).tensors == world.published(after).tensors

    asyncio.run(main())


def test_experts_are_patched_where_the_kernel_reads_them(tmp_path: Path) -> None:
    """vLLM on a CPU keeps all experts of a layer in one shuffled parameter."""
    model = tiny_model(2, MOE_CONFIG)
    checkpoint, store = write_checkpoint(tmp_path / "model", model), TrainedStore(tmp_path / "store", model)

    async def main(world: World) -> None:
        async with world.engine() as engine:
            for version in (0, store.step()):
                await engine.apply(version)
                reply = await engine.generate(GenerateRequest(prompt_ids=PROMPT, max_tokens=64, seed=1))
                assert world.errors(reply, version).max() < world.tolerance
                assert (await engine.digest()).tensors == world.published(version).tensors

    with start_vllm(checkpoint, log=tmp_path / "log", dtype="float32", max_len=MAX_LEN) as server:
        asyncio.run(main(World("float32", server, store)))
    store.close()


def test_server_that_was_killed_comes_back_to_the_newest_version(tmp_path: Path) -> None:
    """It has its own server, and kills it with -9 in the middle of a request."""
    model = tiny_model(1)
    checkpoint, store = write_checkpoint(tmp_path / "model", model), TrainedStore(tmp_path / "store", model)

    async def before(world: World) -> None:
        async with world.engine() as engine:
            await engine.apply(0)
            running = await in_flight(engine, seed=14)
            world.server.kill()
            with pytest.raises(EngineUnavailable):
                await running
            assert (await engine.health()).phase == "failed"

    async def after(world: World, newest: int) -> None:
        async with world.engine() as engine:
            with pytest.raises(EngineUnavailable, match="a checkpoint of its own"):
                await engine.generate(GenerateRequest(prompt_ids=PROMPT, max_tokens=8, seed=1))
            assert (await engine.digest()).unproven
            await engine.apply(newest)
            assert (await engine.digest()).tensors == world.published(newest).tensors
            reply = await engine.generate(GenerateRequest(prompt_ids=PROMPT, max_tokens=64, seed=1))
            assert world.errors(reply, newest).max() < world.tolerance

    with start_vllm(checkpoint, log=tmp_path / "log", dtype="float32", max_len=MAX_LEN) as server:
        asyncio.run(before(World("float32", server, store)))
    newest = [store.step() for _ in range(3)][-1]
    with start_vllm(checkpoint, log=tmp_path / "log", dtype="float32", max_len=MAX_LEN) as server:
        asyncio.run(after(World("float32", server, store), newest))
    store.close()
