"""An SGLang server behind the engine protocol, over its native HTTP API; updates go through a directory of safetensors.

Written from SGLang's public documentation and tested against a fake of it: it has not met a real server. SGLang shows no
fingerprints of its weights in checkpoint coordinates, so what it serves is always `unproven`; the directory it is told to load
is proved. Newer servers stamp the spans of versions; of an older one a request in flight over a swap is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from rollmill.adapters.checks import Stamp, check, check_score, check_version, finish_of, spans_of, version_of
from rollmill.adapters.http import JsonHttp
from rollmill.adapters.records import Digest, EngineCaps, PauseMode
from rollmill.adapters.routed import from_int32, record_of
from rollmill.engine.client import GRACE_S, PROBE_S, EngineRejected, EngineUnavailable
from rollmill.engine.protocol import GenerateReply, GenerateRequest, Health, ScoreReply, ScoreRequest, SwapMode, Timing
from rollmill.model.route_record import RouteShape
from rollmill.weights.errors import CorruptSnapshot, UnknownFormat, WrongWeights

MAX_SEED = 2**31 - 1
"""Sampling seeds are 32-bit integers there."""
_MODES = {PauseMode.ABORT: "abort"}
UNPROVEN = "SGLang shows checksums of its own layout only; the directory it loaded from was proved"


class Finish(msgspec.Struct, frozen=True):
    type: str


class Meta(msgspec.Struct, frozen=True):
    """`meta_info`, as far as we read it."""

    finish_reason: Finish
    weight_version: str
    weight_versions: list[Stamp] | None = None
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    input_token_logprobs: list[tuple[float | None, int, str | None]] = []
    cached_tokens: int = 0
    routed_experts: str | None = None


class Answer(msgspec.Struct, frozen=True):
    meta_info: Meta
    output_ids: list[int] = []


class SglangEngine:
    """Made by `connect`. `exchange` is a directory that this process and the server both see."""

    def __init__(
        self,
        http: JsonHttp,
        *,
        store: str,
        exchange: Path,
        vocab_size: int,
        max_len: int,
        swap_mode: SwapMode = SwapMode.RE_PREFILL,
        routes: RouteShape | None = None,
        timeout_s: float = 600.0,
        version: str = "",
    ) -> None:
        self._http, self._store, self._exchange = http, store, exchange
        self._vocab_size, self._max_len, self._routes, self._timeout_s = vocab_size, max_len, routes, timeout_s
        self._keep = "in_place" if swap_mode is SwapMode.KEEP_KV else "retract"
        self._swapping = asyncio.Lock()
        self._is_paused = False
        self.caps = EngineCaps(
            engine=f"sglang {version}".strip(),
            pause_modes=(PauseMode.KEEP, PauseMode.ABORT),
            sparse_updates=False,
            routed_experts=routes is not None,
            exact_stamps=False,
        )

    @classmethod
    async def connect(cls, base_url: str, *, store: str, exchange: Path, vocab_size: int, **options: Any) -> SglangEngine:
        """Asks the server for its context length and version."""
        http = JsonHttp(base_url)
        try:
            card = (await http.get("/v1/models", timeout_s=PROBE_S))["data"][0]
            facts = await http.get("/get_server_info", timeout_s=PROBE_S)
        finally:
            # What the adapter is given opens again on first use.
            await http.aclose()
        max_len, version = int(card["max_model_len"]), str(facts.get("version", ""))
        return cls(http, store=store, exchange=exchange, vocab_size=vocab_size, max_len=max_len, version=version, **options)

    async def __aenter__(self) -> SglangEngine:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        check(request, vocab_size=self._vocab_size, max_len=self._max_len, has_routes=self._routes is not None)
        before = await self._served()
        check_version(request, [before])
        seed = secrets.randbelow(MAX_SEED + 1) if request.seed is None else request.seed % (MAX_SEED + 1)
        began, rid = time.monotonic(), uuid.uuid4().hex
        sent = asyncio.ensure_future(self._http.post("/generate", _body(request, rid=rid, seed=seed), timeout_s=self._timeout_s))
        try:
            done, _ = await asyncio.wait({sent}, timeout=request.deadline_s)
            if not done:
                await self._http.post("/abort_request", {"rid": rid}, timeout_s=PROBE_S)
                await asyncio.wait({sent}, timeout=GRACE_S)
                if not sent.done():
                    raise EngineUnavailable(f"{self._http.base_url} did not end a request {GRACE_S:.0f} s past its deadline")
            answer = _answer(sent.result())
        finally:
            if not sent.done():
                sent.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await sent
        reply = self._reply(answer, request, seed=seed, before=before, is_late=not done, total_s=time.monotonic() - began)
        check_version(request, [span.version for span in reply.spans])
        return reply

    def _reply(self, answer: Answer, request: GenerateRequest, *, seed: int, before: int, is_late: bool, total_s: float) -> GenerateReply:
        meta, tokens = answer.meta_info, answer.output_ids
        if [entry[1] for entry in meta.output_token_logprobs] != tokens:
            raise EngineUnavailable(f"SGLang gave {len(meta.output_token_logprobs)} logprobs for {len(tokens)} tokens, or those of others")
        routes = b""
        if request.routes_from is not None and self._routes is not None and tokens:
            if meta.routed_experts is None:
                raise EngineUnavailable("SGLang sent no routed experts; start it with --enable-return-routed-experts")
            try:
                ids_TLK = from_int32(meta.routed_experts, self._routes)
                num_prompt, start = len(request.prompt_ids), request.routes_from
                routes = record_of(ids_TLK, self._routes, num_prompt=num_prompt, num_sampled=len(tokens), start=start)
            except ValueError as error:
                raise EngineUnavailable(str(error)) from error
        return GenerateReply(
            token_ids=tokens,
            logprobs=_floats([entry[0] for entry in meta.output_token_logprobs]),
            spans=spans_of(_stamps(meta, before, len(tokens)), len(tokens)),
            finish_reason=finish_of(
                meta.finish_reason.type, request, num_sampled=len(tokens), max_len=self._max_len, is_late=is_late
            ),
            seed=seed,
            num_reused=meta.cached_tokens,
            routes=routes,
            timing=Timing(queue_s=0.0, first_token_s=0.0, total_s=total_s),
        )  # fmt: skip

    async def score(self, request: ScoreRequest) -> ScoreReply:
        check_score(request, vocab_size=self._vocab_size, max_len=self._max_len)
        before = await self._served()
        check_version(request, [before])
        body = {
            "input_ids": request.token_ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            # The first entry returned has no logprob, so one position earlier is asked for.
            "logprob_start_len": request.start - 1,
        }
        meta = _answer(await self._http.post("/generate", body, timeout_s=request.deadline_s or self._timeout_s)).meta_info
        if version_of(meta.weight_version) != before:
            raise EngineUnavailable(f"version {before} was replaced by {meta.weight_version} while tokens were scored; ask again")
        wanted = request.token_ids[request.start :]
        found = meta.input_token_logprobs[-len(wanted) :]
        if [entry[1] for entry in found] != wanted:
            raise EngineUnavailable(f"SGLang gave {len(meta.input_token_logprobs)} prompt logprobs, not those of the {len(wanted)} tokens")
        return ScoreReply(logprobs=_floats([entry[0] for entry in found]), version=before, start=request.start)

    async def pause(self, mode: PauseMode = PauseMode.KEEP) -> None:
        if mode not in self.caps.pause_modes:
            raise EngineRejected(
                f"SGLang cannot pause with mode {mode.value!r}; it has {', '.join(m.value for m in self.caps.pause_modes)}"
            )
        await self._pause(_MODES.get(mode, self._keep))
        self._is_paused = True

    async def resume(self) -> None:
        self._is_paused = False
        await self._http.post("/continue_generation", {}, timeout_s=PROBE_S)

    async def apply(self, version: int) -> Digest:
        """Writes the version as a directory first, by its delta, while the server goes on; then pauses and has it load."""
        async with self._swapping:
            folder = await asyncio.to_thread(self._write, version)
            await self._pause(self._keep)
            problem = await self._load(folder, version)
            if not self._is_paused:
                await self._http.post("/continue_generation", {}, timeout_s=PROBE_S)
            if problem:
                raise WrongWeights(f"version {version} was refused, the old one serves on: {problem}")
            return Digest(version=version, total="", tensors={}, unproven=UNPROVEN)

    def _write(self, version: int) -> Path:
        from rollmill.weights import open_store
        from rollmill.weights.interop.pull import pull

        folder = self._exchange / "weights"
        try:
            pull(open_store(self._store), version, folder)
        except (CorruptSnapshot, UnknownFormat, OSError) as error:
            raise WrongWeights(f"version {version} was refused, the old one serves on: {error}") from error
        return folder

    async def _load(self, folder: Path, version: int) -> str:
        """Empty when the server says it loaded; it puts the old weights back when it could not."""
        body = {
            "model_path": str(folder),
            "weight_version": str(version),
            "abort_all_requests": False,
            # Kept requests keep their cache, and the server refuses to flush it beneath them.
            "flush_cache": self._keep == "retract",
        }
        try:
            done = await self._http.post("/update_weights_from_disk", body, timeout_s=self._timeout_s)
        except EngineRejected as error:
            return str(error)
        return "" if done["success"] else str(done["message"])

    async def digest(self) -> Digest:
        stamp = await self._stamp()
        return Digest(version=int(stamp) if stamp.isdecimal() else -1, total="", tensors={}, unproven=UNPROVEN)

    async def health(self) -> Health:
        try:
            await self._http.text("/health", timeout_s=PROBE_S)
            stamp = await self._stamp()
        except EngineUnavailable as error:
            return Health(phase="failed", version=-1, fingerprint="", running=0, waiting=0, note=str(error))
        is_ours = stamp.isdecimal()
        note = "" if is_ours else f"serves {stamp!r}, no version of the store"
        return Health(phase="serving", version=int(stamp) if is_ours else -1, fingerprint="", running=0, waiting=0, note=note)

    async def _pause(self, mode: str) -> None:
        await self._http.post("/pause_generation", {"mode": mode}, timeout_s=self._timeout_s)

    async def _stamp(self) -> str:
        return str((await self._http.get("/get_model_info", timeout_s=PROBE_S))["weight_version"])

    async def _served(self) -> int:
        return version_of(await self._stamp())


def _body(request: GenerateRequest, *, rid: str, seed: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": request.prompt_ids,
        "sampling_params": {
            "max_new_tokens": request.max_tokens,
            "temperature": request.temperature,
            "sampling_seed": seed,
            "stop_token_ids": request.stop_ids,
            # It makes SGLang ignore `stop_token_ids` too, so a request with stop tokens also ends at the model's own end token.
            "ignore_eos": not request.stop_ids,
            # The stop token belongs to what was sampled.
            "no_stop_trim": True,
        },
        "return_logprob": True,
    }
    if request.routes_from is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": request.routes_from}
    return body


def _answer(raw: Any) -> Answer:
    try:
        return msgspec.convert(raw, Answer)
    except msgspec.ValidationError as error:
        raise EngineUnavailable(f"SGLang's answer has another form than its documentation says: {error}") from error


def _stamps(meta: Meta, before: int, num_tokens: int) -> list[Stamp]:
    """A server without spans tells the version at the end only; with the one at the start that settles requests that saw no swap."""
    if meta.weight_versions is not None:
        return meta.weight_versions
    if version_of(meta.weight_version) != before:
        raise EngineUnavailable(
            f"version {before} was replaced by {meta.weight_version} during the request, and SGLang does not say at which token; ask again"
        )
    return [Stamp(version=meta.weight_version, start=0, end=num_tokens)]


def _floats(values: list[float | None]) -> bytes:
    if any(value is None for value in values):
        raise EngineUnavailable("SGLang left out logprobs that were asked for")
    return np.array(values, "<f4").tobytes()
