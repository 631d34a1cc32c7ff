"""The line of published versions as text for people; only reads, and shows what it can of a damaged store."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice

from rollmill.weights.chunk import Codec
from rollmill.weights.errors import CorruptSnapshot, UnknownFormat
from rollmill.weights.manifest import Kind, PackRef, Route, RouteName, Tag, Version
from rollmill.weights.objects import ObjectMissing
from rollmill.weights.pack import Entry, index_range, read_index
from rollmill.weights.store import WeightStore

_SAMPLE = 256
"""Cells of a pack whose codec is looked at: enough to see what is used, and a few requests at most."""
_TOP = 5


def log(store: WeightStore, *, limit: int | None = 50, now: float | None = None) -> list[str]:
    """Newest first, one line per version. Folds stand beside the line as brackets from version (.) to base (')."""
    now = time.time() if now is None else now
    records, problem = _records(store, limit)
    if not records:
        return [problem or f"nothing was published in {store} yet"]
    routes: dict[int, list[RouteName]] = {}
    for name in store.routes(after=records[-1].version - 1):
        routes.setdefault(name.version, []).append(name)
    tags = store.tags()
    marks = _brackets([record.version for record in records], _folds(records, routes))
    rows = [
        [
            f"o {marks[index]}",
            f"v{record.version}",
            f"step {record.step}",
            _ways(record, routes.get(record.version, [])),
            f"{_changed(store, record)} changed",
            f"epoch {record.epoch}",
            record.fingerprint[:8],
            _age(now - record.created),
            _remarks(record, tags, is_latest=index == 0),
        ]
        for index, record in enumerate(records)
    ]
    return [*_columns(rows), *([problem] if problem else [])]


def show(store: WeightStore, version: int, *, now: float | None = None) -> list[str]:
    """Everything about one version. Raises CorruptSnapshot when there is no record of it."""
    now = time.time() if now is None else now
    record = store.version(version)
    lines = [
        f"version {record.version}, step {record.step}, run {record.run_id}, epoch {record.epoch}",
        f"  previous     {'none' if record.previous is None else f'v{record.previous}'}"
        + ("" if record.restores is None else f", restores v{record.restores}"),
        f"  fingerprint  {record.fingerprint}",
        f"  schema       {record.schema}, {len(record.tensors)} tensors, {_size(record.raw_bytes)} raw",
        f"  changed      {record.num_changed} elements, {_changed(store, record)}",
        f"  published    {_age(now - record.created)} by {record.writer}",
    ]
    if record.note:
        lines.append(f"  note         {record.note}")
    lines += [f"  tag          {tag.name}{f': {tag.note}' if tag.note else ''}" for tag in store.tags() if tag.version == version]
    for lease in store.leases():
        if version in (lease.version, lease.staging):
            does = "serves" if lease.version == version else "stages"
            until = f"for {lease.expires - now:.0f} s more" if lease.expires > now else f"expired {_age(now - lease.expires)}"
            lines.append(f"  lease        {lease.replica} {does} it, {until}")
    names = [name for name in store.routes(after=version - 1) if name.version == version]
    for name in names:
        lines += _route_lines(store, record, name)
    return lines if names else [*lines, "  no route leads to it"]


def kind_of(name: RouteName, record: Version) -> Kind:
    """What a route is, told from its name and the version it leads to."""
    if name.base is None:
        return Kind.FULL
    if not name.num_bytes:
        return Kind.ALIAS
    return Kind.DELTA if name.base == record.previous else Kind.FOLD


def _records(store: WeightStore, limit: int | None) -> tuple[list[Version], str]:
    found: list[Version] = []
    try:
        for record in islice(store.lineage(), limit):
            found.append(record)
    except (CorruptSnapshot, UnknownFormat) as error:
        return found, f"the line ends here: {error}; look with `rollmill weights fsck`"
    return found, ""


def _folds(records: Sequence[Version], routes: Mapping[int, Sequence[RouteName]]) -> list[tuple[int, int]]:
    """(version, base) of each fold, shortest first."""
    found = [
        (name.version, name.base)
        for record in records
        for name in routes.get(record.version, [])
        if name.base is not None and kind_of(name, record) is Kind.FOLD
    ]
    return sorted(found, key=lambda fold: (fold[0] - fold[1], fold))


def _brackets(versions: Sequence[int], folds: Sequence[tuple[int, int]]) -> list[str]:
    """One string per version: folds that do not overlap share a column, and one that begins where another ends is joined to it (+)."""
    rows = {version: row for row, version in enumerate(versions)}
    columns: list[list[str]] = []
    for version, base in folds:
        top, bottom = rows[version], rows.get(base, len(versions))
        inside = range(top + 1, min(bottom, len(versions)))
        ends = range(bottom, min(bottom + 1, len(versions)))
        free = (c for c in columns if c[top] in " '" and all(c[row] == " " for row in inside) and all(c[row] in " ." for row in ends))
        if (column := next(free, None)) is None:
            column = [" "] * len(versions)
            columns.append(column)
        column[top] = "+" if column[top] == "'" else "."
        for row in inside:
            column[row] = "|"
        for row in ends:
            column[row] = "+" if column[row] == "." else "'"
    return ["".join(column[row] for column in columns) for row in range(len(versions))]


def _ways(record: Version, names: Sequence[RouteName]) -> str:
    """e.g. `delta 1.4 MB (193.7x) + full 180.1 MB (1.5x)`; folds are drawn, and only their bytes are told."""
    order = [Kind.DELTA, Kind.ALIAS, Kind.FULL, Kind.FOLD]
    found = sorted(((kind_of(name, record), name) for name in names), key=lambda pair: (order.index(pair[0]), pair[1].key))
    texts = []
    for kind, name in found:
        if kind is Kind.ALIAS:
            texts.append(f"alias of v{name.base}")
        else:
            since = f" v{name.base}" if kind is Kind.FOLD else ""
            texts.append(f"{kind}{since} {_size(name.num_bytes)} ({record.raw_bytes / max(1, name.num_bytes):.1f}x)")
    return " + ".join(texts) or "no route"


def _changed(store: WeightStore, record: Version) -> str:
    try:
        total = sum(spec.num_elements for spec in store.schema(record.schema).tensors)
    except (CorruptSnapshot, UnknownFormat):
        return "? %"
    return f"{100 * min(1.0, record.num_changed / total) if total else 0.0:.3g} %"


def _remarks(record: Version, tags: Sequence[Tag], *, is_latest: bool) -> str:
    texts = ["<- latest"] if is_latest else []
    texts += [f"restores v{record.restores}"] if record.restores is not None else []
    texts += [f"[{tag.name}]" for tag in tags if tag.version == record.version]
    return " ".join(texts + ([record.note] if record.note else []))


def _route_lines(store: WeightStore, record: Version, name: RouteName) -> list[str]:
    start = "from nothing" if name.base is None else f"from v{name.base}"
    head = f"  {kind_of(name, record):<6} {start}, {_size(name.num_bytes)}"
    if name.num_bytes:
        head += f" ({record.raw_bytes / name.num_bytes:.1f}x)"
    try:
        route = store.route(name)
        return [f"{head}, {_many(len(route.packs), 'pack')}, by {route.writer}", *_pack_lines(store, record, route)]
    except (CorruptSnapshot, UnknownFormat, ObjectMissing) as error:
        return [f"{head}: damaged: {error}"]


def _pack_lines(store: WeightStore, record: Version, route: Route) -> list[str]:
    if not route.packs:
        return []
    lines, entries, codecs = [], [], Counter[int]()
    for ref in route.packs:
        found, counted = _look(store, ref)
        entries += found
        codecs += counted
        lines.append(f"    {ref.key}  {_size(ref.num_bytes)}, {_many(len(found), 'cell')}")
    used = ", ".join(f"{_codec(byte)} {count}" for byte, count in codecs.most_common())
    seen = "" if codecs.total() == len(entries) else f" (of {codecs.total()} cells looked at)"
    return [*lines, f"    codecs       {used or 'none'}{seen}", *_top_lines(store, record, entries)]


def _look(store: WeightStore, ref: PackRef) -> tuple[list[Entry], Counter[int]]:
    """The cells of a pack, and how many of those looked at begin with which codec byte."""
    (tail,) = store.objects.get_ranges(ref.key, [index_range(ref)])
    entries = list(read_index(tail, ref).entries())
    filled = [entry for entry in entries if entry.stop > entry.start]
    some = filled[:: max(1, -(-len(filled) // _SAMPLE))]
    heads = store.objects.get_ranges(ref.key, [(entry.start, entry.start + 1) for entry in some])
    return entries, Counter(head[0] for head in heads)


def _top_lines(store: WeightStore, record: Version, entries: Sequence[Entry]) -> list[str]:
    specs = store.schema(record.schema).tensors
    if strange := [entry.tensor for entry in entries if not 0 <= entry.tensor < len(specs)]:
        raise CorruptSnapshot(f"it names tensor {strange[0]} of {len(specs)}")
    changed, num_bytes = Counter[int](), Counter[int]()
    for entry in entries:
        changed[entry.tensor] += entry.num_changed
        num_bytes[entry.tensor] += entry.stop - entry.start
    share = {tensor: min(1.0, count / max(1, specs[tensor].num_elements)) for tensor, count in changed.items()}
    by_share = sorted(share, key=lambda tensor: (-share[tensor], tensor))[:_TOP]
    by_bytes = sorted(num_bytes, key=lambda tensor: (-num_bytes[tensor], tensor))[:_TOP]
    return [
        f"    tensors      {len(changed)} of {len(specs)} changed",
        *(f"    most changed {specs[tensor].name} {100 * share[tensor]:.3g} %" for tensor in by_share),
        *(f"    most bytes   {specs[tensor].name} {_size(num_bytes[tensor])}" for tensor in by_bytes),
    ]


def _codec(byte: int) -> str:
    return Codec(byte).name if byte in list(Codec) else f"unknown {byte}"


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _size(num_bytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} B"


def _age(seconds: float) -> str:
    for unit, scale in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= scale:
            return f"{seconds / scale:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
