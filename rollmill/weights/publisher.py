"""The trainer's end: numbered snapshots leave in a background thread, each after the other, and no failure stays silent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType

import torch

from rollmill.weights import pack as packing
from rollmill.weights.bits import Bits, snapshot_bits
from rollmill.weights.errors import CorruptSnapshot, PublishFailed
from rollmill.weights.fingerprint import Fingerprint, fingerprint
from rollmill.weights.manifest import Kind, Manifest, PackRef, TensorEntry
from rollmill.weights.store import SnapshotStore, version_in


@dataclass(frozen=True, kw_only=True)
class Published:
    """One version that replicas may now take."""

    version: int
    step: int
    kind: Kind
    num_bytes: int
    """Bytes written to the store, all packs of the version."""
    delta_bytes: int | None
    """Bytes that a replica holding the version before has to read; None without a delta."""
    full_bytes: int
    """Bytes of all tensors in the serving dtype, uncompressed."""
    fingerprint: Fingerprint
    encode_s: float
    write_s: float


@dataclass(frozen=True, kw_only=True)
class PublisherStats:
    """Counts since the publisher was made."""

    num_published: int = 0
    num_full: int = 0
    num_pending: int = 0
    """Snapshots submitted and not yet published: 0, 1 or 2."""
    num_bytes: int = 0
    full_bytes: int = 0
    blocked_s: float = 0.0
    """Seconds that `submit` made the trainer wait for a free place."""
    encode_s: float = 0.0
    write_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _Job:
    version: int
    step: int
    snapshot: dict[str, Bits]


class Publisher:
    """Publishes what it is given, in order; one snapshot may be in work and one may wait.

    With `anchor_every` N at least one version in N has a full pack, which is where late replicas start.
    """

    def __init__(
        self,
        store: SnapshotStore,
        *,
        run_id: str,
        anchor_every: int = 16,
        on_published: Callable[[Published], None] = lambda published: None,
    ) -> None:
        if anchor_every < 1:
            raise ValueError(f"anchor_every is {anchor_every}; it counts versions, so give 1 (every version full) or more")
        self._store = store
        self._run_id = run_id
        self._anchor_every = anchor_every
        self._on_published = on_published
        self._latest = store.latest()
        self._base: tuple[Manifest, dict[str, Bits]] | None = None
        self._anchor: tuple[int, int] = (-1, 0)
        """(version, bytes) of the newest full pack this publisher knows."""
        self._num_since_anchor = 0
        self._changed = threading.Condition()
        self._pending: _Job | None = None
        self._busy = False
        self._closed = False
        self._error: BaseException | None = None
        self._stats = PublisherStats()
        self._submitting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="rollmill-publisher", daemon=True)
        self._thread.start()

    def submit(self, tensors: Mapping[str, torch.Tensor], *, step: int, timeout_s: float = 600.0) -> int:
        """Copy the tensors, give them the next version and return; blocks only while another snapshot already waits."""
        with self._submitting:
            with self._changed:
                start = time.monotonic()
                try:
                    self._await(lambda: self._pending is None, timeout_s, "a free place in the publisher")
                finally:
                    self._stats = replace(self._stats, blocked_s=self._stats.blocked_s + time.monotonic() - start)
                if self._closed:
                    raise ValueError("this publisher is closed; make a new one to publish more")
            # Copied and numbered outside the lock, so that the thread can finish its work meanwhile.
            snapshot = snapshot_bits(tensors)
            version = self._store.reserve()
            with self._changed:
                self._raise_error()
                self._pending = _Job(version=version, step=step, snapshot=snapshot)
                self._changed.notify_all()
            return version

    def resume(self, tensors: Mapping[str, torch.Tensor], *, step: int, timeout_s: float = 600.0) -> int:
        """The version of these weights: that of `latest` when they are the same bits, otherwise a new full one, durable on return."""
        assert self._base is None and self._stats.num_pending == 0, "resume comes before the first submit"
        if (manifest := self._latest_manifest()) is not None:
            found, snapshot = fingerprint(tensors), snapshot_bits(tensors)
            if set(manifest.tensors) == set(_entries(snapshot, found)):
                self._base = (manifest, snapshot)
                self._find_anchor(manifest)
                return manifest.version
        version = self.submit(tensors, step=step, timeout_s=timeout_s)
        self.flush(timeout_s)
        return version

    def flush(self, timeout_s: float = 600.0) -> None:
        """Return when everything submitted is published; raise what went wrong, or TimeoutError."""
        with self._changed:
            self._await(lambda: self._pending is None and not self._busy, timeout_s, "the publisher to finish")

    def close(self, timeout_s: float = 600.0) -> None:
        """Publish what is pending and end the thread. Safe to call twice."""
        try:
            self.flush(timeout_s)
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            self._thread.join(timeout_s)

    def stats(self) -> PublisherStats:
        with self._changed:
            return replace(self._stats, num_pending=(self._pending is not None) + self._busy)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        with self._changed:
            # The caller is failing already; what it submitted last is not worth hiding that failure behind another.
            self._closed = True
            self._changed.notify_all()

    def _await(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        if not self._changed.wait_for(lambda: self._error is not None or condition(), timeout_s):
            raise TimeoutError(f"waited {timeout_s:.0f} s for {what}; the store is slow or gone: see its disk or mount")
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise PublishFailed(f"publishing stopped: {self._error}; mend it and start again, `resume` finds the place") from self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._pending is not None)
                if self._pending is None:
                    return
                job, self._pending, self._busy = self._pending, None, True
                self._changed.notify_all()
            try:
                self._publish(job)
            except BaseException as error:  # noqa: BLE001 - a thread's only way to be heard: submit, flush and close raise it
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _publish(self, job: _Job) -> None:
        start = time.monotonic()
        found = fingerprint({name: bits.tensor() for name, bits in job.snapshot.items()})
        packs = self._encode(job)
        encoded = time.monotonic()
        for name, _, pack in packs:
            self._store.put_pack(name, pack.chunks)
        refs = tuple(PackRef(name=name, base_version=base, num_bytes=pack.num_bytes, digest=pack.digest) for name, base, pack in packs)
        full = next((ref for ref in refs if ref.base_version is None), None)
        delta = next((ref for ref in refs if ref.base_version is not None), None)
        manifest = Manifest(
            version=job.version,
            kind=Kind.DELTA if full is None else Kind.FULL,
            base_version=None if delta is None else delta.base_version,
            previous=self._latest,
            packs=refs,
            fingerprint=found.total,
            tensors=_entries(job.snapshot, found),
            raw_bytes=sum(bits.data.size for bits in job.snapshot.values()),
            step=job.step,
            run_id=self._run_id,
            created=time.time(),
        )
        self._store.publish(manifest, expected=self._latest)
        written = time.monotonic()
        self._latest, self._base = job.version, (manifest, job.snapshot)
        self._num_since_anchor = 1 if full else self._num_since_anchor + 1
        self._anchor = (job.version, full.num_bytes) if full else self._anchor
        published = Published(
            version=job.version,
            step=job.step,
            kind=manifest.kind,
            num_bytes=sum(ref.num_bytes for ref in refs),
            delta_bytes=None if delta is None else delta.num_bytes,
            full_bytes=manifest.raw_bytes,
            fingerprint=found,
            encode_s=encoded - start,
            write_s=written - encoded,
        )
        self._count(published)
        self._on_published(published)

    def _encode(self, job: _Job) -> list[tuple[str, int | None, packing.Pack]]:
        """The packs of one version: a delta where there is a base it fits, and a full pack where one is due."""
        delta: tuple[str, int | None, packing.Pack] | None = None
        if self._base is not None and _same_schema(self._base[1], job.snapshot):
            base = self._base[0].version
            pack = packing.build(version=job.version, new=job.snapshot, base_version=base, old=self._base[1])
            delta = (f"v{job.version:08d}.delta", base, pack)
            if not self._anchor_due() and pack.num_bytes < self._anchor[1]:
                return [delta]
        full = (f"v{job.version:08d}.full", None, packing.build(version=job.version, new=job.snapshot))
        # A replica that is up to date reads the anchor's delta; only late ones pay for the full pack.
        return [delta, full] if delta is not None and delta[2].num_bytes < full[2].num_bytes else [full]

    def _anchor_due(self) -> bool:
        """Every N versions, and at once when a replica found damage since the last anchor: it can only go on from a new one."""
        damaged = any(version_in(name) >= self._anchor[0] for name in self._store.quarantined())
        return damaged or self._num_since_anchor >= self._anchor_every

    def _latest_manifest(self) -> Manifest | None:
        try:
            return None if self._latest is None else self._store.manifest(self._latest)
        except CorruptSnapshot:
            # Nobody can tell any more what that version was, so these weights get a number of their own.
            return None

    def _find_anchor(self, manifest: Manifest) -> None:
        """Where the chain of an adopted version starts; an unreadable chain makes the next version an anchor."""
        self._num_since_anchor = 1
        try:
            while (full := manifest.full_pack()) is None and manifest.previous is not None and self._num_since_anchor < self._anchor_every:
                manifest = self._store.manifest(manifest.previous)
                self._num_since_anchor += 1
        except CorruptSnapshot:
            full = None
        if full is None:
            self._num_since_anchor = self._anchor_every
        else:
            self._anchor = (manifest.version, full.num_bytes)

    def _count(self, published: Published) -> None:
        with self._changed:
            now = self._stats
            self._stats = replace(
                now,
                num_published=now.num_published + 1,
                num_full=now.num_full + (published.kind is Kind.FULL),
                num_bytes=now.num_bytes + published.num_bytes,
                full_bytes=now.full_bytes + published.full_bytes,
                encode_s=now.encode_s + published.encode_s,
                write_s=now.write_s + published.write_s,
            )


def _entries(snapshot: Mapping[str, Bits], found: Fingerprint) -> tuple[TensorEntry, ...]:
    return tuple(
        TensorEntry(name=name, dtype=bits.dtype, shape=bits.shape, fingerprint=found.tensors[name]) for name, bits in snapshot.items()
    )


def _same_schema(old: Mapping[str, Bits], new: Mapping[str, Bits]) -> bool:
    return old.keys() == new.keys() and all((old[name].dtype, old[name].shape) == (bits.dtype, bits.shape) for name, bits in new.items())
