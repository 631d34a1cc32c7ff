"""The `hot_load` endpoint that hosted inference providers offer, over a weight store, and the call that announces a snapshot to one.

A snapshot is a directory below one root, named by its identity. POST makes it the version replicas should serve, once everything in
it is verified; GET tells what each replica serves. Paths and fields are those of Fireworks' public guide and of Stitch's api-shim:

    POST /hot_load/v1/models/hot_load  {identity, incremental_snapshot_metadata?: {previous_snapshot_identity, compression_format,
                                        checksum_format}, reset_prompt_cache?}
    GET  /hot_load/v1/models/hot_load  {replicas: [{readiness, current_snapshot_identity, readiness_reason?}, ...]}
"""

from __future__ import annotations

import hmac
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol
from urllib.parse import urlsplit

import msgspec

from rollmill.weights.errors import CorruptSnapshot, LatestMoved, WrongBase
from rollmill.weights.interop.hf import read_directory
from rollmill.weights.interop.intake import take_in, tensors_of
from rollmill.weights.interop.tensor_file import Tensors
from rollmill.weights.interop.xor_dir import Checksum, Formats, apply, formats_of, is_delta, read_xor_directory
from rollmill.weights.manifest import Lease, Version
from rollmill.weights.reader import materialise
from rollmill.weights.store import WeightStore

if TYPE_CHECKING:
    from starlette.applications import Starlette

PATH = "/hot_load/v1/models/hot_load"
_NOTE = "hot_load "
_MAX_IDENTITY = 200


class Incremental(msgspec.Struct, frozen=True, kw_only=True):
    """What a delta says of itself."""

    previous_snapshot_identity: str
    compression_format: str = "zstd"
    checksum_format: str = "adler32"


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a POST; fields that providers add are left alone."""

    identity: str
    incremental_snapshot_metadata: Incremental | None = None
    reset_prompt_cache: Literal["all", "none", "new_session"] = "all"


class Replica(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One replica in the answer to a GET."""

    replica_id: str
    readiness: bool
    current_snapshot_identity: str | None
    current_version: int | None
    readiness_reason: str | None = None


class Refused(ValueError):
    """A signal that changes nothing, with the HTTP status that says why."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class HotLoadTarget(Protocol):
    """What a deployment must be able to do. Calls come one at a time, except `replicas`."""

    def current(self) -> str | None:
        """The identity that replicas should serve now."""

    def load_full(self, identity: str) -> int:
        """Verify the named snapshot and make it current; returns its version."""

    def apply_incremental(self, identity: str, delta: Incremental) -> int:
        """The same for a delta on the current one."""

    def knows(self, identity: str) -> bool:
        """Whether this identity was current before."""

    def replicas(self, now: float) -> list[Replica]:
        """What is served where."""


def hot_load_app(target: HotLoadTarget, *, api_key: str = "") -> Starlette:
    """The two routes. With `api_key` every request must carry it as a bearer token."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    one_at_a_time = threading.Lock()

    def refuse_stranger(request: Request) -> None:
        if api_key and not hmac.compare_digest(request.headers.get("authorization", "").encode(), f"Bearer {api_key}".encode()):
            raise Refused(HTTPStatus.UNAUTHORIZED, "send the deployment's key as `Authorization: Bearer KEY`")

    async def signal(request: Request) -> JSONResponse:
        try:
            refuse_stranger(request)
            try:
                wanted = msgspec.json.decode(await request.body(), type=Signal)
            except msgspec.MsgspecError as error:
                raise Refused(HTTPStatus.BAD_REQUEST, f"the body must be a hot-load signal: {error}") from error
            return JSONResponse(await run_in_threadpool(accept, wanted))
        except Refused as refused:
            return JSONResponse({"error": str(refused)}, status_code=refused.status)

    def accept(wanted: Signal) -> dict[str, Any]:
        with one_at_a_time:
            return _accepted(target, wanted)

    async def status(request: Request) -> JSONResponse:
        try:
            refuse_stranger(request)
        except Refused as refused:
            return JSONResponse({"error": str(refused)}, status_code=refused.status)
        replicas = await run_in_threadpool(target.replicas, time.time())
        return JSONResponse({"protocol_version": 1, "replicas": msgspec.to_builtins(replicas)})

    return Starlette(routes=[Route(PATH, signal, methods=["POST"]), Route(PATH, status, methods=["GET"])])


def _accepted(target: HotLoadTarget, wanted: Signal) -> dict[str, Any]:
    identity, delta = wanted.identity, wanted.incremental_snapshot_metadata
    if not is_identity(identity):
        raise Refused(HTTPStatus.BAD_REQUEST, f"identity {identity[:50]!r} must be one path segment of up to {_MAX_IDENTITY} characters")
    current, version = target.current(), None
    if current != identity:
        if target.knows(identity):
            raise Refused(
                HTTPStatus.CONFLICT, f"{identity!r} was served before {current!r}; to serve it again send it under a new identity"
            )
        if delta is not None and (previous := delta.previous_snapshot_identity) != current:
            text = f"{identity!r} is a delta on {previous!r}, the deployment is at {current!r}; send a full snapshot"
            raise Refused(HTTPStatus.CONFLICT, text)
        try:
            version = target.load_full(identity) if delta is None else target.apply_incremental(identity, delta)
        except Refused:
            raise
        except LatestMoved as error:
            raise Refused(HTTPStatus.CONFLICT, str(error)) from error
        except ValueError as error:
            raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from error
        except OSError as error:
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}; signal it again") from error
    return {
        "accepted": True, "identity": identity, "current_snapshot_identity": identity,
        "version": version, "already_current": version is None,
    }  # fmt: skip


def is_identity(text: str) -> bool:
    """One path segment that can be a directory below the root."""
    return 0 < len(text) <= _MAX_IDENTITY and text.isprintable() and "/" not in text and not text.startswith(".")


class StoreTarget:
    """A weight store as a hot-load deployment: each signal becomes a version, and its identity the version's note.

    A version that nobody signalled goes by its newest tag, or by its number.
    """

    def __init__(self, store: WeightStore, root: Path, *, run_id: str = "hot_load") -> None:
        self._store, self._root, self._run_id = store, root, run_id
        self._names: dict[int, str] = {}
        """version -> identity, of the line as far as it was read."""
        self._lock = threading.Lock()

    def current(self) -> str | None:
        pointer = self._store.latest()
        return None if pointer is None else self._identity(pointer.version)

    def knows(self, identity: str) -> bool:
        return identity in self._line().values()

    def load_full(self, identity: str) -> int:
        folder = self._folder(identity)
        if is_delta(folder):
            raise WrongBase(f"{identity!r} holds a delta and was sent as a full snapshot; send incremental_snapshot_metadata with it")
        tensors = read_directory(folder)
        pointer = self._store.latest()
        if pointer is not None:
            self._refuse_other_model(identity, tensors, self._store.version(pointer.version))
        return take_in(self._store, tensors, run_id=self._run_id, note=_NOTE + identity, always=True).record.version

    def apply_incremental(self, identity: str, delta: Incremental) -> int:
        folder = self._folder(identity)
        said = {"compression_format": delta.compression_format, "checksum_format": delta.checksum_format}
        default = formats_of(said, f"the signal of {identity!r}", default=Formats(checksum=Checksum.ADLER32))
        if not is_delta(folder):
            raise WrongBase(f"{identity!r} holds a full snapshot and was sent as a delta; leave incremental_snapshot_metadata out")
        pointer = self._store.latest()
        assert pointer is not None, "the previous identity was compared already"
        _, schema, data = materialise(self._store, pointer.version)
        held = tensors_of(schema, data)
        new = apply(read_xor_directory(folder, default=default), held)
        return take_in(self._store, new, run_id=self._run_id, note=_NOTE + identity, held=held, always=True).record.version

    def replicas(self, now: float) -> list[Replica]:
        live = [lease for lease in self._store.leases() if lease.expires > now]
        return [self._replica(lease) for lease in sorted(live, key=lambda lease: lease.replica)]

    def _replica(self, lease: Lease) -> Replica:
        reason, identity = lease.problem, None
        if lease.version is None:
            reason = reason or "nothing is served yet"
        else:
            identity = self._identity(lease.version)
            if not reason and self._published(lease.version) not in (None, lease.fingerprint):
                reason = f"it serves other weights than those of version {lease.version}"
        return Replica(
            replica_id=lease.replica, readiness=not reason, current_snapshot_identity=identity, current_version=lease.version,
            readiness_reason=reason or None,
        )  # fmt: skip

    def _published(self, version: int) -> str | None:
        """The fingerprint of a version, or None when its record was collected."""
        try:
            return self._store.version(version).fingerprint
        except CorruptSnapshot:
            return None

    def _identity(self, version: int) -> str:
        line = self._line()
        if version in line:
            return line[version]
        tags = sorted((tag.created, tag.name) for tag in self._store.tags() if tag.version == version)
        return tags[-1][1] if tags else str(version)

    def _line(self) -> Mapping[int, str]:
        """Identities along the line; what was read once is not read again, since versions never change."""
        with self._lock:
            pointer = self._store.latest()
            newest = max(self._names, default=-1)
            if pointer is not None:
                for record in self._store.lineage():
                    if record.version <= newest:
                        break
                    if record.note.startswith(_NOTE):
                        self._names[record.version] = record.note.removeprefix(_NOTE)
            return dict(self._names)

    def _folder(self, identity: str) -> Path:
        folder = self._root / identity
        if not folder.is_dir() or folder.resolve().parent != self._root.resolve():
            raise Refused(
                HTTPStatus.NOT_FOUND, f"there is no snapshot {identity!r} below the deployment's root; upload it before the signal"
            )
        return folder

    def _refuse_other_model(self, identity: str, tensors: Tensors, latest: Version) -> None:
        table = {spec.name: spec.shape for spec in self._store.schema(latest.schema).tensors}
        theirs = {name: tensor.shape for name, tensor in tensors.items()}
        wrong = sorted(name for name in table.keys() | theirs.keys() if table.get(name) != theirs.get(name))
        if wrong:
            text = f"{len(wrong)} tensors of {identity!r} are not those of the deployment's model, first {wrong[0]}"
            raise WrongBase(f"{text}: there {theirs.get(wrong[0])}, here {table.get(wrong[0])}")


def announce(
    url: str,
    identity: str,
    *,
    previous: str | None = None,
    checksum: Checksum = Checksum.ADLER32,
    reset_prompt_cache: Literal["all", "none", "new_session"] = "all",
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
) -> dict[str, Any]:
    """Tell a provider at `url` that a snapshot lies ready: full, or an XOR delta on `previous`. Raises Refused with its words."""
    delta = None if previous is None else Incremental(previous_snapshot_identity=previous, checksum_format=checksum)
    signal = Signal(identity=identity, incremental_snapshot_metadata=delta, reset_prompt_cache=reset_prompt_cache)
    body = {name: value for name, value in msgspec.to_builtins(signal).items() if value is not None}
    return _call(url, headers or {}, timeout_s, json.dumps(body).encode())


def share_ready(url: str, identity: str, *, headers: Mapping[str, str] | None = None, timeout_s: float = 30.0) -> float:
    """The share of a provider's replicas that are ready and serve this snapshot; 0 without replicas."""
    replicas = _call(url, headers or {}, timeout_s, None).get("replicas") or []
    ready = [row for row in replicas if row.get("readiness") and row.get("current_snapshot_identity") == identity]
    return len(ready) / len(replicas) if replicas else 0.0


def _call(url: str, headers: Mapping[str, str], timeout_s: float, body: bytes | None) -> dict[str, Any]:
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(f"{url!r} is no address of a provider; write https://host")
    request = urllib.request.Request(url.rstrip("/") + PATH, data=body, headers={"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        with error:
            text = error.read(10_000).decode(errors="replace")
        raise Refused(HTTPStatus(error.code), f"{url} refused it with {error.code}: {text}") from error
    except ValueError as error:
        raise ValueError(f"{url} answered with something that is no JSON object; is it a hot-load endpoint?") from error
