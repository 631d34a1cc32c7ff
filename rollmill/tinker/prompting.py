"""From a sample request to what the engine runs, and from its replies to the response message."""

from __future__ import annotations

import asyncio
import hashlib

import msgspec
import numpy as np

from rollmill.engine.protocol import MAX_SEED, MAX_TOP, FinishReason, GenerateReply, GenerateRequest, ScoreRequest
from rollmill.model.tokenizer import Tokenizer
from rollmill.tinker.requests import Sample, SamplingParams
from rollmill.tinker.sampling import Samplers
from rollmill.tinker.stopping import StopTexts
from rollmill.tinker.training import Snapshot
from rollmill.tinker.wire import Sampled, sample_output

MAX_SAMPLES = 1024


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """What has to be known of the model to sample from it."""

    max_len: int
    """Context length in tokens."""
    vocab_size: int
    eos_ids: frozenset[int]
    tokenizer: Tokenizer | None
    """None: stop texts cannot be looked for."""


async def sampled(samplers: Samplers, snapshot: Snapshot, ask: Sample, model: Model) -> bytes:
    """Sample, and score the prompt when asked to; all from one snapshot. Raises ValueError for what cannot be."""
    prompt = ask.prompt.token_ids()
    _check(ask, prompt, model)
    scoring = asyncio.create_task(_prompt_logprobs(samplers, snapshot, ask, prompt))
    texts = _stop_texts(ask.sampling_params, model)
    stops = [StopTexts(model.tokenizer, texts) if texts and model.tokenizer else None for _ in range(ask.num_samples)]
    try:
        if ask.prompt_logprobs and len(prompt) == model.max_len:
            # A prompt that fills the context can be scored; there is no room for a token behind it.
            return sample_output([_nothing()] * ask.num_samples, prompt_logprobs_T=await scoring)
        asked = [_generate(ask, prompt, i, model) for i in range(ask.num_samples)]
        replies = await asyncio.gather(*(samplers.generate(snapshot, g, s) for g, s in zip(asked, stops, strict=True)))
        sequences = [_sequence(reply, stop) for reply, stop in zip(replies, stops, strict=True)]
        return sample_output(sequences, prompt_logprobs_T=await scoring, num_reused=replies[0].num_reused)
    finally:
        scoring.cancel()


def _check(ask: Sample, prompt: list[int], model: Model) -> None:
    if not 1 <= ask.num_samples <= MAX_SAMPLES:
        raise ValueError(f"num_samples is {ask.num_samples}, it must be from 1 to {MAX_SAMPLES}")
    if not 0 <= ask.topk_sample_logprobs <= MAX_TOP:
        raise ValueError(f"topk_sample_logprobs is {ask.topk_sample_logprobs}, it must be from 0 to {MAX_TOP}")
    for name, is_asked in (
        ("topk_prompt_logprobs", ask.topk_prompt_logprobs),
        ("target_prompt_logprobs", ask.target_prompt_logprobs is not None),
        ("prompt_alt_tokens_k", ask.prompt_alt_tokens_k),
    ):
        if is_asked:
            raise ValueError(f"{name} is set, which this server does not have; leave it out, or use forward() with the tokens as targets")
    last_n = ask.prompt_logprobs_last_n
    if last_n is not None and not (ask.prompt_logprobs and 1 <= last_n < len(prompt)):
        raise ValueError(f"prompt_logprobs_last_n is {last_n}; it needs prompt_logprobs and must be from 1 to {len(prompt) - 1}")
    if ask.prompt_logprobs and not 1 <= len(prompt) <= model.max_len:
        raise ValueError(f"the prompt has {len(prompt)} tokens, the context {model.max_len}")


def _stop_texts(params: SamplingParams, model: Model) -> list[str]:
    stop = [params.stop] if isinstance(params.stop, str) else params.stop or []
    texts = [s for s in stop if isinstance(s, str)]
    if texts and model.tokenizer is None:
        raise ValueError("stop holds texts, but this model directory has no tokenizer.json; give token ids")
    if any(not text for text in texts):
        raise ValueError("stop holds an empty text")
    return texts


def _generate(ask: Sample, prompt: list[int], index: int, model: Model) -> GenerateRequest:
    params = ask.sampling_params
    stop = params.stop
    ids = [s for s in stop if isinstance(s, int)] if isinstance(stop, list) else []
    # A stop text stands beside the model's own end, token ids and the empty list stand in its place.
    if stop is None or isinstance(stop, str) or len(ids) < len(stop):
        ids += sorted(model.eos_ids)
    request = GenerateRequest(
        prompt_ids=prompt,
        max_tokens=params.max_tokens if params.max_tokens is not None else max(1, model.max_len - len(prompt)),
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(0, params.top_k),
        seed=None if params.seed is None else seed_of(params.seed, index),
        stop_ids=ids,
        num_top=ask.topk_sample_logprobs,
        # Samplers take turns, so that one client's flood delays its own.
        queue=(ask.sampling_session_id or "")[:256],
    )
    request.check(vocab_size=model.vocab_size, max_len=model.max_len)
    return request


def seed_of(seed: int, index: int) -> int:
    """Of one of several samples; the first has the seed itself.

    >>> seed_of(7, 0)
    7
    """
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED


async def _prompt_logprobs(samplers: Samplers, snapshot: Snapshot, ask: Sample, prompt: list[int]) -> np.ndarray | None:
    """NaN where nothing was asked for, and at the first token, which nothing predicts."""
    if not ask.prompt_logprobs:
        return None
    start = 1 if ask.prompt_logprobs_last_n is None else len(prompt) - ask.prompt_logprobs_last_n
    found = np.full(len(prompt), np.nan, np.float32)
    if start < len(prompt):
        found[start:] = await samplers.score(snapshot, ScoreRequest(token_ids=prompt, start=start))
    return found


def _sequence(reply: GenerateReply, stops: StopTexts | None) -> Sampled:
    cut = stops.cut(reply.token_ids) if stops is not None else None
    return Sampled(
        tokens_T=np.asarray(reply.token_ids[:cut], np.int32),
        logprobs_T=reply.logprobs_T[:cut],
        is_stopped=cut is not None or reply.finish_reason is FinishReason.STOP,
        tops=reply.tops[:cut],
    )


def _nothing() -> Sampled:
    return Sampled(tokens_T=np.empty(0, np.int32), logprobs_T=np.empty(0, np.float32), is_stopped=False)
