"""The records of the native endpoints and their range checks; imports no torch, so that any process may speak to an engine.

Logprobs travel as raw little-endian float32 bytes (base64 inside JSON), so that what the sampler computed arrives bit for bit.
"""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec
import numpy as np

PROTOCOL_SCHEMA = 1
MSGPACK = "application/msgpack"
JSON = "application/json"
FRAMES = "application/octet-stream"
MAX_SEED = 2**63 - 1
MAX_TOP = 20
MAX_CONSTRAINT_CHARS = 256 * 1024


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """A stop token was sampled; it is the last of `token_ids`."""
    LENGTH = "length"
    """`max_tokens` were sampled."""
    CONTEXT = "context"
    """The engine's context length is used up."""
    DEADLINE = "deadline"
    """`deadline_s` passed; the tokens sampled until then are returned."""
    CANCELLED = "cancelled"
    """The client went away, or the engine was shut down."""
    VERSION = "version"
    """The weights were swapped beneath a request that asked for `exact_version`; the server answers 409."""
    CONSTRAINT = "constraint"
    """The constraint has no way on from the tokens sampled so far, or became too complex; the server answers 400."""
    ERROR = "error"
    """The model produced a logit that is not a number."""


class ConstraintKind(StrEnum):
    """How the text of a constraint is to be read."""

    JSON_SCHEMA = "json_schema"
    """A JSON schema; the sampled text is one JSON value that follows it."""
    REGEX = "regex"
    """A regular expression (Rust syntax, no look-around) that the whole sampled text matches."""
    LARK = "lark"
    """A grammar in llguidance's dialect of Lark; the sampled text is one `start`."""


class Constraint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sampled text, up to its stop token, must follow this.

    >>> Constraint(kind=ConstraintKind.REGEX, text="yes|no").kind
    <ConstraintKind.REGEX: 'regex'>
    """

    kind: ConstraintKind
    text: str


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One continuation to sample.

    >>> GenerateRequest(prompt_ids=[1, 2, 3], max_tokens=16, seed=7).temperature
    1.0
    """

    schema: int = PROTOCOL_SCHEMA
    prompt_ids: list[int]
    """Token ids, at least one."""
    max_tokens: int
    """Most tokens to sample, from 1."""
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probability reaches this; 1 is off."""
    top_k: int = 0
    """Sample from this many most likely tokens; 0 is off."""
    seed: int | None = None
    """Same seed, prompt and weights: same tokens, whoever else is in the batch. None draws one."""
    stop_ids: list[int] = []
    """Token ids that end the request."""
    session: str | None = None
    """Requests of one conversation carry the same key, by which a router sends them to one replica; contexts are shared by their tokens."""
    queue: str = ""
    """The line it waits in. Each line is first come first served, and the lines take turns: one client's flood delays its own."""
    min_version: int | None = None
    """Refuse (409) when the served weight version is older."""
    exact_version: int | None = None
    """Refuse (409) when the served weight version is any other."""
    deadline_s: float | None = None
    """Seconds after arrival at which the request ends with what it has."""
    routes_from: int | None = None
    """Record the experts of tokens from this position of prompt + sampled on; None: none."""
    num_top: int = 0
    """Report this many most likely tokens beside every sampled one, 0 to 20."""
    constraint: Constraint | None = None
    """Sample only what this allows; `stop_ids` must hold the token that ends the text."""
    constraint_from: int | None = None
    """Position of `prompt_ids` where the constrained text began, when sampled tokens are part of the prompt; None: at its end."""

    def check(self, *, vocab_size: int, max_len: int) -> None:
        """Raise ValueError, naming field and value, for what this engine cannot serve."""
        if self.schema != PROTOCOL_SCHEMA:
            raise ValueError(f"schema is {self.schema}, this engine speaks {PROTOCOL_SCHEMA}")
        if not self.prompt_ids:
            raise ValueError("prompt_ids is empty; send at least one token")
        if len(self.prompt_ids) >= max_len:
            raise ValueError(
                f"the prompt has {len(self.prompt_ids)} tokens, the context {max_len}, and one must be left to sample; shorten it"
            )
        for name, ids in (("prompt_ids", self.prompt_ids), ("stop_ids", self.stop_ids)):
            if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
                bad = next(i for i in ids if not 0 <= i < vocab_size)
                raise ValueError(f"{name} holds {bad}, token ids of this model go from 0 to {vocab_size - 1}")
        if not 1 <= self.max_tokens < 2**31:
            raise ValueError(f"max_tokens is {self.max_tokens}, it must be a count from 1 to 2**31 - 1")
        if not (math.isfinite(self.temperature) and (self.temperature == 0 or 1e-3 <= self.temperature <= 100)):
            raise ValueError(f"temperature is {self.temperature}, it must be 0 or between 0.001 and 100")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, it must be above 0 and at most 1")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k is {self.top_k}, it must be 0 (off) or a positive count")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed is {self.seed}, it must be between 0 and 2**63 - 1")
        if self.session is not None and not 0 < len(self.session) <= 256:
            raise ValueError(f"session has {len(self.session)} characters, it must have 1 to 256")
        if len(self.queue) > 256:
            raise ValueError(f"queue has {len(self.queue)} characters, it must have at most 256")
        if self.routes_from is not None and not 0 <= self.routes_from <= len(self.prompt_ids):
            raise ValueError(f"routes_from is {self.routes_from}, the prompt has {len(self.prompt_ids)} tokens")
        if self.deadline_s is not None and not 0 < self.deadline_s <= 86400:
            raise ValueError(f"deadline_s is {self.deadline_s}, it must be above 0 and at most 86400")
        if not 0 <= self.num_top <= MAX_TOP:
            raise ValueError(f"num_top is {self.num_top}, it must be between 0 and {MAX_TOP}")
        self._check_constraint()

    def _check_constraint(self) -> None:
        if self.constraint is None:
            if self.constraint_from is not None:
                raise ValueError(f"constraint_from is {self.constraint_from}, but there is no constraint; leave it out or send one")
            return
        if not self.stop_ids:
            raise ValueError("constraint is set and stop_ids is empty; send the token that ends the constrained text")
        if len(self.constraint.text) > MAX_CONSTRAINT_CHARS:
            raise ValueError(f"constraint.text has {len(self.constraint.text)} characters, at most {MAX_CONSTRAINT_CHARS} are compiled")
        if self.constraint_from is not None and not 0 <= self.constraint_from <= len(self.prompt_ids):
            raise ValueError(f"constraint_from is {self.constraint_from}, the prompt has {len(self.prompt_ids)} tokens")


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Sampled tokens [start, end) came from weight version `version`."""

    start: int
    end: int
    version: int


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Where the seconds of a request went."""

    queue_s: float
    """Arrival to admission."""
    first_token_s: float
    """Arrival to first sampled token; 0 when none was sampled."""
    total_s: float
    """Arrival to end."""


class GenerateReply(msgspec.Struct, frozen=True, kw_only=True):
    """What was sampled, with the evidence. Arrays have one entry per sampled token."""

    schema: int = PROTOCOL_SCHEMA
    token_ids: list[int]
    logprobs: bytes
    """float32 little-endian: log-softmax of logits / temperature at the sampled token, before top_p and top_k cut the tail."""
    spans: list[VersionSpan]
    """The weight version of every token, as stamped by the step that sampled it; spans touch and cover all tokens."""
    finish_reason: FinishReason
    seed: int
    """The seed in force, drawn when the request had none."""
    num_reused: int
    """Prompt tokens whose keys and values an earlier request with the same beginning had computed."""
    stale_from: int | None = None
    """First sampled token whose context was in part computed by older weights (a swap that kept the cache); None: no token."""
    replica: str = ""
    """Name of the replica that sampled; empty when it has none, and the caller goes by its address."""
    routes: bytes = b""
    """Route record of tokens routes_from .. prompt + sampled - 1, one row per computed token; the last sampled token has no row
    since it was never computed. Empty when none was asked for or the model has no experts."""
    tops: list[list[tuple[int, float]]] = []
    """Per sampled token its `num_top` most likely (token, logprob), likeliest first, of the distribution that `logprobs` speaks of."""
    forced: list[tuple[int, int]] = []
    """Sampled tokens [start, end) where the constraint left one choice: nothing is to be learnt there."""
    timing: Timing

    @property
    def logprobs_T(self) -> np.ndarray:
        return np.frombuffer(self.logprobs, "<f4")

    @property
    def versions_T(self) -> np.ndarray:
        """int32[T]: the weight version of each sampled token."""
        out = np.empty(len(self.token_ids), np.int32)
        for span in self.spans:
            out[span.start : span.end] = span.version
        return out


class Piece(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens of a stream since the last piece, all of one weight version: with those before it all that the reply would say of them
    but their routes, should it never come. Positions count from the piece's own first token.
    """

    token_ids: list[int]
    logprobs: list[float]
    """float32 values, as in the reply."""
    version: int
    """As stamped by the step that sampled them."""
    tops: list[list[tuple[int, float]]] = []
    """As in the reply."""
    forced: list[tuple[int, int]] = []
    """As in the reply, of these tokens."""
    stale_from: int | None = None
    """As in the reply, in the piece that holds this token; None in all others."""
    replica: str = ""
    """As in the reply; told by the first piece."""
    num_reused: int = 0
    """As in the reply; told by the first piece."""


class StreamError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a stream ended before its time: what the status line would have said."""

    status: int
    message: str
    version: int
    """The served one."""


class StreamFrame(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One frame of `/v1/stream`: 4 bytes of length, little-endian, then this as MessagePack; exactly one field is set. A stream
    ends with `reply` or `error`; one that ends otherwise was cut off.
    """

    piece: Piece | None = None
    reply: GenerateReply | None = None
    error: StreamError | None = None

    def to_bytes(self) -> bytes:
        body = msgspec.msgpack.encode(self)
        return len(body).to_bytes(4, "little") + body


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Logprobs of given tokens, as one prefill computes them: what an audit compares sampled ones with.

    >>> ScoreRequest(token_ids=[1, 2, 3], start=2).start
    2
    """

    schema: int = PROTOCOL_SCHEMA
    token_ids: list[int]
    """At least two: a token is scored by those before it."""
    start: int = 1
    """First position that is scored."""
    temperature: float = 1.0
    """As in the request that sampled them; 0 counts as 1."""
    exact_version: int | None = None
    """Refuse (409) when the served weight version is any other, also when it changes on the way."""
    deadline_s: float | None = None
    """Seconds after arrival at which the request fails."""
    queue: str = ""
    """As in `GenerateRequest`."""

    def as_generate(self) -> GenerateRequest:
        """The same, as what the scheduler runs; checks what is particular to scoring."""
        if not 1 <= self.start < len(self.token_ids):
            raise ValueError(f"start is {self.start} of {len(self.token_ids)} tokens; it must be at least 1 and below their number")
        return GenerateRequest(
            schema=self.schema,
            prompt_ids=self.token_ids,
            max_tokens=1,
            temperature=self.temperature,
            exact_version=self.exact_version,
            deadline_s=self.deadline_s,
            queue=self.queue,
        )


class ScoreReply(msgspec.Struct, frozen=True, kw_only=True):
    """One logprob per token from `start` on, all by one weight version."""

    schema: int = PROTOCOL_SCHEMA
    logprobs: bytes
    """float32 little-endian, as in `GenerateReply`."""
    version: int
    start: int

    @property
    def logprobs_T(self) -> np.ndarray:
        return np.frombuffer(self.logprobs, "<f4")


class SwapMode(StrEnum):
    """What becomes of running requests' keys and values when the weights change."""

    KEEP_KV = "keep_kv"
    """They are kept: no work is lost, and later tokens see a context that older weights computed."""
    RE_PREFILL = "re_prefill"
    """They are computed again: every token is then a function of one version's weights, at the cost of a prefill."""


class Pressure(msgspec.Struct, frozen=True, kw_only=True):
    """How busy an engine is, for whoever routes to it."""

    running: int
    waiting: int
    slots: int
    """Sequences that can run at once."""
    kv_used_frac: float
    """Share of the key/value cache that holds tokens of running requests."""
    version: int
    """Served weight version; -1 before the first."""
    tokens_per_s: float
    """Sampled tokens over the last seconds."""
    max_len: int = 0
    """Context length in tokens, prompt and sampled together; 0: not told."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the engine serves, and what it can prove about its weights."""

    phase: str
    """`starting`, `serving`, `failed` or `stopped`."""
    version: int
    fingerprint: str
    """Of the live weights, hex; empty before the first verified ones."""
    running: int
    waiting: int
    note: str = ""
    """What is wrong, in one line; empty when nothing is."""
