"""A provider in one process: the E2B protocol in front of any backend of ours, enough of it for the SDK's everyday verbs.

It keeps what the real one keeps: a key and a token are asked for, a paused or copied sandbox cuts its connections, an end that nobody
reads is lost, a sandbox past its time is gone. What the backend behind cannot do, it cannot do either.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import itertools
import json
import posixpath
import secrets
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

from aiohttp import web

from rollmill.records import RunFailure
from rollmill.sandbox.hosted.api import END_OF_STREAM, ENVELOPE
from rollmill.sandbox.interface import Process, Sandbox, SandboxBackend, Snapshot
from rollmill.sandbox.records import FileKind, SandboxSpec

KEY = "e2b_0000000000000000000000000000000000000000"
_CODES = {errno.ENOENT: "not_found", errno.EEXIST: "already_exists", errno.EISDIR: "invalid_argument", errno.ENOTDIR: "invalid_argument"}
_STATUS = {"not_found": 404, "already_exists": 409, "invalid_argument": 400, "unauthenticated": 401, "internal": 500, "unavailable": 502}


class Held:
    """One sandbox: its box, and the processes that its daemon started."""

    def __init__(self, box: Sandbox, template: str, timeout_s: float) -> None:
        self.box, self.template = box, template
        self.token = secrets.token_hex(8)
        self.started = datetime.now(UTC)
        self.end = self.started + timedelta(seconds=timeout_s)
        self.timer: asyncio.TimerHandle | None = None
        self.is_paused = False
        self.processes: dict[int, Running] = {}


class Running:
    """A process and whoever listens to it now; what comes while nobody does is dropped."""

    def __init__(self, pid: int, process: Process, config: dict) -> None:
        self.pid, self.process, self.config = pid, process, config
        self.listeners: set[asyncio.Queue[dict | None]] = set()
        self.pump = asyncio.ensure_future(self._pump())

    async def _pump(self) -> None:
        try:
            async for chunk in self.process:
                name = "stderr" if chunk.is_stderr else "pty" if self.config.get("pty") else "stdout"
                await self._tell({"data": {name: base64.b64encode(chunk.data).decode()}})
            result = await self.process.wait(timeout_s=60)
            status = f"exit status {result.exit_code}" if result.exit_code >= 0 else f"signal {-result.exit_code}"
            await self._tell({"end": {"exitCode": result.exit_code, "exited": result.exit_code >= 0, "status": status}})
        except RunFailure:
            await self._tell({"end": {"exitCode": -1, "exited": False, "status": "gone"}})
        self.cut()

    async def _tell(self, event: dict) -> None:
        for listener in list(self.listeners):
            await listener.put(event)

    def cut(self) -> None:
        for listener in self.listeners:
            while listener.full():
                listener.get_nowait()
            listener.put_nowait(None)
        self.listeners = set()


class Refused(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class Face:
    """`num_busy` creations are answered with 429 first."""

    def __init__(self, backend: SandboxBackend, *, num_busy: int = 0) -> None:
        self.num_busy = num_busy
        self.sandboxes: dict[str, Held] = {}
        self.snapshots: dict[str, Snapshot] = {}
        self._backend = backend
        self._names = itertools.count(1)
        self._pids = itertools.count(1000)
        self._ending: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        """Its address."""
        app = web.Application(client_max_size=256 << 20, middlewares=[self._answer])
        app.add_routes([
            web.post("/v2/sandboxes", self.create), web.get("/sandboxes/{id}", self.info), web.delete("/sandboxes/{id}", self.kill),
            web.post("/sandboxes/{id}/timeout", self.timeout), web.post("/sandboxes/{id}/pause", self.pause),
            web.post("/v2/sandboxes/{id}/connect", self.connect), web.post("/sandboxes/{id}/snapshots", self.snapshot),
            web.delete("/templates/{id}", self.delete_snapshot), web.get("/health", self.health),
            web.get("/files", self.download), web.post("/files", self.upload),
            web.post("/process.Process/Start", self.start), web.post("/process.Process/Connect", self.listen),
            web.post("/process.Process/SendInput", self.send_input), web.post("/process.Process/CloseStdin", self.close_stdin),
            web.post("/process.Process/SendSignal", self.signal), web.post("/process.Process/List", self.list_processes),
            web.post("/filesystem.Filesystem/Stat", self.stat), web.post("/filesystem.Filesystem/ListDir", self.list_dir),
            web.post("/filesystem.Filesystem/MakeDir", self.make_dir), web.post("/filesystem.Filesystem/Remove", self.remove),
            web.post("/filesystem.Filesystem/Move", self.move),
        ])  # fmt: skip
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            for name in list(self.sandboxes):
                await self._end(name)
            for snapshot in self.snapshots.values():
                await snapshot.close()
            await asyncio.gather(*self._ending)
            await runner.cleanup()

    @web.middleware
    async def _answer(self, request: web.Request, handler) -> web.StreamResponse:
        try:
            if not request.path.startswith(("/files", "/health", "/process.", "/filesystem.")) and request.headers.get("X-API-KEY") != KEY:
                raise Refused("unauthenticated", "no such key")
            return await handler(request)
        except Refused as refused:
            code, message = refused.code, refused.message
        except OSError as error:
            code, message = _CODES.get(error.errno or 0, "internal"), str(error)
        except (RunFailure, ValueError) as error:
            code, message = "internal", str(error)
        # The control interface has numbers where the daemon has words.
        content = {"code": code if request.path.startswith(("/process.", "/filesystem.")) else _STATUS[code], "message": message}
        return web.json_response(content, status=_STATUS[code])

    # The control interface

    async def create(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if self.num_busy:
            self.num_busy -= 1
            return web.json_response({"code": 429, "message": "too many"}, status=429, headers={"Retry-After": "0"})
        template, spec = asked["templateID"], SandboxSpec(env=asked.get("envVars") or {}, num_processes=128)
        if template in self.snapshots:
            (box,) = await self.snapshots[template].fork(1)
        elif template == "base":
            box = await self._backend.create(spec)
        else:
            raise Refused("not_found", f"template {template} not found")
        name = f"sbx{next(self._names)}"
        self.sandboxes[name] = held = Held(box, template, asked.get("timeout", 15))
        self._set_timer(name, held)
        return web.json_response(self._described(name), status=201)

    async def info(self, request: web.Request) -> web.Response:
        name, held = self._named(request)
        return web.json_response(
            self._described(name)
            | {
                "startedAt": held.started.isoformat(),
                "endAt": held.end.isoformat(),
                "cpuCount": 1,
                "memoryMB": 512,
                "diskSizeMB": 64,
                "state": "paused" if held.is_paused else "running",
                "metadata": {},
            }
        )

    async def kill(self, request: web.Request) -> web.Response:
        name, _ = self._named(request)
        await self._end(name)
        return web.Response(status=204)

    async def timeout(self, request: web.Request) -> web.Response:
        name, held = self._named(request)
        held.end = datetime.now(UTC) + timedelta(seconds=(await request.json())["timeout"])
        self._set_timer(name, held)
        return web.Response(status=204)

    async def pause(self, request: web.Request) -> web.Response:
        _, held = self._named(request)
        if held.is_paused:
            return web.json_response({"code": 409, "message": "already paused"}, status=409)
        await held.box.suspend()
        held.is_paused = True
        self._cut(held)
        return web.Response(status=204)

    async def connect(self, request: web.Request) -> web.Response:
        name, held = self._named(request)
        if held.is_paused:
            await held.box.resume()
            held.is_paused = False
        return web.json_response(self._described(name))

    async def snapshot(self, request: web.Request) -> web.Response:
        _, held = self._named(request)
        taken = await held.box.snapshot()
        self._cut(held)
        name = f"snap{next(self._names)}"
        self.snapshots[name] = taken
        return web.json_response({"snapshotID": name, "names": []}, status=201)

    async def delete_snapshot(self, request: web.Request) -> web.Response:
        snapshot = self.snapshots.pop(request.match_info["id"], None)
        if snapshot is None:
            raise Refused("not_found", "no such template")
        await snapshot.close()
        return web.Response(status=204)

    # The daemon

    async def health(self, request: web.Request) -> web.Response:
        self._inside(request)
        return web.Response(status=204)

    async def download(self, request: web.Request) -> web.Response:
        return web.Response(body=await self._inside(request).box.read(request.query["path"], limit_bytes=32 << 20))

    async def upload(self, request: web.Request) -> web.Response:
        box, path = self._inside(request).box, request.query.get("path", "")
        if request.content_type == "application/octet-stream":
            files = [(path, await request.read())]
        else:
            files = [(path or part.filename or "", bytes(await part.read())) async for part in await request.multipart()]
        for name, data in files:
            await box.write(name, data)
        return web.json_response([{"name": posixpath.basename(name), "path": name, "type": "file"} for name, _ in files])

    async def start(self, request: web.Request) -> web.StreamResponse:
        held, asked = self._inside(request), await _enveloped(request)
        config = asked["process"]
        argv = [config["cmd"], *config.get("args", [])]
        process = await held.box.start(argv, cwd=config.get("cwd", ""), env=config.get("envs") or None, pty="pty" in asked)
        if not asked.get("stdin"):
            with contextlib.suppress(BrokenPipeError):  # it has ended already
                await process.close_stdin()
        running = Running(next(self._pids), process, config | ({"pty": True} if "pty" in asked else {}))
        held.processes[running.pid] = running
        return await self._events(request, running)

    async def listen(self, request: web.Request) -> web.StreamResponse:
        asked = await _enveloped(request)
        return await self._events(request, self._process(self._inside(request), asked))

    async def send_input(self, request: web.Request) -> web.Response:
        asked = await request.json()
        data = asked["input"].get("stdin") or asked["input"].get("pty") or ""
        await self._process(self._inside(request), asked).process.write(base64.b64decode(data))
        return web.json_response({})

    async def close_stdin(self, request: web.Request) -> web.Response:
        await self._process(self._inside(request), await request.json()).process.close_stdin()
        return web.json_response({})

    async def signal(self, request: web.Request) -> web.Response:
        asked = await request.json()
        await self._process(self._inside(request), asked).process.kill({"SIGNAL_SIGKILL": 9, "SIGNAL_SIGTERM": 15}[asked["signal"]])
        return web.json_response({})

    async def list_processes(self, request: web.Request) -> web.Response:
        living = [r for r in self._inside(request).processes.values() if not r.pump.done()]
        return web.json_response({"processes": [{"pid": r.pid, "config": {"cmd": r.config["cmd"]}} for r in living]})

    async def stat(self, request: web.Request) -> web.Response:
        return web.json_response({"entry": await self._entry(self._inside(request).box, (await request.json())["path"])})

    async def list_dir(self, request: web.Request) -> web.Response:
        box, path = self._inside(request).box, (await request.json())["path"]
        await box.stat(path)
        found = await box.exec(["ls", "-A", path], timeout_s=60)
        names = found.stdout.decode().splitlines()
        return web.json_response({"entries": [await self._entry(box, posixpath.join(path, name)) for name in names]})

    async def make_dir(self, request: web.Request) -> web.Response:
        box, path = self._inside(request).box, (await request.json())["path"]
        with contextlib.suppress(FileNotFoundError):
            await box.stat(path)
            raise Refused("already_exists", path)
        await box.exec(["mkdir", "-p", path], timeout_s=60)
        return web.json_response({"entry": await self._entry(box, path)})

    async def remove(self, request: web.Request) -> web.Response:
        box, path = self._inside(request).box, (await request.json())["path"]
        await box.exec(["rm", "-rf", path], timeout_s=60)
        return web.json_response({})

    async def move(self, request: web.Request) -> web.Response:
        box, asked = self._inside(request).box, await request.json()
        await box.stat(asked["source"])
        await box.exec(["mv", asked["source"], asked["destination"]], timeout_s=60)
        return web.json_response({"entry": await self._entry(box, asked["destination"])})

    # Inside

    def _named(self, request: web.Request) -> tuple[str, Held]:
        name = request.match_info["id"]
        if name not in self.sandboxes:
            raise Refused("not_found", f"sandbox {name} not found")
        return name, self.sandboxes[name]

    def _inside(self, request: web.Request) -> Held:
        held = self.sandboxes.get(request.headers.get("E2b-Sandbox-Id", ""))
        if held is None or held.is_paused:
            raise Refused("unavailable", "the sandbox was not found")
        if request.headers.get("X-Access-Token") != held.token:
            raise Refused("unauthenticated", "wrong token")
        return held

    def _process(self, held: Held, asked: dict) -> Running:
        running = held.processes.get(asked["process"]["pid"])
        if running is None or running.pump.done():
            raise Refused("not_found", "no such process")
        return running

    def _described(self, name: str) -> dict:
        held = self.sandboxes[name]
        return {"templateID": held.template, "sandboxID": name, "clientID": "face", "envdVersion": "0.6.9", "envdAccessToken": held.token}

    async def _entry(self, box: Sandbox, path: str) -> dict:
        found = await box.stat(path)
        kind = "FILE_TYPE_DIRECTORY" if found.kind == FileKind.FOLDER else "FILE_TYPE_FILE"
        return {"name": posixpath.basename(path), "path": path, "type": kind, "size": str(found.num_bytes), "mode": found.mode}

    async def _events(self, request: web.Request, running: Running) -> web.StreamResponse:
        queue: asyncio.Queue[dict | None] = asyncio.Queue(maxsize=16)
        running.listeners.add(queue)
        response = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        await response.prepare(request)
        is_whole = False
        try:
            await response.write(_envelope({"event": {"start": {"pid": running.pid}}}))
            while (event := await queue.get()) is not None:
                await response.write(_envelope({"event": event}))
                is_whole = "end" in event
        except ConnectionError:
            return response
        finally:
            running.listeners.discard(queue)
            while not queue.empty():  # whoever waits to put must not wait for a listener that left
                queue.get_nowait()
        if is_whole:
            await response.write(_envelope({}, END_OF_STREAM))
        elif request.transport is not None:
            request.transport.abort()
        return response

    def _cut(self, held: Held) -> None:
        for running in held.processes.values():
            running.cut()

    def _set_timer(self, name: str, held: Held) -> None:
        if held.timer is not None:
            held.timer.cancel()
        left_s = (held.end - datetime.now(UTC)).total_seconds()
        held.timer = asyncio.get_running_loop().call_later(left_s, self._expire, name)

    def _expire(self, name: str) -> None:
        task = asyncio.ensure_future(self._end(name))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end(self, name: str) -> None:
        held = self.sandboxes.pop(name, None)
        if held is None:
            return
        if held.timer is not None:
            held.timer.cancel()
        self._cut(held)
        await held.box.close()
        await asyncio.gather(*(running.pump for running in held.processes.values()))


async def _enveloped(request: web.Request) -> dict:
    data = await request.read()
    _, size = ENVELOPE.unpack_from(data)
    return json.loads(data[ENVELOPE.size : ENVELOPE.size + size])


def _envelope(message: dict, flags: int = 0) -> bytes:
    data = json.dumps(message).encode()
    return ENVELOPE.pack(flags, len(data)) + data
