"""A gateway in front of engines that run already, or with an engine of its own in a second process that ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from rollmill.chat.format import ChatFormat
from rollmill.engine.client import EngineClient, EngineRejected, EngineUnavailable
from rollmill.fleet.role import PARENT_ENV, die_with_supervisor
from rollmill.gateway.front.keys import KeyRing, ring_from
from rollmill.gateway.front.run import GatewayServer, start_gateway
from rollmill.gateway.gateway import Gateway
from rollmill.gateway.recording.record import SqliteRecorder
from rollmill.gateway.recording.restore import kept_secret, restore
from rollmill.gateway.routing.pins import Pins
from rollmill.gateway.routing.replicas import Replicas
from rollmill.model.tokenizer import Tokenizer
from rollmill.telemetry import Waits

START_S = 600.0
"""For a large model to be read."""
STOP_S = 15.0


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """What both verbs ask for."""

    model: Path
    """Directory with the tokenizer and the chat template."""
    host: str = "127.0.0.1"
    port: int = 8000
    name: str = ""
    """What the model is called; empty: the directory's name."""
    keys: Path | None = None
    record: Path | None = None
    """Folder to keep every call in."""
    store: str = ""
    """Weight store whose tags `name@tag` means."""
    tool_format: str = "auto"
    is_open: bool = False
    """Listen beyond this machine although there are no keys."""

    @property
    def shown_name(self) -> str:
        return self.name or self.model.resolve().name


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The engine that `rollmill serve` starts."""

    model: str
    store: str = ""
    device: str = "cpu"
    num_slots: int = 32
    max_len: int | None = None
    num_threads: int | None = None


async def open_gateway(settings: GatewaySettings, urls: Callable[[], list[str]]) -> GatewayServer:
    """Listening, with the episodes of its record."""
    chat = ChatFormat(Tokenizer(settings.model), tool_format=settings.tool_format)
    tag_version = _tag_version(settings.store) if settings.store else None
    recorder = SqliteRecorder(settings.record) if settings.record is not None else None
    gateway = Gateway(
        chat,
        Replicas(urls, Waits()),
        name=settings.shown_name,
        pins=Pins(settings.shown_name, tag_version),
        recorder=recorder,
    )
    try:
        secret = None
        if settings.record is not None:
            secret = kept_secret(settings.record)
            restore(gateway, settings.record)
        ring: KeyRing = ring_from(os.environ, settings.keys, secret=secret)
        return await start_gateway(
            gateway,
            host=settings.host,
            port=settings.port,
            keys=ring,
            opens_unknown=True,
            is_open_anywhere=settings.is_open,
        )
    except (ValueError, OSError):
        await gateway.close()
        raise


def _tag_version(url: str) -> Callable[[str], int | None]:
    from rollmill.weights import open_store

    store = open_store(url)

    def look_up(name: str) -> int | None:
        return next((tag.version for tag in store.tags() if tag.name == name), None)

    return look_up


def greeting(server: GatewayServer, name: str) -> str:
    """What to type next."""
    url, _ = server.base_url()
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64})
    key = "" if server.app.keys.is_open else " -H 'authorization: Bearer KEY'"
    return f"{name} is served at {url}\n  curl {url}/chat/completions{key} -H 'content-type: application/json' -d '{body}'"


async def run_gateway(settings: GatewaySettings, replicas: list[str], say: Callable[[str], None]) -> None:
    """Serve until a signal ends it."""
    await check_engines(replicas)
    server = await open_gateway(settings, lambda: replicas)
    server.end_on_signals()
    say(greeting(server, settings.shown_name))
    try:
        await server.wait()
    finally:
        await server.close()


async def check_engines(urls: list[str]) -> None:
    """ValueError for an address where something answers that is no engine. One that is not up yet may still come."""
    for url in urls:
        async with EngineClient(url) as engine:
            try:
                await engine.pressure()
            except EngineRejected as error:
                raise ValueError(f"--replica {url} is no engine ({error}); `rollmill serve` tells the address of its engine") from error
            except EngineUnavailable:
                continue


async def run_serve(settings: GatewaySettings, engine: EngineSettings, say: Callable[[str], None]) -> None:
    """The same with an engine in a process of its own; whichever ends takes the other with it."""
    engines: list[str] = []
    async with serving(settings, engine, engines.append) as (server, process):
        server.end_on_signals()
        say(greeting(server, settings.shown_name))
        say(f"  its engine, for `--replica` of other commands: {engines[0]}")
        ended, done = asyncio.create_task(process.wait()), asyncio.create_task(server.wait())
        await asyncio.wait({ended, done}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        done.cancel()
        if process.returncode is not None:
            server.gateway.stop_running("the engine behind this gateway has ended")
            raise ValueError(f"the engine ended with status {process.returncode}; its last words are above")


@contextlib.asynccontextmanager
async def serving(
    settings: GatewaySettings, engine: EngineSettings, on_engine: Callable[[str], None] = lambda url: None
) -> AsyncIterator[tuple[GatewayServer, asyncio.subprocess.Process]]:
    """A gateway with an engine of its own, for as long as the block runs; `on_engine` is told the engine's address."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollmill.fleet.serve", msgspec.json.encode(engine).decode()),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, PARENT_ENV: str(os.getpid())},
        start_new_session=True,
    )
    try:
        url = await _engine_url(process)
        on_engine(url)
        server = await open_gateway(settings, lambda: [url])
        try:
            yield server, process
        finally:
            await server.close()
    finally:
        await _stop(process)


async def _engine_url(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), START_S)
    if not line:
        raise ValueError(f"the engine did not start (status {await process.wait()}); its last words are above")
    return str(json.loads(line)["url"])


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_S)
    if process.returncode is None:
        process.kill()
        await process.wait()


def _engine_process(settings: EngineSettings) -> None:
    """The body of the engine's process: its URL is the one line it prints."""
    from rollmill.engine.run import run_engine
    from rollmill.weights import open_store

    die_with_supervisor()

    def ready(port: int) -> None:
        print(json.dumps({"url": f"http://127.0.0.1:{port}"}), flush=True)

    asyncio.run(
        run_engine(
            Path(settings.model),
            store=open_store(settings.store) if settings.store else None,
            replica="engine-0",
            device=settings.device,
            num_slots=settings.num_slots,
            max_len=settings.max_len,
            num_threads=settings.num_threads,
            on_ready=ready,
        )
    )


if __name__ == "__main__":
    _engine_process(msgspec.json.decode(sys.argv[1], type=EngineSettings))
