"""Takes every route of a store, one after the other along the line, and proves where each one leads; holds few versions in memory."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rollmill.weights.damage import Damage, Finding, finding
from rollmill.weights.errors import UnknownFormat, WrongBase
from rollmill.weights.manifest import Route, RouteName, version_in
from rollmill.weights.plan import plan
from rollmill.weights.probe import pack_damage
from rollmill.weights.reader import Damaged, replay
from rollmill.weights.store import WeightStore
from rollmill.weights.survey import Survey, is_there

Weights = dict[str, np.ndarray]
MAX_HELD = 5
"""Folds at 4, 16 and 64 versions keep three bases waiting beside the newest version; one more for an alias."""


class Retrace:
    """One walk. Routes that are known to be damaged are left out; those that turn out wrong are named in `found`."""

    def __init__(self, store: WeightStore, seen: Survey, *, bad: Iterable[str] = (), max_held: int = MAX_HELD) -> None:
        self._store, self._seen, self._max_held = store, seen, max_held
        self._bad = set(bad)
        self._lost: set[int] = set()
        self._held: dict[int, Weights] = {}
        self._ways: dict[int, list[RouteName]] = {}
        self._uses: dict[int, list[int]] = {}
        for name in sorted(seen.routes, key=lambda name: (name.version, name.num_bytes)):
            if leads_somewhere(seen, seen.routes[name]):
                self._ways.setdefault(name.version, []).append(name)
                self._uses.setdefault(-1 if name.base is None else name.base, []).append(name.version)
        self.found: list[Finding] = []

    def all(self) -> set[int]:
        """Prove every route of every version; the versions that could be rebuilt."""
        return {version for version in sorted(self._seen.versions) if self.version(version)}

    def version(self, version: int) -> bool:
        """Prove every route to one version; whether one of them leads there."""
        data: Weights | None = None
        for name in self._ways.get(version, ()):
            if name.key not in self._bad and (made := self._proved(self._seen.routes[name])) is not None:
                data = made
        if data is None:
            self._lost.add(version)
            return False
        self._hold(version, data)
        return True

    def route(self, name: RouteName) -> bool:
        """Prove one route."""
        listed = name.key not in self._bad and name in self._ways.get(name.version, ())
        return listed and self._proved(self._seen.routes[name]) is not None

    def weights(self, version: int) -> Weights | None:
        """The bytes of a version by any good way; None when there is none left. Nobody may write into them."""
        while version not in self._held and version not in self._lost:
            # From a full route, or from the nearest of what is held.
            start = max((held for held in self._held if held < version), default=None)
            names = (name for names in self._ways.values() for name in names)
            if (path := plan(names, held=start, target=version, refused=self._bad)) is None:
                self._lost.add(version)
                break
            data = None if start is None or path[0].base is None else self._held[start]
            for name in path:
                if (data := self._proved(self._seen.routes[name], base=data)) is None:
                    break
            else:
                assert data is not None
                self._hold(version, data)
        return self._held.get(version)

    def _proved(self, route: Route, base: Weights | None = None) -> Weights | None:
        """The bytes a route leads to when they are those of its version; otherwise None and, once, a finding."""
        if route.base is not None and base is None and (base := self.weights(route.base)) is None:
            return None
        schema, record = self._seen.schemas[route.schema], self._seen.versions.get(route.version)
        if base is not None and any(spec.name not in base or base[spec.name].nbytes != spec.num_bytes for spec in schema.tensors):
            return self._blame(route, Damage.ROUTE_GIVES_OTHER_WEIGHTS, route.name.key, f"the tensors of version {route.base} are others")
        data = None if base is None else {spec.name: np.array(base[spec.name]) for spec in schema.tensors}
        try:
            return replay(self._store, route, record, schema, data)
        except Damaged as damaged:
            kind = Damage.PACK_UNDECODABLE if damaged.key.startswith("packs/") else Damage.ROUTE_GIVES_OTHER_WEIGHTS
            return self._blame(route, kind, damaged.key, damaged.reason)
        except UnknownFormat as error:
            return self._blame(route, Damage.OTHER_FORM, route.name.key, str(error))
        except WrongBase as error:
            return self._blame(route, Damage.ROUTE_GIVES_OTHER_WEIGHTS, route.name.key, str(error))

    def _blame(self, route: Route, kind: Damage, key: str, what: str) -> Weights | None:
        self._bad.add(route.name.key)
        if is_there(self._store, route.name.key):
            self.found.append(finding(kind, key, what))
        return None

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


def leads_somewhere(seen: Survey, route: Route) -> bool:
    """Whether a route can be tried at all: readers leave out one that has another schema than its version."""
    record = seen.versions.get(route.version)
    return route.schema in seen.schemas and (record is None or record.schema == route.schema)


def unusable(store: WeightStore, seen: Survey, target: str) -> str:
    """Why a quarantined object cannot be used; empty when it is whole or nothing refers to it any more."""
    unread = [one.what for one in seen.found if one.key == target]
    if unread:
        return unread[0]
    if (number := version_in(target)) is not None:
        if number not in seen.versions:
            return "" if seen.is_collected(number) else "its record is gone"
        return "" if Retrace(store, seen).version(number) else "no whole route leads to it"
    wanted = [route for name, route in seen.routes.items() if target in (name.key, *(ref.key for ref in route.packs))]
    for route in wanted:
        for ref in route.packs:
            if target in (ref.key, route.name.key) and (damage := pack_damage(store, route, ref, deep=True)) is not None:
                return damage.what
        if not Retrace(store, seen).route(route.name):
            return "it does not lead to its version"
    return ""
