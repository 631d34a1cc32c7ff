"""What a store holds and whether it is whole, in lines for people; changes nothing."""

from __future__ import annotations

from datetime import UTC, datetime

from rollmill.weights import pack as packing
from rollmill.weights.bits import Bits
from rollmill.weights.errors import CorruptSnapshot, UnknownFormat, WrongBase
from rollmill.weights.fingerprint import fingerprint
from rollmill.weights.manifest import Kind, Manifest
from rollmill.weights.store import SnapshotStore


def log(store: SnapshotStore) -> list[str]:
    """One line per version, newest first."""
    latest, lines = store.latest(), []
    for version in reversed(store.versions()):
        try:
            manifest = store.manifest(version)
        except (CorruptSnapshot, UnknownFormat) as error:
            lines.append(f"v{version}  unreadable: {error}")
            continue
        num_bytes = sum(pack.num_bytes for pack in manifest.packs)
        ratio = manifest.raw_bytes / max(1, min(pack.num_bytes for pack in manifest.packs))
        base = "" if manifest.base_version is None else f" on v{manifest.base_version}"
        made = datetime.fromtimestamp(manifest.created, UTC).strftime("%Y-%m-%d %H:%M:%S")
        lines.append(
            f"v{version}  step {manifest.step}  {manifest.kind}{base}  {num_bytes / 1e6:.3f} MB ({ratio:.1f}x)  "
            f"{manifest.fingerprint}  {made}  {manifest.run_id}{'  <- latest' if version == latest else ''}"
        )
    return lines


def verify(store: SnapshotStore) -> list[str]:
    """Everything wrong with the store; empty when every published version can be rebuilt, bit for bit, from its packs."""
    problems = [f"{name} is quarantined: {reason}" for name, reason in store.quarantined().items()]
    try:
        latest = store.latest()
    except (CorruptSnapshot, UnknownFormat) as error:
        return [*problems, str(error)]
    lineage: list[Manifest] = []
    at = latest
    while at is not None:
        try:
            lineage.append(store.manifest(at))
        except (CorruptSnapshot, UnknownFormat) as error:
            problems.append(f"version {at} and all before it cannot be listed: {error}")
            break
        at = lineage[-1].previous
        if at is not None and at >= lineage[-1].version:
            problems.append(f"version {lineage[-1].version} claims to follow version {at}")
            break
    held: dict[int | None, dict[str, Bits]] = {None: {}}
    for manifest in reversed(lineage):
        rebuilt = _rebuild(store, manifest, held, problems)
        # Only the version before is ever a base here; keeping more would keep every version in memory.
        held = {None: {}} if rebuilt is None else {None: {}, manifest.version: rebuilt}
    return problems


def _rebuild(
    store: SnapshotStore, manifest: Manifest, held: dict[int | None, dict[str, Bits]], problems: list[str]
) -> dict[str, Bits] | None:
    """The tensors of one version from every pack that leads to it; what disagrees goes to `problems`."""
    rebuilt: dict[str, Bits] | None = None
    for pack in manifest.packs:
        if pack.base_version not in held:
            problems.append(f"{pack.name} cannot be checked: version {pack.base_version}, its base, could not be rebuilt")
            continue
        try:
            header, decoded = packing.read(store.read_pack(pack.name), digest=pack.digest, old=held[pack.base_version])
        except (CorruptSnapshot, UnknownFormat, WrongBase) as error:
            problems.append(f"{pack.name} is damaged: {error}")
            continue
        bits = {**held[pack.base_version], **decoded}
        if header.version != manifest.version or fingerprint({name: b.tensor() for name, b in bits.items()}) != manifest.print_of():
            problems.append(f"{pack.name} does not give the weights that version {manifest.version} promises")
            continue
        rebuilt = bits
    if rebuilt is None:
        problems.append(f"version {manifest.version} ({Kind(manifest.kind)}) cannot be rebuilt")
    return rebuilt
