"""The life of the server process: load the model twice, as what is trained and as what samples, serve, and close in the right order."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from rollmill.engine.engine import Engine, EnginePhase
from rollmill.engine.replies import Posted, deliver
from rollmill.engine.room import pages_that_fit
from rollmill.model import Model, Tokenizer, compute_dtype, load_model
from rollmill.ops import PAGE
from rollmill.tinker import prompting
from rollmill.tinker.checkpoints import Checkpoints
from rollmill.tinker.sampling import Samplers
from rollmill.tinker.server import make_app
from rollmill.tinker.service import Service
from rollmill.tinker.training import Snapshot, Trainer
from rollmill.web import Server, bind

log = logging.getLogger(__name__)
SWITCH_S = 2e-4
MAX_WAITING = 1 << 16


async def run_tinker(
    model_path: Path,
    *,
    state_dir: Path,
    host: str = "127.0.0.1",
    port: int = 0,
    name: str | None = None,
    device: str = "cpu",
    numerics: str = "exact",
    num_engines: int = 1,
    num_slots: int = 32,
    num_threads: int | None = None,
    max_len: int | None = None,
    tokens_per_pass: int = 8192,
    alpha: float = 32.0,
    key: str | None = None,
    on_ready: Callable[[int], None] | None = None,
) -> None:
    """Serve until cancelled or signalled. `on_ready` gets the bound port once connections are accepted.

    Memory: the weights once for the trainer, once unchanged, and once for every engine; a training run adds its adapters and moments.
    """
    if num_engines < 1:
        raise ValueError(f"num_engines is {num_engines}, it must be at least 1")
    check_reach(host, key)
    # As in an engine's own process: the threads that compute give up the interpreter lock often.
    sys.setswitchinterval(SWITCH_S)
    loop = asyncio.get_running_loop()

    def post(batch: Posted) -> None:
        # After the loop has closed nobody waits for updates any more.
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, batch)

    def leave() -> None:
        # A failed engine cannot recover in place: the process ends, and whoever supervises it starts another.
        server.should_exit = True

    def load() -> Model:
        return load_model(model_path, device=device, compute_dtype=compute_dtype(device), numerics=numerics)[0]

    with contextlib.closing(bind(host, port)) as sock, ThreadPoolExecutor(1, "trainer") as thread:
        trainer = await asyncio.wrap_future(thread.submit(lambda: Trainer(load(), tokens_per_pass=tokens_per_pass)))
        engines = []
        for i in range(num_engines):
            model = await asyncio.to_thread(load)
            engine = Engine(
                model,
                model.config,
                version=0,
                num_slots=num_slots,
                max_len=max_len,
                num_pages=_num_pages(model, num_slots=num_slots, max_len=max_len),
                max_waiting=MAX_WAITING,
                replica=f"sampler-{i}",
                num_threads=num_threads,
                post=post,
                on_failed=leave,
            )
            engines.append(engine)
        service = _service(trainer, engines, thread, model_path, name=name, state_dir=state_dir, alpha=alpha)
        bound_port = sock.getsockname()[1]
        server = Server(make_app(service, key=key), lambda: on_ready(bound_port) if on_ready else None)
        try:
            for engine in engines:
                engine.start()
            log.info("tinker endpoint listens on %s:%d", host, bound_port)
            await server.serve(sockets=[sock])
        finally:
            await asyncio.gather(*(asyncio.to_thread(engine.close) for engine in engines))
    if failed := [engine.note for engine in engines if engine.phase is EnginePhase.FAILED]:
        raise RuntimeError(f"an engine stopped serving: {failed[0]}")


def _num_pages(model: Model, *, num_slots: int, max_len: int | None) -> int:
    """Half of what an engine alone would take: the trainer's activations need room beside it."""
    longest = -(-min(max_len or model.config.max_position, model.config.max_position) // PAGE)
    return max(longest, min(num_slots * longest, pages_that_fit(model, most=2 * num_slots * longest) // 2))


def check_reach(host: str, key: str | None) -> None:
    """Whoever reaches this server can use its machine, so beyond this one a key is asked for; the SDK sends only keys of its own form."""
    if key is not None and not key.startswith("tml-"):
        raise ValueError("the key must start with 'tml-', or the SDK refuses to send it")
    try:
        is_near = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_near = False
    if not is_near and key is None:
        raise ValueError(f"host is {host!r}, which others can reach, and no key is set; give a key, or listen on 127.0.0.1")


def _service(
    trainer: Trainer, engines: list[Engine], thread: ThreadPoolExecutor, path: Path, *, name: str | None, state_dir: Path, alpha: float
) -> Service:
    async def merge(snapshot: Snapshot) -> Mapping[str, torch.Tensor]:
        return await asyncio.wrap_future(thread.submit(trainer.serving_tensors, snapshot))

    tokenizer = Tokenizer(path) if (path / "tokenizer.json").is_file() else None
    config = trainer.model.config
    eos_ids = frozenset(config.eos_token_ids) or (tokenizer.stop_ids if tokenizer else frozenset())
    facts = prompting.Model(max_len=engines[0].max_len, vocab_size=config.vocab_size, eos_ids=eos_ids, tokenizer=tokenizer)
    samplers = Samplers(engines, base=trainer.base_snapshot, base_tensors=trainer.base, merge=merge)
    names = tuple(dict.fromkeys(n for n in (name, str(path), path.name, str(path.resolve())) if n))
    return Service(
        trainer,
        samplers,
        Checkpoints(state_dir),
        facts,
        names=names,
        tokenizer_id=str(path.resolve()),
        thread=thread,
        alpha=alpha,
    )
