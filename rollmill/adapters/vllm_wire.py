"""vLLM's token-in, token-out records from and to ours, every field checked; pure, so that a changed vLLM fails here and by name."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from rollmill.adapters.checks import Stamp, finish_of, spans_of
from rollmill.adapters.routed import from_npy, record_of
from rollmill.engine.client import EngineUnavailable
from rollmill.engine.protocol import GenerateReply, GenerateRequest, ScoreRequest, Timing
from rollmill.model.route_record import RouteShape


class TokenLogprob(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float


class Logprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob] | None = None


class Choice(msgspec.Struct, frozen=True):
    finish_reason: str
    token_ids: list[int]
    logprobs: Logprobs | None = None
    routed_experts: str | None = None
    weight_versions: list[Stamp] | None = None


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens_details: CachedTokens | None = None


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float


class Answer(msgspec.Struct, frozen=True):
    """What `/inference/v1/generate` says, as far as we read it."""

    choices: list[Choice]
    usage: Usage | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


def body_of(request: GenerateRequest, *, request_id: str, seed: int, cache_salt: str | None) -> dict[str, Any]:
    params = {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "seed": seed,
        "stop_token_ids": request.stop_ids,
        # Only what the request names ends it, whatever the model's own files say.
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
        "routed_experts_prompt_start": request.routes_from or 0,
    }
    body = {"request_id": request_id, "token_ids": request.prompt_ids, "sampling_params": params}
    return body if cache_salt is None else {**body, "cache_salt": cache_salt}


def score_body(request: ScoreRequest) -> dict[str, Any]:
    return {
        "token_ids": request.token_ids,
        "sampling_params": {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "ignore_eos": True, "detokenize": False},
    }


def answer_of(raw: Any) -> Answer:
    try:
        answer = msgspec.convert(raw, Answer)
    except msgspec.ValidationError as error:
        raise EngineUnavailable(f"vLLM's answer has another form than that of 0.32: {error}") from error
    if len(answer.choices) != 1:
        raise EngineUnavailable(f"vLLM answered with {len(answer.choices)} choices, one was asked for")
    return answer


def stamps_of(choice: Choice) -> list[Stamp]:
    if choice.weight_versions is None and choice.token_ids:
        raise EngineUnavailable("vLLM stamped no weight versions; 0.32 or newer does")
    return choice.weight_versions or []


def logprobs_of(choice: Choice) -> bytes:
    """float32: vLLM writes the float32 it sampled with as the shortest decimal of its float64, which reads back to the same bits."""
    content = (choice.logprobs.content if choice.logprobs else None) or []
    if [entry.token_id for entry in content] != choice.token_ids:
        raise EngineUnavailable(f"vLLM gave {len(content)} logprobs for {len(choice.token_ids)} tokens, or those of other tokens")
    return np.array([entry.logprob for entry in content], "<f4").tobytes()


def reply_of(
    answer: Answer, request: GenerateRequest, *, seed: int, max_len: int, timing: Timing, is_late: bool, routes: RouteShape | None
) -> GenerateReply:
    (choice,) = answer.choices
    cached = answer.usage.prompt_tokens_details if answer.usage else None
    record = b""
    if request.routes_from is not None and routes is not None and choice.token_ids:
        if choice.routed_experts is None:
            raise EngineUnavailable("vLLM sent no routed experts; start it with --enable-return-routed-experts")
        try:
            record = record_of(
                from_npy(choice.routed_experts), routes,
                num_prompt=len(request.prompt_ids), num_sampled=len(choice.token_ids), start=request.routes_from,
            )  # fmt: skip
        except ValueError as error:
            raise EngineUnavailable(str(error)) from error
    return GenerateReply(
        token_ids=choice.token_ids,
        logprobs=logprobs_of(choice),
        spans=spans_of(stamps_of(choice), len(choice.token_ids)),
        finish_reason=finish_of(choice.finish_reason, request, num_sampled=len(choice.token_ids), max_len=max_len, is_late=is_late),
        seed=seed,
        num_reused=(cached.cached_tokens if cached else None) or 0,
        routes=record,
        timing=timing,
    )


def scores_of(answer: Answer, request: ScoreRequest) -> bytes:
    """The prompt logprobs of tokens start .. end as float32."""
    entries = answer.prompt_logprobs
    if entries is None or len(entries) != len(request.token_ids):
        raise EngineUnavailable(f"vLLM gave {len(entries or ())} prompt logprobs for {len(request.token_ids)} tokens")
    found = []
    for token, entry in zip(request.token_ids[request.start :], entries[request.start :], strict=True):
        if entry is None or str(token) not in entry:
            raise EngineUnavailable(f"vLLM's prompt logprobs leave out token {token}")
        found.append(entry[str(token)].logprob)
    return np.array(found, "<f4").tobytes()
