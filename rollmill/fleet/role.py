"""One role as a process: its lock, its ledger handle, its telemetry port, its signals, and the way it ends.

Exit status: 0 the role's work is done, 2 a person must change something (the message says what), 75 stopped on request,
120 its last words could not be written, anything else a crash after which the role may simply be started again.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from rollmill.config import RunConfig
from rollmill.fleet.disk import is_full, left, places
from rollmill.fleet.rundir import ReplicaBook, announce, hold
from rollmill.records import Role
from rollmill.telemetry import Metrics, RoleServer, Waits, WaitTimeout

EXIT_DONE, EXIT_FIX, EXIT_STOPPED = 0, 2, 75
EXIT_UNHEARD = 120
"""Python's own, in place of any other status, when what is left for the log at the end cannot be written."""
PARENT_ENV = "ROLLMILL_SUPERVISOR_PID"
ROLES = (Role.TRAINER, Role.ENGINE, Role.ROLLOUT, Role.COMPACTOR)
PR_SET_PDEATHSIG = 1
STREAM_S = 2.0

log = logging.getLogger("rollmill.role")


def run_role(role: str, config: RunConfig, *, index: int = 0) -> int:
    """Run one role to its end; returns its exit status."""
    if role not in ROLES:
        raise ValueError(f"there is no role {role!r}; known: {', '.join(ROLES)}")
    die_with_supervisor()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    name = f"engine-{index}" if role == Role.ENGINE else role
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        with hold(config.run.dir, name):
            _BODIES[Role(role)](config, index, stop.is_set)
    except (ValueError, WaitTimeout) as error:
        log.error("%s", error)
        return EXIT_FIX
    except Exception as error:
        # Looked at whatever it is: a full disk comes out of libraries as an error of their own.
        if is_full(error):
            # The temporary folder too: boxes and compiled loops are written there, and the error may name no file.
            room = left([*places(config), Path(tempfile.gettempdir())])
            log.error("the disk is full: %s (%s; free some space and go on with --resume)", error, room)
            return EXIT_FIX
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            log.error("%s", error)
            return EXIT_FIX
        raise
    return EXIT_STOPPED if stop.is_set() else EXIT_DONE


def die_with_supervisor() -> None:
    """A role started by a supervisor is killed by the kernel when that supervisor dies, however it dies."""
    parent = os.environ.get(PARENT_ENV)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        os._exit(1)


def _trainer(config: RunConfig, index: int, should_stop: Callable[[], bool]) -> None:
    from rollmill.ledger import Ledger
    from rollmill.trainer.loop import TrainerLoop

    run_dir = config.run.dir
    metrics, waits = Metrics(run_dir, Role.TRAINER), Waits()
    with Ledger.create_or_open(run_dir, Role.TRAINER) as ledger:
        loop = TrainerLoop(config, ledger, metrics, waits, should_stop)
        server = RoleServer(metrics, waits, lambda: {"step": loop.step, "version": loop.version})
        announce(run_dir, Role.TRAINER, {"url": f"http://127.0.0.1:{server.start()}"})
        loop.run()
        server.stop()


def _rollout(config: RunConfig, index: int, should_stop: Callable[[], bool]) -> None:
    from rollmill.ledger import Ledger
    from rollmill.rollout.role import run_rollout

    run_dir = config.run.dir
    metrics, waits = Metrics(run_dir, Role.ROLLOUT), Waits()
    with Ledger.create_or_open(run_dir, Role.ROLLOUT) as ledger:
        server = RoleServer(metrics, waits, dict)
        announce(run_dir, Role.ROLLOUT, {"url": f"http://127.0.0.1:{server.start()}"})
        asyncio.run(run_rollout(config, ledger, metrics, waits, ReplicaBook(run_dir, config.engine.num_replicas), should_stop))
        server.stop()


def _engine(config: RunConfig, index: int, should_stop: Callable[[], bool]) -> None:
    from rollmill.engine.protocol import SwapMode
    from rollmill.engine.run import run_engine
    from rollmill.weights import open_store

    e, run_dir = config.engine, config.run.dir

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        streams: list[asyncio.Task[None]] = []

        def ready(port: int) -> None:
            url = f"http://{e.host}:{port}"
            announce(run_dir, f"engine-{index}", {"url": url})
            streams.append(loop.create_task(_stream_pressure(url, Metrics(run_dir, f"engine-{index}"))))

        await run_engine(
            config.model.path,
            store=open_store(config.weight_store),
            replica=f"engine-{index}",
            peers=config.weights.peers,
            host=e.host,
            port=e.port + index if e.port else 0,
            num_threads=e.num_threads,
            num_slots=e.num_slots,
            max_len=e.max_len,
            num_pages=e.num_pages or None,
            swap_mode=SwapMode(e.swap),
            device=e.device,
            numerics=e.numerics or config.model.numerics,
            on_ready=ready,
        )

    asyncio.run(serve())


def _compactor(config: RunConfig, index: int, should_stop: Callable[[], bool]) -> None:
    from rollmill.weights.compact_role import run_compactor

    run_dir, w = config.run.dir, config.weights
    metrics, waits = Metrics(run_dir, Role.COMPACTOR), Waits()
    server = RoleServer(metrics, waits, dict)
    announce(run_dir, Role.COMPACTOR, {"url": f"http://127.0.0.1:{server.start()}"})

    def say(done: dict[str, float], version: int) -> None:
        metrics.write(done, step=version)

    run_compactor(config.weight_store, every_s=w.compact_every_s, collect_after_s=w.collect_after_s, should_stop=should_stop, say=say)
    server.stop()


async def _stream_pressure(url: str, metrics: Metrics) -> None:
    """The engine's own JSONL stream; Prometheus text with all its counters is on its port."""
    from rollmill.engine.client import EngineClient, EngineUnavailable

    async with EngineClient(url) as client:
        while True:
            await asyncio.sleep(STREAM_S)
            try:
                now = await client.pressure()
            except EngineUnavailable:
                continue
            metrics.write(
                {
                    "engine/tokens_per_s": now.tokens_per_s,
                    "engine/num_running": now.running,
                    "engine/num_waiting": now.waiting,
                    "engine/kv_used_frac": now.kv_used_frac,
                    "engine/version": now.version,
                },
                step=max(0, now.version),
            )


_BODIES: dict[Role, Callable[[RunConfig, int, Callable[[], bool]], None]] = {
    Role.TRAINER: _trainer,
    Role.ROLLOUT: _rollout,
    Role.ENGINE: _engine,
    Role.COMPACTOR: _compactor,
}


def role_command(role: str, run_file: Path, index: int) -> list[str]:
    return [sys.executable, "-m", "rollmill.cli", "role", role, str(run_file), "--index", str(index)]
