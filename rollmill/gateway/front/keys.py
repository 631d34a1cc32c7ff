"""Who may call, and how much: API keys, keys that open one episode, and quotas; no I/O after the key file is read.

A key is looked up by its digest, so the time a lookup takes says nothing about how much of a guess was right.
"""

from __future__ import annotations

import hmac
import math
import secrets
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import msgspec
from blake3 import blake3

from rollmill.web import ApiError

KEYS_ENV = "ROLLMILL_GATEWAY_KEYS"
_EPISODE_PREFIX = "rme-"
_MAC_BYTES = 16


class KeySpec(msgspec.Struct, frozen=True, kw_only=True):
    """One key of the key file. Limits left out are no limits."""

    name: str
    """Shown in records and metrics."""
    digest: bytes
    """blake3 of the key."""
    requests_per_min: float | None = None
    tokens_per_min: float | None = None
    """Prompt and sampled tokens together."""
    max_running: int | None = None
    """Requests at one time."""
    may_admin: bool = False
    """May open and end episodes."""


class _KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    key: str = ""
    hash: str = ""
    requests_per_min: float | None = None
    tokens_per_min: float | None = None
    max_running: int | None = None
    may_admin: bool = False


def digest_of(key: str) -> bytes:
    return blake3(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(path: Path) -> tuple[KeySpec, ...]:
    """Keys from a TOML file of `[[key]]` tables, each with `name` and either `key` (plain) or `hash` (`blake3:` and 64 hex digits)."""
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"the key file {path} cannot be read: {error}") from error
    if unknown := sorted(set(table) - {"key"}):
        raise ValueError(f"{path} holds {unknown[0]!r}; a key file has [[key]] tables only")
    try:
        entries = msgspec.convert(table.get("key", []), list[_KeyEntry])
    except msgspec.ValidationError as error:
        raise ValueError(f"{path} is not a key file: {error}") from error
    specs = tuple(_spec(path, entry) for entry in entries)
    names = [s.name for s in specs]
    if twice := next((n for n in names if names.count(n) > 1), None):
        raise ValueError(f"{path} names {twice!r} twice; give every key a name of its own")
    return specs


def _spec(path: Path, entry: _KeyEntry) -> KeySpec:
    if bool(entry.key) == bool(entry.hash):
        raise ValueError(f"{path}: {entry.name!r} needs either key or hash")
    kind, _, text = entry.hash.partition(":")
    if entry.hash and (kind != "blake3" or len(text) != 64 or not set(text.lower()) <= set("0123456789abcdef")):
        raise ValueError(f"{path}: hash of {entry.name!r} is {entry.hash!r}; write blake3: and 64 hex digits")
    limits = {name: getattr(entry, name) for name in ("requests_per_min", "tokens_per_min", "max_running")}
    if bad := next((n for n, v in limits.items() if v is not None and not (math.isfinite(v) and v > 0)), None):
        raise ValueError(f"{path}: {bad} of {entry.name!r} is {limits[bad]}; it must be above 0, or be left out")
    digest = digest_of(entry.key) if entry.key else bytes.fromhex(text)
    return KeySpec(name=entry.name, digest=digest, may_admin=entry.may_admin, **limits)


class Bucket:
    """Holds a minute's worth and fills at that rate. It may be overdrawn: what a call costs is known when it has ended."""

    def __init__(self, per_min: float, now: float) -> None:
        self._per_min, self._level, self._at = per_min, per_min, now

    def wait_s(self, now: float, cost: float = 0.0) -> float:
        """Seconds until `cost` can be taken; 0: now. A cost above the capacity waits for a full bucket."""
        self._level = min(self._per_min, self._level + (now - self._at) * self._per_min / 60)
        self._at = now
        return max(0.0, (min(cost, self._per_min) - self._level) * 60 / self._per_min)

    def take(self, cost: float) -> None:
        self._level -= cost


class Holder:
    """One key in use: its limits and what it has used of them."""

    def __init__(self, spec: KeySpec, clock: Callable[[], float]) -> None:
        self.spec, self._clock, self.num_running = spec, clock, 0
        now = clock()
        self._requests = None if spec.requests_per_min is None else Bucket(spec.requests_per_min, now)
        self._tokens = None if spec.tokens_per_min is None else Bucket(spec.tokens_per_min, now)

    def admit(self) -> None:
        """Count a request in, or ApiError(429) with the seconds after which it may be sent again."""
        spec, now = self.spec, self._clock()
        if spec.max_running is not None and self.num_running >= spec.max_running:
            raise _limited(f"{spec.name} has {self.num_running} requests running, at most {spec.max_running} are allowed", 1.0)
        wait_s = 0.0 if self._requests is None else self._requests.wait_s(now, 1.0)
        if wait_s > 0:
            raise _limited(f"{spec.name} may send {spec.requests_per_min:g} requests a minute", wait_s)
        # A bucket at exactly nothing is empty: the smallest call takes a token.
        wait_s = 0.0 if self._tokens is None else self._tokens.wait_s(now, 1.0)
        if wait_s > 0:
            raise _limited(f"{spec.name} may use {spec.tokens_per_min:g} tokens a minute", wait_s)
        if self._requests is not None:
            self._requests.take(1.0)
        self.num_running += 1

    def release(self, num_tokens: int) -> None:
        """A request that was admitted has ended after so many tokens."""
        self.num_running -= 1
        if self._tokens is not None:
            self._tokens.take(num_tokens)


def _limited(message: str, wait_s: float) -> ApiError:
    return ApiError(429, message, headers={"retry-after": str(max(1, math.ceil(wait_s)))}, extra={"retryable": True})


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """What the key of a request allows."""

    name: str = ""
    is_admin: bool = False
    episode: str = ""
    """The only episode that this key opens; empty: any."""
    holder: Holder | None = None


class KeyRing:
    """All keys of one gateway.

    >>> ring = KeyRing(secret=b"0" * 32)
    >>> ring.grant(ring.episode_key("e1"), "e1").episode
    'e1'
    """

    def __init__(
        self,
        specs: Sequence[KeySpec] = (),
        *,
        is_open: bool = False,
        secret: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_open`: who comes without a key of ours may do everything. `secret` (32 bytes): the same one makes the same episode keys."""
        self.is_open = is_open
        self._holders = {spec.digest: Holder(spec, clock) for spec in specs}
        self._secret = secrets.token_bytes(32) if secret is None else secret

    def episode_key(self, episode: str) -> str:
        """The key that opens this episode alone."""
        return f"{_EPISODE_PREFIX}{self._mac(episode)}-{quote(episode, safe='')}"

    def grant(self, key: str, episode: str) -> Grant:
        """What `key` allows on a request that names `episode` (empty: none). ApiError 401 or 403."""
        if key.startswith(_EPISODE_PREFIX):
            return self._episode_grant(key, episode)
        digest = digest_of(key)
        holder = self._holders.get(digest)
        if holder is not None and hmac.compare_digest(holder.spec.digest, digest):
            return Grant(name=holder.spec.name, is_admin=holder.spec.may_admin, holder=holder)
        if self.is_open:
            return _OPEN
        text = "this API key is not known" if key else "no API key; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"
        raise ApiError(401, text, headers={"www-authenticate": "Bearer"}, extra={"code": "invalid_api_key"})

    def _episode_grant(self, key: str, episode: str) -> Grant:
        mac, _, quoted = key[len(_EPISODE_PREFIX) :].partition("-")
        mine = unquote(quoted)
        if not hmac.compare_digest(mac.encode("utf-8", "replace"), self._mac(mine).encode()):
            raise ApiError(401, "this API key is not known", headers={"www-authenticate": "Bearer"}, extra={"code": "invalid_api_key"})
        if episode and episode != mine:
            raise ApiError(403, f"this key opens episode {mine!r} only")
        return Grant(name=f"episode:{mine}", episode=mine)

    def _mac(self, episode: str) -> str:
        return blake3(episode.encode("utf-8", "replace"), key=self._secret).hexdigest(length=_MAC_BYTES)


_OPEN = Grant(is_admin=True)


def key_of(headers: Mapping[bytes, bytes]) -> str:
    """The key as OpenAI's clients (`Authorization: Bearer`) or Anthropic's (`x-api-key`) send it; empty: none."""
    kind, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if kind.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get(b"x-api-key", b"").decode("latin-1").strip()


def ring_from(environment: Mapping[str, str], path: Path | None, **options: Any) -> KeyRing:
    """Keys of the file given, or of the one that the environment names; open when there is neither."""
    named = environment.get(KEYS_ENV, "")
    source = path or (Path(named) if named else None)
    return KeyRing(read_keys(source), **options) if source is not None else KeyRing(is_open=True, **options)
