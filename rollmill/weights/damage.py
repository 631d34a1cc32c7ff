"""The words for what can be wrong with a weight store: one kind per cause, each with its remedy; looks at nothing itself."""

from __future__ import annotations

from enum import StrEnum

import msgspec

FSCK = "rollmill weights fsck --repair"
GC = "rollmill weights gc"
TRAINER = "the next version that the trainer publishes"
HARMLESS = "harmless"


class Damage(StrEnum):
    """Kinds in the order of the path: pointers, versions, routes, packs, then who uses them, then litter and advice."""

    LATEST_MISSING = "latest_missing"
    LATEST_UNREADABLE = "latest_unreadable"
    LATEST_POINTS_AT_NOTHING = "latest_points_at_nothing"
    LATEST_WENT_BACK = "latest_went_back"
    """A replica serves a version newer than `latest`: an old copy of the pointer was put back."""
    RESERVED_MISSING = "reserved_missing"
    RESERVED_UNREADABLE = "reserved_unreadable"
    RESERVED_BEHIND = "reserved_behind"
    """A number that was used already would be given out again."""
    FLOOR_MISSING = "floor_missing"
    """The line ends in the middle, and nothing older is left: it was collected, and the record of that is gone."""
    FLOOR_UNREADABLE = "floor_unreadable"
    VERSION_MISSING = "version_missing"
    VERSION_UNREADABLE = "version_unreadable"
    VERSION_MISNUMBERED = "version_misnumbered"
    VERSION_UNREACHABLE = "version_unreachable"
    SCHEMA_MISSING = "schema_missing"
    SCHEMA_UNREADABLE = "schema_unreadable"
    ROUTE_UNREADABLE = "route_unreadable"
    ROUTE_MISNAMED = "route_misnamed"
    ROUTE_BASE_UNKNOWN = "route_base_unknown"
    ROUTE_OF_ANOTHER_SCHEMA = "route_of_another_schema"
    ROUTE_GIVES_OTHER_WEIGHTS = "route_gives_other_weights"
    PACK_MISSING = "pack_missing"
    PACK_TRUNCATED = "pack_truncated"
    PACK_FLIPPED = "pack_flipped"
    PACK_INDEX_WRONG = "pack_index_wrong"
    PACK_OF_ANOTHER_VERSION = "pack_of_another_version"
    PACK_UNDECODABLE = "pack_undecodable"
    """Every byte is the one that was written, and the cells cannot be decoded all the same."""
    LEASE_OF_GONE_VERSION = "lease_of_gone_version"
    LEASE_OTHER_FINGERPRINT = "lease_other_fingerprint"
    """A replica serves something that was never published."""
    TAG_OF_MISSING_VERSION = "tag_of_missing_version"
    OTHER_FORM = "other_form"
    """Whole, but written by another Rollmill: it is left alone."""

    QUARANTINED = "quarantined"
    QUARANTINE_OBSOLETE = "quarantine_obsolete"
    """The object is whole again, or gone with everything that named it."""
    QUARANTINE_UNREADABLE = "quarantine_unreadable"
    LEASE_UNREADABLE = "lease_unreadable"
    LEASE_EXPIRED = "lease_expired"
    TAG_UNREADABLE = "tag_unreadable"
    TOMBSTONE_UNREADABLE = "tombstone_unreadable"
    TOMBSTONE_OVERDUE = "tombstone_overdue"
    ROUTE_ORPHAN = "route_orphan"
    """Of a version that was never published: its writer died, or is at work."""
    PACK_ORPHAN = "pack_orphan"
    VERSION_UNSERVED = "version_unserved"
    """Newer than `latest`: its publisher died before it could point there, or does so now."""
    FORK = "fork"
    """Follows the same version as one that is on the line; nobody was ever sent here."""
    TEMPORARY_FILE = "temporary_file"
    STRANGE_OBJECT = "strange_object"
    FOLD_NOT_SMALLER = "fold_not_smaller"


_LITTER = frozenset(list(Damage)[list(Damage).index(Damage.QUARANTINED) :])
_REMEDY: dict[Damage, str] = {
    **dict.fromkeys(Damage, FSCK),
    Damage.LATEST_WENT_BACK: TRAINER,
    Damage.SCHEMA_MISSING: TRAINER,
    Damage.SCHEMA_UNREADABLE: TRAINER,
    Damage.ROUTE_BASE_UNKNOWN: GC,
    Damage.LEASE_OF_GONE_VERSION: "restart that replica",
    Damage.LEASE_OTHER_FINGERPRINT: "stop that replica",
    Damage.TAG_OF_MISSING_VERSION: "rollmill weights tag --delete",
    Damage.OTHER_FORM: "read it with the Rollmill that wrote it",
    Damage.LEASE_EXPIRED: HARMLESS,
    Damage.TOMBSTONE_OVERDUE: GC,
    Damage.ROUTE_ORPHAN: GC,
    Damage.PACK_ORPHAN: GC,
    Damage.VERSION_UNSERVED: HARMLESS,
    Damage.FORK: HARMLESS,
    Damage.TEMPORARY_FILE: HARMLESS,
    Damage.STRANGE_OBJECT: HARMLESS,
    Damage.FOLD_NOT_SMALLER: HARMLESS,
}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong, and what to do about it.

    >>> print(finding(Damage.PACK_MISSING, "packs/00000003/delta-0000.pack", "named by a route to version 3"))
    pack_missing packs/00000003/delta-0000.pack: named by a route to version 3 [rollmill weights fsck --repair]
    """

    kind: Damage
    key: str
    """The object at fault."""
    what: str
    repair: str
    """The command or event that mends it, or `harmless`."""
    is_fatal: bool
    """Something published is damaged or served wrong; everything else is litter and advice."""

    def __str__(self) -> str:
        return f"{self.kind} {self.key}: {self.what} [{self.repair}]"


def finding(kind: Damage, key: str, what: str) -> Finding:
    return Finding(kind=kind, key=key, what=what, repair=_REMEDY[kind], is_fatal=kind not in _LITTER)
