"""Takes every route of a store, one after the other along the line, and proves where each one leads; holds few versions in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from rollmill.weights.damage import Damage, Finding, finding
from rollmill.weights.encode import in_order, num_workers
from rollmill.weights.errors import CorruptSnapshot, UnknownFormat, WrongBase
from rollmill.weights.manifest import Route, RouteName, Version
from rollmill.weights.plan import plan
from rollmill.weights.proof import combine, fingerprint_bytes
from rollmill.weights.reader import Damaged, OpenRoute, TensorWork, advance, works
from rollmill.weights.schema import Schema
from rollmill.weights.shard import all_of
from rollmill.weights.store import WeightStore
from rollmill.weights.survey import Survey

Weights = dict[str, np.ndarray]
MAX_HELD = 5
"""Folds at 4, 16 and 64 versions keep three bases waiting beside the newest version; one more for an alias."""


def take(store: WeightStore, route: Route, schema: Schema, base: Weights | None) -> Weights:
    """The bytes that a route makes of those of its base, proved cell by cell. Raises Damaged or WrongBase."""
    held = all_of(schema)
    assert (base is None) == (route.base is None)
    data = {name: np.zeros(part.num_bytes, np.uint8) if base is None else np.array(base[name]) for name, part in held.items()}
    hops = [OpenRoute(store, route)] if route.packs else []

    def move(work: TensorWork) -> None:
        advance(work, data[work.held.spec.name])

    for _ in in_order(move, works(hops, schema, held), workers=num_workers()):
        pass
    return data


def differing(record: Version, schema: Schema, data: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    """The tensors whose bytes are not those of the version."""
    found = combine({spec.name: fingerprint_bytes(spec.name, spec.dtype, spec.shape, data[spec.name]) for spec in schema.tensors})
    return found.differing(record.print_of(schema))


class Retrace:
    """One walk. Routes that are known to be damaged are left out; those that turn out wrong are named in `found`."""

    def __init__(self, store: WeightStore, seen: Survey, *, bad: Iterable[str] = (), max_held: int = MAX_HELD) -> None:
        self._store, self._seen, self._max_held = store, seen, max_held
        self._bad = set(bad)
        self._held: dict[int, Weights] = {}
        self._uses: dict[int, list[int]] = {}
        for name in self._good():
            if name.base is not None:
                self._uses.setdefault(name.base, []).append(name.version)
        self.found: list[Finding] = []

    def all(self) -> set[int]:
        """Prove every route of every version; the versions that could be rebuilt."""
        rebuilt = set()
        for version in sorted(self._seen.versions):
            if self.version(version):
                rebuilt.add(version)
        return rebuilt

    def version(self, version: int) -> bool:
        """Prove every route to one version; whether one of them leads there."""
        data: Weights | None = None
        for name in [name for name in self._good() if name.version == version]:
            if (made := self._proved(self._seen.routes[name])) is not None:
                data = made
        if data is None:
            return False
        self._hold(version, data)
        return True

    def weights(self, version: int) -> Weights | None:
        """The bytes of a version by any good way; None when there is none left. Nobody may write into them."""
        while version not in self._held:
            # From what is held when that is nearest, else from a full route.
            starts = [*sorted((held for held in self._held if held < version), reverse=True)[:1], None]
            paths = [(start, path) for start in starts if (path := plan(self._good(), held=start, target=version)) is not None]
            if not paths:
                return None
            start, path = min(paths, key=lambda found: sum(name.num_bytes for name in found[1]))
            data = None if start is None else self._held[start]
            for name in path:
                data = self._proved(self._seen.routes[name], base=data)
                if data is None:
                    break
            else:
                assert data is not None
                self._hold(version, data)
                return data
        return self._held[version]

    def _good(self) -> list[RouteName]:
        """Every route that can be tried, ascending; those to another schema than their version's lead nowhere."""
        versions, schemas = self._seen.versions, self._seen.schemas
        return [
            name
            for name, route in sorted(self._seen.routes.items(), key=lambda item: (item[0].version, item[0].num_bytes))
            if name.key not in self._bad and route.schema in schemas
            and (name.version not in versions or versions[name.version].schema == route.schema)
        ]  # fmt: skip

    def _proved(self, route: Route, base: Weights | None = None) -> Weights | None:
        """The bytes a route leads to when they are those of its version; otherwise None and, once, a finding."""
        if route.base is not None and base is None and (base := self.weights(route.base)) is None:
            return None
        schema, record = self._seen.schemas[route.schema], self._seen.versions.get(route.version)
        try:
            data = take(self._store, route, schema, base if route.base is not None else None)
        except Damaged as damaged:
            return self._blame(route, Damage.PACK_UNDECODABLE, damaged.key, damaged.reason)
        except UnknownFormat as error:
            return self._blame(route, Damage.OTHER_FORM, route.name.key, str(error))
        except (WrongBase, CorruptSnapshot, KeyError) as error:
            return self._blame(route, Damage.ROUTE_GIVES_OTHER_WEIGHTS, route.name.key, str(error))
        if record is not None and (wrong := differing(record, schema, data)):
            what = f"{len(wrong)} tensors are not those of version {route.version}, first {wrong[0]}"
            return self._blame(route, Damage.ROUTE_GIVES_OTHER_WEIGHTS, route.name.key, what)
        return data

    def _blame(self, route: Route, kind: Damage, key: str, what: str) -> None:
        self._bad.add(route.name.key)
        self.found.append(finding(kind, key, what))

    def _hold(self, version: int, data: Weights) -> None:
        """Keep the newest version and those that a later route starts from, those needed soonest first."""
        self._held[version] = data
        newest = max(self._held)

        def next_use(held: int) -> float:
            return min((use for use in self._uses.get(held, ()) if use > newest), default=float("inf"))

        ranked = sorted(self._held, key=lambda held: (held != version, next_use(held)))
        for held in ranked[self._max_held :]:
            del self._held[held]
        for held in ranked[1 : self._max_held]:
            if next_use(held) == float("inf") and held != newest:
                del self._held[held]
