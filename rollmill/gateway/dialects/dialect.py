"""The seam between wire formats and the call core: what a dialect must be able to do, and the checks all of them share; no I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from rollmill.engine.protocol import MAX_SEED
from rollmill.gateway.call import Answer, ChatCall, Event, TextCall
from rollmill.gateway.halves import without_halves
from rollmill.web import ApiError, error_body

S = TypeVar("S")
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_TOKENS = 2**31 - 1
MAX_TOP_LOGPROBS = 20


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """What every reply to one request carries, whatever the dialect calls it."""

    id: str
    """32 hex digits; dialects add their prefix (`chatcmpl-`, `msg_`, `resp_`)."""
    created: int
    """Unix seconds."""
    model: str
    """As the client named it; the gateway's own name when it named none."""
    decode: Callable[[list[int]], str]
    """Token ids to text, special tokens written out: for the texts beside logprobs."""
    prompts: list[list[int]] = []
    """Ids of every prompt of the call, in order, as they go to the replica."""


class StreamWriter(Protocol):
    """Turns the events of one answer into server-sent events; one per request, called in order. Returns b"" where nothing is to be sent."""

    def start(self, num_prompt: int) -> bytes: ...

    def write(self, event: Event) -> bytes:
        """Also called with END events: what closes one choice goes out here."""
        ...

    def finish(self, answers: Sequence[Answer]) -> bytes: ...

    def fail(self, status: int, message: str) -> bytes:
        """Something broke after the status line was out: the last bytes of the stream."""
        ...


class Dialect(Protocol):
    """One wire format. `name` labels its calls in records and metrics."""

    name: str

    def parse(self, body: bytes) -> ChatCall | TextCall:
        """ApiError(400) with a text that names the field; ApiError(404) for something the body names that is not there."""
        ...

    def whole(self, call: ChatCall | TextCall, envelope: Envelope, answers: Sequence[Answer]) -> bytes: ...

    def writer(self, call: ChatCall | TextCall, envelope: Envelope) -> StreamWriter: ...

    def error(self, status: int, message: str, extra: Mapping[str, Any] = {}) -> bytes: ...


def sse(data: bytes, event: str = "") -> bytes:
    """One server-sent event; `data` is JSON on one line."""
    return b"event: %b\ndata: %b\n\n" % (event.encode(), data) if event else b"data: %b\n\n" % data


def decode_body(body: bytes, decoder: msgspec.json.Decoder[S]) -> S:
    """The body as the decoder's record. Unknown fields are ignored; a field of the wrong type is named in the error."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        mended = without_halves(body)
        if mended != body:
            # What a model wrote comes back as it was written: the rest of it is text.
            return decode_body(mended, decoder)
        raise ApiError(400, f"the body is not a valid request: {str(error) or 'nested too deeply'}") from error


def check_number(name: str, value: float | None, low: float, high: float) -> None:
    """ApiError(400) unless `value` is absent or within [low, high]."""
    if value is not None and not (math.isfinite(value) and low <= value <= high):
        raise ApiError(400, f"{name} is {value}, it must be between {low} and {high}")


def check_sampling(*, temperature: float | None, top_p: float | None, top_k: int | None, seed: int | None = None) -> None:
    """The ranges that every dialect shares, under the names that every dialect shares."""
    check_number("temperature", temperature, 0, 2)
    if temperature is not None and 0 < temperature < 1e-3:
        raise ApiError(400, f"temperature is {temperature}, it must be 0 (the most likely token) or at least 0.001")
    if top_p is not None and not 0 < top_p <= 1:
        raise ApiError(400, f"top_p is {top_p}, it must be above 0 and at most 1")
    # vLLM's -1 and 0 both mean off.
    check_number("top_k", top_k, -1, MAX_TOKENS)
    check_number("seed", seed, -MAX_SEED - 1, MAX_SEED)


def checked_stops(name: str, stops: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop strings as a tuple, refused when empty, too long or too many."""
    found = (stops,) if isinstance(stops, str) else tuple(stops or ())
    if len(found) > MAX_STOPS:
        raise ApiError(400, f"{name} has {len(found)} strings, at most {MAX_STOPS} are allowed")
    if any(not s or len(s) > MAX_STOP_CHARS for s in found):
        raise ApiError(400, f"{name} holds an empty string or one of more than {MAX_STOP_CHARS} characters")
    return found


def openai_error(status: int, message: str, extra: Mapping[str, Any] = {}) -> bytes:
    """The error shape of all OpenAI endpoints; `extra` (`retryable`, `version`, `param`, `code`) finds its place."""
    return msgspec.json.encode(error_body(status, message, extra))
