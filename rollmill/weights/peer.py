"""Weights from a replica that serves them already: two routes that read the live weights, and the joining replica's end.

A range is sent only when no swap touched the weights while it was read; the joiner proves every tensor before it uses it. Who may
ask is decided by the network: the routes hand out the weights to anybody who can reach them.

    GET /weights/version                                    {"version": 16, "held": [names held whole]}
    GET /weights/16/tensor?name=NAME&start=0&stop=4096      raw bytes; 409 {"version": 17} when another version is served by now
"""

from __future__ import annotations

import http.client
import logging
import queue
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

import msgspec
import numpy as np
from blake3 import blake3

from rollmill.weights.encode import cell_bytes, in_order
from rollmill.weights.errors import CorruptSnapshot, UnknownFormat, WrongBase, WrongWeights
from rollmill.weights.live import LiveWeights
from rollmill.weights.manifest import Version
from rollmill.weights.proof import fingerprint_bytes
from rollmill.weights.schema import Schema
from rollmill.weights.shard import Held, whole
from rollmill.weights.store import WeightStore

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from rollmill.weights.follower import Follower

log = logging.getLogger(__name__)
PIECE_BYTES = 16 << 20
"""Of one request: 15 ms at 10 Gbit/s, and few enough tries are lost when the peer moves on."""
_IN_FLIGHT = 4
# A joiner that three replicas could not serve is better off with the store.
_MAX_PEERS = 3
_READ_BYTES = 1 << 20
_MAX_OFFER_BYTES = 64 << 20


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica can give."""

    version: int | None
    held: tuple[str, ...]
    """Names of the tensors it holds whole: only they can be proved alone."""


def peer_app(live: LiveWeights, follower: Follower) -> Starlette:
    """The routes of one replica; mount them beside its own."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    def moved() -> JSONResponse:
        return JSONResponse({"version": follower.version}, status_code=HTTPStatus.CONFLICT)

    async def version(request: Request) -> JSONResponse:
        held = tuple(name for name, part in live.held().items() if part == whole(part.spec))
        return JSONResponse(msgspec.to_builtins(Offer(version=follower.version, held=held)))

    def read(wanted: int, name: str, start: int, stop: int) -> Response:
        before = follower.swaps
        if before % 2 or follower.version != wanted:
            return moved()
        data = live.read(name)[start:stop].tobytes()
        # The counter moves when a swap begins and when it ends, so an equal even number means that none came between.
        if follower.swaps != before or follower.version != wanted:
            return moved()
        return Response(data, media_type="application/octet-stream")

    async def tensor(request: Request) -> Response:
        query = request.query_params
        part = live.held().get(query.get("name", ""))
        if part is None:
            return JSONResponse({"error": "no such tensor"}, status_code=HTTPStatus.NOT_FOUND)
        start, stop = (query.get(key, "") for key in ("start", "stop"))
        if not (start.isdigit() and stop.isdigit() and int(start) <= int(stop) <= part.num_bytes and int(stop) - int(start) <= PIECE_BYTES):
            text = f"start and stop must lie in 0 to {part.num_bytes}, at most {PIECE_BYTES} apart"
            return JSONResponse({"error": text}, status_code=HTTPStatus.BAD_REQUEST)
        return await run_in_threadpool(read, request.path_params["version"], part.spec.name, int(start), int(stop))

    return Starlette(routes=[Route("/weights/version", version), Route("/weights/{version:int}/tensor", tensor)])


@dataclass(frozen=True, kw_only=True)
class Joined:
    """How asking the other replicas went."""

    is_loaded: bool
    """False: the store has to give the weights."""
    num_failed: int
    """Replicas that were asked and could not give them."""


def load_from_peers(store: WeightStore, live: LiveWeights, record: Version, schema: Schema, *, replica: str) -> Joined:
    """Load the weights to start from out of a replica that serves them, which is nearer than any store."""
    now = time.time()
    try:
        leases = store.leases()
    except UnknownFormat as error:
        # One replica of a newer Rollmill; the store gives the weights as well.
        log.warning("weights: no replica can be asked for weights: %s", error)
        return Joined(is_loaded=False, num_failed=0)
    serving = [lease for lease in leases if lease.url and lease.version == record.version and lease.expires > now]
    peers = [lease for lease in serving if lease.replica != replica]
    num_failed = 0
    # Joiners that start together begin with different peers.
    for peer in sorted(peers, key=lambda p: blake3(f"{replica} {p.replica}".encode()).digest())[:_MAX_PEERS]:
        try:
            for name, data in fetch_from_peer(peer.url, record, schema, live.held()):
                live.load(name, data)
        except (OSError, ValueError, WrongWeights) as error:
            num_failed += 1
            log.warning("weights: replica %s cannot give version %d: %s", peer.replica, record.version, error)
            continue
        return Joined(is_loaded=True, num_failed=num_failed)
    return Joined(is_loaded=False, num_failed=num_failed)


def fetch_from_peer(
    url: str, record: Version, schema: Schema, held: Mapping[str, Held], *, timeout_s: float = 30.0
) -> Iterator[tuple[str, np.ndarray]]:
    """The bytes of every held box, tensor by tensor, each proved by the version's fingerprint of the whole tensor.

    `timeout_s` bounds each request. Raises OSError, WrongBase (the peer serves another version or only shards) or WrongWeights.
    """
    peer = _Peer(url, timeout_s)
    try:
        yield from _fetch(peer, record, schema, held)
    finally:
        peer.close()


def _fetch(peer: _Peer, record: Version, schema: Schema, held: Mapping[str, Held]) -> Iterator[tuple[str, np.ndarray]]:
    offer = peer.offer()
    if offer.version != record.version:
        raise WrongBase(f"{peer.url} serves version {offer.version}, wanted is {record.version}")
    if lacking := held.keys() - set(offer.held):
        raise WrongBase(f"{peer.url} does not hold all of {min(lacking)}")
    expected = record.print_of(schema).tensors
    specs = [spec for spec in schema.tensors if spec.name in held]
    for spec in specs:
        mine = held[spec.name].spec
        # Before anything of its size is made: it may be made up.
        if (spec.dtype, spec.shape) != (mine.dtype, mine.shape):
            raise WrongBase(f"{spec.name} is {spec.dtype} {list(spec.shape)} in the store and {mine.dtype} {list(mine.shape)} here")
    pieces = [(s.name, at, min(at + PIECE_BYTES, s.num_bytes)) for s in specs for at in range(0, max(1, s.num_bytes), PIECE_BYTES)]
    with closing(in_order(lambda piece: peer.tensor(record.version, *piece), pieces, workers=_IN_FLIGHT)) as arriving:
        for spec in specs:
            data = np.empty(spec.num_bytes, np.uint8)
            for at in range(0, max(1, spec.num_bytes), PIECE_BYTES):
                piece = next(arriving)
                data[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            if fingerprint_bytes(spec.name, spec.dtype, spec.shape, data) != expected[spec.name]:
                text = f"{peer.url} sent other bytes than those of version {record.version} for {spec.name}"
                raise WrongWeights(text, tensors=(spec.name,))
            yield spec.name, cell_bytes(data, held[spec.name].region, spec.item_bytes)


class _Peer:
    """Connections to one replica, kept open between requests; each request has a deadline."""

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise WrongBase(f"{url!r} is no address of a replica; it must be http://host:port")
        self.url, self._host, self._port, self._prefix = url, parts.hostname, parts.port, parts.path.rstrip("/")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._timeout_s = timeout_s
        self._idle: queue.SimpleQueue[http.client.HTTPConnection] = queue.SimpleQueue()

    def offer(self) -> Offer:
        try:
            return msgspec.json.decode(self._get("/weights/version", limit=_MAX_OFFER_BYTES), type=Offer)
        except msgspec.MsgspecError as error:
            raise CorruptSnapshot(f"{self.url} does not say what it serves: {error}") from error

    def tensor(self, version: int, name: str, start: int, stop: int) -> bytes:
        data = self._get(f"/weights/{version}/tensor?name={quote(name, safe='')}&start={start}&stop={stop}", limit=stop - start)
        if len(data) != stop - start:
            raise CorruptSnapshot(f"{self.url} sent {len(data)} of {stop - start} bytes of {name}")
        return data

    def close(self) -> None:
        while not self._idle.empty():
            self._idle.get().close()

    def _get(self, path: str, *, limit: int) -> bytes:
        deadline = time.monotonic() + self._timeout_s
        connection = self._connection()
        try:
            connection.request("GET", self._prefix + path)
            answer = connection.getresponse()
            data = bytearray()
            while len(data) <= limit and (chunk := answer.read1(_READ_BYTES)):
                data += chunk
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self.url}{path} took longer than {self._timeout_s:g} s")
        except http.client.HTTPException as error:
            connection.close()
            raise ConnectionError(f"{self.url}{path} broke off: {error!r}") from error
        except OSError:
            connection.close()
            raise
        if answer.status != HTTPStatus.OK or answer.length or len(data) > limit:
            connection.close()
            raise WrongBase(f"{self.url}{path} answered {answer.status}: {data[:200].decode(errors='replace')}")
        answer.close()
        self._idle.put(connection)
        return bytes(data)

    def _connection(self) -> http.client.HTTPConnection:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return self._kind(self._host, self._port, timeout=self._timeout_s)
