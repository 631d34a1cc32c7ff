"""Adds shorter ways to published versions, folds over several steps and full anchors; it never moves `latest` nor removes a way.

A route is added only after its pack was read back and gave the version's fingerprint, so a compactor killed anywhere leaves at most
a pack that nobody names. Two at once build the same packs under the same keys.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Container, Iterable, Sequence
from enum import StrEnum

import msgspec
import numpy as np

from rollmill.weights.encode import write_part
from rollmill.weights.errors import CorruptSnapshot, WrongBase
from rollmill.weights.manifest import Declined, Kind, Route, RouteName, Version, pack_key
from rollmill.weights.plan import plan, reachable
from rollmill.weights.reader import materialise, replay
from rollmill.weights.schema import Schema
from rollmill.weights.shard import all_of
from rollmill.weights.store import Place, WeightStore


class CostModel(msgspec.Struct, frozen=True, kw_only=True):
    """When a shorter way pays for itself."""

    spans: tuple[int, ...] = (4, 16, 64)
    """Versions under one fold, each a multiple of the one before. Changes flicker: on real optimiser steps a fold of 4 is 34-38 % and a
    fold of 16 is 59-66 % smaller than its chain. With three levels a replica n versions behind makes about 3 hops a level, not n."""
    anchor_replay: float = 0.3
    """Bytes a joiner reads after the full route, as a share of it, at which a new full one is due. A joiner then reads at most 1.3 full
    snapshots, and with deltas of a hundredth of a full one the store writes few anchors."""
    anchor_versions: int = 128
    """The same in versions on the line: bounds how far back collection must keep when deltas are tiny."""
    retry_s: float = 600.0
    """A way that could not be built for damage is tried again after this long, since damage gets mended."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A route that is worth having: a fold from `base`, or with None a full one."""

    version: int
    base: int | None

    @property
    def kind(self) -> Kind:
        return Kind.FULL if self.base is None else Kind.FOLD

    @property
    def pack_key(self) -> str:
        return pack_key(self.version, self.kind, base=self.base, rank=0)


class Outcome(StrEnum):
    ADDED = "added"
    DECLINED = "declined"
    """A fold that is not smaller than the routes it would replace."""
    FAILED = "failed"
    """Its base or its version could not be rebuilt, or its pack did not prove itself."""


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one wanted route."""

    wanted: Wanted
    outcome: Outcome
    num_bytes: int = 0
    replaced_bytes: int = 0
    """Of the cheapest way from the base (for an anchor: from nothing) before this one."""
    reason: str = ""

    def __str__(self) -> str:
        way = f"version {self.wanted.version} " + ("in full" if self.wanted.base is None else f"from {self.wanted.base}")
        sizes = f" {self.num_bytes} bytes, without it {self.replaced_bytes}" if self.num_bytes else ""
        return f"{self.outcome} {self.wanted.kind} to {way}:{sizes}{f' {self.reason}' if self.reason else ''}"


def due(
    routes: Iterable[RouteName],
    line: Sequence[Place],
    *,
    cost: CostModel = CostModel(),
    refused: Container[str] = (),
    skip: Container[Wanted] = (),
) -> list[Wanted]:
    """What to build now, in the order that keeps rebuilding small: folds, short ones first, and an anchor only when no fold is missing.

    `line` is the published line, oldest first; `refused` names routes that are damaged; `skip` is what was tried.
    """
    listed = list(routes)
    usable = [route for route in listed if route.key not in refused]
    known = {Wanted(version=route.version, base=route.base) for route in listed}
    reached = reachable(usable)
    changes = [0]
    for before, after in itertools.pairwise(line):
        changes.append(changes[-1] + (before.schema != after.schema))
    folds = []
    for span in cost.spans:
        for index in range(span, len(line)):
            wanted = Wanted(version=line[index].version, base=line[index - span].version)
            if line[index].position % span or changes[index] != changes[index - span] or wanted in known or wanted in skip:
                continue
            if {wanted.version, wanted.base} <= reached:
                folds.append(wanted)
    if folds or not line:
        return folds
    anchor = Wanted(version=line[-1].version, base=None)
    return [anchor] if anchor not in known and anchor not in skip and _needs_anchor(usable, line, cost) else []


class Compactor:
    """Builds what is due when `step` is called. Holds one version's bytes between steps and two at most while it builds."""

    def __init__(self, store: WeightStore, *, writer: str = "", cost: CostModel = CostModel()) -> None:
        self._store, self._cost = store, cost
        self._writer = writer or f"{socket.gethostname()}-{os.getpid()}"
        self._line: list[Place] = []
        self._held: dict[int, dict[str, np.ndarray]] = {}
        self._retry_after: dict[Wanted, float] = {}

    def step(self, now: float) -> list[Done]:
        """Everything that is due for the line as it is now. Raises CorruptSnapshot when the line itself cannot be read."""
        self._line = self._store.line(known=self._line)
        self._retry_after = {wanted: after for wanted, after in self._retry_after.items() if after > now}
        refused = self._store.quarantined()
        skip = self._retry_after.keys() | {Wanted(version=old.version, base=old.base) for old in self._store.declined()}
        # A pack that awaits deletion would be deleted under its new route: it is built again once it is gone.
        doomed = {key for tombstone in self._store.tombstones() for key in tombstone.packs}
        done: list[Done] = []
        while wanted := due(self._store.routes(), self._line, cost=self._cost, refused=refused, skip=skip):
            skip |= set(wanted)
            done += [self._make(one, now) for one in wanted if one.pack_key not in doomed]
        self._held = {version: self._held[version] for version in sorted(self._held)[-1:]}
        return done

    def _make(self, wanted: Wanted, now: float) -> Done:
        try:
            return self._build(wanted, now)
        except (CorruptSnapshot, WrongBase) as error:
            # Half-patched bytes may be among them.
            self._held.clear()
            self._retry_after[wanted] = now + self._cost.retry_s
            return Done(wanted=wanted, outcome=Outcome.FAILED, reason=str(error))

    def _build(self, wanted: Wanted, now: float) -> Done:
        record = self._store.version(wanted.version)
        schema = self._store.schema(record.schema)
        old = None if wanted.base is None else self._bytes(wanted.base, beside=wanted.version)
        new = self._bytes(wanted.version, beside=wanted.base)
        part = write_part(
            self._store, schema, kind=wanted.kind, version=wanted.version, base=wanted.base, held=all_of(schema), new=new, old=old
        )
        routes = self._store.routes()
        others = [route for route in routes if (route.version, route.base) != (wanted.version, wanted.base)]
        path = plan(others, held=wanted.base, target=wanted.version, refused=self._store.quarantined()) or []
        num_bytes, replaced_bytes = part.num_bytes, sum(route.num_bytes for route in path)
        if wanted.base is not None and num_bytes >= replaced_bytes:
            self._decline(
                Declined(version=wanted.version, base=wanted.base, num_bytes=num_bytes, chain_bytes=replaced_bytes),
                wanted,
                [pack.key for pack in part.packs],
            )
            return Done(wanted=wanted, outcome=Outcome.DECLINED, num_bytes=num_bytes, replaced_bytes=replaced_bytes)
        route = Route(
            kind=wanted.kind, version=wanted.version, base=wanted.base, schema=schema.digest, packs=part.packs,
            writer=self._writer, created=now,
        )  # fmt: skip
        self._prove(route, record, schema)
        self._store.add_route(route)
        return Done(wanted=wanted, outcome=Outcome.ADDED, num_bytes=num_bytes, replaced_bytes=replaced_bytes)

    def _bytes(self, version: int, *, beside: int | None) -> dict[str, np.ndarray]:
        """The proved bytes of a version, forward from what is in memory where that is nearer than from the store."""
        if version not in self._held:
            older = max((held for held in self._held if held < version), default=None)
            # Two copies of all weights are the most this process may take, and one is about to be made.
            stays = beside if beside in self._held else older
            self._held = {} if stays is None else {stays: self._held[stays]}
            start = (stays, self._held[stays]) if stays is not None and stays < version else None
            self._held[version] = materialise(self._store, version, start=start)[2]
        return self._held[version]

    def _prove(self, route: Route, record: Version, schema: Schema) -> None:
        """Read the pack back. The base's bytes are used up by it, which saves a third copy."""
        if route.base is None:
            self._held = {record.version: self._held[record.version]}
        replay(self._store, route, record, schema, None if route.base is None else self._held.pop(route.base))

    def _decline(self, declined: Declined, wanted: Wanted, packs: list[str]) -> None:
        self._store.decline(declined)
        if all((route.version, route.base) != (wanted.version, wanted.base) for route in self._store.routes()):
            self._store.objects.delete(packs)


def _needs_anchor(usable: Sequence[RouteName], line: Sequence[Place], cost: CostModel) -> bool:
    latest = line[-1]
    path = plan(usable, held=None, target=latest.version)
    if path is None:
        return False
    full, *rest = path
    positions = {place.version: place.position for place in line}
    # A full route of a version that has left the line hangs on a tag or a lease, which may go at any time.
    since = latest.position - positions[full.version] if full.version in positions else cost.anchor_versions
    return sum(route.num_bytes for route in rest) >= cost.anchor_replay * full.num_bytes or since >= cost.anchor_versions
