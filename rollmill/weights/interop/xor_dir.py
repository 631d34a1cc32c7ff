"""Directories of byte-wise deltas as slime, miles, Stitch and CoreWeave write them: made from versions, and taken in as versions.

    weight_v000007/model.safetensors.index.json     metadata: version, base_version, delta_encoding, compression_format, checksum_format
    weight_v000007/model-00000-of-00001.safetensors  per changed tensor one zstd frame as U8; header: name -> checksum of the new bytes

`xor`: new ^ old, byte for byte. `overwrite`: u32 count, u32 byte positions, new bytes. Tensors that did not change are left out.
Field names, file numbers from 0, six-digit versions as strings, lower-case hex checksums and little-endian positions were compared
with the sender's code in THUDM/slime (06236d0, 1a7ef65) and Stitch's description of what it accepts. The applying side, which
lives in a fork of SGLang, and cwtrain's writer could not be read, so nothing was tried against them.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import zstandard
from blake3 import blake3

from rollmill.weights.encode import in_order, num_workers
from rollmill.weights.errors import CorruptSnapshot, UnknownFormat, WrongBase
from rollmill.weights.interop.hf import INDEX, MAX_FILE_BYTES, read_whole_index
from rollmill.weights.interop.intake import Taken, take_in, tensors_of
from rollmill.weights.interop.tensor_file import Tensor, Tensors, cut_into_files, read_file, sync_directory, write_file
from rollmill.weights.reader import materialise
from rollmill.weights.store import WeightStore

_COUNT = struct.Struct("<I")
_DIRECTORY = re.compile(r"^weight_v(\d{6,})$")
_NOTE = re.compile(r"^xor (\d+)$")
_MAX_POSITIONS = 1 << 32


class Encoding(StrEnum):
    XOR = "xor"
    """Applying it twice takes it back."""
    OVERWRITE = "overwrite"


class Checksum(StrEnum):
    XXH3 = "xxh3-128"
    BLAKE3 = "blake3"
    ADLER32 = "adler32"


@dataclass(frozen=True, kw_only=True)
class Formats:
    """How a directory is written, e.g. `Formats(encoding=Encoding.XOR, checksum=Checksum.BLAKE3)`; the compression is always zstd."""

    encoding: Encoding = Encoding.XOR
    checksum: Checksum = Checksum.BLAKE3


@dataclass(frozen=True, kw_only=True)
class XorDirectory:
    """One delta as it lies on disk, read and not yet applied."""

    path: Path
    version: int | None
    """None for a directory whose index holds the weight map alone; whoever announced it knows."""
    base_version: int | None
    formats: Formats
    payloads: dict[str, np.ndarray]
    checksums: dict[str, str]


def formats_of(metadata: Mapping[str, object], where: str, *, default: Formats | None = None) -> Formats:
    """Refuses what cannot be read, by name. `alder32` is how one provider spells it."""
    default = default or Formats()
    compression = str(metadata.get("compression_format", "zstd"))
    encoding = str(metadata.get("delta_encoding", default.encoding))
    checksum = str(metadata.get("checksum_format", default.checksum)).replace("alder32", "adler32")
    if compression != "zstd":
        raise UnknownFormat(f"{where} is compressed as {compression!r}; only zstd can be read here (the layout of arc_v2 is not public)")
    if encoding not in set(Encoding) or checksum not in set(Checksum):
        raise UnknownFormat(
            f"{where} has encoding {encoding!r} and checksum {checksum!r}; known are {', '.join(Encoding)} and {', '.join(Checksum)}"
        )
    return Formats(encoding=Encoding(encoding), checksum=Checksum(checksum))


def is_delta(path: Path) -> bool:
    """Whether a directory holds differences rather than weights: its index says so, or every tensor is bytes with a checksum beside it."""
    index = read_whole_index(path)
    if index is not None and "delta_encoding" in index[1]:
        return True
    files = sorted(path.glob("*.safetensors"))
    read = [read_file(file) for file in files]
    return bool(files) and all(t.dtype == "uint8" and n in metadata for tensors, metadata in read for n, t in tensors.items())


def read_xor_directory(path: Path, *, default: Formats | None = None) -> XorDirectory:
    """`default` stands in for formats that the index does not name."""
    index = read_whole_index(path)
    if index is None:
        raise ValueError(f"{path} is no delta directory: it has no {INDEX}")
    weight_map, metadata = index
    formats = formats_of(metadata, str(path), default=default)
    payloads: dict[str, np.ndarray] = {}
    checksums: dict[str, str] = {}
    for file in sorted(set(weight_map.values())):
        if "/" in file or not (path / file).is_file():
            raise CorruptSnapshot(f"{path / INDEX} names {file}, which is not there; the directory is incomplete")
        tensors, header = read_file(path / file)
        for name, tensor in tensors.items():
            if tensor.dtype != "uint8" or name not in header:
                raise WrongBase(
                    f"{path / file}: {name} is a tensor of {tensor.dtype}, not a difference with a checksum; this is a full snapshot"
                )
            payloads[name], checksums[name] = tensor.data, header[name]
    if lost := sorted(weight_map.keys() ^ payloads.keys()):
        raise CorruptSnapshot(f"{path / INDEX} and its files do not agree on {lost[0]}; the directory is incomplete")
    numbers = [_number(metadata.get(key), path / INDEX) for key in ("version", "base_version")]
    return XorDirectory(path=path, version=numbers[0], base_version=numbers[1], formats=formats, payloads=payloads, checksums=checksums)


def apply(delta: XorDirectory, base: Tensors) -> dict[str, Tensor]:
    """The new tensors, every changed one verified. Those that did not change share memory with the base."""
    if unknown := sorted(delta.payloads.keys() - base.keys()):
        raise WrongBase(f"{delta.path} changes {unknown[0]}, which the base does not have; give the base it was made from")
    summed = checksum_of(delta.formats.checksum)

    def change(name: str) -> tuple[str, Tensor]:
        old = base[name]
        new = _decoded(delta, name, old.data)
        if (found := summed(new)) != delta.checksums[name]:
            raise WrongBase(
                f"{delta.path}: {name} becomes {delta.formats.checksum} {found}, promised is {delta.checksums[name]}; "
                f"the base is not version {delta.base_version} of that chain, or the file is damaged"
            )
        return name, Tensor(dtype=old.dtype, shape=old.shape, data=new)

    return {**base, **dict(in_order(change, sorted(delta.payloads), workers=num_workers(sum(t.data.nbytes for t in base.values()))))}


def write_xor_directory(
    out: Path, *, version: int, base_version: int, old: Tensors, new: Tensors, formats: Formats, max_file_bytes: int = MAX_FILE_BYTES
) -> int:
    """Write one delta, whole or not at all; returns its bytes."""
    if out.exists():
        raise ValueError(f"{out} exists; a delta directory is written once, so give another place")
    if old.keys() != new.keys() or any((old[n].dtype, old[n].shape) != (new[n].dtype, new[n].shape) for n in new):
        raise ValueError(
            f"version {version} has other tensors than {base_version}, which this format cannot say; export it as a full directory"
        )
    summed = checksum_of(formats.checksum)

    def code(name: str) -> tuple[str, bytes, str] | None:
        was, now = old[name].data, new[name].data
        if np.array_equal(was, now):
            return None
        plain = (was ^ now).tobytes() if formats.encoding is Encoding.XOR else _overwriting(name, was, now)
        return name, zstandard.ZstdCompressor(level=1).compress(plain), summed(now)

    coded = {
        row[0]: row[1:]
        for row in in_order(code, sorted(new), workers=num_workers(sum(t.data.nbytes for t in new.values())))
        if row is not None
    }
    cut = cut_into_files(((name, len(row[0])) for name, row in coded.items()), max_file_bytes)
    files = {f"model-{at:05d}-of-{len(cut):05d}.safetensors": names for at, names in enumerate(cut)}
    out.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        num_bytes = 0
        for file, names in files.items():
            payloads = {n: Tensor(dtype="uint8", shape=(len(coded[n][0]),), data=np.frombuffer(coded[n][0], np.uint8)) for n in names}
            num_bytes += write_file(making / file, payloads, {name: coded[name][1] for name in names})
        metadata = {
            "version": f"{version:06d}", "base_version": f"{base_version:06d}", "delta_encoding": str(formats.encoding),
            "compression_format": "zstd", "checksum_format": str(formats.checksum),
        }  # fmt: skip
        index = json.dumps({"metadata": metadata, "weight_map": {name: file for file, names in files.items() for name in names}})
        (making / INDEX).write_text(index)
        making.chmod(0o755)
        sync_directory(making)
        making.rename(out)
        sync_directory(out.parent)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return num_bytes + len(index)


def export_xor(
    store: WeightStore, out: Path, *, first: int, last: int, formats: Formats, max_file_bytes: int = MAX_FILE_BYTES
) -> list[tuple[Path, int]]:
    """One directory per version after `first` up to `last`, with the store's numbers: (path, bytes) each."""
    line = [record for record in store.lineage(start=last) if record.version >= first][::-1]
    if not line or line[0].version != first or last <= first:
        raise ValueError(f"there is no line from version {first} to {last} in {store}; see `rollmill weights log`")
    checksum_of(formats.checksum)
    _, schema, data = materialise(store, first)
    old, written = tensors_of(schema, data), []
    for before, record in itertools.pairwise(line):
        # A fresh dict and fresh arrays: `materialise` leaves those it was given alone.
        _, schema, data = materialise(store, record.version, start=(before.version, {n: t.data for n, t in old.items()}))
        new = tensors_of(schema, data)
        path = out / directory_name(record.version)
        num_bytes = write_xor_directory(
            path, version=record.version, base_version=before.version, old=old, new=new, formats=formats, max_file_bytes=max_file_bytes
        )
        written.append((path, num_bytes))
        old = new
    return written


def chain_below(path: Path) -> list[Path]:
    """The delta directories of a chain in order: `path` itself, or `weight_v*` below it."""
    if (path / INDEX).is_file() and is_delta(path):
        return [path]
    found = [(int(name[1]), child) for child in path.iterdir() if (name := _DIRECTORY.match(child.name)) and (child / INDEX).is_file()]
    return [child for _, child in sorted(found)]


def import_xor(store: WeightStore, path: Path, *, base: Tensors | None = None, run_id: str = "") -> Iterator[tuple[Path, Taken]]:
    """Take in a chain, one version per directory, from `base`, which becomes a version first unless latest has its bits.

    Each version remembers the chain's number in its note, so that a later call goes on where the last one ended.
    """
    chain = [read_xor_directory(child) for child in chain_below(path)]
    if not chain:
        raise ValueError(f"there is no weight_vNNNNNN directory below {path}")
    if any(delta.version is None or delta.base_version is None for delta in chain):
        raise CorruptSnapshot(f"{path}: an {INDEX} does not say version and base_version")
    pointer = store.latest()
    noted = None if pointer is None else _NOTE.match(store.version(pointer.version).note)
    if pointer is not None and noted is not None:
        _, schema, data = materialise(store, pointer.version)
        held, reached = tensors_of(schema, data), int(noted[1])
    elif base is not None:
        held, reached = base, chain[0].base_version or 0
        yield path, take_in(store, base, run_id=run_id, note=f"xor {reached}")
    else:
        raise ValueError(f"name the weights that {chain[0].path.name} starts from with --base: a directory, or a version of the store")
    for delta in chain:
        assert delta.version is not None
        if delta.version == reached:
            _refuse_other_chain(delta, held)
        if delta.version <= reached:
            continue
        if delta.base_version != reached:
            raise WrongBase(
                f"{delta.path} starts from {delta.base_version} of its chain, the store is at {reached}; give what lies between"
            )
        new = apply(delta, held)
        yield delta.path, take_in(store, new, run_id=run_id, note=f"xor {delta.version}", held=held, always=True)
        held, reached = new, delta.version


def _refuse_other_chain(delta: XorDirectory, held: Tensors) -> None:
    summed = checksum_of(delta.formats.checksum)
    for name, promised in delta.checksums.items():
        if name not in held or summed(held[name].data) != promised:
            raise WrongBase(f"{delta.path} is not what the store took in as version {delta.version}: {name} differs; it is another chain")


def directory_name(version: int) -> str:
    return f"weight_v{version:06d}"


def checksum_of(kind: Checksum) -> Callable[[np.ndarray], str]:
    """The function that gives the hex text of a tensor's bytes."""
    if kind is Checksum.BLAKE3:
        return lambda data: blake3(data.data).hexdigest()
    if kind is Checksum.ADLER32:
        return lambda data: f"{zlib.adler32(data.data):08x}"
    try:
        import xxhash
    except ImportError as error:
        raise ValueError(f"checksums of kind {kind} need the package xxhash: pip install 'rollmill[interop]'") from error
    return lambda data: str(xxhash.xxh3_128(data.data).hexdigest())


def _number(value: object, where: Path) -> int | None:
    if value is None:
        return None
    if not str(value).isdigit():
        raise CorruptSnapshot(f"{where} has version {value!r}, which is no number")
    return int(str(value))


def _overwriting(name: str, old: np.ndarray, new: np.ndarray) -> bytes:
    if new.nbytes > _MAX_POSITIONS:
        raise ValueError(f"{name} has {new.nbytes} bytes; positions of 32 bits reach {_MAX_POSITIONS}: export with the encoding xor")
    at = np.flatnonzero(old != new)
    return _COUNT.pack(at.size) + at.astype("<u4").tobytes() + new[at].tobytes()


def _decoded(delta: XorDirectory, name: str, old: np.ndarray) -> np.ndarray:
    is_xor = delta.formats.encoding is Encoding.XOR
    limit = old.nbytes if is_xor else _COUNT.size + 5 * old.nbytes
    plain = np.frombuffer(_unpacked(delta, name, limit), np.uint8)
    if is_xor:
        if plain.size != old.size:
            raise WrongBase(f"{delta.path}: the difference of {name} has {plain.size} bytes, the base has {old.size}")
        return old ^ plain
    count = int(plain[: _COUNT.size].view("<u4")[0]) if plain.size >= _COUNT.size else 0
    if plain.size != _COUNT.size + 5 * count:
        raise CorruptSnapshot(f"{delta.path}: {name} has {plain.size} bytes where {count} changes need {_COUNT.size + 5 * count}")
    at = plain[_COUNT.size : _COUNT.size + 4 * count].view("<u4")
    if count and int(at.max()) >= old.size:
        raise WrongBase(f"{delta.path}: {name} changes byte {int(at.max())}, the base has {old.size}")
    new = np.array(old)
    new[at] = plain[_COUNT.size + 4 * count :]
    return new


def _unpacked(delta: XorDirectory, name: str, limit: int) -> bytes:
    """Never more than `limit` bytes, whatever the frame claims."""
    payload = np.ascontiguousarray(delta.payloads[name]).data
    try:
        reader = zstandard.ZstdDecompressor().stream_reader(payload)
        plain = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise CorruptSnapshot(f"{delta.path}: {name} cannot be unpacked: {error}") from error
    if len(plain) > limit:
        raise WrongBase(f"{delta.path}: the difference of {name} is longer than the base, {limit} bytes at most")
    return plain
