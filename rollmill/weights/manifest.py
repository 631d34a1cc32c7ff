"""The small records of a weight store and their sealed form, in which a flipped bit is an error; opens nothing.

one line of JSON \\n BLAKE3 of that line in hex \\n

A Version says what the weights are, a Route says one way to get there; folds and anchors add routes to versions long published.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, TypeVar

import msgspec
from blake3 import blake3

from rollmill.weights.errors import CorruptSnapshot, UnknownFormat
from rollmill.weights.proof import Fingerprint
from rollmill.weights.schema import Schema

FORMAT = 2
Record = TypeVar("Record", bound=msgspec.Struct)
# What becomes part of a key or of a range is looked at when the record is read: a strange one is of another form, not a crash later.
Count = Annotated[int, msgspec.Meta(ge=0)]
SchemaName = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,100}$")]
PackKey = Annotated[str, msgspec.Meta(pattern=r"^packs/[A-Za-z0-9_-]{1,100}/[A-Za-z0-9_-]{1,100}\.pack$")]


class Kind(StrEnum):
    FULL = "full"
    """Every cell, from nothing."""
    DELTA = "delta"
    """The cells that differ from the version published before."""
    FOLD = "fold"
    """The cells that differ from a version several steps back."""
    ALIAS = "alias"
    """Nothing to read: the version has the same bits as its base (a roll-back)."""


class PackRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One object with coded cells; a route has one per publishing rank."""

    key: PackKey
    """e.g. `packs/00000016/delta-0000.pack`."""
    num_bytes: Count
    digest: str
    """BLAKE3 of the whole object before its trailing digest, hex."""
    index_bytes: Count
    index_digest: str
    """BLAKE3 of the index alone, hex, so that a reader of a few cells can trust where they lie."""


class RouteName(msgspec.Struct, frozen=True, kw_only=True):
    """What the key of a route tells without reading it: enough to plan."""

    version: int
    base: int | None
    num_bytes: int

    @property
    def key(self) -> str:
        base = "full" if self.base is None else f"{self.base:08d}"
        return f"routes/{self.version:08d}-{base}-{self.num_bytes}.json"


class Route(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to reach a version: from nothing (`base` None) or from the bytes of another version."""

    format: int = FORMAT
    kind: Kind
    version: int
    base: int | None
    schema: SchemaName
    packs: tuple[PackRef, ...]
    writer: str
    created: float

    @property
    def num_bytes(self) -> int:
        return sum(pack.num_bytes for pack in self.packs)

    @property
    def name(self) -> RouteName:
        return RouteName(version=self.version, base=self.base, num_bytes=self.num_bytes)


class Version(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one published version is. Following `previous` from `latest` lists everything that was ever served."""

    format: int = FORMAT
    version: int
    previous: int | None
    """The version that was latest when this one was published; None for the first."""
    epoch: int = 0
    """Grows by one at every roll-back and whenever a trainer goes on from other weights than those last published."""
    restores: int | None = None
    """Set by a roll-back: the version whose bits these are."""
    schema: SchemaName
    """Digest of the tensor table."""
    fingerprint: str
    """The total over all tensors, 32 hex digits."""
    tensors: tuple[str, ...]
    """Each tensor's fingerprint, in schema order."""
    num_changed: int
    """Elements that differ from `previous`; all of them for a first version."""
    raw_bytes: int
    step: int
    """The optimiser step that made these weights."""
    run_id: str
    writer: str
    created: float
    """Unix seconds."""
    note: str = ""

    @property
    def key(self) -> str:
        return version_key(self.version)

    def print_of(self, schema: Schema) -> Fingerprint:
        assert schema.digest == self.schema
        if len(self.tensors) != len(schema.tensors):
            raise CorruptSnapshot(f"{self.key} has fingerprints of {len(self.tensors)} tensors, its schema has {len(schema.tensors)}")
        names = (spec.name for spec in schema.tensors)
        return Fingerprint(total=self.fingerprint, tensors=dict(zip(names, self.tensors, strict=True)))


class Pointer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `latest.json` and `reserved.json`."""

    version: int
    epoch: int = 0


class Floor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `floor.json`: where the line begins since older versions were collected."""

    version: int
    position: int
    """How many versions were on the line before it."""


class Lease(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a replica says of itself. While it lives, collection keeps what the replica holds and what it needs to move on."""

    replica: str
    version: int | None
    """What it serves."""
    fingerprint: str = ""
    """Of the live weights, recomputed at the swap."""
    staging: int | None = None
    renewed: float
    expires: float
    """Unix seconds."""
    url: str = ""
    """Where peers may read this replica's weights; empty: nowhere."""
    problem: str = ""
    timings_s: dict[str, float] = {}
    """Seconds of the last update by phase: plan, fetch, decode, swap."""
    num_swaps: int = 0

    @property
    def key(self) -> str:
        return f"leases/{self.replica}.json"


class Tag(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A name that keeps a version from being collected."""

    name: str
    version: int
    created: float
    note: str = ""

    @property
    def key(self) -> str:
        return f"tags/{self.name}.json"


class Tombstone(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Routes that nobody may start on any more, and packs that go once everybody who might read them is done."""

    name: str
    created: float
    delete_after: float
    """Unix seconds; later than any lease alive when this was written."""
    routes: tuple[str, ...]
    versions: tuple[str, ...]
    packs: tuple[str, ...]
    num_bytes: int

    @property
    def key(self) -> str:
        return f"tombstones/{self.name}.json"


class Quarantine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An object that must not be used, and why."""

    target: str
    """The key of the pack, route or version."""
    reason: str
    created: float

    @property
    def key(self) -> str:
        return f"quarantine/{self.target.replace('/', '__')}.json"


class Declined(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fold that was tried and not kept, so that nobody tries it again."""

    version: int
    base: int
    num_bytes: int
    chain_bytes: int
    """Of the routes it would have replaced, which are no more than its own."""

    @property
    def key(self) -> str:
        return f"declined/{self.version:08d}-{self.base:08d}.json"


_ROUTE = re.compile(r"^routes/(\d{8,})-(full|\d{8,})-(\d+)\.json$")
_VERSION = re.compile(r"^versions/(\d{8,})\.json$")
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")


def version_key(version: int) -> str:
    return f"versions/{version:08d}.json"


def schema_key(digest: str) -> str:
    return f"schema/{digest}.json"


def pack_key(version: int, kind: Kind, *, base: int | None, rank: int, number: int = 0) -> str:
    """Packs of one version lie together; a fold says from where it starts."""
    label = kind if kind is not Kind.FOLD else f"{kind}{base:08d}"
    more = f"-{number:04d}" if number else ""
    return f"packs/{version:08d}/{label}-{rank:04d}{more}.pack"


def route_in(key: str) -> RouteName | None:
    if (found := _ROUTE.match(key)) is None:
        return None
    return RouteName(version=int(found[1]), base=None if found[2] == "full" else int(found[2]), num_bytes=int(found[3]))


def version_in(key: str) -> int | None:
    found = _VERSION.match(key)
    return int(found[1]) if found else None


def check_name(name: str, what: str) -> str:
    if not _NAME.match(name):
        raise ValueError(f"{what} {name!r} must be 1 to 100 letters, digits, '.', '_' or '-', beginning with a letter or digit")
    return name


def seal(record: msgspec.Struct) -> bytes:
    line = msgspec.json.encode(record)
    return line + b"\n" + blake3(line).hexdigest().encode() + b"\n"


def unseal(data: bytes, kind: type[Record], what: str) -> Record:
    line, _, rest = data.partition(b"\n")
    if rest != blake3(line).hexdigest().encode() + b"\n":
        raise CorruptSnapshot(f"{what} is damaged: its digest line does not fit its content")
    try:
        found = msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:
        raise UnknownFormat(f"{what} is whole but of another form: {error}; read it with the Rollmill that wrote it") from error
    if getattr(found, "format", FORMAT) not in (FORMAT, 1 if kind is Schema else FORMAT):
        raise UnknownFormat(f"{what} has format {getattr(found, 'format', '?')}; read it with the Rollmill that wrote it")
    return found
