"""The life of an engine process: load, bind, follow, serve, and close everything in the right order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from rollmill.engine.constrain import Constraints
from rollmill.engine.engine import Engine, EnginePhase
from rollmill.engine.protocol import SwapMode
from rollmill.engine.replies import Posted, deliver
from rollmill.engine.server import make_app
from rollmill.engine.service import Service
from rollmill.engine.swap import WeightWatch, follower_of
from rollmill.model import ModelConfig, Tokenizer, compute_dtype, load_model
from rollmill.web import Server, bind
from rollmill.weights import WeightStore
from rollmill.weights.peer import peer_app

log = logging.getLogger(__name__)
SWITCH_S = 2e-4


async def run_engine(
    model_path: Path,
    *,
    store: WeightStore | None = None,
    replica: str = "",
    peers: bool = False,
    host: str = "127.0.0.1",
    port: int = 0,
    num_threads: int | None = None,
    num_slots: int = 32,
    max_len: int | None = None,
    max_waiting: int = 256,
    step_tokens: int = 1024,
    num_pages: int | None = None,
    swap_mode: SwapMode = SwapMode.KEEP_KV,
    numerics: str = "exact",
    device: str = "cpu",
    model_name: str | None = None,
    on_ready: Callable[[int], None] | None = None,
) -> None:
    """Serve until cancelled or signalled. `on_ready` gets the bound port once connections are accepted.

    With a store nothing is generated before the store's newest version runs here and is proved; without one the
    directory's own weights are served as version 0. With `peers` other replicas may read the weights from this port.
    """
    # The compute thread gives up the interpreter lock at every tensor operation; with the default of 5 ms the server thread
    # keeps it for half of each decode step.
    sys.setswitchinterval(SWITCH_S)
    with contextlib.closing(bind(host, port)) as sock:
        loop, bound_port = asyncio.get_running_loop(), sock.getsockname()[1]

        def post(batch: Posted) -> None:
            # After the loop has closed nobody waits for updates any more.
            if not loop.is_closed():
                loop.call_soon_threadsafe(deliver, batch)

        def leave() -> None:
            # A failed engine cannot recover in place: the process ends, and whoever supervises it starts another.
            server.should_exit = True

        model, config = await asyncio.to_thread(
            load_model, model_path, device=device, compute_dtype=compute_dtype(device), numerics=numerics
        )
        engine = Engine(
            model,
            config,
            version=None if store is not None else 0,
            num_slots=num_slots,
            max_len=max_len,
            max_waiting=max_waiting,
            step_tokens=step_tokens,
            num_pages=num_pages,
            swap_mode=swap_mode,
            replica=replica,
            num_threads=num_threads,
            post=post,
            on_failed=leave,
        )
        url = f"http://{host}:{bound_port}" if peers else ""
        follower = follower_of(store, model, replica=replica, url=url) if store is not None else None
        more = peer_app(follower.live, follower).routes if peers and follower is not None else []
        service = Service(engine=engine, constraints=_constraints(model_path, config), model_name=model_name or model_path.name)
        server = Server(make_app(service, more), lambda: on_ready(bound_port) if on_ready else None)
        watch = WeightWatch(engine, follower) if follower is not None else None
        log.info("engine listens on %s:%d", host, bound_port)
        with contextlib.closing(service.constraints):
            await _serve(server, sock, engine, watch)


def _constraints(model_path: Path, config: ModelConfig) -> Constraints:
    file, eos_ids = model_path / "tokenizer.json", frozenset(config.eos_token_ids)
    if not file.is_file():
        return Constraints(None, vocab_size=config.vocab_size, eos_ids=eos_ids)
    return Constraints(file, vocab_size=config.vocab_size, eos_ids=eos_ids or Tokenizer(model_path).stop_ids)


async def _serve(server: Server, sock: socket.socket, engine: Engine, watch: WeightWatch | None) -> None:
    engine.start()
    if watch:
        watch.start()
    try:
        await server.serve(sockets=[sock])
    finally:
        await asyncio.to_thread(engine.close)
        if watch:
            await asyncio.to_thread(watch.close)
    if engine.phase is EnginePhase.FAILED:
        raise RuntimeError(f"the engine stopped serving: {engine.note}")
