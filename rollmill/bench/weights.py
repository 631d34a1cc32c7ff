"""What bringing new weights to a replica costs: bytes and speed of every codec, ours and peers, on one pair in one process.

Every blob is decoded and compared bit for bit. Speeds are MB of raw weights per CPU second of one thread, best of the repeats, from
arrays to bytes and back to arrays in place.
"""

from __future__ import annotations

import importlib.metadata
import io
import itertools
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rollmill.bench.report import cpu_name
from rollmill.bench.weight_codecs import Codec, codecs
from rollmill.bench.weight_entropy import bits_of_change, codes_of
from rollmill.bench.weight_states import State, check_pair, read_state
from rollmill.weights.chunk import elements_of
from rollmill.weights.encode import commit, write_part
from rollmill.weights.manifest import Kind
from rollmill.weights.reader import materialise
from rollmill.weights.schema import make_schema
from rollmill.weights.shard import all_of
from rollmill.weights.store import open_store

_SCALED = ("cgr", "xor+zstd-1")
"""Measured with several threads too."""
_FOLDS = (1, 4, 16, 64, 256)


def run(old: State, new: State, *, repeats: int = 3, threads: int = 2, command: str = "") -> dict[str, Any]:
    """One JSON object about one pair; elements are codes, so two for a byte of a 4-bit dtype."""
    check_pair(old, new)
    if repeats < 1 or threads < 1:
        raise ValueError(f"repeats {repeats} and threads {threads} must be at least 1")
    facts = _facts(old, new)
    all_codecs = codecs()
    rows = _measure(all_codecs, old, new, repeats, facts["num_changed"])
    scaled = {codec.name: _scaling(codec, old, new, repeats, threads) for codec in all_codecs if codec.name in _SCALED}
    return {"command": command, **facts, **_pack(old, new, repeats), "codecs": rows, "threads": scaled, "repeats": repeats, **_where()}


def run_chain(states: Sequence[State]) -> list[dict[str, Any]]:
    """Folds from the first state to the 1st, 4th, 16th ... after it, beside the deltas of the single steps."""
    by_name = {codec.name: codec for codec in codecs()}
    sizes: dict[str, list[int]] = {name: [] for name in _SCALED}
    for old, new in itertools.pairwise(states):
        check_pair(old, new)
        for name in _SCALED:
            sizes[name].append(sum(map(len, by_name[name].encode(old, new, workers=1))))
    rows = []
    for num_steps in (k for k in _FOLDS if k < len(states)):
        first, last = states[0], states[num_steps]
        row: dict[str, Any] = {"num_steps": num_steps, "changed_fraction": _facts(first, last)["changed_fraction"]}
        for name in _SCALED:
            blobs = by_name[name].encode(first, last, workers=1)
            fold, chain = sum(map(len, blobs)), sum(sizes[name][:num_steps])
            row[name] = {
                "fold_bytes": fold,
                "chain_bytes": chain,
                "saved": _rounded(1 - fold / chain) if chain else 0.0,
                "lossless": _decoded(by_name[name], blobs, first, last)[1],
            }
        rows.append(row)
    return rows


def bench_command(
    old: str, new: str, *, as_json: bool = False, repeats: int = 3, threads: int = 2, between: Sequence[str] = (), command: str = ""
) -> str:
    """The text that `rollmill weights bench OLD NEW` prints; `between`, the snapshots from OLD to NEW in order, adds a table of folds."""
    first, last = read_state(old), read_state(new)
    found = run(first, last, repeats=repeats, threads=threads, command=command or f"rollmill weights bench {old} {new}")
    if between:
        found["folds"] = run_chain([first, *(read_state(where) for where in between), last])
    return json.dumps(found, indent=2) if as_json else as_text(found)


def as_text(found: dict[str, Any]) -> str:
    """For people."""
    from rich.console import Console
    from rich.table import Table

    out = io.StringIO()
    console = Console(file=out, width=120, highlight=False)
    share = 100 * found["changed_fraction"]
    console.print(
        f"{found['raw_bytes'] / 1e6:.1f} MB, {found['num_changed']:,} of {found['num_elements']:,} elements changed ({share:.3f} %)"
    )
    console.print(
        f"pack with index: {found['pack_bytes']:,} bytes, {_ratio(found['raw_bytes'], found['pack_bytes']):.1f} times smaller than raw"
    )
    if found["entropy_bits_per_change"] is not None:
        console.print(f"entropy given the old exponents: {found['entropy_bits_per_change']:.2f} bits per change")
    table = Table("codec", *(_right(title) for title in ("bytes", "ratio", "bits/change", "encode MB/s", "decode MB/s")), "lossless")
    for row in found["codecs"]:
        if row["note"]:
            table.add_row(row["name"], "", "", "", "", "", row["note"])
            continue
        bits = "" if row["bits_per_change"] is None else f"{row['bits_per_change']:.2f}"
        speeds = (f"{row['encode_mb_s']:,.0f}", f"{row['decode_mb_s']:,.0f}")
        table.add_row(row["name"], f"{row['bytes']:,}", f"{row['ratio']:.1f}", bits, *speeds, "yes" if row["lossless"] else "NO")
    console.print(table)
    for name, by_count in found["threads"].items():
        parts = (f"{n} thread(s) {speed['encode_mb_s']:,.0f} / {speed['decode_mb_s']:,.0f}" for n, speed in by_count.items())
        console.print(f"{name}, MB/s of the clock, encode / decode: {', '.join(parts)}")
    for row in found.get("folds", ()):
        ours, peer = row["cgr"], row["xor+zstd-1"]
        console.print(
            f"{row['num_steps']:>3} steps in one: {ours['fold_bytes']:,} bytes instead of {ours['chain_bytes']:,} "
            f"({100 * ours['saved']:.0f} % less); xor+zstd-1 {peer['fold_bytes']:,} instead of {peer['chain_bytes']:,}"
        )
    return out.getvalue().rstrip("\n")


class _Trials:
    """What one codec did so far."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.encode_s: list[float] = []
        self.decode_s: list[float] = []
        self.num_bytes = 0
        self.lossless = True

    def run(self, old: State, new: State) -> None:
        blobs, seconds = _timed(lambda: self.codec.encode(old, new, workers=1), time.process_time)
        self.encode_s.append(seconds)
        self.num_bytes = sum(map(len, blobs))
        seconds, same = _decoded(self.codec, blobs, old, new)
        self.decode_s.append(seconds)
        self.lossless = self.lossless and same


def _measure(all_codecs: Sequence[Codec], old: State, new: State, repeats: int, num_changed: int) -> list[dict[str, Any]]:
    """One row a codec. Codecs take turns, so that a busy minute of the machine is everybody's."""
    trials = {codec.name: _Trials(codec) for codec in all_codecs if not codec.why_not(new)}
    for trial in trials.values():
        _warm(trial.codec, old, new)
    for _ in range(repeats):
        for trial in trials.values():
            trial.run(old, new)
    raw = sum(tensor.data.size for tensor in new.values())
    rows = []
    for codec in all_codecs:
        row: dict[str, Any] = {"name": codec.name, "note": codec.why_not(new)}
        if (found := trials.get(codec.name)) is None:
            rows.append(row | dict.fromkeys(("bytes", "ratio", "bits_per_change", "encode_mb_s", "decode_mb_s", "lossless")))
            continue
        rows.append(
            row
            | {
                "bytes": found.num_bytes,
                "ratio": _rounded(_ratio(raw, found.num_bytes)),
                "bits_per_change": _rounded(8 * found.num_bytes / num_changed) if num_changed and codec.needs_old else None,
                "encode_mb_s": _mb_s(raw, found.encode_s),
                "decode_mb_s": _mb_s(raw, found.decode_s),
                "lossless": found.lossless,
            }
        )
    return rows


def _decoded(
    codec: Codec, blobs: Sequence[bytes], old: State, new: State, *, workers: int = 1, clock: Callable[[], float] = time.process_time
) -> tuple[float, bool]:
    """(seconds, whether every bit is right)."""
    target = {name: np.array(tensor.data) for name, tensor in old.items()}
    _, seconds = _timed(lambda: codec.decode(blobs, new, target, workers=workers), clock)
    return seconds, all(np.array_equal(target[name], tensor.data) for name, tensor in new.items())


def _scaling(codec: Codec, old: State, new: State, repeats: int, threads: int) -> dict[str, dict[str, float]]:
    raw = sum(tensor.data.size for tensor in new.values())
    found = {}
    for count in sorted({1, threads}):
        encode_s, decode_s = [], []
        for _ in range(repeats):
            blobs, seconds = _timed(lambda: codec.encode(old, new, workers=count), time.perf_counter)  # noqa: B023 - called at once
            encode_s.append(seconds)
            seconds, same = _decoded(codec, blobs, old, new, workers=count, clock=time.perf_counter)
            assert same, f"{codec.name} with {count} threads gave other bits"
            decode_s.append(seconds)
        found[str(count)] = {"encode_mb_s": _mb_s(raw, encode_s), "decode_mb_s": _mb_s(raw, decode_s)}
    return found


def _pack(old: State, new: State, repeats: int) -> dict[str, Any]:
    """A delta through a real store in a temporary folder: coding, fingerprints, digests, index and files, one thread, CPU seconds."""
    schema = make_schema((name, tensor.dtype, tensor.shape) for name, tensor in new.items())
    before, after = ({name: tensor.data for name, tensor in state.items()} for state in (old, new))
    encode_s, decode_s, num_bytes = [], [], 0
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            store = open_store(folder)
            start = time.process_time()
            part = write_part(store, schema, kind=Kind.DELTA, version=1, base=0, held=all_of(schema), new=after, old=before, workers=1)
            commit(store, schema, [part], kind=Kind.DELTA, version=1, base=0, expected=None, step=1, run_id="bench", writer="bench")
            encode_s.append(time.process_time() - start)
            found, seconds = _timed(lambda: materialise(store, 1, start=(0, before), workers=1)[2], time.process_time)  # noqa: B023
            decode_s.append(seconds)
            num_bytes = part.num_bytes
        assert all(np.array_equal(found[name], data) for name, data in after.items()), "the store gave other bits"
    raw = schema.num_bytes
    return {"pack_bytes": num_bytes, "pack_encode_mb_s": _mb_s(raw, encode_s), "pack_decode_mb_s": _mb_s(raw, decode_s)}


def _facts(old: State, new: State) -> dict[str, Any]:
    num_elements = num_changed = 0
    for name, tensor in new.items():
        elements = elements_of(tensor.dtype)
        after = codes_of(tensor.data, elements)
        num_elements += after.size
        num_changed += int(np.count_nonzero(after != codes_of(old[name].data, elements)))
    bits = bits_of_change(old, new)
    return {
        "raw_bytes": sum(tensor.data.size for tensor in new.values()),
        "num_elements": num_elements,
        "num_changed": num_changed,
        "changed_fraction": num_changed / num_elements if num_elements else 0.0,
        "entropy_bits_per_change": _rounded(bits / num_changed) if num_changed and bits is not None else None,
    }


def _warm(codec: Codec, old: State, new: State) -> None:
    """Compiles and loads what the codec needs, on the smallest tensor of each dtype that changed."""
    chosen: dict[str, str] = {}
    for name in sorted(new, key=lambda name: -new[name].data.size):
        if not np.array_equal(old[name].data, new[name].data):
            chosen[new[name].dtype] = name
    few_old, few_new = ({name: state[name] for name in chosen.values()} for state in (old, new))
    _decoded(codec, codec.encode(few_old, few_new, workers=1), few_old, few_new)


def _where() -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for package in ("rollmill", "numpy", "numba", "zstandard", "lz4", "zipnn"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    hardware = {"machine": platform.machine(), "cpu": cpu_name(), "num_cores": os.cpu_count(), "load_average": os.getloadavg()[0]}
    return {"versions": versions, "hardware": hardware}


def _timed(work: Callable[[], Any], clock: Callable[[], float]) -> tuple[Any, float]:
    start = clock()
    found = work()
    return found, clock() - start


def _mb_s(raw_bytes: int, seconds: Sequence[float]) -> float:
    # A state of a few bytes may take less than a tick of the clock.
    return _rounded(raw_bytes / max(min(seconds), 1e-9) / 1e6)


def _ratio(raw_bytes: int, num_bytes: int) -> float:
    return raw_bytes / max(1, num_bytes)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _right(title: str) -> Any:
    from rich.table import Column

    return Column(title, justify="right")
