"""Mends a weight store without the trainer, out of what is left in it; writes nothing that it has not proved.

Order matters: lost routes are found again in their packs, records of versions are made from their routes, packs from the weights on both
sides, then pointers, and at the end what was quarantined and is whole again is released.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from rollmill.weights.damage import TRAINER, Damage, Finding
from rollmill.weights.encode import write_part
from rollmill.weights.errors import CorruptSnapshot, UnknownFormat, WrongBase
from rollmill.weights.manifest import Floor, Kind, PackRef, Route, RouteName, Version, route_in, seal, version_in, version_key
from rollmill.weights.objects import ObjectMissing
from rollmill.weights.pack import Index
from rollmill.weights.plan import reachable
from rollmill.weights.probe import identify
from rollmill.weights.proof import combine, fingerprint_bytes
from rollmill.weights.reader import OpenRoute, replay
from rollmill.weights.retrace import Retrace, unusable
from rollmill.weights.schema import Schema
from rollmill.weights.shard import all_of
from rollmill.weights.store import LATEST, WeightStore
from rollmill.weights.survey import pack_version, survey

WRITER = "repair"
_RECORDS = (Damage.VERSION_MISSING, Damage.VERSION_UNREADABLE, Damage.VERSION_MISNUMBERED, Damage.LATEST_POINTS_AT_NOTHING)
_ROUTES = (Damage.ROUTE_UNREADABLE, Damage.ROUTE_MISNAMED)
_PACKS = (
    Damage.PACK_MISSING, Damage.PACK_TRUNCATED, Damage.PACK_FLIPPED, Damage.PACK_INDEX_WRONG, Damage.PACK_OF_ANOTHER_VERSION,
    Damage.PACK_UNDECODABLE, Damage.ROUTE_GIVES_OTHER_WEIGHTS,
)  # fmt: skip
_NUMBERS = (Damage.RESERVED_MISSING, Damage.RESERVED_UNREADABLE, Damage.RESERVED_BEHIND)
_POINTERS = (Damage.LATEST_MISSING, Damage.LATEST_UNREADABLE)
# Each is a statement that its writer makes again when it still holds.
_DROPPED = (Damage.LEASE_UNREADABLE, Damage.QUARANTINE_UNREADABLE, Damage.TOMBSTONE_UNREADABLE, Damage.ROUTE_OF_ANOTHER_SCHEMA)


def repair(store: WeightStore, findings: Sequence[Finding], *, now: float) -> list[str]:
    """Do what can be done about the findings of `fsck`; says what was done and what could not be, one line each."""
    return _Repair(store, findings, now).run()


class _Repair:
    def __init__(self, store: WeightStore, findings: Sequence[Finding], now: float) -> None:
        self._store, self._now = store, now
        self._keys: dict[Damage, list[str]] = defaultdict(list)
        for one in findings:
            self._keys[one.kind].append(one.key)
        self._said: list[str] = []
        self._mended: set[str] = set()
        self._holes: set[int | None] = set()
        """Versions whose records cannot be made again."""
        self._seen = survey(store)
        self._walk = Retrace(store, self._seen, bad=self._bad())

    def run(self) -> list[str]:
        if self._of(_NUMBERS):
            self._say(f"reserved.json stands at {self._store.renumber()} now")
        self._each(self._of(_ROUTES), self._find_route)
        self._each(self._keys[Damage.VERSION_UNREACHABLE], self._find_way)
        self._each(self._of(_RECORDS), self._make_record)
        self._each(self._of(_PACKS), self._make_packs)
        if self._of(_POINTERS):
            self._say(self._point())
        line = self._seen.line
        if line and self._of((Damage.FLOOR_MISSING, Damage.FLOOR_UNREADABLE)):
            self._say(self._begin_line(line[-1]))
        elif line and (hole := self._seen.versions[line[-1]].previous) in self._holes:
            known = reachable(name for name in self._seen.routes if name.key not in self._bad())
            self._say(f"version {hole} is lost for good; " + self._begin_line(min(known & set(line), default=line[-1])))
        if dropped := self._of(_DROPPED):
            self._store.objects.delete(dropped)
            self._said += [f"dropped {key}" for key in dropped]
        for key in self._of((Damage.SCHEMA_MISSING, Damage.SCHEMA_UNREADABLE)):
            self._say(f"cannot mend {key}: only a trainer has the tensor table; {TRAINER} writes it again")
        self._release()
        return self._said

    def _of(self, kinds: Iterable[Damage]) -> list[str]:
        return list(dict.fromkeys(key for kind in kinds for key in self._keys[kind]))

    def _say(self, text: str) -> None:
        self._said.append(text)

    def _each(self, keys: Sequence[str], mend: Callable[[str], str]) -> None:
        self._said += [mend(key) for key in keys]

    def _add(self, route: Route) -> None:
        """Make a route known, here too: what was out of reach may be in reach now."""
        self._store.add_route(route)
        self._seen.routes[route.name] = route
        self._seen.listed_routes.add(route.name)
        self._walk = Retrace(self._store, self._seen, bad=self._bad())

    # Routes.

    def _find_route(self, key: str) -> str:
        """A route whose record is damaged: its packs still say what it was."""
        name = route_in(key)
        assert name is not None, "the survey lists only keys of routes"
        if name.num_bytes == 0 and name.base is not None:
            found = self._proved(name, (), self._schema_of(name.version))
        else:
            packs = [pack for pack in self._packs_of(name.version) if pack[1].base == name.base]
            fits = packs and sum(ref.num_bytes for ref, _ in packs) == name.num_bytes
            found = self._proved(name, tuple(ref for ref, _ in packs), packs[0][1].schema) if fits else None
        if found is None:
            return self._rewrite(name, None, key)
        self._add(found)
        return f"{key} was written again from what its packs say"

    def _find_way(self, key: str) -> str:
        """A version without a whole route: packs that no route names may be one whose record is gone."""
        number = version_in(key)
        assert number is not None, "the survey lists only keys of versions"
        if self._walk.weights(number) is not None:
            return f"version {number} can be rebuilt"
        named = {ref.key for route in self._seen.routes.values() for ref in route.packs}
        ways: dict[tuple[int | None, str], list[PackRef]] = defaultdict(list)
        for ref, index in self._packs_of(number):
            if ref.key not in named:
                ways[index.base, index.schema].append(ref)
        made = []
        for (base, schema), refs in ways.items():
            name = RouteName(version=number, base=base, num_bytes=sum(ref.num_bytes for ref in refs))
            if (found := self._proved(name, tuple(refs), schema)) is not None:
                self._add(found)
                made.append(name.key)
        if made:
            return f"version {number} has its route again, from what its packs say: {', '.join(made)}"
        return f"cannot rebuild version {number}: {TRAINER} is full when this is what replicas need"

    def _packs_of(self, version: int) -> list[tuple[PackRef, Index]]:
        """The whole packs in a version's folder that say they are of it."""
        found = []
        for key in sorted(key for key in self._seen.packs if pack_version(key) == version):
            try:
                pack = identify(self._store, key)
            except (CorruptSnapshot, UnknownFormat, ObjectMissing):
                continue
            if pack.index.version == version:
                found.append((pack.ref, pack.index))
        return found

    def _proved(self, name: RouteName, refs: tuple[PackRef, ...], schema: str) -> Route | None:
        """The route of these packs when it leads to its version."""
        route = Route(
            kind=_kind(name, refs), version=name.version, base=name.base, schema=schema, packs=refs, writer=WRITER, created=self._now
        )
        return route if self._leads(route) else None

    def _leads(self, route: Route) -> bool:
        """Whether a route turns the weights of its base into those of its version."""
        schema, base = self._seen.schemas.get(route.schema), None
        if schema is None or (route.base is not None and (base := self._walk.weights(route.base)) is None):
            return False
        data = None if base is None else {spec.name: np.array(base[spec.name]) for spec in schema.tensors}
        try:
            replay(self._store, route, self._seen.versions.get(route.version), schema, data)
        except (CorruptSnapshot, UnknownFormat, WrongBase):
            return False
        return True

    # Packs.

    def _make_packs(self, key: str) -> str:
        routes = [route for name, route in self._seen.routes.items() if key in (name.key, *(ref.key for ref in route.packs))]
        return "; ".join(self._rewrite(route.name, route, key) for route in routes) or f"{key} is no longer needed"

    def _rewrite(self, name: RouteName, route: Route | None, key: str) -> str:
        """Code a route anew from the proved weights on both its sides."""
        record = self._seen.versions.get(name.version)
        new = self._walk.weights(name.version)
        old = None if name.base is None else self._walk.weights(name.base)
        if record is None or new is None or (old is None and name.base is not None):
            # The trainer watches this folder: damage that is new to it makes its next version full.
            self._store.quarantine(key, "it is damaged and cannot be made again from other routes")
            return f"cannot mend {key}: no other whole route leads to version {name.version} and its base; {TRAINER} is full"
        refs = () if route is None else route.packs
        kind = _kind(name, (), record.previous) if route is None else route.kind
        schema = self._seen.schemas[record.schema]
        # One damaged pack is written over, since nobody can use it; of several some are whole, and readers may be in them.
        rank = len(refs) if len(refs) > 1 else 0
        part = write_part(
            self._store, schema, kind=kind, version=name.version, base=name.base, held=all_of(schema), new=new, old=old, rank=rank
        )
        made = Route(
            kind=kind, version=name.version, base=name.base, schema=record.schema, packs=part.packs, writer=WRITER, created=self._now
        )
        assert self._leads(made), "what was just coded decodes"
        self._mended |= {key, name.key, made.name.key, *(pack.key for pack in part.packs)}
        if route is not None and refs == part.packs:
            self._walk = Retrace(self._store, self._seen, bad=self._bad())
            return f"{part.packs[0].key} was made again, byte for byte"
        if made.name != name:
            self._seen.routes.pop(name, None)
        self._add(made)
        if made.name != name:
            self._store.objects.delete([name.key])
        return f"{key}: {made.name.key} with {part.packs[0].key} takes its place"

    # Versions and pointers.

    def _make_record(self, key: str) -> str:
        """What a version was, from its routes: the bytes are certain, of the rest what its neighbours tell."""
        number = self._seen.latest.version if key == LATEST and self._seen.latest is not None else version_in(key)
        if number is None or number in self._seen.versions:
            return f"{key} is in order"
        data = self._walk.weights(number)
        routes = {route.kind: route for name, route in self._seen.routes.items() if name.version == number}
        if data is None:
            self._holes.add(number)
            return f"cannot make {version_key(number)} again: no whole route leads to it; replicas take the version before or after"
        one = next(iter(routes.values()))
        schema = self._seen.schemas[one.schema]
        near = self._near(number, routes)
        proof = combine({spec.name: fingerprint_bytes(spec.name, spec.dtype, spec.shape, data[spec.name]) for spec in schema.tensors})
        alias = routes.get(Kind.ALIAS)
        record = Version(
            version=number, previous=self._before(number, routes), epoch=0 if near is None else near.epoch,
            restores=None if alias is None else alias.base, schema=one.schema, fingerprint=proof.total,
            tensors=tuple(proof.tensors[spec.name] for spec in schema.tensors), num_changed=self._num_changed(routes, schema),
            raw_bytes=schema.num_bytes, step=-1 if near is None else near.step, run_id="" if near is None else near.run_id,
            writer=WRITER, created=self._now, note="made again from its routes; epoch, step and run are those of a neighbour",
        )  # fmt: skip
        self._store.objects.put(record.key, [seal(record)])
        self._seen.versions[number] = record
        self._seen.listed_versions.add(number)
        return f"{record.key} was made again from its routes; its step is not known and taken from a neighbour"

    def _before(self, number: int, routes: Mapping[Kind, Route]) -> int | None:
        delta = routes.get(Kind.DELTA)
        return delta.base if delta is not None else max((known for known in self._seen.listed_versions if known < number), default=None)

    def _near(self, number: int, routes: Mapping[Kind, Route]) -> Version | None:
        before = self._seen.versions.get(-1 if (found := self._before(number, routes)) is None else found)
        after = next((record for record in self._seen.versions.values() if record.previous == number), None)
        return before or after

    def _num_changed(self, routes: Mapping[Kind, Route], schema: Schema) -> int:
        if (delta := routes.get(Kind.DELTA)) is None:
            return sum(spec.num_elements for spec in schema.tensors)
        opened = OpenRoute(self._store, delta)
        return sum(entry.num_changed for tensor in opened.tensors() for entry in opened.entries(tensor))

    def _point(self) -> str:
        if self._seen.latest is not None:
            return "latest.json is in order"
        for number in sorted(self._seen.versions, reverse=True):
            if self._walk.weights(number) is not None:
                self._store.repoint(self._seen.versions[number])
                return f"latest.json points at version {number}, the newest that can be rebuilt"
        return f"cannot point latest.json anywhere: no version can be rebuilt; start a trainer, {TRAINER} is full"

    def _begin_line(self, first: int) -> str:
        """Let the line begin at a version, so that readers of it end there and collection can go on.

        Folds lie at multiples of their span, which tells where on the line it is.
        """
        index = {number: at for at, number in enumerate(reversed(self._seen.line))}
        folds = [
            (index[name.version] - index[name.base], index[name.version] - index[first])
            for name, route in self._seen.routes.items()
            if route.kind is Kind.FOLD and name.base in index and name.version in index
        ]
        span, at = max(folds, default=(1, 0))
        self._store.raise_floor(Floor(version=first, position=-at % span))
        return f"the line begins at version {first}; what is older stays where a tag or a lease holds it"

    def _release(self) -> None:
        self._seen = survey(self._store)
        for record in self._seen.quarantined:
            if not unusable(self._store, self._seen, record.target):
                self._store.release(record.target)
                self._say(f"{record.target} may be used again")

    def _schema_of(self, version: int) -> str:
        record = self._seen.versions.get(version)
        return "" if record is None else record.schema

    def _bad(self) -> set[str]:
        """Keys of the routes that findings speak against."""
        damaged = set(self._of(_PACKS)) - self._mended
        routes = self._seen.routes.items()
        return {name.key for name, route in routes if damaged & {name.key, *(ref.key for ref in route.packs)}}


def _kind(name: RouteName, refs: Sequence[PackRef], previous: int | None = None) -> Kind:
    """What a route is, by the names of its packs, or without them by whether it starts from the version before."""
    if name.base is None:
        return Kind.FULL
    if not name.num_bytes:
        return Kind.ALIAS
    is_fold = refs[0].key.rsplit("/", 1)[1].startswith(Kind.FOLD) if refs else name.base != previous
    return Kind.FOLD if is_fold else Kind.DELTA
