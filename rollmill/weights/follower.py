"""A replica's end: stages the newest version beside the live weights, and holds it only once the live weights prove it.

IDLE -> poll -> STAGED -> swap: apply, prove -> HELD        a failed proof: revert, prove the old version, serve on
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rollmill.weights.encode import num_workers
from rollmill.weights.errors import CorruptSnapshot, UnknownFormat, WrongBase, WrongWeights
from rollmill.weights.live import CellStager, CodedCell, LiveWeights, TensorPatch
from rollmill.weights.manifest import Lease, Route, Version, version_key
from rollmill.weights.mend import mend
from rollmill.weights.peer import load_from_peers
from rollmill.weights.proof import Fingerprint, Lanes, add, base_value, combine, from_hex, seeds_of, to_hex
from rollmill.weights.reader import Damaged, OpenRoute, TensorWork, advance, each_tensor, find_path
from rollmill.weights.schema import Schema
from rollmill.weights.stage import patch_of
from rollmill.weights.staged import FollowerStats, Staged
from rollmill.weights.store import WeightStore

log = logging.getLogger(__name__)
Agree = Callable[[dict[str, Lanes]], dict[str, Lanes]]
"""Joins the ranks of a sharded replica: the lane-wise sums over all of them, the same on each."""


@dataclass(frozen=True, kw_only=True)
class _HeldVersion:
    version: int
    schema: Schema
    fingerprint: Fingerprint


class Follower:
    """Follows one store for one engine. `poll` may run in a background thread while the engine serves; `swap` runs in the engine's own
    thread between two decode steps. There is no second copy of the weights: old values are read off the live ones.
    """

    def __init__(
        self,
        store: WeightStore,
        live: LiveWeights,
        *,
        replica: str = "",
        lease_s: float = 60.0,
        url: str = "",
        agree: Agree | None = None,
    ) -> None:
        self._store, self.live = store, live
        self._replica, self._lease_s, self._url, self._agree = replica, lease_s, url, agree
        self._lock = threading.Lock()
        self._staging = threading.Lock()
        self._held: _HeldVersion | None = None
        self.swaps = 0
        """Odd while a swap is under way; a reader of the live weights that sees the same even number twice read one version."""
        self._settled: int | None = None
        """The value of `latest` that was last staged or given up on."""
        self._stuck: frozenset[str] | None = None
        """What the store offered when `latest` could not be reached; once it offers something else, it is worth another look."""
        self._refused: dict[str, str] = {}
        self._noted: dict[str, str] = {}
        """What is damaged and could not be quarantined, since this process may not write."""
        self._stats = FollowerStats()
        self._timings: dict[str, float] = {}
        self._staged_version: int | None = None
        self._renewed = 0.0
        self._has_told = False
        """Whether the store heard that a version is served."""

    @property
    def version(self) -> int | None:
        """The version that the live weights last proved to be."""
        held = self._held
        return None if held is None else held.version

    @property
    def fingerprint(self) -> Fingerprint | None:
        held = self._held
        return None if held is None else held.fingerprint

    def stats(self) -> FollowerStats:
        with self._lock:
            return self._stats

    def poll(self) -> Staged | None:
        """The newest version that can be reached past the held one; None when there is none or it was staged before."""
        self._count(num_polls=1)
        try:
            pointer = self._store.latest()
            held = self._held
            if pointer is None or (pointer.version == self._settled and (self._stuck is None or self._stuck == self._offered())):
                return None
            if held is not None and pointer.version <= held.version:
                gone_back = f"the store went back to version {pointer.version}, this replica holds {held.version}"
                self._settle(pointer.version, gone_back if pointer.version < held.version else "")
                return None
            return self._stage(pointer.version, held)
        except (CorruptSnapshot, UnknownFormat) as error:
            self._say(str(error))
        except OSError as error:
            self._count(num_read_errors=1)
            self._say(f"cannot read the weight store: {error}")
        return None

    def bootstrap(self) -> Staged:
        """The newest version the store can prove, loaded into live weights that serve nothing; raises ValueError when there is none."""
        with self._lock:
            self._held, self._settled = None, None
        staged = self.poll()
        if staged is None:
            raise ValueError(
                f"the weight store {self._store} has no version to start from: {self.stats().problem or 'nothing was published yet'}"
            )
        return staged

    def swap(self, staged: Staged) -> Fingerprint:
        """Apply and prove `staged`; when the proof fails put the old version back, prove that, and raise WrongWeights."""
        self.swaps += 1
        try:
            return self._swap(staged)
        finally:
            self.swaps += 1

    def _swap(self, staged: Staged) -> Fingerprint:
        began = time.monotonic()
        self._refuse_wrong_base(staged)
        self.live.apply(staged.patch)
        live = self._prove(staged.schema)
        if live != staged.fingerprint:
            self._undo(staged, live)
        with self._lock:
            self._held = _HeldVersion(version=staged.version, schema=staged.schema, fingerprint=live)
            problem = self._stats.problem if self._settled != staged.version else ""
            self._timings = {**staged.timings_s, "swap": time.monotonic() - began}
        self._count(num_confirmed=1, problem=problem)
        return live

    def scrub(self) -> Staged | None:
        """Recompute the fingerprint of the live weights; None when they are what they should be, else a patch of only the bad cells.

        Apply the patch with `swap`. Call it between two decode steps.
        """
        held = self._held
        if held is None or (live := self._prove(held.schema)) == held.fingerprint:
            return None
        names = live.differing(held.fingerprint)
        self._say(f"the live weights of version {held.version} have changed under way: {', '.join(names[:3])}")
        with self._staging:
            return self._repair(held, names)

    def renew(self, now: float) -> bool:
        """Say in the store what is served here, when a third of the lease has passed; False when it was not time or failed."""
        held, stats = self._held, self.stats()
        # The first version is told at once: replicas that start with this one could take it from here.
        is_first = held is not None and not self._has_told
        if not self._replica or (now < self._renewed + self._lease_s / 3 and not is_first):
            return False
        lease = Lease(
            replica=self._replica, version=None if held is None else held.version,
            fingerprint="" if held is None else held.fingerprint.total, staging=self._staged_version, renewed=now,
            expires=now + self._lease_s, url=self._url, problem=stats.problem, timings_s=self._timings, num_swaps=stats.num_confirmed,
        )  # fmt: skip
        # Also after a failure: there are two more times to try before the lease ends.
        self._renewed, self._has_told = now, held is not None
        try:
            self._store.renew(lease)
        except OSError as error:
            # Without a lease a replica may lose its short way to the next version, which is no reason to stop following.
            self._count(num_lease_errors=1)
            log.warning("weights: the lease of replica %s could not be renewed: %s", self._replica, error)
            return False
        return True

    def _undo(self, staged: Staged, live: Fingerprint) -> None:
        names = live.differing(staged.fingerprint)
        message = f"version {staged.version} should show {staged.fingerprint.total}, the live weights show {live.total}"
        message += f"; {len(names)} tensors differ, first {', '.join(names[:3])}"
        self._count(num_wrong_weights=1)
        self._say(message)
        self.live.revert(staged.patch)
        held = self._held
        if held is None:
            raise WrongWeights(message, tensors=names)
        back = self._prove(held.schema)
        if back != held.fingerprint:
            lost = f"{message}; and version {held.version} could not be put back: stop serving and `bootstrap` again"
            raise WrongWeights(lost, tensors=back.differing(held.fingerprint), is_lost=True)
        raise WrongWeights(message, tensors=names)

    def _prove(self, schema: Schema) -> Fingerprint:
        """The fingerprint of the live weights, joined with that of the other ranks where there are any."""
        lanes = self.live.lanes()
        if self._agree is not None:
            lanes = self._agree(lanes)
        specs = {spec.name: spec for spec in schema.tensors}
        return combine({n: to_hex(add(base_value(seeds_of(n, s.dtype, s.shape)), lanes.get(n, (0, 0)))) for n, s in specs.items()})

    def _refuse_wrong_base(self, staged: Staged) -> None:
        held = self.version
        if held is not None and staged.version < held:
            raise WrongBase(f"version {staged.version} was staged before the replica moved on to {held}; drop it")
        if staged.base_version is not None and held not in (staged.base_version, staged.version):
            # What is dropped here must be staged again, even if nothing newer ever comes.
            self._settled = None
            raise WrongBase(f"version {staged.version} was staged on {staged.base_version}, the replica holds {held}; poll again")

    def _stage(self, latest: int, held: _HeldVersion | None) -> Staged | None:
        """Read and prove a path to `latest`, going round what turns out to be damaged."""
        with self._staging:
            # Asked anew each time: what was mended and released may be used again.
            self._refused = self._noted | self._store.quarantined()
            self._staged_version = latest
            try:
                return self._stage_alone(latest, held)
            finally:
                self._staged_version = None

    def _stage_alone(self, latest: int, held: _HeldVersion | None) -> Staged | None:
        base: int | None = None if held is None else held.version
        record: Version | None = None
        while True:
            planning = time.monotonic()
            try:
                if (record := self._target(latest, -1 if held is None else held.version)) is None:
                    self._settle(latest, self._stranded(latest), is_stuck=True)
                    return None
                schema = self._check_schema(self._store.schema(record.schema))
                fits = held is not None and held.schema.digest == record.schema
                path = find_path(self._store, record.version, held=base if fits else None, refused=self._refused, schema=record.schema)
                if path is None:
                    self._refuse(version_key(record.version), f"no route to version {record.version} is left", mark=False)
                    continue
                staged = self._prepare(record, schema, path, held, planning)
            except Damaged as damaged:
                self._refuse(damaged.key, damaged.reason)
                continue
            except WrongBase as error:
                if base is None:
                    assert record is not None, "only routes to a version can have a wrong base"
                    self._refuse(version_key(record.version), f"its routes do not give what it promises: {error}", mark=False)
                    continue
                # A path from a full route brings its own bases along, so this is the live copy's fault and happens once.
                base = None
                self._count(num_wrong_base=1)
                self._say(f"the live weights are not what was published ({error}); starting from a full route")
                continue
            self._settle(latest, "" if record.version == latest else self._stranded(latest), is_stuck=record.version != latest)
            self._count(num_staged=1, bytes_read=staged.bytes_read)
            return staged

    def _target(self, latest: int, floor: int) -> Version | None:
        """The newest version on the line from `latest` back that is not known to be out of reach."""
        at: int | None = latest
        while at is not None and at > floor:
            try:
                record = self._store.version(at)
            except CorruptSnapshot as error:
                # Without its record nobody can prove a version, nor follow the line further back: take what is listed before it.
                self._refuse(version_key(at), str(error))
                at = max((v for v in self._store.versions() if floor < v < at), default=None)
                continue
            if version_key(at) not in self._refused:
                return record
            at = record.previous if at > self._store.floor().version else None
        return None

    def _prepare(self, record: Version, schema: Schema, path: Sequence[Route], held: _HeldVersion | None, planning: float) -> Staged:
        fetching = time.monotonic()
        if held is None and self._loaded_from_peer(record, schema):
            path = ()
        hops = [OpenRoute(self._store, route) for route in path if route.packs]
        workers, parts, expected = num_workers(schema.num_bytes), self.live.held(), record.print_of(schema)
        if held is None:
            for _ in each_tensor(hops, schema, parts, self._load, workers=workers):
                pass
            num_changed, patch = sum(part.region.num_elements for part in parts.values()), self.live.stage([])
        elif isinstance(self.live, CellStager) and len(hops) == 1 and path[0].base is not None:
            num_changed, patch = self._stage_where_they_lie(self.live, hops, schema)
        else:
            fresh = bool(path) and path[0].base is None
            patches = list(each_tensor(hops, schema, parts, lambda work: self._patch(work, fresh), workers=workers))
            if self._agree is None and not fresh:
                self._check_patches(patches, held.fingerprint, expected)
            num_changed, patch = sum(len(p.positions) for p in patches), self.live.stage(patches)
        done = time.monotonic()
        return Staged(
            version=record.version, step=record.step, base_version=None if held is None else held.version, schema=schema,
            fingerprint=expected, num_changed=num_changed, bytes_read=sum(hop.bytes_read for hop in hops),
            num_packs=sum(len(r.packs) for r in path), patch=patch,
            timings_s={"plan": fetching - planning, "fetch_decode": done - fetching},
        )  # fmt: skip

    def _stage_where_they_lie(self, live: CellStager, hops: Sequence[OpenRoute], schema: Schema) -> tuple[int, Any]:
        """One delta, decoded by the device that holds the weights; no weight comes to the host."""
        works = each_tensor(hops, schema, live.held(), lambda work: work, workers=1)
        found = [(work.held.spec.name, cell, steps[0]) for work in works for cell, _, steps in work.cells]
        cells = [CodedCell(name=name, cell=cell, payload=payload) for name, cell, (_, _, payload) in found]
        try:
            staged = live.stage_cells(cells)
        except CorruptSnapshot as error:
            # Every payload is the one that was published, so it is the live weights that are not its base.
            raise WrongBase(f"the live weights do not take the delta: {error}") from error
        return sum(entry.num_changed for _, _, (_, entry, _) in found), staged

    def _loaded_from_peer(self, record: Version, schema: Schema) -> bool:
        joined = load_from_peers(self._store, self.live, record, schema, replica=self._replica)
        self._count(num_from_peer=int(joined.is_loaded), num_peers_failed=joined.num_failed)
        return joined.is_loaded

    def _load(self, work: TensorWork) -> None:
        data = np.zeros(work.held.num_bytes, np.uint8)
        advance(work, data)
        self.live.load(work.held.spec.name, data)

    def _patch(self, work: TensorWork, fresh: bool) -> TensorPatch:
        return patch_of(work, self.live.read(work.held.spec.name), fresh=fresh)

    def _check_patches(self, patches: Sequence[TensorPatch], now: Fingerprint, expected: Fingerprint) -> None:
        """O(changes): the proved fingerprint of the live weights plus what the patches add must be the version's.

        After a full route every cell was proved by itself, and what is live may be anything.
        """
        values = dict(now.tensors)
        for patch in patches:
            spec = patch.held.spec
            lanes = patch.lanes(seeds_of(spec.name, spec.dtype, spec.shape))
            values[spec.name] = to_hex(add(from_hex(values[spec.name]), lanes))
        if wrong := combine(values).differing(expected):
            raise WrongBase(f"{len(wrong)} tensors would not become those of the version, first {', '.join(wrong[:3])}")

    def _repair(self, held: _HeldVersion, names: Sequence[str]) -> Staged:
        planning = time.monotonic()
        record = self._store.version(held.version)
        mended = mend(self._store, self.live, record, held.schema, names, refused=self._refused)
        self._count(num_repaired_cells=mended.num_bad)
        patch = self.live.stage(mended.patches)
        return Staged(
            version=held.version, step=record.step, base_version=held.version, schema=held.schema, fingerprint=held.fingerprint,
            num_changed=sum(len(p.positions) for p in mended.patches), bytes_read=mended.bytes_read, num_packs=mended.num_packs,
            timings_s={"repair": time.monotonic() - planning}, patch=patch,
        )  # fmt: skip

    def _check_schema(self, schema: Schema) -> Schema:
        """The live tensors must be those of the schema: a replica of another model is a mistake to be told, not retried."""
        mine = {name: (held.spec.dtype, held.spec.shape) for name, held in self.live.held().items()}
        theirs = {spec.name: (spec.dtype, spec.shape) for spec in schema.tensors}
        if self._agree is None and mine != theirs:
            names = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
            first = names[0]
            raise CorruptSnapshot(
                f"{len(names)} tensors of this replica are not those of the store, first {first}: here {mine.get(first)}, "
                f"published {theirs.get(first)}; start the replica with the model that is trained"
            )
        return schema

    def _refuse(self, key: str, reason: str, *, mark: bool = True) -> None:
        self._refused[key] = reason
        marked = mark and self._store.quarantine(key, reason)
        if mark and not marked:
            self._noted[key] = reason
        self._count(num_quarantined=int(mark))
        done = "quarantined" if marked else "noted here only"
        log.error("weights: %s is unusable (%s); %s", key, reason, done)

    def _stranded(self, latest: int) -> str:
        reasons = "; ".join(f"{key}: {why}" for key, why in sorted(self._refused.items())[-3:])
        return f"version {latest} cannot be reached from {self.version} ({reasons or 'no path'}); waiting for the next full route"

    def _settle(self, latest: int, problem: str, *, is_stuck: bool = False) -> None:
        self._settled = latest
        self._stuck = self._offered() if is_stuck else None
        self._say(problem)

    def _offered(self) -> frozenset[str]:
        """The routes past what is held, and what must not be used: when neither changes, a second look finds the same."""
        after = -1 if self.version is None else self.version
        return frozenset(name.key for name in self._store.routes(after=after)) | self._store.quarantined().keys()

    def _say(self, problem: str) -> None:
        with self._lock:
            news = problem and problem != self._stats.problem
            self._stats = replace(self._stats, problem=problem)
        if news:
            log.error("weights: %s", problem)

    def _count(self, *, problem: str | None = None, **more: int) -> None:
        with self._lock:
            grown: Mapping[str, Any] = {name: getattr(self._stats, name) + by for name, by in more.items()}
            self._stats = replace(self._stats, **grown)
            if problem is not None:
                self._stats = replace(self._stats, problem=problem)
