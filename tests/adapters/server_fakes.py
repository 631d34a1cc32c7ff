"""Named stand-ins for foreign servers: what vLLM 0.32 and SGLang answer, as far as the adapters ask, with weights that are a number."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def serving(routes: dict[str, Handler]) -> AsyncIterator[str]:
    """The base URL of a server with these `METHOD /path` handlers."""
    app = web.Application()
    for route, handler in routes.items():
        method, path = route.split(" ")
        app.router.add_route(method, path, handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class VllmFake:
    """One token a step, stamped with the version in force; steps are taken by the test (`step`) or all at once."""

    def __init__(self) -> None:
        self.stamp, self.held, self.is_paused = "default", -1, False
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.swap_answer: dict[str, Any] | None = None
        self.stage_problem = ""
        self.facts: dict[str, Any] = {"logprobs_mode": "processed_logprobs", "num_workers": 1}
        self.routed_rows: np.ndarray | None = None
        self.hold: asyncio.Event | None = None
        """A request waits for it, or for its abort, before it ends."""
        self.aborted, self.started = asyncio.Event(), asyncio.Event()

    def routes(self) -> dict[str, Handler]:
        return {
            "GET /health": self._ok, "GET /weight_info": self._weight_info, "GET /is_paused": self._paused, "GET /metrics": self._metrics,
            "POST /collective_rpc": self._rpc, "POST /pause": self._pause, "POST /resume": self._resume,
            "POST /update_weight_version": self._set_version, "POST /abort_requests": self._abort,
            "POST /inference/v1/generate": self._generate,
        }  # fmt: skip

    async def _ok(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.stamp})

    async def _paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.is_paused})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text='# HELP x\nvllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_waiting{engine="0"} 1.0\n')

    async def _pause(self, request: web.Request) -> web.Response:
        self.calls.append(f"pause {request.query['mode']} clear={request.query['clear_cache']}")
        self.is_paused = True
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        self.calls.append("resume")
        self.is_paused = False
        return web.json_response({"status": "resumed"})

    async def _set_version(self, request: web.Request) -> web.Response:
        self.stamp = (await request.json())["new_version"]
        self.calls.append(f"stamp {self.stamp}")
        return web.json_response({"success": True, "new_version": self.stamp})

    async def _abort(self, request: web.Request) -> web.Response:
        self.calls.append(f"abort {len((await request.json())['request_ids'])}")
        self.aborted.set()
        return web.json_response({"status": "aborted"})

    async def _rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        method = body["method"].removeprefix("rollmill_")
        self.calls.append(method)
        return web.json_response({"results": [getattr(self, f"_rpc_{method}")(*body["args"])]})

    def _rpc_facts(self) -> dict[str, Any]:
        plain = {"vllm": "0.32.0", "max_len": 64, "vocab_size": 100, "routed_experts": self.routed_rows is not None, "is_compiled": False}
        return {**plain, "version": self.held, "fingerprint": f"{self.held:032x}" if self.held >= 0 else "", **self.facts}

    def _rpc_stage(self, store: str, version: str, replica: str) -> dict[str, Any]:
        self.wanted = int(version)
        return {"stage": "staging"}

    def _rpc_staged(self) -> dict[str, Any]:
        stage = "failed" if self.stage_problem else "ready"
        return {"stage": stage, "problem": self.stage_problem, "version": self.held, "fingerprint": f"{self.held:032x}"}

    def _rpc_swap(self) -> dict[str, Any]:
        assert self.is_paused, "weights are swapped while nothing is sampled"
        if self.swap_answer is not None:
            return self.swap_answer
        self.held = self.wanted
        return {"version": self.held, "fingerprint": f"{self.held:032x}", "swap_s": 0.01}

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.started.set()
        params, before = body["sampling_params"], self.stamp
        tokens = [(7 * i) % 100 for i in range(params["max_tokens"])]
        reason, cut = "length", len(tokens)
        if self.hold is not None:
            waits = [asyncio.ensure_future(self.hold.wait()), asyncio.ensure_future(self.aborted.wait())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if self.aborted.is_set():
                reason, tokens = "abort", tokens[:2]
            cut = min(1, len(tokens))
        spans = [{"version": before, "start": 0, "end": len(tokens)}]
        if self.stamp != before:
            spans = [{"version": before, "start": 0, "end": cut}, {"version": self.stamp, "start": cut, "end": len(tokens)}]
        content = [{"token_id": t, "logprob": float(np.float32(-0.1 * (i + 1))), "rank": 1} for i, t in enumerate(tokens)]
        choice = {
            "index": 0, "finish_reason": reason, "token_ids": tokens, "weight_versions": spans,
            "logprobs": {"content": content} if params.get("logprobs") == 0 else None, "routed_experts": self._routed(),
        }  # fmt: skip
        prompt = None
        if "prompt_logprobs" in params:
            prompt = [None, *({str(t): {"logprob": -0.25 * t, "rank": 3}} for t in body["token_ids"][1:])]
        usage = {"prompt_tokens_details": {"cached_tokens": 3}}
        return web.json_response({"choices": [choice], "prompt_logprobs": prompt, "usage": usage})

    def _routed(self) -> str | None:
        if self.routed_rows is None:
            return None
        file = io.BytesIO()
        np.save(file, self.routed_rows)
        return base64.b64encode(file.getvalue()).decode()


class SglangFake:
    """Written from SGLang's public documentation of its native API; nobody claims that a real server is like it."""

    def __init__(self, *, has_spans: bool = True) -> None:
        self.stamp, self.has_spans = "default", has_spans
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.refuse_load = ""
        self.loaded: list[Path] = []
        self.hold: asyncio.Event | None = None
        self.started = asyncio.Event()
        self.routed_rows: np.ndarray | None = None

    def routes(self) -> dict[str, Handler]:
        return {
            "GET /health": self._ok, "GET /v1/models": self._models, "GET /get_server_info": self._server_info,
            "GET /get_model_info": self._model_info, "POST /generate": self._generate, "POST /pause_generation": self._pause,
            "POST /continue_generation": self._continue, "POST /update_weights_from_disk": self._load, "POST /abort_request": self._abort,
        }  # fmt: skip

    async def _ok(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "max_model_len": 64}]})

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.6.0", "context_length": None})

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "m", "is_generation": True, "weight_version": self.stamp})

    async def _pause(self, request: web.Request) -> web.Response:
        self.calls.append(f"pause {(await request.json())['mode']}")
        return web.json_response({"status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        self.calls.append("continue")
        return web.json_response({"status": "ok"})

    async def _abort(self, request: web.Request) -> web.Response:
        self.calls.append("abort")
        assert self.hold is not None
        self.hold.set()
        return web.Response()

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(f"load {body['weight_version']} flush={body['flush_cache']}")
        if self.refuse_load:
            return web.json_response({"success": False, "message": self.refuse_load, "num_paused_requests": 0}, status=400)
        self.loaded.append(Path(body["model_path"]))
        self.stamp = body["weight_version"]
        return web.json_response({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        before, prompt = self.stamp, body["input_ids"]
        tokens = [(3 * i) % 100 for i in range(body["sampling_params"]["max_new_tokens"])]
        reason = {"type": "length", "length": len(tokens)}
        if self.hold is not None:
            self.started.set()
            await self.hold.wait()
            if self.calls[-1:] == ["abort"]:
                tokens, reason = tokens[:2], {"type": "abort", "message": "Abort in waiting queue"}
        meta: dict[str, Any] = {
            "id": body.get("rid", "r"), "finish_reason": reason, "prompt_tokens": len(prompt), "completion_tokens": len(tokens),
            "cached_tokens": 2, "weight_version": self.stamp,
            "output_token_logprobs": [[float(np.float32(-0.3 * (i + 1))), t, None] for i, t in enumerate(tokens)],
        }  # fmt: skip
        if "logprob_start_len" in body:
            first = body["logprob_start_len"]
            meta["input_token_logprobs"] = [[None if at == first else -0.5 * at, prompt[at], None] for at in range(first, len(prompt))]
        if self.has_spans:
            edges = [(before, 0, 1), (self.stamp, 1, len(tokens))] if self.stamp != before else [(before, 0, len(tokens))]
            meta["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in edges]
        if body.get("return_routed_experts") and self.routed_rows is not None:
            meta["routed_experts"] = base64.b64encode(self.routed_rows.astype("<i4").tobytes()).decode()
        return web.json_response({"text": "", "output_ids": tokens, "meta_info": meta})
