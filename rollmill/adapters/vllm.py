"""A `vllm serve` behind the engine protocol: samples, scores, and moves to versions of our weight store that it then proves.

The order of a swap is what the guarantees rest on: pause (no step is under way when vLLM answers), stamp `swapping`, swap and
prove in the worker, stamp the version, resume. vLLM stamps every step with the version in force, so spans are exact; a server
that stops in between either samples nothing or stamps what we refuse.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
import uuid
from types import TracebackType
from typing import Any

from rollmill.adapters import vllm_wire as wire
from rollmill.adapters.checks import SWAPPING, check, check_score, check_version, spans_of, version_of
from rollmill.adapters.http import JsonHttp
from rollmill.adapters.records import Digest, EngineCaps, PauseMode
from rollmill.engine.client import GRACE_S, PROBE_S, EngineRejected, EngineUnavailable
from rollmill.engine.protocol import MAX_SEED, GenerateReply, GenerateRequest, Health, ScoreReply, ScoreRequest, SwapMode, Timing
from rollmill.model.route_record import RouteShape
from rollmill.weights.errors import WrongWeights

POLL_S = 0.02
START_COMMAND = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs "
    "--worker-extension-cls rollmill.adapters.vllm_worker.RollmillWorker"
)


class VllmEngine:
    """Made by `connect`. One process swaps a server; any number may generate on it."""

    def __init__(
        self,
        http: JsonHttp,
        facts: dict[str, Any],
        *,
        store: str,
        replica: str = "",
        swap_mode: SwapMode = SwapMode.RE_PREFILL,
        routes: RouteShape | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._http, self._store, self._replica, self._keeps_kv = http, store, replica, swap_mode is SwapMode.KEEP_KV
        self._timeout_s = timeout_s
        self._vocab_size, self._max_len = int(facts["vocab_size"]), int(facts["max_len"])
        self._routes = routes if facts["routed_experts"] else None
        self._swapping = asyncio.Lock()
        self._is_paused = False
        self.caps = EngineCaps(
            engine=f"vllm {facts['vllm']}",
            pause_modes=tuple(PauseMode),
            sparse_updates=True,
            routed_experts=self._routes is not None,
            exact_stamps=True,
        )
        self.last_swap_s = 0.0
        """Seconds the worker took for the last swap, proof included."""

    @classmethod
    async def connect(cls, base_url: str, *, store: str, **options: Any) -> VllmEngine:
        """Raises ValueError, with the command to start it by, when the server is not set up for this."""
        http = JsonHttp(base_url)
        try:
            facts = await _call(http, "rollmill_facts", timeout_s=PROBE_S)
            if facts["logprobs_mode"] != "processed_logprobs":
                raise ValueError(f"{base_url} gives {facts['logprobs_mode']}, from before the temperature; start it as\n{START_COMMAND}")
            if facts["num_workers"] != 1:
                raise ValueError(f"{base_url} splits its model over {facts['num_workers']} workers; weights are followed by a single one")
        except EngineRejected as error:
            raise ValueError(f"{base_url} does not take remote calls ({error}); start it as\n{START_COMMAND}") from error
        else:
            return cls(http, facts, store=store, **options)
        finally:
            # Also when the server is not there at all; what `cls` was given opens again on first use.
            await http.aclose()

    async def __aenter__(self) -> VllmEngine:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        check(request, vocab_size=self._vocab_size, max_len=self._max_len, has_routes=self._routes is not None)
        salt = None
        if self._keeps_kv or request.min_version is not None or request.exact_version is not None:
            served = await self._served()
            check_version(request, [served])
            # Keys and values of another version must not be found in the prefix cache.
            salt = f"version-{served}" if self._keeps_kv else None
        seed = secrets.randbelow(MAX_SEED + 1) if request.seed is None else request.seed
        began, request_id = time.monotonic(), uuid.uuid4().hex
        body = wire.body_of(request, request_id=request_id, seed=seed, cache_salt=salt)
        sent = asyncio.ensure_future(self._http.post("/inference/v1/generate", body, timeout_s=self._timeout_s))
        try:
            done, _ = await asyncio.wait({sent}, timeout=request.deadline_s)
            is_late = not done
            if is_late:
                await self._abort(request_id)
                await asyncio.wait({sent}, timeout=GRACE_S)
                if not sent.done():
                    raise EngineUnavailable(f"{self._http.base_url} did not end a request {GRACE_S:.0f} s past its deadline")
            answer = wire.answer_of(sent.result())
        finally:
            if not sent.done():
                # vLLM drops a request whose connection closes.
                sent.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await sent
        total_s = time.monotonic() - began
        reply = wire.reply_of(
            answer, request, seed=seed, max_len=self._max_len, is_late=is_late, routes=self._routes,
            timing=Timing(queue_s=0.0, first_token_s=0.0, total_s=total_s),
        )  # fmt: skip
        check_version(request, [span.version for span in reply.spans])
        return reply

    async def score(self, request: ScoreRequest) -> ScoreReply:
        check_score(request, vocab_size=self._vocab_size, max_len=self._max_len)
        before = await self._served()
        check_version(request, [before])
        timeout_s = request.deadline_s or self._timeout_s
        answer = wire.answer_of(await self._http.post("/inference/v1/generate", wire.score_body(request), timeout_s=timeout_s))
        (after,) = spans_of(wire.stamps_of(answer.choices[0]), 1)
        # The stamp is of the step that ended the prompt; earlier chunks of it may have been computed before a swap.
        if after.version != before:
            raise EngineUnavailable(f"version {before} was replaced by {after.version} while tokens were scored; ask again")
        return ScoreReply(logprobs=wire.scores_of(answer, request), version=before, start=request.start)

    async def pause(self, mode: PauseMode = PauseMode.KEEP) -> None:
        await self._pause(mode)
        self._is_paused = True

    async def resume(self) -> None:
        self._is_paused = False
        await self._http.post("/resume", timeout_s=PROBE_S)

    async def apply(self, version: int) -> Digest:
        """Staging runs beside sampling; requests in flight are kept. Also mends what a swap that was cut off left behind."""
        async with self._swapping:
            state = await self._stage(version)
            if state["version"] == version and await self._is_settled(version):
                return Digest(version=version, total=state["fingerprint"], tensors={})
            await self._pause(PauseMode.KEEP)
            await self._stamp(SWAPPING)
            done = await self._call("rollmill_swap", timeout_s=self._timeout_s)
            if done.get("is_lost"):
                # Nothing may be sampled from weights that nobody can name: the server stays paused.
                raise WrongWeights(f"vLLM's weights are lost and it stays paused; restart it ({done['error']})", is_lost=True)
            held = int(done["version"])
            await self._stamp(str(held) if held >= 0 else "default")
            if not self._is_paused:
                await self._http.post("/resume", timeout_s=PROBE_S)
            if "error" in done:
                raise WrongWeights(f"version {version} was refused, {_named(held)} serves on: {done['error']}")
            self.last_swap_s = float(done["swap_s"])
            return Digest(version=held, total=done["fingerprint"], tensors={})

    async def digest(self) -> Digest:
        shown = await self._call("rollmill_digest", timeout_s=self._timeout_s)
        if "error" in shown:
            return Digest(version=-1, total="", tensors={}, unproven=shown["error"])
        return Digest(version=int(shown["version"]), total=shown["total"], tensors=shown["tensors"])

    async def health(self) -> Health:
        try:
            await self._http.text("/health", timeout_s=PROBE_S)
            facts = await self._call("rollmill_facts", timeout_s=PROBE_S)
            is_paused = (await self._http.get("/is_paused", timeout_s=PROBE_S))["is_paused"]
            counts = _gauges(await self._http.text("/metrics", timeout_s=PROBE_S))
        except EngineUnavailable as error:
            return Health(phase="failed", version=-1, fingerprint="", running=0, waiting=0, note=str(error))
        running, waiting = counts.get("vllm:num_requests_running", 0), counts.get("vllm:num_requests_waiting", 0)
        note = "paused" if is_paused else "" if facts["version"] >= 0 else "no version of the store was applied yet"
        version, fingerprint = int(facts["version"]), str(facts["fingerprint"])
        return Health(phase="serving", version=version, fingerprint=fingerprint, running=running, waiting=waiting, note=note)

    async def _is_settled(self, version: int) -> bool:
        stamp = (await self._http.get("/weight_info", timeout_s=PROBE_S))["weight_version"]
        is_paused = (await self._http.get("/is_paused", timeout_s=PROBE_S))["is_paused"]
        return stamp == str(version) and is_paused == self._is_paused

    async def _stage(self, version: int) -> dict[str, Any]:
        state = await self._call("rollmill_stage", self._store, str(version), self._replica, timeout_s=self._timeout_s)
        deadline = time.monotonic() + self._timeout_s
        while state.get("stage") == "staging":
            if time.monotonic() > deadline:
                raise EngineUnavailable(f"version {version} was not staged within {self._timeout_s:.0f} s; ask again")
            await asyncio.sleep(POLL_S)
            # Calls wait for the step that is under way, which a long prompt can make long.
            state = await self._call("rollmill_staged", timeout_s=self._timeout_s)
        if state.get("stage") != "ready":
            raise WrongWeights(f"version {version} was refused, the old one serves on: {state.get('error') or state.get('problem')}")
        return state

    async def _pause(self, mode: PauseMode) -> None:
        clear = "false" if self._keeps_kv else "true"
        await self._http.post(f"/pause?mode={mode.value}&clear_cache={clear}", timeout_s=self._timeout_s)

    async def _stamp(self, stamp: str) -> None:
        await self._http.post("/update_weight_version", {"new_version": stamp}, timeout_s=PROBE_S)

    async def _served(self) -> int:
        return version_of((await self._http.get("/weight_info", timeout_s=PROBE_S))["weight_version"])

    async def _abort(self, request_id: str) -> None:
        # vLLM puts its own prefix before the id it was given.
        await self._http.post("/abort_requests", {"request_ids": [f"generate-tokens-{request_id}"]}, timeout_s=PROBE_S)

    async def _call(self, method: str, *args: str, timeout_s: float) -> dict[str, Any]:
        return await _call(self._http, method, *args, timeout_s=timeout_s)


async def _call(http: JsonHttp, method: str, *args: str, timeout_s: float) -> dict[str, Any]:
    answer = await http.post("/collective_rpc", {"method": method, "args": list(args)}, timeout_s=timeout_s)
    (result,) = answer["results"]
    return result


def _named(version: int) -> str:
    return f"version {version}" if version >= 0 else "vLLM's own checkpoint"


def _gauges(metrics: str) -> dict[str, int]:
    """name -> sum over labels, of the Prometheus text format."""
    found: dict[str, int] = {}
    for line in metrics.splitlines():
        name, _, rest = line.partition("{")
        if name.startswith("vllm:num_requests_") and rest:
            found[name] = found.get(name, 0) + int(float(rest.rpartition(" ")[2]))
    return found
