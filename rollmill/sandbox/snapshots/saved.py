"""A snapshot as a manifest and the blobs of its layers: saved manifest last, so that what has a digest can be restored whole.

Knows layers only through a courier, which packs one into a raw archive and makes one from it; `docs/formats/snapshot.md` is the format.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from typing import BinaryIO, Protocol, TypeVar

import msgspec
import zstandard
from blake3 import blake3

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.records import SandboxSpec, Service
from rollmill.sandbox.snapshots.layers import Layer, read_portable, read_raw, write_portable, write_raw
from rollmill.sandbox.snapshots.merge import merge
from rollmill.sandbox.snapshots.store import BlobDamaged, BlobStore, working
from rollmill.sandbox.snapshots.threads import PIECE_BYTES, in_steps, in_thread

SCHEMA = 1
DEADLINE_S = 600.0
_LEVEL = 3
L = TypeVar("L")


class LayerRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One layer in a store."""

    digest: str
    """Of the blob: a portable archive, compressed with zstd."""
    diff: str
    """BLAKE3 of the archive itself, the same whatever compressed it: equal for equal layers."""
    num_bytes: int
    num_tar_bytes: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a snapshot is: `Manifest(image="host", image_digest="", layers=(...), spec=SandboxSpec(), created=1.8e9)`."""

    schema: int = SCHEMA
    image: str
    """The image's name, for people."""
    image_digest: str
    """What the layers lie on; empty for `host`, whose files are those of whatever machine restores."""
    layers: tuple[LayerRef, ...]
    """Bottom to top."""
    spec: SandboxSpec
    services: tuple[Service, ...] = ()
    """Running at the snapshot, in the order they were started; every fork starts them again."""
    created: float
    """Unix seconds at which the state was frozen, so that saving twice gives one digest."""


class Courier(Protocol[L]):
    """Who can see layers of this machine. Failures are `RunFailure(Boundary.SANDBOX)`."""

    def pack(self, layer: L) -> AsyncGenerator[bytes, None]:
        """A raw archive of the layer, as `layers.PACK` writes it; raises when the archive is not whole."""

    async def unpack(self, chunks: AsyncIterator[bytes]) -> L:
        """A frozen layer filled from a raw archive, as `layers.UNPACK` reads it; whatever `chunks` raises passes, and leaves nothing."""

    async def discard(self, layer: L) -> None:
        """Give up a layer of this machine, one that `unpack` made or one that was frozen here."""


async def save(
    store: BlobStore,
    courier: Courier[L],
    chain: Sequence[L],
    *,
    image: str,
    image_digest: str,
    spec: SandboxSpec,
    created: float,
    services: Sequence[Service] = (),
    known: MutableMapping[L, LayerRef] | None = None,
    deadline_s: float = DEADLINE_S,
) -> str:
    """Store the layers, bottom to top, then the manifest; its digest.

    `known` holds layers that were saved or restored before, and gains these: a layer that already lies in the store is not packed again.
    """
    refs = []
    async with _within(deadline_s, f"saving to {store.name}"):
        for layer in chain:
            ref = known.get(layer) if known is not None else None
            if ref is None or not await store.has(ref.digest):
                async with aclosing(courier.pack(layer)) as chunks:
                    ref = await put_layer(store, chunks)
                if known is not None:
                    known[layer] = ref
            refs.append(ref)
        manifest = Manifest(
            image=image, image_digest=image_digest, layers=tuple(refs), spec=spec, services=tuple(services), created=created
        )
        return await store.put_manifest(msgspec.json.encode(manifest, order="deterministic"))


async def load(store: BlobStore, digest: str) -> Manifest:
    """What the snapshot is. Raises ValueError when it is missing, damaged or of a later schema."""
    data = await store.get_manifest(digest)
    try:
        schema = msgspec.json.decode(data).get("schema")
        if schema != SCHEMA:
            raise ValueError(f"snapshot {digest} has schema {schema}, this program reads {SCHEMA}; use the version that saved it")
        return msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, AttributeError) as error:
        raise ValueError(f"{digest} in {store.name} is no snapshot: {error}") from None


async def restore(
    store: BlobStore, manifest: Manifest, courier: Courier[L], *, have: Mapping[str, L] | None = None, deadline_s: float = DEADLINE_S
) -> list[L]:
    """The layers of a snapshot on this machine, bottom to top. Those in `have` (blob digest -> layer) are used as they are;
    of the others none is left behind when one fails."""
    made: list[L] = []
    chain: list[L] = []
    try:
        async with _within(deadline_s, f"restoring from {store.name}"):
            for ref in manifest.layers:
                if have is not None and ref.digest in have:
                    chain.append(have[ref.digest])
                    continue
                async with aclosing(get_layer(store, ref)) as chunks:
                    made.append(await courier.unpack(chunks))
                chain.append(made[-1])
    except BaseException:
        for layer in made:
            await asyncio.shield(courier.discard(layer))
        raise
    return chain


async def flatten(courier: Courier[L], chain: Sequence[L], *, deadline_s: float = DEADLINE_S) -> L:
    """One layer that does what `chain`, bottom to top, does; the old ones stay as they are."""
    with ExitStack() as held:
        async with _within(deadline_s, f"flattening {len(chain)} layers"):
            layers = []
            for layer in chain:
                async with aclosing(courier.pack(layer)) as chunks:
                    file = held.enter_context(await _spooled(chunks))
                layers.append(await in_thread(read_raw, file))
            whole = await in_thread(merge, layers)
            async with aclosing(in_steps(write_raw(whole))) as chunks:
                return await courier.unpack(chunks)


async def put_layer(store: BlobStore, raw: AsyncIterable[bytes]) -> LayerRef:
    """Store one layer from its raw archive."""
    with await _spooled(raw) as file:
        packing = _Packing(await in_thread(read_raw, file))
        blob = await store.put(in_steps(packing.pieces()))
        return LayerRef(digest=blob.digest, diff=packing.diff.hexdigest(), num_bytes=blob.num_bytes, num_tar_bytes=packing.num_tar_bytes)


async def get_layer(store: BlobStore, ref: LayerRef) -> AsyncGenerator[bytes, None]:
    """The raw archive of a stored layer, verified before its first byte is given."""
    with await store.open(ref.digest) as blob:
        diff = blake3()
        with await _spooled(in_steps(_decompressed(blob, ref, diff))) as file:
            if diff.hexdigest() != ref.diff:
                raise BlobDamaged(f"blob {ref.digest} in {store.name} holds layer {diff.hexdigest()}, its manifest says {ref.diff}")
            layer = await in_thread(read_portable, file)
            async for piece in in_steps(write_raw(layer)):
                yield piece


class _Packing:
    """A layer on its way into a blob."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self.diff = blake3()
        self.num_tar_bytes = 0

    def pieces(self) -> Iterator[bytes]:
        compressor = zstandard.ZstdCompressor(level=_LEVEL).compressobj()
        for piece in write_portable(self._layer):
            self.diff.update(piece)
            self.num_tar_bytes += len(piece)
            yield compressor.compress(piece)
        yield compressor.flush()


def _decompressed(blob: BinaryIO, ref: LayerRef, diff: blake3) -> Iterator[bytes]:
    num_bytes = 0
    try:
        with zstandard.ZstdDecompressor().stream_reader(blob, closefd=False) as reader:
            while piece := reader.read(PIECE_BYTES):
                num_bytes += len(piece)
                if num_bytes > ref.num_tar_bytes:  # a few bytes can hold terabytes of zeros
                    raise BlobDamaged(f"blob {ref.digest} holds more than the {ref.num_tar_bytes} bytes its manifest says")
                diff.update(piece)
                yield piece
    except zstandard.ZstdError as error:
        raise BlobDamaged(f"blob {ref.digest} is no zstd stream: {error}") from None


async def _spooled(chunks: AsyncIterable[bytes]) -> BinaryIO:
    """A file of this machine with the stream; the caller closes it. Runs of zeros take no room in it."""
    with working(tempfile.gettempdir()):
        file = tempfile.TemporaryFile(prefix="rollmill-layer-")  # noqa: SIM115, the caller closes it
    try:
        held, num_bytes = [], 0
        async for chunk in chunks:
            held.append(chunk)
            num_bytes += len(chunk)
            if num_bytes >= PIECE_BYTES:  # a step in a thread for every few kilobytes of a pipe would cost more than the writing
                with working(tempfile.gettempdir()):
                    await in_thread(_append, file, held)
                held, num_bytes = [], 0
        with working(tempfile.gettempdir()):
            await in_thread(_append, file, held)
            await in_thread(file.truncate)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def _append(file: BinaryIO, chunks: Iterable[bytes]) -> None:
    for chunk in chunks:
        if len(chunk) >= 4096 and not chunk.strip(b"\0"):
            file.seek(len(chunk), 1)
        else:
            file.write(chunk)


@asynccontextmanager
async def _within(deadline_s: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(deadline_s) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise RunFailure(Boundary.SANDBOX, f"{what} took longer than {deadline_s:g} s") from None
