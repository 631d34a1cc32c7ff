"""The trainer's end: numbered snapshots leave in a background thread, each after the other, and no failure stays silent."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType

import torch

from rollmill.weights.bits import dtype_name
from rollmill.weights.encode import commit
from rollmill.weights.errors import CorruptSnapshot, PublishFailed
from rollmill.weights.manifest import Kind, Pointer, Route, Version
from rollmill.weights.proof import Fingerprint, fingerprint
from rollmill.weights.reader import materialise
from rollmill.weights.schema import Schema, make_schema
from rollmill.weights.snapshot import HostSnapshot, Snapshot, SnapshotTaker
from rollmill.weights.store import WeightStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Published:
    """One version that replicas may now take."""

    version: int
    step: int
    kind: Kind
    """FULL when every replica must read everything, DELTA otherwise."""
    num_bytes: int
    """Bytes of packs written to the store."""
    delta_bytes: int | None
    """Bytes that a replica holding the version before has to read; None without a delta."""
    full_bytes: int
    """Bytes of all tensors in the serving dtype, uncompressed."""
    num_changed: int
    """Elements that differ from the version before."""
    fingerprint: Fingerprint
    encode_s: float
    """Coding and writing packs, which overlap."""
    write_s: float
    """Writing route, version and pointer."""


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
    snapshot: Snapshot


@dataclass(frozen=True, kw_only=True)
class _Base:
    version: int
    snapshot: Snapshot


class Publisher:
    """Publishes what it is given, in order; one snapshot may be in work and one may wait.

    The first version is full, every other one a delta on the version before; folds and anchors are the compactor's work. Only when a
    replica has found damage since the last full route does the publisher add one, since it alone can still vouch for the bytes.
    """

    def __init__(
        self,
        store: WeightStore,
        *,
        run_id: str,
        on_published: Callable[[Published], None] = lambda published: None,
        row_cuts: Mapping[str, tuple[int, ...]] | None = None,
        col_cuts: Mapping[str, tuple[int, ...]] | None = None,
        quantiser: str = "",
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._writer = f"{socket.gethostname()}-{os.getpid()}"
        self._on_published = on_published
        self._row_cuts, self._col_cuts = row_cuts, col_cuts
        self._quantiser = quantiser
        self._snapshots = SnapshotTaker()
        pointer = _pointer(store)
        self._latest = None if pointer is None else pointer.version
        self._epoch = 0 if pointer is None else pointer.epoch
        self._base: _Base | None = None
        self._damaged: set[str] = set()
        """Quarantined objects that a full route was made for. Those from before this trainer started may have cut replicas off too."""
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
            snapshot = self._snapshots.take(self._schema(tensors), tensors)
            version = self._store.reserve()
            with self._changed:
                self._raise_error()
                self._pending = _Job(version=version, step=step, snapshot=snapshot)
                self._changed.notify_all()
            return version

    def resume(self, tensors: Mapping[str, torch.Tensor], *, step: int, timeout_s: float = 600.0) -> int:
        """The version of these weights: that of `latest` when they are the same bits, otherwise a new one, durable on return.

        A new one begins a new epoch: whatever was published after the trainer's checkpoint is history that nobody continues.
        """
        assert self._base is None and self._stats.num_pending == 0, "resume comes before the first submit"
        record = self._latest_record()
        if record is not None:
            schema = self._schema(tensors)
            if record.schema == schema.digest and record.fingerprint == fingerprint(tensors).total:
                self._base = _Base(version=record.version, snapshot=self._snapshots.take(schema, tensors))
                return record.version
            self._base = self._rebuilt(record, schema)
        if self._latest is not None:
            self._epoch += 1
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
            raise TimeoutError(f"waited {timeout_s:.0f} s for {what}; the store {self._store} is slow or gone: see its disk or network")
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
        snapshot, schema = job.snapshot, job.snapshot.schema
        base = self._base if self._base is not None and self._base.snapshot.schema == schema else None
        kind, base_version = (Kind.FULL, None) if base is None else (Kind.DELTA, base.version)
        part = snapshot.write(self._store, version=job.version, base=base_version, old=None if base is None else base.snapshot)
        num_bytes, committing = part.num_bytes, time.monotonic()
        if base is not None and self._is_damaged():
            num_bytes += self._add_full(job)
        record = commit(
            self._store, schema, [part], kind=kind, version=job.version, base=base_version,
            expected=self._latest, step=job.step, run_id=self._run_id, writer=self._writer, epoch=self._epoch,
        )  # fmt: skip
        if self._base is not None:
            self._base.snapshot.release()
        self._latest, self._base = job.version, _Base(version=job.version, snapshot=snapshot)
        published = Published(
            version=job.version,
            step=job.step,
            kind=kind,
            num_bytes=num_bytes,
            delta_bytes=None if base is None else part.num_bytes,
            full_bytes=record.raw_bytes,
            num_changed=record.num_changed,
            fingerprint=record.print_of(schema),
            encode_s=part.encode_s,
            write_s=time.monotonic() - committing,
        )
        self._count(published)
        self._on_published(published)

    def _add_full(self, job: _Job) -> int:
        """A second route to the same version, for replicas that damage has cut off."""
        part = job.snapshot.write(self._store, version=job.version, base=None, old=None)
        route = Route(
            kind=Kind.FULL, version=job.version, base=None, schema=job.snapshot.schema.digest, packs=part.packs,
            writer=self._writer, created=time.time(),
        )  # fmt: skip
        self._store.add_route(route)
        return part.num_bytes

    def _is_damaged(self) -> bool:
        before, self._damaged = self._damaged, set(self._store.quarantined())
        return bool(self._damaged - before)

    def _schema(self, tensors: Mapping[str, torch.Tensor]) -> Schema:
        triples = ((name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items())
        return make_schema(triples, row_cuts=self._row_cuts, col_cuts=self._col_cuts, quantiser=self._quantiser)

    def _latest_record(self) -> Version | None:
        try:
            return None if self._latest is None else self._store.version(self._latest)
        except CorruptSnapshot:
            # Nobody can tell any more what that version was, so these weights get a number of their own.
            return None

    def _rebuilt(self, record: Version, schema: Schema) -> _Base | None:
        """The published bytes of a version, so that replicas need only the difference to other weights."""
        if record.schema != schema.digest:
            return None
        try:
            _, _, data = materialise(self._store, record.version)
        except CorruptSnapshot as error:
            log.warning("version %d cannot be rebuilt (%s); the next version is a full one", record.version, error)
            return None
        return _Base(version=record.version, snapshot=HostSnapshot(schema, data))

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


def _pointer(store: WeightStore) -> Pointer | None:
    """Where to go on. A pointer lost with versions published would begin a second line beside the first, so it is put back."""
    pointer = store.latest()
    if pointer is None and (published := store.versions()):
        store.repoint(store.version(published[-1]))
        return store.latest()
    return pointer
