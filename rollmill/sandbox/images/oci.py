"""Imports images without a daemon: `docker save` archives, OCI layouts (folder or archive) and plain root file systems.

Every blob is checked against the digest that names it; a tree appears in the store only when all of them matched.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import platform
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import msgspec

from rollmill.sandbox.images.archive import BROKEN, Bounds, Forward, compression, entries, plain
from rollmill.sandbox.images.layers import apply
from rollmill.sandbox.images.store import Image, ImageStore
from rollmill.sandbox.images.tree import Tree

_JSON_BYTES = 16 << 20
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Blobs(Protocol):
    """Files by name, wherever they lie."""

    def names(self) -> set[str]: ...
    def open(self, name: str) -> BinaryIO: ...


def import_archive(archive: Path, name: str, *, store: ImageStore, bounds: Bounds = Bounds()) -> Image:
    """Take an archive or OCI layout into the store under a name."""
    return store.name(name, take(archive, store=store, bounds=bounds))


def take(archive: Path, *, store: ImageStore, bounds: Bounds = Bounds()) -> Image:
    """The same without a name."""
    if not archive.exists():
        raise ValueError(f"{archive} does not exist; name a `docker save` archive, an OCI layout or a tar of a root file system")
    with store.stage() as stage:
        (stage / "rootfs").mkdir()
        with Tree(stage / "rootfs") as tree, _blobs(archive, stage, bounds) as blobs:
            config = _lay_all(tree, archive, blobs, bounds)
            image = described(tree, config)
        return store.commit(stage, image)


def _lay_all(tree: Tree, archive: Path, blobs: Blobs, bounds: Bounds) -> dict[str, Any]:
    names = blobs.names()
    if "index.json" in names:
        config, layers = _read_layout(blobs)
    elif "manifest.json" in names:
        config, layers = _read_saved(blobs)
    elif archive.is_dir():
        raise ValueError(f"{archive} holds neither index.json nor manifest.json; name an OCI layout, or pack a root file system as a tar")
    else:
        with archive.open("rb") as source:
            done = apply(tree, Forward(plain(source), bounds), name=archive.name, bounds=bounds)
        return {"rootfs": {"diff_ids": [f"sha256:{done.digest}"]}}
    wanted = [str(digest) for digest in config.get("rootfs", {}).get("diff_ids", ())]
    if len(wanted) != len(layers):
        raise ValueError(f"{archive}: the configuration names {len(wanted)} layers, the manifest {len(layers)}")
    for layer, digest in zip(layers, wanted, strict=True):
        with blobs.open(layer) as source:
            done = apply(tree, Forward(plain(source), bounds), name=layer, bounds=bounds)
        if f"sha256:{done.digest}" != digest:
            raise ValueError(f"{archive}: layer {layer} is damaged: it unpacks to sha256:{done.digest}, not {digest}; fetch it again")
    return config


def _read_saved(blobs: Blobs) -> tuple[dict[str, Any], list[str]]:
    """`docker save` before it wrote OCI layouts."""
    manifest = _json(blobs, "manifest.json")
    if not isinstance(manifest, list) or len(manifest) != 1:
        raise ValueError("the archive holds more than one image; save one at a time")
    return _json(blobs, str(manifest[0]["Config"])), [str(layer) for layer in manifest[0]["Layers"]]


def _read_layout(blobs: Blobs) -> tuple[dict[str, Any], list[str]]:
    found = _json(blobs, "index.json")
    for _ in range(4):  # An index may lead to another; no more than a few do.
        if "manifests" not in found:
            break
        found = _json(blobs, _blob(_pick(found["manifests"])["digest"]))
    if "layers" not in found:
        raise ValueError("the OCI layout leads to no image manifest")
    for layer in found["layers"]:
        if layer.get("urls") or "tar" not in layer["mediaType"]:
            raise ValueError(
                f"layer {layer['digest']} of type {layer['mediaType']} is not in the archive or not a tar; fetch the whole image"
            )
    return _json(blobs, _blob(found["config"]["digest"])), [_blob(layer["digest"]) for layer in found["layers"]]


def _pick(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    """The one for this machine; attestations and the like have the architecture `unknown`."""
    wanted = _ARCHITECTURES.get(platform.machine(), platform.machine())
    fitting = [m for m in manifests if m.get("platform", {}).get("architecture", wanted) == wanted]
    if len(fitting) != 1:
        found = [m.get("platform", {}).get("architecture", "?") for m in manifests]
        raise ValueError(f"the OCI layout holds {len(fitting)} images for {wanted} (architectures {found}); keep exactly one")
    return fitting[0]


def _blob(digest: str) -> str:
    kind, _, value = digest.partition(":")
    if kind != "sha256" or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
        raise ValueError(f"digest {digest!r} is not a SHA-256")
    return f"blobs/sha256/{value}"


def _json(blobs: Blobs, name: str) -> Any:
    with blobs.open(name) as file:
        data = file.read(_JSON_BYTES + 1)
    if len(data) > _JSON_BYTES:
        raise ValueError(f"{name} is larger than {_JSON_BYTES} bytes")
    if name.startswith("blobs/sha256/") and (found := hashlib.sha256(data).hexdigest()) != name.rpartition("/")[2]:
        raise ValueError(f"{name} is damaged: its SHA-256 is {found}; fetch it again")
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(f"{name} is not JSON: {error}") from None


# Where the blobs lie


class _Folder:
    def __init__(self, root: Path) -> None:
        self._root = root

    def names(self) -> set[str]:
        return {path.name for path in self._root.iterdir()}

    def open(self, name: str) -> BinaryIO:
        path = self._root / name
        if ".." in path.parts or path.is_symlink() or not path.is_file():
            raise ValueError(f"{name} is not in {self._root}; fetch the whole image")
        return path.open("rb")


class _Bounded(io.FileIO):
    """No header of the outer archive makes us hold more than this at once."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= 2 * _JSON_BYTES:
            raise ValueError(f"the archive has a header of {size} bytes; the largest allowed is {2 * _JSON_BYTES}")
        return super().read(size) or b""


class _Packed:
    """The members of a plain tar, each read on its own; none is unpacked under its own name."""

    def __init__(self, path: Path, bounds: Bounds) -> None:
        self._file = _Bounded(path)
        self._tar = tarfile.open(fileobj=self._file, mode="r:")  # noqa: SIM115 - closed by `close`
        self._members: dict[str, tarfile.TarInfo] = {}
        while (member := self._tar.next()) is not None:
            self._members[member.name.removeprefix("./")] = member
            if len(self._members) > bounds.num_entries:
                raise ValueError(f"{path} holds more than {bounds.num_entries} files")

    def names(self) -> set[str]:
        return set(self._members)

    def open(self, name: str) -> BinaryIO:
        file = None
        if (member := self._members.get(name)) is not None and (member.isreg() or member.issym() or member.islnk()):
            with contextlib.suppress(KeyError):
                file = self._tar.extractfile(member)
        if file is None:
            raise ValueError(f"{name} is not in the archive; save the whole image")
        return cast(BinaryIO, file)

    def close(self) -> None:
        self._tar.close()
        self._file.close()


@contextlib.contextmanager
def _blobs(archive: Path, stage: Path, bounds: Bounds) -> Iterator[Blobs]:
    if archive.is_dir():
        yield _Folder(archive)
        return
    with archive.open("rb") as source, contextlib.ExitStack() as stack:
        if not _is_image(source, archive, bounds):
            yield _Nothing()
            return
        source.seek(0)
        path = archive
        if compression(source.read(6)):
            source.seek(0)
            spool = stack.enter_context(tempfile.NamedTemporaryFile(dir=stage))
            _spool(plain(source), cast(BinaryIO, spool), bounds)
            path = Path(spool.name)
        try:
            packed = _Packed(path, bounds)
        except BROKEN as error:
            raise ValueError(f"{archive} is damaged: {error}; fetch it again") from error
        stack.callback(packed.close)
        yield packed


class _Nothing:
    def names(self) -> set[str]:
        return set()

    def open(self, name: str) -> BinaryIO:
        raise AssertionError(f"nothing was listed, yet {name} was asked for")


def _is_image(source: BinaryIO, archive: Path, bounds: Bounds) -> bool:
    """Whether an archive holds an image and not a root file system; the latter is not read twice in full."""
    for seen, (entry, _) in enumerate(entries(Forward(plain(source), bounds), bounds, name=archive.name)):
        path = entry.path.removeprefix("./")
        if path in ("manifest.json", "index.json", "oci-layout") or path.startswith("blobs/"):
            return True
        if path.partition("/")[0] in ("bin", "etc", "usr", "lib", "dev") or seen > 100_000:
            return False
    return False


def _spool(source: BinaryIO, target: BinaryIO, bounds: Bounds) -> None:
    left = bounds.num_bytes
    try:
        while chunk := source.read(1 << 20):
            left -= len(chunk)
            if left < 0:
                raise ValueError(f"the archive unpacks to more than {bounds.num_bytes} bytes")
            target.write(chunk)
    except BROKEN as error:
        raise ValueError(f"the archive is damaged: {error}; fetch it again") from error
    target.flush()


# What the configuration says


def described(tree: Tree, config: dict[str, Any]) -> Image:
    """The record of an imported tree: its environment, folder and user, looked up in its own /etc/passwd."""
    inner = config.get("config") or {}
    env = dict(pair.split("=", 1) for pair in inner.get("Env") or () if "=" in pair)
    user, uid, gid, home, shell = _account(tree, str(inner.get("User") or ""))
    return Image(
        env={"PATH": _PATH} | env, workdir=str(inner.get("WorkingDir") or "/"), user=user, uid=uid, gid=gid, home=home, shell=shell,
        layers=tuple(config.get("rootfs", {}).get("diff_ids", ())),
    )  # fmt: skip


def _account(tree: Tree, wanted: str) -> tuple[str, int, int, str, str]:
    user, _, group = wanted.partition(":")
    user = user or "root"
    lines = _table(tree, "etc/passwd", 7)
    shell = next((path for path in ("/bin/bash", "/bin/sh") if tree.stat(path) is not None), "/bin/sh")
    found = next((line for line in lines if user in (line[0], line[2])), None)
    if found is None:
        if user != "root" and not user.isdigit():
            raise ValueError(f"the image's user {user!r} is not in its /etc/passwd")
        uid = int(user) if user.isdigit() else 0
        found = [user, "", str(uid), str(uid), "", "/root" if uid == 0 else "/", shell]
    gid = found[3]
    if group:
        gid = group if group.isdigit() else next((line[2] for line in _table(tree, "etc/group", 4) if line[0] == group), "")
        if not gid.isdigit():
            raise ValueError(f"the image's group {group!r} is not in its /etc/group")
    usable = found[6] if found[6].rpartition("/")[2] not in ("", "nologin", "false") else shell
    return found[0], int(found[2]), int(gid), found[5] or "/", usable


def _table(tree: Tree, path: str, num_fields: int) -> list[list[str]]:
    text = (tree.read(path) or b"").decode(errors="replace")
    lines = [line.split(":") for line in text.splitlines()]
    numbers = (2, 3) if num_fields == 7 else (2,)
    return [line for line in lines if len(line) == num_fields and all(line[i].isdigit() for i in numbers)]
