"""The seam between trainer and replicas: immutable packs, routes and versions, and one `latest` that moves by compare-and-swap.

Packs are durable before their route, the route before its version, the version before the pointer; a number once reserved is
never given out again. Knows nothing of tensors: it moves bytes and sealed records over any `Objects`.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from rollmill.weights.errors import CorruptSnapshot, LatestMoved
from rollmill.weights.manifest import (
    Declined,
    Floor,
    Lease,
    PackRef,
    Pointer,
    Quarantine,
    Record,
    Route,
    RouteName,
    Tag,
    Tombstone,
    Version,
    check_name,
    route_in,
    schema_key,
    seal,
    unseal,
    version_in,
    version_key,
)
from rollmill.weights.objects import ObjectMissing, Objects, ReadOnly, SwapLost, open_objects
from rollmill.weights.pack import Coded, PackWriter
from rollmill.weights.schema import Schema

LATEST, RESERVED, FLOOR = "latest.json", "reserved.json", "floor.json"
_RESERVE_TRIES = 100
_UNDER_WAY = 16
"""Numbers given out without a trace yet: a publisher has two at most, a roll-back one."""


def open_store(where: str | os.PathLike[str]) -> WeightStore:
    """A directory, or a bucket as `s3://bucket/prefix?endpoint=...`; made on first use."""
    return WeightStore(open_objects(where))


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One version's place on the line of what was served."""

    position: int
    """How many were served before it, those long collected included: it stays what it is."""
    version: int
    schema: str
    created: float


def find_store(where: str, *, may_be_new: bool = False) -> WeightStore:
    """What a person means by a store: a URL, its directory, or the directory of a run that keeps one in `weights/`."""
    if "://" in where:
        return open_store(where)
    path = Path(where)
    inside = path / "weights"
    if inside.is_dir() and not (path / LATEST).exists():
        return open_store(inside)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; give the directory of a store or of a run")
    if not may_be_new and not path.is_dir():
        raise ValueError(f"there is no {path}; give a store or a run directory")
    return open_store(path)


class WeightStore:
    """What a publisher, a replica and the operations need, in terms of records."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self._schema = functools.lru_cache(maxsize=16)(self._read_schema)

    def __str__(self) -> str:
        return self.objects.describe()

    # What is published.

    def latest(self) -> Pointer | None:
        """The version replicas should move to; None before the first."""
        return self._pointer(LATEST)[0]

    def version(self, version: int) -> Version:
        found = self._read(version_key(version), Version)
        if found.version != version:
            raise CorruptSnapshot(f"{version_key(version)} in {self} describes version {found.version}")
        if found.previous is not None and found.previous >= version:
            # Whoever walks back along the line would not come to an end.
            raise CorruptSnapshot(f"version {version} in {self} claims to follow version {found.previous}")
        return found

    def versions(self, *, after: int = -1) -> list[int]:
        """Every version with a record, ascending, whether or not `latest` ever pointed at it."""
        keys = self.objects.list("versions/", after=version_key(after) if after >= 0 else "")
        return sorted(number for key in keys if (number := version_in(key)) is not None)

    def lineage(self, *, start: int | None = None) -> Iterator[Version]:
        """From `start` (or latest) back through everything that was ever served, down to the floor."""
        return self._back(start, self.floor())

    def _back(self, start: int | None, floor: Floor) -> Iterator[Version]:
        pointer = self.latest() if start is None else None
        at = start if start is not None else (pointer.version if pointer else None)
        while at is not None:
            found = self.version(at)
            yield found
            at = found.previous if at > floor.version else None

    def line(self, *, known: Sequence[Place] = ()) -> list[Place]:
        """The lineage of latest, oldest first. What `known`, a line seen before, holds already is not read again."""
        seen = {place.version: index for index, place in enumerate(known)}
        fresh: list[Version] = []
        older: Sequence[Place] = ()
        # One floor for the walk and for the count: a collector may raise it in between.
        floor = self.floor()
        for record in self._back(None, floor):
            if record.version in seen:
                older = known[: seen[record.version] + 1]
                break
            fresh.append(record)
        first = floor.position if fresh and fresh[-1].version == floor.version else 0
        first = older[-1].position + 1 if older else first
        newer = [
            Place(position=first + index, version=record.version, schema=record.schema, created=record.created)
            for index, record in enumerate(reversed(fresh))
        ]
        return [place for place in (*older, *newer) if place.version >= floor.version]

    def floor(self) -> Floor:
        """Where the line begins; below every version until something was collected."""
        try:
            return self._unsealed(FLOOR, Floor, f"{FLOOR} in {self}")[0]
        except ObjectMissing:
            return Floor(version=-1, position=0)

    def schema(self, digest: str) -> Schema:
        return self._schema(digest)

    def routes(self, *, after: int = -1) -> list[RouteName]:
        """Ways to versions past `after`, from one listing; what a route holds is read only when it is taken."""
        keys = self.objects.list("routes/", after=f"routes/{after + 1:08d}" if after >= 0 else "")
        return [name for key in keys if (name := route_in(key)) is not None]

    def route(self, name: RouteName) -> Route:
        found = self._read(name.key, Route)
        if found.name != name:
            raise CorruptSnapshot(f"{name.key} in {self} describes another route")
        return found

    # Publishing.

    def reserve(self) -> int:
        """A version number that nobody was given before or will be given again."""
        for _ in range(_RESERVE_TRIES):
            number, tag = self._last_number()
            # An old copy of the counter must not give out published numbers: the packs of those would be written over.
            with suppress(CorruptSnapshot):
                number = max(number, -1 if (pointer := self.latest()) is None else pointer.version)
            try:
                self.objects.swap(RESERVED, seal(Pointer(version=number + 1)), expected=tag)
            except SwapLost:
                continue
            return number + 1
        raise LatestMoved(f"no version number could be reserved in {self} in {_RESERVE_TRIES} tries; too many writers share it")

    def renumber(self) -> int:
        """Put `reserved` past every number that was used, when it is lost, damaged or an old copy; where it stands then."""
        for _ in range(_RESERVE_TRIES):
            number, tag = self._last_number()
            number = max(number, self._highest_trace())
            try:
                self.objects.swap(RESERVED, seal(Pointer(version=number)), expected=tag)
            except SwapLost:
                continue
            return number
        raise LatestMoved(f"{RESERVED} in {self} could not be moved in {_RESERVE_TRIES} tries; too many writers share it")

    def put_schema(self, schema: Schema) -> None:
        """Only who has the tensors knows the table: a damaged one is mended by the next version or never, so it is read each time."""
        try:
            self._read_schema(schema.digest)
        except CorruptSnapshot:
            self.objects.put(schema_key(schema.digest), [seal(schema)])

    def put_pack(self, writer: PackWriter, cells: Iterable[Coded]) -> PackRef:
        """Durable when it returns."""
        self.objects.put(writer.key, writer.stream(cells))
        assert writer.ref is not None, "the stream was read to its end"
        return writer.ref

    def add_route(self, route: Route) -> None:
        """Make one more way known; the packs must be there. Writing the same route again changes nothing."""
        self.objects.put(route.name.key, [seal(route)])

    def publish(self, version: Version, *, expected: int | None) -> None:
        """Write the version, then move `latest` from `expected` to it. Raises LatestMoved when it is elsewhere."""
        pointer, tag = self._pointer(LATEST)
        current = None if pointer is None else pointer.version
        if current != expected:
            raise LatestMoved(self._moved(version.version, current, expected))
        assert current is None or version.version > current, "versions only grow"
        if not self.objects.create(version.key, seal(version)):
            raise LatestMoved(f"version {version.version} was already published in {self} by another writer")
        try:
            self.objects.swap(LATEST, seal(Pointer(version=version.version, epoch=version.epoch)), expected=tag)
        except SwapLost as lost:
            now = self._pointer(LATEST)[0]
            raise LatestMoved(self._moved(version.version, None if now is None else now.version, expected)) from lost

    # What must not be used.

    def quarantine(self, target: str, reason: str) -> bool:
        """Take an object out of use for everybody; False when this process may not write here."""
        record = Quarantine(target=target, reason=reason, created=time.time())
        try:
            self.objects.put(record.key, [seal(record)])
        except ReadOnly:
            return False
        return True

    def release(self, target: str) -> None:
        self.objects.delete([Quarantine(target=target, reason="", created=0.0).key])

    def quarantined(self) -> dict[str, str]:
        """key -> reason."""
        return {record.target: record.reason for record in self._all("quarantine/", Quarantine)}

    def decline(self, declined: Declined) -> None:
        self.objects.put(declined.key, [seal(declined)])

    def declined(self) -> list[Declined]:
        """Folds that are not worth their bytes."""
        return self._all("declined/", Declined)

    # Who uses what.

    def renew(self, lease: Lease) -> None:
        check_name(lease.replica, "replica name")
        self.objects.put(lease.key, [seal(lease)])

    def leases(self) -> list[Lease]:
        """All of them, also the expired ones; a damaged one is no lease."""
        return self._all("leases/", Lease)

    def tag(self, tag: Tag) -> None:
        check_name(tag.name, "tag")
        self.objects.put(tag.key, [seal(tag)])

    def untag(self, name: str) -> None:
        self.objects.delete([f"tags/{check_name(name, 'tag')}.json"])

    def tags(self) -> list[Tag]:
        return self._all("tags/", Tag)

    def tombstones(self) -> list[Tombstone]:
        return self._all("tombstones/", Tombstone)

    def raise_floor(self, floor: Floor) -> None:
        """Let the line begin at a later version; one that begins later already, or a damaged floor, is dealt with."""
        for _ in range(_RESERVE_TRIES):
            try:
                data, tag = self.objects.get(FLOOR)
            except ObjectMissing:
                data, tag = b"", None
            try:
                if data and unseal(data, Floor, FLOOR).version >= floor.version:
                    return
            except CorruptSnapshot:
                # Its content is lost and does not matter: the new floor replaces it.
                pass
            try:
                self.objects.swap(FLOOR, seal(floor), expected=tag)
            except SwapLost:
                continue
            return
        raise LatestMoved(f"{FLOOR} in {self} could not be moved in {_RESERVE_TRIES} tries; too many collectors share it")

    def _all(self, prefix: str, kind: type[Record]) -> list[Record]:
        found = []
        for key in self.objects.list(prefix):
            try:
                found.append(self._read(key, kind))
            except CorruptSnapshot:
                # Gone between listing and reading, or torn; the check of the store names the second.
                continue
        return found

    def _read(self, key: str, kind: type[Record]) -> Record:
        try:
            return self._unsealed(key, kind, f"{key} in {self}")[0]
        except ObjectMissing as missing:
            raise CorruptSnapshot(f"{key} is missing in {self}") from missing

    def _unsealed(self, key: str, kind: type[Record], what: str) -> tuple[Record, str]:
        data, tag = self.objects.get(key)
        try:
            return unseal(data, kind, what), tag
        except CorruptSnapshot:
            # A second read before the object is blamed: the first may have met a bad cable.
            data, tag = self.objects.get(key)
            return unseal(data, kind, what), tag

    def _read_schema(self, digest: str) -> Schema:
        found = self._read(schema_key(digest), Schema)
        if found.digest != digest:
            raise CorruptSnapshot(f"{schema_key(digest)} in {self} holds another schema")
        return found

    def _pointer(self, key: str) -> tuple[Pointer | None, str | None]:
        hint = f"{key} in {self} (`rollmill weights fsck --repair` points it at the newest whole version)"
        try:
            return self._unsealed(key, Pointer, hint)
        except ObjectMissing:
            return None, None

    def repoint(self, version: Version) -> None:
        """Put `latest` on a published version when its own bytes are lost or damaged; an intact pointer is left alone."""
        try:
            assert self.latest() is None, "an intact pointer moves by publishing only"
            tag = None
        except CorruptSnapshot:
            tag = self.objects.get(LATEST)[1]
        self.objects.swap(LATEST, seal(Pointer(version=version.version, epoch=version.epoch)), expected=tag)

    def _last_number(self) -> tuple[int, str | None]:
        """The number given out last, and the tag of the object that says so."""
        tag = None
        try:
            # The tag is that of the bytes judged, so that a number somebody else mends meanwhile is not overwritten.
            for _ in range(2):
                data, tag = self.objects.get(RESERVED)
                with suppress(CorruptSnapshot):
                    return unseal(data, Pointer, RESERVED).version, tag
        except ObjectMissing:
            tag = None
        # Lost with its disk block: what left a trace was given out, and a few more may be under way without one.
        highest = self._highest_trace()
        return highest + (_UNDER_WAY if highest >= 0 else 0), tag

    def _highest_trace(self) -> int:
        numbers = [-1, *self.versions(), *(name.version for name in self.routes())]
        numbers += [int(part) for key in self.objects.list("packs/") if (part := key.split("/")[1]).isdigit()]
        return max(numbers)

    def _moved(self, version: int, current: int | None, expected: int | None) -> str:
        return (
            f"cannot publish version {version}: latest is {current}, this publisher had left it at {expected}; "
            f"another trainer or a roll-back wrote to {self}: stop one of them, or restart this one so that it goes on from there"
        )


def describe(record: msgspec.Struct) -> str:
    """A record as indented JSON, for people."""
    return msgspec.json.format(msgspec.json.encode(record), indent=2).decode()


def keys_of(routes: Sequence[Route]) -> list[str]:
    return [pack.key for route in routes for pack in route.packs]
