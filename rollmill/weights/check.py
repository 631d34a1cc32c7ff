"""The proof that a weight store is whole: `verify` rebuilds every version by every route, `fsck` names each damage and its remedy.

Neither writes. Both may run beside a trainer, replicas, a compactor and collection.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator

from rollmill.weights.damage import Damage, Finding, finding
from rollmill.weights.encode import in_order
from rollmill.weights.manifest import Kind, PackRef, Route, RouteName, schema_key, version_key
from rollmill.weights.plan import plan, reachable
from rollmill.weights.probe import pack_damage
from rollmill.weights.repair import repair
from rollmill.weights.retrace import Retrace, leads_somewhere, unusable
from rollmill.weights.store import FLOOR, LATEST, RESERVED, WeightStore
from rollmill.weights.survey import READERS, Survey, is_there, pack_version, strangers, survey, version_of

__all__ = ["Damage", "Finding", "fsck", "repair", "verify"]

OVERDUE_S = 3600.0
"""Collection runs now and then; a tombstone this late means that it does not."""
PUBLISHING_S = 600.0
"""A version newer than `latest` and younger than this is being published."""


def verify(store: WeightStore, *, version: int | None = None) -> list[str]:
    """Everything that keeps a published version from being rebuilt, bit for bit, by every route that leads to it.

    Of one `version` only the routes to it are proved, each from a proved base.
    """
    seen = survey(store)
    if version is not None and version not in seen.listed_versions:
        raise ValueError(f"version {version} is not in {store}; `rollmill weights log` lists what is")
    checked = {name: route for name, route in seen.routes.items() if version in (None, name.version)}
    damaged = _packs(store, checked, deep=True)
    walk = Retrace(store, seen, bad=damaged)
    if version is None:
        lost = _unreachable(store, seen, walk.all())
        found = [*seen.found, *_pointers(seen), *_records(seen), *_bases(seen)]
    else:
        lost = [] if walk.version(version) else [_lost(version)]
        record = seen.versions.get(version)
        needed = "" if record is None else schema_key(record.schema)
        found = [one for one in seen.found if version_of(one) == version or one.key == needed]
    found += [*(one for several in damaged.values() for one in several), *walk.found, *lost]
    return [str(one) for one in _once(found) if one.is_fatal]


def fsck(store: WeightStore, *, deep: bool = False, now: float) -> list[Finding]:
    """Everything that is wrong, worst first. Reads the small records and the sizes of packs; `deep`: every byte, and decodes it."""
    seen = survey(store)
    damaged = _packs(store, seen.routes, deep=deep)
    walk = Retrace(store, seen, bad=damaged)
    lost = _unreachable(store, seen, walk.all() if deep else _by_records(seen, damaged))
    found = [
        *seen.found, *_pointers(seen), *_records(seen), *_bases(seen), *(one for several in damaged.values() for one in several),
        *walk.found, *lost, *_users(seen, now), *_quarantine(store, seen), *_litter(seen, now), *strangers(store), *_folds(seen),
    ]  # fmt: skip
    order = list(Damage)
    return sorted(_once(found), key=lambda one: (order.index(one.kind), one.key))


def _once(found: list[Finding]) -> list[Finding]:
    """Routes can share a pack, and its damage is one."""
    return list({(one.kind, one.key): one for one in found}.values())


def _packs(store: WeightStore, routes: dict[RouteName, Route], *, deep: bool) -> dict[str, list[Finding]]:
    """Key of a route -> what is wrong with its packs."""

    def look(item: tuple[Route, PackRef]) -> tuple[Route, Finding | None]:
        return item[0], pack_damage(store, item[0], item[1], deep=deep)

    work = [(route, ref) for name, route in sorted(routes.items(), key=lambda item: item[0].key) for ref in route.packs]
    found = defaultdict(list)
    for route, damage in in_order(look, work, workers=READERS):
        if damage is not None and is_there(store, route.name.key):
            found[route.name.key].append(damage)
    return dict(found)


def _pointers(seen: Survey) -> Iterator[Finding]:
    trace = seen.highest_trace
    if not seen.has_latest and seen.listed_versions:
        yield finding(Damage.LATEST_MISSING, LATEST, f"{len(seen.listed_versions)} versions are published and nothing points at one")
    if seen.latest is not None and seen.latest.version not in seen.listed_versions:
        yield finding(Damage.LATEST_POINTS_AT_NOTHING, LATEST, f"points at version {seen.latest.version}, which has no record")
    if not seen.has_reserved and trace >= 0:
        yield finding(Damage.RESERVED_MISSING, RESERVED, f"numbers up to {trace} were used")
    if seen.reserved is not None and seen.reserved.version < trace:
        yield finding(Damage.RESERVED_BEHIND, RESERVED, f"stands at {seen.reserved.version}, numbers up to {trace} were used")


def _records(seen: Survey) -> Iterator[Finding]:
    lowest = min([*seen.listed_versions, *(name.version for name in seen.listed_routes), *map(pack_version, seen.packs)], default=0)
    for number, record in sorted(seen.versions.items()):
        before = record.previous
        if before is not None and before not in seen.listed_versions and not seen.is_collected(before):
            if before < lowest and not seen.has_floor:
                yield finding(Damage.FLOOR_MISSING, FLOOR, f"nothing older than version {number} is left, which is not the first")
            else:
                yield finding(Damage.VERSION_MISSING, version_key(before), f"version {number} follows it")


def _bases(seen: Survey) -> Iterator[Finding]:
    known = seen.listed_versions | {name.version for name in seen.listed_routes}
    for name, route in seen.routes.items():
        record = seen.versions.get(name.version)
        if name.base is not None and name.base not in known and not seen.is_collected(name.base):
            yield finding(Damage.ROUTE_BASE_UNKNOWN, name.key, f"starts from version {name.base}, of which nothing is here")
        if record is not None and record.schema != route.schema:
            what = f"has schema {route.schema[:8]}, its version {record.schema[:8]}: no reader takes it"
            yield finding(Damage.ROUTE_OF_ANOTHER_SCHEMA, name.key, what)


def _by_records(seen: Survey, damaged: dict[str, list[Finding]]) -> set[int]:
    """Versions with a way from a full route, as far as records tell."""
    return reachable(name for name, route in seen.routes.items() if name.key not in damaged and leads_somewhere(seen, route))


def _unreachable(store: WeightStore, seen: Survey, reached: set[int]) -> list[Finding]:
    """Of versions that were there before the routes were listed: their routes were written before them."""
    lost = [number for number in (seen.versions.keys() & seen.early_versions) - reached if seen.versions[number].schema in seen.schemas]
    if all(map(seen.is_collected, lost)):
        return []
    # Collection may have gone on while packs were read.
    since = survey(store)
    return [_lost(number) for number in sorted(lost) if number in since.listed_versions and not since.is_collected(number)]


def _lost(version: int) -> Finding:
    return finding(Damage.VERSION_UNREACHABLE, version_key(version), "no whole route leads to it")


def _users(seen: Survey, now: float) -> Iterator[Finding]:
    for lease in seen.leases:
        record = None if lease.version is None else seen.versions.get(lease.version)
        if lease.expires < now:
            yield finding(Damage.LEASE_EXPIRED, lease.key, f"{lease.replica} was last heard {now - lease.renewed:.0f} s ago")
        elif lease.version is not None and lease.version not in seen.listed_versions:
            what = f"{lease.replica} serves version {lease.version}, which is not in the store"
            yield finding(Damage.LEASE_OF_GONE_VERSION, lease.key, what)
        elif record is not None and lease.fingerprint != record.fingerprint:
            what = (
                f"{lease.replica} serves {lease.fingerprint or 'nothing proved'} as version {lease.version}, which is {record.fingerprint}"
            )
            yield finding(Damage.LEASE_OTHER_FINGERPRINT, lease.key, what)
        elif seen.latest is not None and lease.version is not None and lease.version > seen.latest.version:
            what = f"points at version {seen.latest.version}, {lease.replica} serves {lease.version}"
            yield finding(Damage.LATEST_WENT_BACK, LATEST, what)
    for tag in seen.tags:
        if tag.version not in seen.listed_versions:
            yield finding(Damage.TAG_OF_MISSING_VERSION, tag.key, f"{tag.name} names version {tag.version}, which has no record")


def _quarantine(store: WeightStore, seen: Survey) -> Iterator[Finding]:
    # There are few, and replicas do without them until they are released: so each is looked at in full.
    for record in seen.quarantined:
        if why := unusable(store, seen, record.target):
            yield finding(Damage.QUARANTINED, record.key, f"{record.target} is not used: {why}")
        else:
            yield finding(Damage.QUARANTINE_OBSOLETE, record.key, f"{record.target} is whole again or no longer needed")


def _litter(seen: Survey, now: float) -> Iterator[Finding]:
    for stone in seen.tombstones:
        if stone.delete_after + OVERDUE_S < now:
            what = f"{stone.num_bytes} bytes were to go {now - stone.delete_after:.0f} s ago"
            yield finding(Damage.TOMBSTONE_OVERDUE, stone.key, what)
    doomed = {key for stone in seen.tombstones for key in (*stone.packs, *stone.routes)}
    # A version that something refers to was published, and its lost record is a finding of its own.
    published = seen.listed_versions | {record.previous for record in seen.versions.values()}
    published |= set() if seen.latest is None else {seen.latest.version}
    for name in sorted(seen.routes, key=lambda name: name.key):
        if name.version not in published and not seen.is_collected(name.version) and name.key not in doomed:
            yield finding(Damage.ROUTE_ORPHAN, name.key, f"version {name.version} was never published")
    named = {ref.key for route in seen.routes.values() for ref in route.packs}
    unread = {name.version for name in seen.listed_routes - seen.routes.keys()}
    for key in sorted(seen.packs - named - doomed):
        # A route that cannot be read may name it, and is a finding of its own.
        if pack_version(key) not in unread:
            yield finding(Damage.PACK_ORPHAN, key, "no route names it")
    yield from _off_the_line(seen, now)


def _off_the_line(seen: Survey, now: float) -> Iterator[Finding]:
    line = set(seen.line)
    if seen.latest is None:
        return
    claims: dict[int | None, list[int]] = defaultdict(list)
    for number, record in sorted(seen.versions.items()):
        claims[record.previous].append(number)
        is_new = number in seen.early_versions and record.created > now - PUBLISHING_S
        if number > seen.latest.version and not is_new:
            yield finding(Damage.VERSION_UNSERVED, record.key, f"latest is {seen.latest.version}; its publisher died before it moved it")
    for before, numbers in claims.items():
        served = [number for number in numbers if number in line] or numbers[-1:]
        for number in numbers:
            if number not in served and number <= seen.latest.version:
                after = "is a first version" if before is None else f"follows version {before}"
                yield finding(Damage.FORK, version_key(number), f"{after} like version {served[0]}, which is on the line of `latest`")


def _folds(seen: Survey) -> Iterator[Finding]:
    """A fold that saves nothing costs space and the choice of a reader."""
    names = sorted(seen.routes, key=lambda name: name.version)
    for name in names:
        if seen.routes[name].kind is not Kind.FOLD or name.base is None:
            continue
        first, last = (bisect_right(names, number, key=lambda other: other.version) for number in (name.base, name.version))
        between = [other for other in names[first:last] if other.base is not None]
        chain = plan(between, held=name.base, target=name.version, refused={name.key}, hop_bytes=0)
        if chain and name.num_bytes >= (num_bytes := sum(hop.num_bytes for hop in chain)):
            what = f"{name.num_bytes} bytes, the {len(chain)} routes it stands for have {num_bytes}"
            yield finding(Damage.FOLD_NOT_SMALLER, name.key, what)
