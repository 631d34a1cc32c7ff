"""The pure choice of the routes that take a replica from the version it holds to a target; reads nothing."""

from __future__ import annotations

from collections.abc import Container, Iterable

from rollmill.weights.manifest import RouteName

# What one more hop costs beside its bytes: a round trip to the store is about as long as this many bytes at 100 MB/s.
HOP_BYTES = 1 << 20


def reachable(routes: Iterable[RouteName]) -> set[int]:
    """Every version that some path from nothing leads to."""
    found: set[int | None] = {None}
    for route in sorted(routes, key=lambda route: route.version):
        if route.base in found and (route.base is None or route.base < route.version):
            found.add(route.version)
    return {version for version in found if version is not None}


def plan(
    routes: Iterable[RouteName], *, held: int | None, target: int, refused: Container[str] = (), hop_bytes: int = HOP_BYTES
) -> list[RouteName] | None:
    """The cheapest path to `target`; [] when it is held, None when there is none.

    `refused` names routes that must not be used. A delta can start at `held`, a full route needs nothing.
    """
    if held == target:
        return []
    # A base is always older than what is built on it, so one pass in ascending order settles every version.
    cost: dict[int | None, int] = {None: 0}
    if held is not None:
        cost[held] = 0
    by_version: dict[int, list[RouteName]] = {}
    for route in routes:
        if route.key not in refused and route.version <= target and (route.base is None or route.base < route.version):
            by_version.setdefault(route.version, []).append(route)
    last: dict[int, RouteName] = {}
    for version in sorted(by_version):
        ways = [route for route in by_version[version] if route.base in cost]
        if ways and version != held:
            last[version] = min(ways, key=lambda route: cost[route.base] + route.num_bytes)
            cost[version] = cost[last[version].base] + last[version].num_bytes + hop_bytes
    if target not in last:
        return None
    path = [last[target]]
    while (base := path[-1].base) is not None and base != held:
        path.append(last[base])
    return path[::-1]
