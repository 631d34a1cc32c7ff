"""Takes away what nobody can need any more, in two phases, marked from records and never by age alone.

    garbage -> tombstone written, floor raised, ROUTES deleted -> (grace, and every lease of that day, over) -> packs, versions deleted

What may go is decided anew in every run, and a tombstone only says since when: a run that died is finished by the next, and what came
into use again meanwhile stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import msgspec
from blake3 import blake3

from rollmill.weights.encode import in_order
from rollmill.weights.errors import CorruptSnapshot
from rollmill.weights.manifest import Floor, Kind, Lease, Quarantine, Route, RouteName, Tag, Tombstone, seal, version_key
from rollmill.weights.objects import ObjectMissing
from rollmill.weights.plan import plan, reachable
from rollmill.weights.store import Place, WeightStore

GRACE_S = 3600.0
"""Longer than any upload or compaction takes from its first pack to its route, and than a reader without a lease reads."""
KEPT_ANCHORS = 2
"""With two, damage to the newest full route costs a joiner bytes and not the store."""
_READERS = 16
"""Small reads wait for the network, not for a core."""


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """What a store holds, as far as collection must know it."""

    line: tuple[Place, ...]
    """Oldest first; the last is latest."""
    others: dict[int, float]
    """Versions with a record that are not on the line -> when they were created."""
    routes: dict[RouteName, Route | None]
    """None: it is there and cannot be read."""
    packs: frozenset[str]
    leases: tuple[Lease, ...]
    tags: tuple[Tag, ...]
    quarantined: frozenset[str]
    """Keys of routes and packs that must not be used."""


class Seen(msgspec.Struct, kw_only=True):
    """Records that were read before: enough to see that there is nothing to do. What is taken away is decided from records read anew."""

    line: tuple[Place, ...] = ()
    routes: dict[RouteName, Route] = {}
    created: dict[int, float] = {}
    """Of versions that are not on the line."""

    def forget(self) -> None:
        self.line, self.routes, self.created = (), {}, {}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What may go, and why the rest may not."""

    floor: Floor
    routes: tuple[RouteName, ...]
    versions: tuple[int, ...]
    packs: tuple[str, ...]
    kept: tuple[str, ...]
    """Lines for people."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What one run did, or with `is_dry` would have done."""

    floor: int = -1
    """The oldest version on the line from now on."""
    num_routes: int = 0
    """Taken away at once, so that nobody starts on them."""
    marked_packs: int = 0
    marked_bytes: int = 0
    """Of packs that wait for their time since this run."""
    num_packs: int = 0
    num_versions: int = 0
    num_leases: int = 0
    """Long expired."""
    num_bytes: int = 0
    """Of packs deleted."""
    num_waiting: int
    """Tombstones whose time has not come."""
    kept: tuple[str, ...]
    is_dry: bool

    def lines(self) -> list[str]:
        did, will = ("would delete", "would mark") if self.is_dry else ("deleted", "marked")
        return [
            f"{did} {self.num_routes} routes, {self.num_packs} packs ({self.num_bytes / 1e6:.1f} MB), {self.num_versions} versions, "
            f"{self.num_leases} expired leases",
            f"{will} {self.marked_packs} packs ({self.marked_bytes / 1e6:.1f} MB) for later; {self.num_waiting} tombstones wait",
            *(f"kept {reason}" for reason in self.kept),
        ]


def plan_gc(contents: Contents, *, now: float, grace_s: float = GRACE_S) -> Plan:
    """What nobody can need: neither a replica with a lease, nor a tag, nor a late joiner, nor a writer at work."""
    keep = _Keep(contents)
    floor = _floor(contents.line, keep.sound, young_after=now - grace_s)
    keep.versions |= {place.version for place in contents.line if place.position >= floor.position}
    keep.say(f"versions {floor.version} to {keep.latest} on the line, {len(keep.versions)} of them: late joiners start there")
    for tag in contents.tags:
        keep.path(None, tag.version, f"tag {tag.name}")
    for lease in contents.leases:
        if lease.expires > now:
            keep.lease(lease, floor.version)
    keep.unfinished(young_after=now - grace_s)
    keep.between()
    keep.cut_off()
    packs = keep.packs()
    return Plan(
        floor=floor,
        routes=tuple(sorted(contents.routes.keys() - keep.routes, key=lambda name: name.key)),
        versions=tuple(sorted(({place.version for place in contents.line} | contents.others.keys()) - keep.versions)),
        packs=tuple(sorted(contents.packs - packs)),
        kept=tuple(keep.reasons),
    )


def collect(store: WeightStore, now: float, *, grace_s: float = GRACE_S, dry_run: bool = False, seen: Seen | None = None) -> Report:
    """Do what is due of both phases. Raises CorruptSnapshot when the line cannot be read: then nothing is taken away.

    Who collects again and again passes the same `seen`, which is kept up here, and is spared reading every record at each look.
    """
    stones = store.tombstones()
    ripe = [old for old in stones if now > old.delete_after]
    seen = seen or Seen()
    was_seen = bool(seen.line)
    contents = read_contents(store, seen)
    if not contents.line:
        return Report(num_waiting=len(stones), kept=("everything: nothing was published yet",), is_dry=dry_run)
    garbage = plan_gc(contents, now=now, grace_s=grace_s)
    if was_seen and (ripe or garbage.routes or garbage.floor.version > contents.line[0].version or not _is_named(garbage, stones)):
        seen.forget()
        contents = read_contents(store, seen)
        garbage = plan_gc(contents, now=now, grace_s=grace_s)
    sizes = _sizes(store, contents, garbage.packs)
    stone = _tombstone(garbage, stones, contents.leases, sizes, now=now, grace_s=grace_s)
    if not dry_run:
        if _names(stone):
            store.objects.put(stone.key, [seal(stone)])
        if garbage.floor.version > contents.line[0].version:
            store.raise_floor(garbage.floor)
        # A tag or a lease that was written before the tombstone was is still heard.
        contents = msgspec.structs.replace(contents, leases=tuple(store.leases()), tags=tuple(store.tags()))
        garbage = _both(garbage, plan_gc(contents, now=now, grace_s=grace_s))
    named = _named(ripe)
    routes = [name.key for name in garbage.routes]
    packs = [key for key in garbage.packs if key in named]
    versions = [key for key in map(version_key, garbage.versions) if key in named]
    leases = [lease.key for lease in contents.leases if lease.expires + grace_s < now]
    if not dry_run:
        declined = [old.key for old in store.declined() if old.base < garbage.floor.version]
        marks = [Quarantine(target=key, reason="", created=0.0).key for key in (*routes, *packs, *versions) if key in contents.quarantined]
        for keys in (routes, packs, versions, [*leases, *declined, *marks], [old.key for old in ripe]):
            if keys:
                store.objects.delete(keys)
    return Report(
        floor=garbage.floor.version, num_routes=len(routes), marked_packs=len(stone.packs), marked_bytes=stone.num_bytes,
        num_packs=len(packs), num_versions=len(versions), num_leases=len(leases), num_bytes=sum(sizes[key] for key in packs),
        num_waiting=len(stones) - len(ripe) + bool(_names(stone)), kept=garbage.kept, is_dry=dry_run,
    )  # fmt: skip


def read_contents(store: WeightStore, seen: Seen) -> Contents:
    """In an order that writers at work cannot confuse: what is published after the line was read counts as unfinished and stays."""
    line = tuple(store.line(known=seen.line))
    packs = frozenset(store.objects.list("packs/"))
    names = store.routes()
    routes = dict(zip(names, in_order(lambda name: seen.routes.get(name) or _route(store, name), names, workers=_READERS), strict=True))
    others = sorted(set(store.versions()) - {place.version for place in line})
    created = dict(zip(others, in_order(lambda number: _created(store, number, seen), others, workers=_READERS), strict=True))
    # What could not be read is looked at again, and what is gone is forgotten.
    seen.line, seen.routes = line, {name: route for name, route in routes.items() if route is not None}
    seen.created = {number: when for number, when in created.items() if when}
    return Contents(
        line=line, others=created, routes=routes, packs=packs, leases=tuple(store.leases()),
        tags=tuple(store.tags()), quarantined=frozenset(store.quarantined()),
    )  # fmt: skip


class _Keep:
    """What must stay, gathered reason by reason."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self.latest = contents.line[-1].version
        self.sound = [name for name, route in contents.routes.items() if _is_sound(name, route, contents)]
        """Routes that can be followed as far as records tell."""
        self.routes: set[RouteName] = set()
        self.versions: set[int] = set()
        self.reasons: list[str] = []

    def say(self, reason: str) -> None:
        self.reasons.append(reason)

    def path(self, held: int | None, target: int, why: str) -> None:
        """The cheapest way there, with the records of all it touches."""
        found = plan(self.sound, held=held, target=target)
        if found is None:
            self.say(f"nothing for {why}: no way leads to version {target}")
            return
        self.routes |= set(found)
        self.versions |= {target, *(name.version for name in found)}
        start = "nothing" if held is None else f"version {held}"
        self.say(f"{len(found)} routes, {sum(name.num_bytes for name in found)} bytes, from {start} to version {target} for {why}")

    def lease(self, lease: Lease, floor: int) -> None:
        """What a replica needs to mend what it serves, to finish what it began, and to move on."""
        for version in sorted({number for number in (lease.version, lease.staging) if number is not None and number < floor}):
            self.path(None, version, f"replica {lease.replica}")
        if lease.version is not None and lease.version < floor:
            self.path(lease.version, self.latest, f"replica {lease.replica} to move on")

    def unfinished(self, *, young_after: float) -> None:
        """What a writer may be at work on: numbers past latest, and what is younger than any upload takes."""
        self.versions |= {number for number, created in self._contents.others.items() if number > self.latest or created > young_after}
        for name, route in self._contents.routes.items():
            if name.version > self.latest or (route is not None and route.created > young_after):
                self.routes.add(name)

    def between(self) -> None:
        """Every way among the versions that stay, and the bases of roll-backs."""
        while True:
            stays = {name for name in self._contents.routes if name.version in self.versions and self._starts(name)}
            aliases = {route for name in stays | self.routes if (route := self._contents.routes[name]) and route.kind is Kind.ALIAS}
            bases = {route.base for route in aliases if route.base is not None and route.base not in self.versions}
            if not bases & reachable(self.sound):
                self.routes |= stays
                return
            for base in sorted(bases & reachable(self.sound)):
                self.path(None, base, "a roll-back")

    def _starts(self, name: RouteName) -> bool:
        is_alias = (route := self._contents.routes[name]) is not None and route.kind is Kind.ALIAS
        return name.base is None or name.base in self.versions or is_alias

    def cut_off(self) -> None:
        """Where damage made a way from below the floor the only one, that way stays too."""
        lost = (reachable(self.sound) - reachable(name for name in self.sound if name in self.routes)) & self.versions
        for version in sorted(lost):
            self.path(None, version, "versions that damage cut off")

    def packs(self) -> set[str]:
        found: set[str] = set()
        blind: set[int] = set()
        for name in self.routes:
            route = self._contents.routes[name]
            if route is None:
                blind.add(name.version)
            else:
                found |= {pack.key for pack in route.packs}
        for key in self._contents.packs - found:
            number = _number_in(key)
            if number is None or number > self.latest or number in blind:
                found.add(key)
        return found


def _floor(line: Sequence[Place], sound: Iterable[RouteName], *, young_after: float) -> Floor:
    """The second newest full route on the line, or an older one when what follows it is younger than the grace."""
    full = {name.version for name in sound if name.base is None}
    anchors = [place for place in line if place.version in full]
    young = next((place.position for place in line if place.created > young_after), line[-1].position)
    old = [place for place in anchors[: 1 - KEPT_ANCHORS] if place.position <= young]
    first = old[-1] if old else line[0]
    return Floor(version=first.version, position=first.position)


def _is_sound(name: RouteName, route: Route | None, contents: Contents) -> bool:
    if route is None or name.key in contents.quarantined:
        return False
    return all(pack.key in contents.packs and pack.key not in contents.quarantined for pack in route.packs)


def _both(one: Plan, other: Plan) -> Plan:
    """What may go by both."""
    routes, versions, packs = set(other.routes), set(other.versions), set(other.packs)
    return Plan(
        floor=one.floor,
        routes=tuple(name for name in one.routes if name in routes),
        versions=tuple(number for number in one.versions if number in versions),
        packs=tuple(key for key in one.packs if key in packs),
        kept=other.kept,
    )


def _tombstone(
    garbage: Plan, stones: Sequence[Tombstone], leases: Sequence[Lease], sizes: Mapping[str, int], *, now: float, grace_s: float
) -> Tombstone:
    """Of the garbage that no tombstone names yet."""
    named = _named(stones)
    routes = tuple(name.key for name in garbage.routes if name.key not in named)
    versions = tuple(key for key in map(version_key, garbage.versions) if key not in named)
    packs = tuple(key for key in garbage.packs if key not in named)
    digest = blake3("\n".join((*routes, *versions, *packs)).encode()).hexdigest()[:8]
    return Tombstone(
        name=f"{round(now * 1000):013d}-{digest}", created=now, routes=routes, versions=versions, packs=packs,
        delete_after=max([now + grace_s, *(lease.expires for lease in leases)]), num_bytes=sum(sizes[key] for key in packs),
    )  # fmt: skip


def _is_named(garbage: Plan, stones: Sequence[Tombstone]) -> bool:
    """Whether all that is left to do is to wait."""
    return {*garbage.packs, *map(version_key, garbage.versions)} <= _named(stones)


def _named(stones: Sequence[Tombstone]) -> set[str]:
    return {key for stone in stones for key in _names(stone)}


def _names(stone: Tombstone) -> tuple[str, ...]:
    return (*stone.routes, *stone.versions, *stone.packs)


def _sizes(store: WeightStore, contents: Contents, packs: Sequence[str]) -> dict[str, int]:
    known = {pack.key: pack.num_bytes for route in contents.routes.values() if route is not None for pack in route.packs}
    return dict(zip(packs, in_order(lambda key: known[key] if key in known else _size(store, key), packs, workers=_READERS), strict=True))


def _size(store: WeightStore, key: str) -> int:
    with suppress(ObjectMissing):
        return store.objects.size(key)
    return 0


def _route(store: WeightStore, name: RouteName) -> Route | None:
    try:
        return store.route(name)
    except CorruptSnapshot:
        # Damaged, or taken away since it was listed: nobody can tell which packs it named, so none of its version's goes.
        return None


def _created(store: WeightStore, version: int, seen: Seen) -> float:
    try:
        return seen.created.get(version) or store.version(version).created
    except CorruptSnapshot:
        # Nothing holds on to a version off the line whose record nobody can read.
        return 0.0


def _number_in(key: str) -> int | None:
    """The version that a pack belongs to."""
    folder = key.split("/")[1]
    return int(folder) if folder.isdigit() else None
