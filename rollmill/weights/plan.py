"""The pure choice of which packs take a replica from the version it holds to the newest one it can reach; reads nothing."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from rollmill.weights.manifest import Manifest, PackRef


@dataclass(frozen=True, kw_only=True)
class Hop:
    manifest: Manifest
    pack: PackRef


def plan(manifests: Iterable[Manifest], *, held: int | None, refused: Container[str]) -> list[Hop]:
    """The cheapest path in bytes to the newest version that can be reached past `held`; empty when there is none.

    `refused` names packs that must not be used. A delta can start at `held`, a full pack needs nothing.
    """
    # A base is always older than what is built on it, so one pass in ascending order settles every version.
    reached: dict[int | None, tuple[int, list[Hop]]] = {None: (0, [])}
    if held is not None:
        reached[held] = (0, [])
    for manifest in sorted(manifests, key=lambda m: m.version):
        ways = [
            (reached[pack.base_version][0] + pack.num_bytes, [*reached[pack.base_version][1], Hop(manifest=manifest, pack=pack)])
            for pack in manifest.packs
            if pack.name not in refused and pack.base_version in reached
        ]
        if ways and manifest.version != held:
            reached[manifest.version] = min(ways, key=lambda way: way[0])
    newest = max((version for version in reached if version is not None), default=None)
    if newest is None or (held is not None and newest <= held):
        return []
    return reached[newest][1]
