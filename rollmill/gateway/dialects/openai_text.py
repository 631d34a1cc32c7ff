"""The `/v1/completions` wire format: text or token ids in, text out; knows no chat template, no episode and no replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollmill.gateway.call import Answer, ChatCall, Event, EventKind, TextCall
from rollmill.gateway.dialects.dialect import MAX_CHOICES, Envelope, check_number, decode_body, openai_error
from rollmill.gateway.dialects.openai_common import DONE, Sampled, SamplingFields, encode, text_logprobs, usage, version_runs
from rollmill.web import ApiError

DEFAULT_TOKENS = 16
MAX_LOGPROBS = 5


class TextRequest(SamplingFields, frozen=True, kw_only=True):
    """The request body."""

    prompt: str | list[Any]
    """Text, texts, token ids, or lists of token ids."""
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


_decoder = msgspec.json.Decoder(TextRequest)


class OpenAIText:
    """The dialect."""

    name = "openai_text"

    def parse(self, body: bytes) -> TextCall:
        request = decode_body(body, _decoder)
        check_number("logprobs", request.logprobs, 0, MAX_LOGPROBS)
        if request.suffix:
            raise ApiError(400, "suffix is not supported: the model continues text, it does not fill in; leave it out")
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise ApiError(400, f"best_of is {request.best_of}; leave it out or make it equal to n")
        if request.echo and request.logprobs is not None:
            raise ApiError(400, "echo with logprobs is not supported: prompts are not scored here; leave one of them out")
        prompts = _prompts(request.prompt)
        num_choices = len(prompts) * (request.n or 1)
        if num_choices > MAX_CHOICES:
            raise ApiError(
                400, f"{len(prompts)} prompts with n = {request.n or 1} make {num_choices} choices, at most {MAX_CHOICES} are allowed"
            )
        wanted = DEFAULT_TOKENS if request.max_tokens is None else request.max_tokens
        return TextCall(prompts=prompts, echo=bool(request.echo), **request.ask(max_tokens=wanted, num_top_logprobs=request.logprobs))

    def whole(self, call: ChatCall | TextCall, envelope: Envelope, answers: Sequence[Answer]) -> bytes:
        assert isinstance(call, TextCall)
        body = {
            "id": f"cmpl-{envelope.id}",
            "object": "text_completion",
            "created": envelope.created,
            "model": envelope.model,
            "choices": [self._choice(i, call, envelope, a) for i, a in enumerate(answers)],
            "usage": usage(answers, call.num_choices),
            "system_fingerprint": None,
        }
        return encode(body)

    def _choice(self, index: int, call: TextCall, envelope: Envelope, answer: Answer) -> dict[str, Any]:
        has_logprobs = call.num_top_logprobs is not None
        out: dict[str, Any] = {
            "index": index,
            "text": echoed(call, envelope, index) + answer.text,
            "logprobs": text_logprobs(Sampled.of(answer), envelope, 0) if has_logprobs else None,
            "finish_reason": str(answer.finish),
            "stop_reason": answer.stop_string,
        }
        if call.wants_token_ids:
            prompt = envelope.prompts[index // call.num_choices]
            out |= {"prompt_token_ids": prompt, "token_ids": answer.token_ids, "policy_versions": version_runs(answer)}
        return out

    def writer(self, call: ChatCall | TextCall, envelope: Envelope) -> TextWriter:
        assert isinstance(call, TextCall)
        return TextWriter(call, envelope)

    def error(self, status: int, message: str, extra: Mapping[str, Any] = {}) -> bytes:
        return openai_error(status, message, extra)


class TextWriter:
    """Chunks of one streamed answer."""

    def __init__(self, call: TextCall, envelope: Envelope) -> None:
        self._call, self._envelope = call, envelope
        head = {"id": f"cmpl-{envelope.id}", "object": "text_completion", "created": envelope.created, "model": envelope.model}
        self._head = b"data: " + encode(head)[:-1]
        self._tail = (b',"usage":null' if call.includes_usage else b"") + b"}\n\n"
        self._plain_tail = b',"logprobs":null,"finish_reason":null}]' + self._tail
        self._num_chars = [0] * (call.num_choices * len(call.prompts))
        self._has_extras = call.wants_token_ids or call.num_top_logprobs is not None

    def start(self, num_prompt: int) -> bytes:
        if not (self._call.echo or self._call.wants_token_ids):
            return b""
        return b"".join(self._first(i) for i in range(len(self._num_chars)))

    def _first(self, index: int) -> bytes:
        choice: dict[str, Any] = {
            "index": index,
            "text": echoed(self._call, self._envelope, index),
            "logprobs": None,
            "finish_reason": None,
        }
        if self._call.wants_token_ids:
            choice["prompt_token_ids"] = self._envelope.prompts[index // self._call.num_choices]
        return b'%b,"choices":[%b]%b' % (self._head, encode(choice), self._tail)

    def write(self, event: Event) -> bytes:
        # Plain text has neither calls nor reasoning.
        text = event.text if event.kind is EventKind.TEXT else ""
        if not self._has_extras and event.kind is not EventKind.END:
            return b'%b,"choices":[{"index":%d,"text":%b%b' % (self._head, event.index, encode(text), self._plain_tail) if text else b""
        choice: dict[str, Any] = {"index": event.index, "text": text, "logprobs": None, "finish_reason": None}
        if self._call.num_top_logprobs is not None and event.token_ids:
            choice["logprobs"] = text_logprobs(Sampled.of(event), self._envelope, self._num_chars[event.index])
        self._num_chars[event.index] += len(text)
        if self._call.wants_token_ids:
            choice["token_ids"] = event.token_ids
        if event.answer is not None:
            choice |= {"finish_reason": str(event.answer.finish), "stop_reason": event.answer.stop_string}
            if self._call.wants_token_ids:
                choice["policy_versions"] = version_runs(event.answer)
        return b'%b,"choices":[%b]%b' % (self._head, encode(choice), self._tail)

    def finish(self, answers: Sequence[Answer]) -> bytes:
        if not self._call.includes_usage:
            return DONE
        return b'%b,"choices":[],"usage":%b}\n\n%b' % (self._head, encode(usage(answers, self._call.num_choices)), DONE)

    def fail(self, status: int, message: str) -> bytes:
        return b"data: %b\n\n" % openai_error(status, message)


def echoed(call: TextCall, envelope: Envelope, index: int) -> str:
    """The prompt of choice `index`, where it is to be repeated."""
    if not call.echo:
        return ""
    prompt = call.prompts[index // call.num_choices]
    return prompt if isinstance(prompt, str) else envelope.decode(prompt)


def _prompts(prompt: str | list[Any]) -> tuple[str | list[int], ...]:
    if isinstance(prompt, str):
        found: list[Any] = [prompt]
    elif prompt and all(type(p) is int for p in prompt):
        found = [prompt]
    else:
        found = prompt
    if not found:
        raise ApiError(400, "prompt is empty; send a text or at least one token id")
    for i, one in enumerate(found):
        is_ids = isinstance(one, list) and bool(one) and all(type(t) is int and 0 <= t < 2**31 for t in one)
        if not (is_ids or (isinstance(one, str) and one)):
            raise ApiError(400, f"prompt[{i}] is neither a text nor a list of token ids, or it is empty")
    return tuple(found)
