"""Every small record of a weight store, read once in an order that a store at work cannot confuse; judges only what it cannot read.

Writers put packs before routes before versions before `latest`, and collection takes them away the other way round. So leases are read
before versions, packs listed before routes, and the floor and the reserved number read last: nothing is missed that was there all along.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from rollmill.weights.damage import Damage, Finding, finding
from rollmill.weights.directory import Directory
from rollmill.weights.encode import in_order
from rollmill.weights.errors import CorruptSnapshot, UnknownFormat
from rollmill.weights.manifest import (
    Floor,
    Lease,
    Pointer,
    Quarantine,
    Record,
    Route,
    RouteName,
    Tag,
    Tombstone,
    Version,
    route_in,
    schema_key,
    unseal,
    version_in,
    version_key,
)
from rollmill.weights.objects import ObjectMissing
from rollmill.weights.schema import Schema
from rollmill.weights.store import FLOOR, LATEST, RESERVED, WeightStore

READERS = 16
"""Small reads wait for the network, not for a core."""
Named = TypeVar("Named", Lease, Tag, Tombstone, Quarantine)
_FOLDERS = ("declined/", "leases/", "packs/", "quarantine/", "routes/", "schema/", "tags/", "tombstones/", "versions/")


@dataclass(kw_only=True)
class Survey:
    """What lies in a store, without the contents of packs."""

    found: list[Finding] = field(default_factory=list)
    """What could not be read, and why."""
    leases: list[Lease] = field(default_factory=list)
    tags: list[Tag] = field(default_factory=list)
    tombstones: list[Tombstone] = field(default_factory=list)
    quarantined: list[Quarantine] = field(default_factory=list)
    packs: set[str] = field(default_factory=set)
    """Keys that were listed before the routes were."""
    early_versions: set[int] = field(default_factory=set)
    """Those that were listed before `latest` and the routes were."""
    latest: Pointer | None = None
    has_latest: bool = False
    """There is an object, readable or not."""
    routes: dict[RouteName, Route] = field(default_factory=dict)
    listed_routes: set[RouteName] = field(default_factory=set)
    """Also those that cannot be read."""
    versions: dict[int, Version] = field(default_factory=dict)
    listed_versions: set[int] = field(default_factory=set)
    schemas: dict[str, Schema] = field(default_factory=dict)
    floor: int = -1
    """Versions before this one may have been collected."""
    has_floor: bool = False
    reserved: Pointer | None = None
    has_reserved: bool = False

    @property
    def line(self) -> list[int]:
        """From `latest` back as far as the records reach."""
        found: list[int] = []
        at = None if self.latest is None else self.latest.version
        while at is not None and at in self.versions and (not found or at < found[-1]):
            found.append(at)
            at = self.versions[at].previous
        return found

    @property
    def highest_trace(self) -> int:
        """The largest number that anything was ever written for."""
        return max([-1, *self.listed_versions, *(name.version for name in self.listed_routes), *map(pack_version, self.packs)])

    def is_collected(self, version: int) -> bool:
        """Whether it is right that a version, or the ways to it, are gone."""
        return version < self.floor or any(version_key(version) in stone.versions for stone in self.tombstones)


def pack_version(key: str) -> int:
    """The version in whose folder a pack lies; -1 when it lies in none."""
    part = key.split("/")[1]
    return int(part) if part.isdigit() else -1


def survey(store: WeightStore) -> Survey:
    seen = Survey()
    seen.leases = [*_named(store, seen, "leases/", Lease, Damage.LEASE_UNREADABLE)]
    seen.tags = [*_named(store, seen, "tags/", Tag, Damage.TAG_UNREADABLE)]
    seen.quarantined = [*_named(store, seen, "quarantine/", Quarantine, Damage.QUARANTINE_UNREADABLE)]
    seen.packs = {key for key in store.objects.list("packs/") if key.endswith(".pack")}
    seen.early_versions = set(store.versions())
    seen.has_latest, seen.latest = _one(store, seen, LATEST, Pointer, Damage.LATEST_UNREADABLE)
    _read_routes(store, seen)
    _read_versions(store, seen)
    _read_schemas(store, seen)
    seen.tombstones = [*_named(store, seen, "tombstones/", Tombstone, Damage.TOMBSTONE_UNREADABLE)]
    seen.has_floor, floor = _one(store, seen, FLOOR, Floor, Damage.FLOOR_UNREADABLE)
    seen.floor = -1 if floor is None else floor.version
    seen.has_reserved, seen.reserved = _one(store, seen, RESERVED, Pointer, Damage.RESERVED_UNREADABLE)
    # What waits for collection may be damaged, unless somebody holds on to it.
    used = {tag.version for tag in seen.tags} | {lease.version for lease in seen.leases}
    seen.found = [one for one in seen.found if (number := version_of(one)) is None or number in used or not seen.is_collected(number)]
    return seen


def version_of(one: Finding) -> int | None:
    """The version whose record or route is at fault."""
    name = route_in(one.key)
    return version_in(one.key) if name is None else name.version


def strangers(store: WeightStore) -> list[Finding]:
    """Objects that no Rollmill writes, and what dead writers left half-written."""
    known = {LATEST, RESERVED, FLOOR}
    found = []
    for key in store.objects.list(""):
        folder = next((name for name in _FOLDERS if key.startswith(name)), "")
        fits = {"packs/": key.endswith(".pack"), "routes/": route_in(key) is not None, "versions/": version_in(key) is not None}
        if key not in known and not fits.get(folder, folder != "" and key.endswith(".json")):
            found.append(finding(Damage.STRANGE_OBJECT, key, "is not an object of a weight store"))
    if isinstance(store.objects, Directory):
        left = ((path.name, path) for path in store.objects.leftovers())
        found += [finding(Damage.TEMPORARY_FILE, f".tmp/{name}", f"was left by a writer that died: {path}") for name, path in left]
    return found


def is_there(store: WeightStore, key: str) -> bool:
    """Asked again of a route before its packs are blamed: collected while we looked is no damage."""
    try:
        return store.objects.size(key) >= 0
    except ObjectMissing:
        return False


def read_twice(store: WeightStore, key: str, kind: type[Record]) -> Record:
    """A record. A second read before it is called damaged: the first may have met a bad cable."""
    for _ in range(2):
        data, _ = store.objects.get(key)
        try:
            return unseal(data, kind, key)
        except CorruptSnapshot as error:
            damaged = error
    raise damaged


def _one(store: WeightStore, seen: Survey, key: str, kind: type[Record], damage: Damage) -> tuple[bool, Record | None]:
    """Whether there is an object, and the record when it can be read."""
    try:
        return True, read_twice(store, key, kind)
    except ObjectMissing:
        return False, None
    except CorruptSnapshot as error:
        seen.found.append(finding(damage, key, str(error)))
    except UnknownFormat as error:
        seen.found.append(finding(Damage.OTHER_FORM, key, str(error)))
    return True, None


def _many(
    store: WeightStore, seen: Survey, keys: Iterable[str], kind: type[Record], damage: Damage
) -> Iterator[tuple[str, bool, Record | None]]:
    def look(key: str) -> tuple[str, bool, Record | None]:
        return key, *_one(store, seen, key, kind, damage)

    # Listed and then gone means collected in between, which is as if it had not been listed.
    return (found for found in in_order(look, keys, workers=READERS) if found[1])


def _named(store: WeightStore, seen: Survey, folder: str, kind: type[Named], damage: Damage) -> Iterator[Named]:
    for key, _, record in _many(store, seen, store.objects.list(folder), kind, damage):
        if record is not None and record.key != key:
            seen.found.append(finding(damage, key, f"it holds the record of {record.key}"))
        elif record is not None:
            yield record


def _read_routes(store: WeightStore, seen: Survey) -> None:
    names = {name.key: name for name in store.routes()}
    for key, _, route in _many(store, seen, names, Route, Damage.ROUTE_UNREADABLE):
        seen.listed_routes.add(names[key])
        if route is not None and route.name != names[key]:
            seen.found.append(finding(Damage.ROUTE_MISNAMED, key, f"it holds the route {route.name.key}"))
        elif route is not None:
            seen.routes[names[key]] = route


def _read_versions(store: WeightStore, seen: Survey) -> None:
    numbers = {version_key(number): number for number in store.versions()}
    for key, _, record in _many(store, seen, numbers, Version, Damage.VERSION_UNREADABLE):
        seen.listed_versions.add(numbers[key])
        if record is not None and record.version != numbers[key]:
            seen.found.append(finding(Damage.VERSION_MISNUMBERED, key, f"it describes version {record.version}"))
        elif record is not None:
            seen.versions[numbers[key]] = record


def _read_schemas(store: WeightStore, seen: Survey) -> None:
    used = {record.schema: number for number, record in sorted(seen.versions.items())}
    for digest, number in used.items():
        key = schema_key(digest)
        is_there, schema = _one(store, seen, key, Schema, Damage.SCHEMA_UNREADABLE)
        if not is_there:
            seen.found.append(finding(Damage.SCHEMA_MISSING, key, f"version {number} and others need it"))
        elif schema is not None and schema.digest != digest:
            seen.found.append(finding(Damage.SCHEMA_UNREADABLE, key, "it holds another schema"))
        elif schema is not None:
            seen.schemas[digest] = schema
