"""The image store: names lead to digests, a digest to a root folder that never changes. Killed at any moment, it still opens.

NAME/image.json      what the name means now (write, rename)
DIGEST/image.json    the same record, without a name
DIGEST/rootfs/       the tree
.steps/KEY           the digest that a build step gave
.new-*/ .tmp-*       being made; locked by its maker, removed by the next one when the maker is gone
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import blake3
import msgspec

from rollmill.sandbox.records import Service

IMAGE_SCHEMA = 1
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Image(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One image: a root folder and what a box needs to know to run commands in it."""

    schema: int = IMAGE_SCHEMA
    name: str = ""
    """Empty: known by its digest only, such as the state between two steps of a build."""
    digest: str = ""
    """BLAKE3 of the tree (paths, kinds, modes, owners, contents, targets; no times) and of the fields below."""
    rootfs: str = ""
    """The tree, relative to the store."""
    env: Mapping[str, str] = {}
    workdir: str = "/"
    home: str = "/root"
    user: str = "root"
    uid: int = 0
    gid: int = 0
    shell: str = "/bin/sh"
    hostname: str = "workstation"
    services: tuple[Service, ...] = ()
    """Started in this order in every box."""
    layers: tuple[str, ...] = ()
    """The `diff_id`s of the archive it was imported from; empty for what was built here."""


def default_root() -> Path:
    home = os.environ.get("ROLLMILL_HOME")
    return Path(home) / "images" if home else Path.home() / ".cache" / "rollmill" / "images"


def tree_digest(root: Path) -> str:
    """BLAKE3 of a canonical listing of a tree. Hard links count as separate files; times do not count."""
    total = blake3.blake3()
    for top, folders, files in os.walk(os.fsencode(root)):
        folders.sort()
        for name in sorted([*files, *(f for f in folders if os.path.islink(os.path.join(top, f)))]):
            path = os.path.join(top, name)
            found = os.lstat(path)
            kind, content = b"other", b""
            if stat.S_ISREG(found.st_mode):
                kind, content = b"file", _file_digest(path)
            elif stat.S_ISLNK(found.st_mode):
                kind, content = b"link", os.readlink(path)
            _count(total, os.path.relpath(path, os.fsencode(root)), kind, found, content)
        _count(total, os.path.relpath(top, os.fsencode(root)), b"folder", os.lstat(top), b"")
    return total.hexdigest()


def _file_digest(path: bytes) -> bytes:
    hasher = blake3.blake3()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            hasher.update(chunk)
    return hasher.digest()


def _count(total: blake3.blake3, path: bytes, kind: bytes, found: os.stat_result, content: bytes) -> None:
    mode = stat.S_IMODE(found.st_mode) if kind != b"link" else 0
    ids = (found.st_uid, found.st_gid) if os.geteuid() == 0 else (0, 0)
    line = b"%b\0%b\0%o\0%d\0%d\0%d\0%b\n" % (path, kind, mode, *ids, len(content), content)
    total.update(line)


class ImageStore:
    """Images below one folder, which only its owner may enter: trees hold programs with the set-user-id bit."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root or default_root()).absolute()
        self.root.mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o700)
        (self.root / ".steps").mkdir(exist_ok=True)

    def get(self, name: str) -> Image:
        """The image of that name or digest."""
        if not (_NAME.fullmatch(name) or _DIGEST.fullmatch(name)):
            raise ValueError(f"image name {name!r} is not usable: lower-case letters, digits, `.`, `_`, `-`, at most 63")
        try:
            image = msgspec.json.decode((self.root / name / "image.json").read_bytes(), type=Image)
        except FileNotFoundError:
            known = ", ".join(image.name for image in self.images()) or "none yet"
            words = f"image {name} is not in the store at {self.root} ({known}); build it with `rollmill sandbox build DIR --name {name}`"
            raise ValueError(words) from None
        except msgspec.MsgspecError as error:
            raise ValueError(f"image {name} in the store at {self.root} cannot be read: {error}; build it again") from None
        if image.schema != IMAGE_SCHEMA:
            raise ValueError(f"image {name} has schema {image.schema}, this version reads {IMAGE_SCHEMA}; build it again")
        if not self.rootfs(image).is_dir():
            raise ValueError(f"image {name} has lost its tree {self.rootfs(image)}; build it again")
        return image

    def has(self, name: str) -> bool:
        return (self.root / name / "image.json").is_file()

    def rootfs(self, image: Image) -> Path:
        return self.root / image.rootfs

    def images(self) -> list[Image]:
        """Every named image."""
        names = sorted(path.parent.name for path in self.root.glob("*/image.json"))
        found = [self._peek(name) for name in names if _NAME.fullmatch(name) and not _DIGEST.fullmatch(name)]
        return [image for image in found if image is not None]

    def _peek(self, name: str) -> Image | None:
        try:
            return msgspec.json.decode((self.root / name / "image.json").read_bytes(), type=Image)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def check_name(self, name: str) -> None:
        if not _NAME.fullmatch(name) or name == "host":
            raise ValueError(f"image name {name!r} is not usable: lower-case letters, digits, `.`, `_`, `-`, at most 63, and not `host`")

    def name(self, name: str, image: Image) -> Image:
        """Let a name lead to this image from now on."""
        self.check_name(name)
        named = msgspec.structs.replace(image, name=name)
        self._write(self.root / name / "image.json", msgspec.json.encode(named))
        return named

    def remove(self, name: str) -> None:
        """Forget a name. The tree stays until `prune`, for boxes and other names may use it."""
        self.get(name)
        if _DIGEST.fullmatch(name):
            raise ValueError(f"{name} is a digest; remove the names that lead to it, then run `prune`")
        (self.root / name / "image.json").unlink()
        with contextlib.suppress(OSError):
            (self.root / name).rmdir()

    def prune(self) -> list[str]:
        """Remove every tree that no name leads to, and what builds kept of it; no box may be using one. The digests removed."""
        self.sweep()
        with self._alone():
            named = {image.digest for image in self.images()}
            gone = sorted(path.name for path in self.root.iterdir() if _DIGEST.fullmatch(path.name) and path.name not in named)
            for digest in gone:
                # Out of sight in one move: killed half-way, the next sweep goes on.
                os.rename(self.root / digest, self.root / f".new-{digest}")
                shutil.rmtree(self.root / f".new-{digest}")
            for step in (self.root / ".steps").iterdir():
                if step.read_text() not in named:
                    step.unlink()
        return gone

    def verify(self, name: str) -> Image:
        """Read the whole tree again and compare it with the digest."""
        image = self.get(name)
        found = _digest(tree_digest(self.rootfs(image)), image)
        if found != image.digest:
            raise ValueError(f"image {name} was {image.digest}, its tree now gives {found}: it was changed or damaged; build it again")
        return image

    # Making

    @contextlib.contextmanager
    def stage(self) -> Iterator[Path]:
        """A folder in which to make `rootfs`; it is gone afterwards, unless `commit` moved it."""
        self.sweep()
        with self._alone():
            folder = Path(tempfile.mkdtemp(prefix=".new-", dir=self.root))
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            os.close(lock)
            shutil.rmtree(folder, ignore_errors=True)

    def commit(self, folder: Path, image: Image) -> Image:
        """Take `folder/rootfs` in, under its digest."""
        os.chmod(folder / "rootfs", 0o755)
        digest = _digest(tree_digest(folder / "rootfs"), image)
        image = msgspec.structs.replace(image, name="", digest=digest, rootfs=f"{digest}/rootfs")
        ready = folder / "ready"
        ready.mkdir()
        os.rename(folder / "rootfs", ready / "rootfs")
        (ready / "image.json").write_bytes(msgspec.json.encode(image))
        try:
            os.rename(ready, self.root / digest)
        except OSError:
            if not self.has(digest):
                raise
        return image

    def sweep(self) -> None:
        """Remove what makers that died left behind."""
        with self._alone():
            for folder in self.root.glob(".new-*"):
                try:
                    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                except FileNotFoundError:
                    continue  # Its maker has just ended well.
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                except BlockingIOError:
                    continue
                finally:
                    os.close(lock)
            for file in self.root.glob(".tmp-*"):
                file.unlink()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Between processes: short changes of the store's own folder happen one after another."""
        lock = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def step(self, key: str) -> Image | None:
        """What a build step with this key gave before, if it is still here."""
        try:
            return self.get((self.root / ".steps" / key).read_text())
        except (FileNotFoundError, ValueError):
            return None

    def keep_step(self, key: str, image: Image) -> None:
        self._write(self.root / ".steps" / key, image.digest.encode())

    def _write(self, path: Path, data: bytes) -> None:
        with self._alone():
            path.parent.mkdir(exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.root, prefix=".tmp-", delete=False) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.rename(file.name, path)


def _digest(tree: str, image: Image) -> str:
    fields = msgspec.structs.replace(image, name="", digest="", rootfs="")
    return blake3.blake3(tree.encode() + b"\n" + msgspec.json.encode(fields, order="sorted")).hexdigest()
