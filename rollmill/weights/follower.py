"""A replica's end: stages the newest version it can prove beside the live weights, and holds it only once the live weights prove it too."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from rollmill.weights import pack as packing
from rollmill.weights.bits import Bits
from rollmill.weights.errors import CorruptSnapshot, UnknownFormat, WrongBase, WrongWeights
from rollmill.weights.fingerprint import Fingerprint, combine, fingerprint, tensor_fingerprint
from rollmill.weights.manifest import Manifest
from rollmill.weights.plan import Hop, plan
from rollmill.weights.store import SnapshotStore

log = logging.getLogger(__name__)
Apply = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Staged:
    """A version made ready beside the live weights. Its tensors are absolute values: applying them twice is the same as once.

    The tensors share memory with what the follower keeps: copy out of them, never write into them.
    """

    version: int
    step: int
    base_version: int | None
    """The version the live weights must have now; None: any, since `tensors` then holds every tensor."""
    tensors: dict[str, torch.Tensor]
    """The new value of every tensor that changed, in the serving dtype."""
    restore: dict[str, torch.Tensor]
    """Every tensor of `base_version`, to go back to; empty when nothing was held."""
    fingerprint: Fingerprint
    """What the live weights must show after the copy."""
    bytes_read: int
    num_packs: int
    prepare_s: float
    bits: dict[str, Bits] = field(repr=False)
    """The whole version as the follower will hold it."""


@dataclass(frozen=True, kw_only=True)
class FollowerStats:
    """Counts since the follower was made."""

    num_polls: int = 0
    num_staged: int = 0
    num_confirmed: int = 0
    num_wrong_weights: int = 0
    """Swaps refused because the live weights were not those of the version."""
    num_wrong_base: int = 0
    """Times the held copy was not what a delta was made from; each led to a fresh start from a full pack."""
    num_quarantined: int = 0
    """Packs and manifests this follower found damaged or missing."""
    num_read_errors: int = 0
    """Reads that the system refused; tried again at the next poll."""
    bytes_read: int = 0
    problem: str = ""
    """Why the replica is behind `latest`, in plain words; empty when nothing is wrong."""


@dataclass(frozen=True, kw_only=True)
class _Held:
    version: int
    fingerprint: Fingerprint
    bits: dict[str, Bits]


class Follower:
    """Follows one store for one engine. `poll` may run in a background thread while the engine serves; `swap` or `confirm`
    run in the engine's own thread between two decode steps.

    `apply` copies the tensors it is given into the live weights and returns all live tensors in the serving dtype.
    """

    def __init__(self, store: SnapshotStore, *, apply: Apply) -> None:
        self._store = store
        self._apply = apply
        self._lock = threading.Lock()
        self._staging = threading.Lock()
        self._held: _Held | None = None
        self._settled: int | None = None
        """The value of `latest` that was last staged or given up on."""
        self._refused: dict[str, str] = {}
        self._stats = FollowerStats()

    @property
    def version(self) -> int | None:
        """The version that the live weights last proved to be."""
        held = self._held
        return None if held is None else held.version

    def stats(self) -> FollowerStats:
        with self._lock:
            return self._stats

    def poll(self) -> Staged | None:
        """The newest version that can be reached past the held one; None when there is none or it was staged before."""
        with self._lock:
            held = self._held
            self._stats = replace(self._stats, num_polls=self._stats.num_polls + 1)
        try:
            latest = self._store.latest()
            if latest is None or latest == self._settled:
                return None
            if held is not None and latest <= held.version:
                gone_back = f"the store went back to version {latest}, this replica holds {held.version}"
                self._settle(latest, gone_back if latest < held.version else "")
                return None
            return self._stage(latest, held)
        except (CorruptSnapshot, UnknownFormat) as error:
            self._say(str(error))
        except OSError as error:
            with self._lock:
                self._stats = replace(self._stats, num_read_errors=self._stats.num_read_errors + 1)
            self._say(f"cannot read the weight store: {error}")
        return None

    def bootstrap(self) -> Staged:
        """Every tensor of the newest version the store can prove, whatever is held; raises ValueError when there is none."""
        latest = self._store.latest()
        staged = None if latest is None else self._stage(latest, None)
        if staged is None:
            why = "nothing was published yet" if latest is None else self.stats().problem
            raise ValueError(f"the weight store has no version to start from: {why}")
        return staged

    def swap(self, staged: Staged) -> None:
        """Apply, prove and hold `staged`; when the proof fails put the old version back, prove that, and raise WrongWeights."""
        self._refuse_wrong_base(staged)
        live = self._apply(staged.tensors)
        try:
            self.confirm(staged, fingerprint(live))
        except WrongWeights as wrong:
            held = self._held
            if held is None:
                raise
            back = fingerprint(self._apply(staged.restore))
            if back != held.fingerprint:
                message = f"{wrong}; and version {held.version} could not be put back: stop serving and `bootstrap` again"
                raise WrongWeights(message, tensors=back.differing(held.fingerprint)) from wrong
            raise

    def confirm(self, staged: Staged, live: Fingerprint) -> None:
        """Hold `staged`, now that the live weights show `live`. On WrongWeights the engine puts `staged.restore` back."""
        self._refuse_wrong_base(staged)
        if live != staged.fingerprint:
            names = live.differing(staged.fingerprint)
            message = f"version {staged.version} should show {staged.fingerprint.total}, the live weights show {live.total}"
            message += f"; {len(names)} tensors differ, first {', '.join(names[:3])}"
            with self._lock:
                self._stats = replace(self._stats, num_wrong_weights=self._stats.num_wrong_weights + 1)
            self._say(message)
            raise WrongWeights(message, tensors=names)
        with self._lock:
            self._held = _Held(version=staged.version, fingerprint=staged.fingerprint, bits=staged.bits)
            problem = self._stats.problem if self._settled != staged.version else ""
            self._stats = replace(self._stats, num_confirmed=self._stats.num_confirmed + 1, problem=problem)

    def _refuse_wrong_base(self, staged: Staged) -> None:
        if self.version is not None and staged.version < self.version:
            raise WrongBase(f"version {staged.version} was staged before the replica moved on to {self.version}; drop it")
        if staged.base_version is not None and self.version not in (staged.base_version, staged.version):
            # What is dropped here must be staged again, even if nothing newer ever comes.
            self._settled = None
            raise WrongBase(f"version {staged.version} was staged on {staged.base_version}, the replica holds {self.version}; poll again")

    def _stage(self, latest: int, base: _Held | None) -> Staged | None:
        """Read and prove a path to the newest reachable version, going round what turns out to be damaged."""
        with self._staging:
            return self._stage_alone(latest, base)

    def _stage_alone(self, latest: int, base: _Held | None) -> Staged | None:
        start = time.monotonic()
        bytes_read = 0
        self._refused.update({name: why for name, why in self._store.quarantined().items() if name not in self._refused})
        while True:
            hops = plan(self._lineage(latest, base), held=None if base is None else base.version, refused=self._refused)
            # Without a base the newest reachable version may lie before the one that is served: nobody goes back by accident.
            if not hops or hops[-1].manifest.version < (-1 if self.version is None else self.version):
                self._settle(latest, self._stranded(latest))
                return None
            try:
                bits = {} if base is None or hops[0].pack.base_version is None else dict(base.bits)
                for hop in hops:
                    bytes_read += hop.pack.num_bytes
                    bits = self._take(hop, bits)
                found = _prove(hops[-1], base, bits)
            except _Damaged as damaged:
                self._refuse(damaged.name, damaged.reason)
                continue
            except WrongBase as error:
                # A path from a full pack brings its own bases along, so this is the held copy's fault and happens once.
                assert base is not None and hops[0].pack.base_version is not None, error
                base = None
                with self._lock:
                    self._stats = replace(self._stats, num_wrong_base=self._stats.num_wrong_base + 1)
                self._say(f"the held copy is not what was published ({error}); starting from a full pack")
                continue
            with self._lock:
                stats, held = self._stats, self._held
                self._stats = replace(stats, num_staged=stats.num_staged + 1, bytes_read=stats.bytes_read + bytes_read)
            target = hops[-1].manifest
            self._settle(latest, "" if target.version == latest else self._stranded(latest))
            changed = {name: now for name, now in bits.items() if base is None or not _same(base.bits.get(name), now)}
            return Staged(
                version=target.version,
                step=target.step,
                base_version=None if base is None else base.version,
                tensors={name: now.tensor() for name, now in changed.items()},
                restore={} if held is None else {name: old.tensor() for name, old in held.bits.items()},
                fingerprint=found,
                bytes_read=bytes_read,
                num_packs=len(hops),
                prepare_s=time.monotonic() - start,
                bits=bits,
            )

    def _lineage(self, latest: int, base: _Held | None) -> list[Manifest]:
        """The published versions from `latest` back as far as a path may want to start: the base, or a full pack once that is cheaper.

        A replica that slept for a thousand versions thus reads some tens of manifests, not a thousand.
        """
        found: list[Manifest] = []
        chain_bytes, anchor_bytes, has_anchor = 0.0, math.inf, False
        at: int | None = latest
        while at is not None and (base is None or at > base.version):
            name = f"v{at:08d}.json"
            if name in self._refused:
                break
            try:
                manifest = self._store.manifest(at)
            except CorruptSnapshot as error:
                self._refuse(name, str(error))
                break
            found.append(manifest)
            usable = [pack for pack in manifest.packs if pack.name not in self._refused]
            for pack in usable:
                if pack.base_version is None:
                    anchor_bytes, has_anchor = min(anchor_bytes, chain_bytes + pack.num_bytes), True
            chain_bytes += min((pack.num_bytes for pack in usable if pack.base_version is not None), default=math.inf)
            if has_anchor and (base is None or chain_bytes >= anchor_bytes):
                break
            at = manifest.previous
        return found

    def _take(self, hop: Hop, bits: dict[str, Bits]) -> dict[str, Bits]:
        """`bits` moved on by one pack. A pack is condemned only when a second read fails too: the first may have met a bad cable."""
        for last_try in (False, True):
            try:
                header, decoded = packing.read(self._store.read_pack(hop.pack.name), digest=hop.pack.digest, old=bits)
            except CorruptSnapshot as error:
                if last_try:
                    raise _Damaged(hop.pack.name, str(error)) from error
                continue
            if (header.version, header.base_version) != (hop.manifest.version, hop.pack.base_version):
                raise _Damaged(hop.pack.name, f"it holds version {header.version} on {header.base_version}, not what its manifest says")
            return {**bits, **decoded} if hop.pack.base_version is not None else decoded
        raise AssertionError("unreachable: the last try returns or raises")

    def _refuse(self, name: str, reason: str) -> None:
        self._refused[name] = reason
        marked = self._store.quarantine(name, reason)
        with self._lock:
            self._stats = replace(self._stats, num_quarantined=self._stats.num_quarantined + 1)
        done = "quarantined" if marked else "the store is read-only, so only noted here"
        log.error("weights: %s is unusable (%s); %s", name, reason, done)

    def _stranded(self, latest: int) -> str:
        reasons = "; ".join(f"{name}: {why}" for name, why in sorted(self._refused.items())[-3:])
        return f"version {latest} cannot be reached from {self.version} ({reasons or 'no path'}); waiting for the next full version"

    def _settle(self, latest: int, problem: str) -> None:
        self._settled = latest
        self._say(problem)

    def _say(self, problem: str) -> None:
        with self._lock:
            news = problem and problem != self._stats.problem
            self._stats = replace(self._stats, problem=problem)
        if news:
            log.error("weights: %s", problem)


class _Damaged(Exception):
    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason


def _prove(hop: Hop, base: _Held | None, bits: Mapping[str, Bits]) -> Fingerprint:
    """The fingerprint of the staged bits, which must be the manifest's. What is still the held object keeps its proved value."""
    untouched = {name for name, now in bits.items() if base is not None and now is base.bits.get(name)}
    values = {}
    for name, now in bits.items():
        values[name] = base.fingerprint.tensors[name] if base and name in untouched else tensor_fingerprint(name, now.tensor())
    found, expected = combine(values), hop.manifest.print_of()
    wrong = found.differing(expected)
    if untouched.intersection(wrong):
        raise WrongBase(f"{len(wrong)} tensors the deltas did not touch are not those of version {hop.manifest.version}")
    schema = {entry.name: (entry.dtype, entry.shape) for entry in hop.manifest.tensors}
    if found != expected or schema != {name: (now.dtype, now.shape) for name, now in bits.items()}:
        raise _Damaged(hop.pack.name, f"it decodes to other tensors than its manifest names: {', '.join(wrong[:3]) or 'schema differs'}")
    return found


def _same(old: Bits | None, new: Bits) -> bool:
    if old is None or (old.dtype, old.shape) != (new.dtype, new.shape):
        return False
    return old is new or bool((old.data == new.data).all())
