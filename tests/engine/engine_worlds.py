"""A tiny model, its tokenizer files, a running engine and a running server: what the engine tests stand on."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import torch

from rollmill import web
from rollmill.engine.constrain import Constraints
from rollmill.engine.engine import Engine
from rollmill.engine.replies import Posted, deliver
from rollmill.engine.run import run_engine
from rollmill.engine.server import make_app
from rollmill.engine.service import Service
from rollmill.model import Model, ModelConfig, PackedAttention, save_model
from rollmill.ops import tempered
from rollmill.weights import fingerprint

DEADLINE_S = 30.0
VOCAB = 300
CONFIG = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    max_position=256,
    eos_token_ids=(256,),
)
TEMPLATE = (
    "{% if tools %}<|tools|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] + '' }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
END = 256


def tiny_model(seed: int = 0, config: ModelConfig = CONFIG) -> Model:
    """Random weights, large enough that the distribution is far from uniform."""
    model = Model(config)
    model.init_weights(seed)
    model.load_serving({name: t * 4 for name, t in model.serving_tensors().items() if t.dim() > 1})
    return model


def write_tokenizer(path: Path) -> None:
    """Byte-level: ids 0..255 are bytes, 256 ends a turn, the markers follow."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tok = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tok.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tok.decoder = tokenizers.decoders.ByteLevel()
    tok.add_special_tokens(["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|tools|>"])
    tok.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))


def write_model(path: Path, model: Model | None = None) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    save_model(model or tiny_model(), path)
    write_tokenizer(path)
    return path


@contextmanager
def running(model: Model | None = None, **options: Any) -> Iterator[Engine]:
    model = model or tiny_model()
    engine = Engine(model, model.config, **{"version": 1, "num_slots": 8, "num_threads": 1, **options})
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


class Gate:
    """Lets an engine's steps through as they are allowed, so that a test knows how far it has got."""

    def __init__(self, engine: Engine) -> None:
        self._steps, self._is_open = threading.Semaphore(0), False
        self.is_waiting = False
        """Whether a step waits for leave."""
        compute = engine._forward.compute

        def gated(step: Any) -> Any:
            self.is_waiting = True
            assert self._is_open or self._steps.acquire(timeout=DEADLINE_S), "no step was allowed"
            self.is_waiting = False
            return compute(step)

        engine._forward.compute = gated  # type: ignore[method-assign]

    def allow(self, num_steps: int) -> None:
        self._steps.release(num_steps)

    def open(self) -> None:
        self._is_open = True
        self._steps.release()


@asynccontextmanager
async def served(model: Model | None = None, *, tokenizer: Path | None = None, **options: Any) -> AsyncIterator[tuple[Engine, str]]:
    """An engine and the address of its server, in the running event loop."""
    loop, ready, model = asyncio.get_running_loop(), asyncio.Event(), model or tiny_model()

    def post(batch: Posted) -> None:
        loop.call_soon_threadsafe(deliver, batch)

    engine = Engine(model, model.config, **{"version": 1, "num_slots": 8, "num_threads": 1, "post": post, **options})
    constraints = Constraints(tokenizer, vocab_size=model.config.vocab_size, eos_ids=frozenset(model.config.eos_token_ids))
    server = web.Server(make_app(Service(engine=engine, constraints=constraints, model_name="tiny")), ready.set)
    with closing(web.bind("127.0.0.1", 0)) as sock, closing(constraints):
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        engine.start()
        try:
            await asyncio.wait_for(ready.wait(), DEADLINE_S)
            yield engine, f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            await asyncio.to_thread(engine.close)
            await asyncio.wait_for(serving, DEADLINE_S)


def rename(engine: Engine, version: int) -> None:
    """Swap to a version of the same weights; returns when it is served."""
    assert engine.offer(version, lambda: fingerprint(engine.model.serving_tensors())).result(DEADLINE_S)


async def swap_beneath(engine: Engine, gate: Gate, version: int, *, num_steps: int | None) -> None:
    """Swap while the engine waits for leave to take its next step, and then let it take so many, or all."""
    await until(lambda: gate.is_waiting, "the engine waits for leave")
    offered = asyncio.create_task(asyncio.to_thread(rename, engine, version))
    await until(lambda: engine._inbox.has_offer, "the swap is offered")
    gate.open() if num_steps is None else gate.allow(num_steps)
    await offered


async def until(condition: Callable[[], bool], what: str) -> None:
    """`wait_until` for a test that shares its loop with the server."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"gave up waiting until {what}"
        await asyncio.sleep(0.002)


class Server:
    """A real engine server on a real port, in a thread of its own."""

    def __init__(self, model_path: Path, **options: Any) -> None:
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self.port = 0
        self._thread = threading.Thread(target=self._run, args=(model_path, {"num_threads": 1, "num_slots": 8, **options}), daemon=True)
        self._thread.start()
        assert self._ready.wait(DEADLINE_S), "the server did not come up"
        if self._error:
            raise self._error
        self.url = f"http://127.0.0.1:{self.port}"

    def _run(self, model_path: Path, options: dict[str, Any]) -> None:
        async def main() -> None:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            await run_engine(model_path, on_ready=self._on_ready, **options)

        try:
            asyncio.run(main())
        except asyncio.CancelledError:
            pass
        except (OSError, ValueError) as error:
            self._error = error
            self._ready.set()

    def _on_ready(self, port: int) -> None:
        self.port = port
        self._ready.set()

    def close(self) -> None:
        assert self._loop and self._task
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the server did not stop"


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"gave up waiting until {what}"
        time.sleep(0.002)


def packed_logprobs(model: Model, prompt: list[int], sampled: list[int], temperature: float = 1.0) -> torch.Tensor:
    """The trainer's view: logprob of each sampled token from one packed forward without a cache."""
    tokens = prompt + sampled
    attention = PackedAttention([len(tokens)])
    with torch.inference_mode():
        hidden = model(torch.tensor(tokens), attention.positions_T, attention)
        logits = tempered(model.logits(hidden[len(prompt) - 1 : -1]), temperature)
        return model.ops.score(logits, torch.tensor(sampled))[0]
