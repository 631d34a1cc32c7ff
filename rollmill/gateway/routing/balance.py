"""Which replica gets a call: a pure function of what is known of the replicas, without I/O, clock or randomness.

A conversation has a home, the replica whose hash with the session key is the greatest, so that it finds its cache and so that a replica
that joins or leaves moves only its own share. A call goes elsewhere when home is full, sick or on a wrong version.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from blake3 import blake3

from rollmill.engine.protocol import Pressure

# Until a replica has told how many sequences it runs at once.
ASSUMED_SLOTS = 64
# Where nobody has room: the most a replica may be fuller than the mean before its conversations go elsewhere.
MAX_FILL_RATIO = 1.25
# What a replica said of its version counts for this long against a call; versions move on.
VERSION_KNOWN_S = 1.0
MIN_ASIDE_S, MAX_ASIDE_S = 0.05, 5.0
_MASK = 2**64 - 1


class Standing(msgspec.Struct, kw_only=True):
    """What is known of one replica. Times are `now` as the caller counts it."""

    url: str
    place: int
    """Where its address falls among the hashes, from `Standing.of`."""
    num_in_flight: int = 0
    """Our own calls that it is at work on."""
    pressure: Pressure | None = None
    """What it said last."""
    in_flight_then: int = 0
    """Our own calls when it said so."""
    version: int | None = None
    version_at: float = 0.0
    num_failures: int = 0
    """In a row."""
    failed_at: float = 0.0
    aside_until: float = 0.0
    called_at: float = 0.0
    heard_at: float = 0.0
    """Its last sign of life."""

    @classmethod
    def of(cls, url: str, now: float) -> Standing:
        return cls(url=url, place=_hash(url), heard_at=now)

    @property
    def load(self) -> int:
        """Sequences it has now, as far as can be told: what it said, and our calls since."""
        if self.pressure is None:
            return self.num_in_flight
        told = self.pressure.running + self.pressure.waiting
        return max(self.num_in_flight, told + self.num_in_flight - self.in_flight_then)

    @property
    def fill(self) -> float:
        """Load over slots; from 1 on a new call would wait."""
        return self.load / (max(1, self.pressure.slots) if self.pressure else ASSUMED_SLOTS)

    def is_aside(self, now: float) -> bool:
        return now < self.aside_until

    def start(self, now: float) -> None:
        self.num_in_flight += 1
        self.called_at = now

    def hear(self, pressure: Pressure, now: float) -> bool:
        """It told how busy it is. Returns whether its version is news."""
        self.pressure, self.in_flight_then, self.heard_at = pressure, self.num_in_flight, now
        return self.serves(pressure.version, now)

    def serves(self, version: int, now: float) -> bool:
        """It serves this version. Returns whether that is news."""
        is_news, self.version, self.version_at = version != self.version, version, now
        return is_news

    def answer(self, now: float) -> None:
        """It did its work: whatever was wrong is over."""
        self.num_failures, self.aside_until, self.heard_at = 0, 0.0, now

    def fail(self, now: float, *, pause_s: float, jitter: float) -> bool:
        """It failed: put aside for `pause_s`, twice that with every failure in a row, less up to a half by `jitter` in [0, 1].

        Returns whether it is put aside by this; calls that fail together are one failure.
        """
        self.failed_at = now
        if self.is_aside(now):
            return False
        self.num_failures += 1
        pause_s = min(MAX_ASIDE_S, max(MIN_ASIDE_S, pause_s) * 2 ** min(self.num_failures - 1, 10))
        self.aside_until = now + pause_s * (1 - jitter / 2)
        return True


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """What a call asks of a replica."""

    session: str | None = None
    """None: no conversation, the emptiest replica is the best."""
    min_version: int | None = None
    exact_version: int | None = None
    liked_version: int | None = None
    """Better this one, where several will do: what sampled the beginning of the answer."""

    def allows(self, version: int) -> bool:
        if self.exact_version is not None:
            return version == self.exact_version
        return self.min_version is None or version >= self.min_version


def choose(standings: Collection[Standing], need: Need, now: float) -> list[str]:
    """Addresses in the order to try them; empty when every replica is known to be on a wrong version.

    Replicas that failed are left out while they are put aside, unless all are: then they come in the order in which they failed.
    """
    ranked = [(rank, s) for s in standings if (rank := _rank(s, need, now)) is not None]
    ready = [(rank, s) for rank, s in ranked if now >= s.aside_until]
    if not ready:
        return [s.url for _, s in sorted(ranked, key=lambda found: found[1].failed_at)]
    if len(ready) == 1:
        return [ready[0][1].url]
    fills = [s.fill for _, s in ready]
    bound = 1.0 if min(fills) < 1.0 else MAX_FILL_RATIO * sum(fills) / len(fills)
    if need.session is None:
        order = [(rank, fill >= bound, fill, s.called_at, s.url) for (rank, s), fill in zip(ready, fills, strict=True)]
    else:
        key = _hash(need.session)
        order = [
            (rank, fill >= bound, fill if fill >= bound else 0.0, -_mixed(key ^ s.place), s.url)
            for (rank, s), fill in zip(ready, fills, strict=True)
        ]
    order.sort()
    return [url for *_, url in order]


def is_hopeless(standings: Collection[Standing], need: Need, now: float) -> bool:
    """Every replica is past the one version that was asked for. Versions only grow, so waiting does not help."""
    exact = need.exact_version
    if exact is None or not standings:
        return False
    return all(s.version is not None and s.version > exact and now - s.version_at <= VERSION_KNOWN_S for s in standings)


def _rank(standing: Standing, need: Need, now: float) -> int | None:
    """0: serves what is needed; 1: that too, but better another; 2: not known; None: known not to."""
    if need.min_version is None and need.exact_version is None and need.liked_version is None:
        return 0
    if standing.version is None:
        return 2
    if not need.allows(standing.version):
        return None if now - standing.version_at <= VERSION_KNOWN_S else 2
    return 0 if need.liked_version in (None, standing.version) else 1


def _hash(text: str) -> int:
    # Not `hash`, which is salted per process: a run repeated with one seed sends each conversation the same way.
    return int.from_bytes(blake3(text.encode("utf-8", "surrogatepass")).digest(8), "little")


def _mixed(x: int) -> int:
    """A bijection of 64 bits without visible order (the end of splitmix64)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
