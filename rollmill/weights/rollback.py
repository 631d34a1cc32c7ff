"""Goes back: publishes the bits of an earlier version under a new number, so that no number ever means two things.

Serving replicas move by a small delta from what they hold; one that still holds the earlier version has nothing to read.
"""

from __future__ import annotations

import time

import msgspec

from rollmill.weights.encode import write_part
from rollmill.weights.errors import CorruptSnapshot
from rollmill.weights.manifest import Kind, Route, Version
from rollmill.weights.reader import materialise, replay
from rollmill.weights.shard import all_of
from rollmill.weights.store import WeightStore


def rollback(store: WeightStore, version: int, *, run_id: str, writer: str, note: str = "") -> Version:
    """Publish a new version with the bits of `version` and point `latest` at it.

    Raises ValueError for a version that nobody can go back to, and LatestMoved when something was published meanwhile. A trainer that
    still runs is stopped by its next publication and has to be started again from the weights it should go on with.
    """
    latest, target = _choose(store, version)
    created = time.time()
    record = msgspec.structs.replace(
        target, version=store.reserve(), previous=latest.version, epoch=latest.epoch + 1, restores=target.version, run_id=run_id,
        writer=writer, created=created, note=note,
    )  # fmt: skip
    assert record.version > latest.version, "a reserved number is past every published one"
    delta, num_changed = _delta(store, latest, record, target)
    alias = Route(
        kind=Kind.ALIAS, version=record.version, base=target.version, schema=record.schema, packs=(), writer=writer, created=created
    )
    for route in [alias] if delta is None else [delta, alias]:
        store.add_route(route)
    record = msgspec.structs.replace(record, num_changed=num_changed)
    store.publish(record, expected=latest.version)
    return record


def _choose(store: WeightStore, version: int) -> tuple[Version, Version]:
    pointer = store.latest()
    if pointer is None:
        raise ValueError(f"nothing was published in {store} yet, so there is nothing to go back to")
    latest = store.version(pointer.version)
    listed = store.versions()
    if version not in listed:
        at_hand = f"{listed[0]} to {listed[-1]}, {len(listed)} of them" if listed else "none"
        raise ValueError(f"version {version} is not in {store}: it was never published or was collected; there are {at_hand}")
    # Below the floor the line is no longer known: what has a record there was served once, and a tag or a lease keeps it.
    if version >= store.floor().version and all(place.version != version for place in store.line()):
        raise ValueError(f"version {version} was never served: it is not among those that lead to latest, {latest.version}; see the log")
    target = store.version(version)
    if (target.fingerprint, target.schema) == (latest.fingerprint, latest.schema):
        raise ValueError(f"latest, version {latest.version}, has the bits of version {version} already; nothing to do")
    return latest, target


def _delta(store: WeightStore, latest: Version, record: Version, target: Version) -> tuple[Route | None, int]:
    """A proved delta from what is served to what is restored and how many elements it changes; None across a change of schema."""
    try:
        _, schema, new = materialise(store, target.version)
    except CorruptSnapshot as error:
        raise CorruptSnapshot(f"cannot go back to version {target.version}: {error}") from error
    num_elements = sum(spec.num_elements for spec in schema.tensors)
    if latest.schema != target.schema:
        return None, num_elements
    try:
        _, _, old = materialise(store, latest.version)
    except CorruptSnapshot:
        # Damage may be why somebody goes back. Replicas then start from a full route.
        return None, num_elements
    part = write_part(store, schema, kind=Kind.DELTA, version=record.version, base=latest.version, held=all_of(schema), new=new, old=old)
    route = Route(
        kind=Kind.DELTA, version=record.version, base=latest.version, schema=record.schema, packs=part.packs, writer=record.writer,
        created=record.created,
    )  # fmt: skip
    replay(store, route, record, schema, old)
    return route, part.num_changed
