"""The recipe of an image: `sandbox.toml` to one typed, frozen record. Unknown keys are errors that name the nearest known key.

Knows what a recipe may say; not how any of it is done.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec

from rollmill.sandbox.records import Service

FILE = "sandbox.toml"


class Packages(msgspec.Struct, frozen=True, kw_only=True):
    apt: tuple[str, ...] = ()
    """Debian packages, fetched on the host with all they need and installed in a box; the base must be a Debian or one of its children."""
    pip: tuple[str, ...] = ()
    """Requirements, fetched on the host as wheels for the image's own python3 and installed in a box."""


class Repository(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    """A git URL, or a path relative to the recipe."""
    commit: str
    """All 40 hex digits: the image holds this commit and what led to it, nothing newer, and no remote."""
    path: str = ""
    """Below the home; empty: the last part of the source."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    command: str
    """For the shell, in the working directory."""
    user: str = "root"
    """`root`, or the user of the image."""
    timeout_s: float = 600.0


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Of the boxes in which the steps and services of a build run."""

    memory_bytes: int = 2 << 30
    disk_bytes: int = 4 << 30
    num_processes: int = 512
    timeout_s: float = 1800.0
    """For installing packages, and for taking changes out of a box."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """One image.

    base = "host-copy"
    [[run]]
    command = "make test-database"
    """

    name: str = ""
    """Empty: the name of the project directory."""
    base: str = "host-copy"
    """`host-copy`; `debian:SUITE`; the path of a `docker save` archive, OCI layout or root file system tar; or the name of an image."""
    programs: tuple[str, ...] = ()
    """With `host-copy`: programs of this host that must be there besides the usual ones."""
    mirror: str = ""
    """Where Debian packages come from; empty: where this host gets its own."""
    packages: Packages = Packages()
    repository: Repository | None = None
    files: str = "files"
    """A folder of the project laid over the root, if it is there; what lies in the home belongs to the user."""
    run: tuple[Run, ...] = ()
    services: tuple[Service, ...] = ()
    env: Mapping[str, str] = {}
    user: str = "dev"
    uid: int = 1000
    home: str = ""
    """Empty: /home/USER."""
    shell: str = "/bin/bash"
    hostname: str = "workstation"
    workdir: str = ""
    """Empty: the repository, or else the home."""
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z_][a-z0-9_-]{0,31}", self.user):
            raise ValueError(f"user = {self.user!r} is no user name; use lower-case letters, digits, `_` and `-`")
        if not 0 <= self.uid < 60000:
            raise ValueError(f"uid = {self.uid} is not between 0 and 59999")
        if not re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9.-]{0,62}", self.hostname):
            raise ValueError(f"hostname = {self.hostname!r} is no host name")
        for key, path in (("home", self.home), ("workdir", self.workdir), ("shell", self.shell)):
            if path and (not path.startswith("/") or ".." in path.split("/") or re.search(r"[:\s]", path)):
                raise ValueError(f"{key} = {path!r} is not usable: an absolute path without `..`, `:` and blanks")
        if self.repository is not None and not re.fullmatch(r"[0-9a-f]{40}", self.repository.commit):
            words = "write all 40 hex digits, from `git rev-parse`: a name could mean something else tomorrow"
            raise ValueError(f"repository.commit = {self.repository.commit!r} is not a commit; {words}")
        for step in self.run:
            if step.user not in ("root", self.user):
                raise ValueError(f"run.user = {step.user!r} is neither `root` nor the image's user {self.user!r}")
        if self.programs and self.base != "host-copy":
            raise ValueError(f"programs are copied from this host only with base = 'host-copy', not {self.base!r}; use packages")

    @property
    def home_path(self) -> str:
        return self.home or ("/root" if self.uid == 0 else f"/home/{self.user}")

    @property
    def repository_path(self) -> str:
        assert self.repository is not None
        name = self.repository.path or self.repository.source.rstrip("/").rpartition("/")[2].removesuffix(".git")
        return f"{self.home_path}/{name}"

    @property
    def workdir_path(self) -> str:
        return self.workdir or (self.repository_path if self.repository is not None else self.home_path)


def read_recipe(project: Path) -> Recipe:
    """The recipe of a project directory."""
    path = project / FILE
    try:
        raw = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f'{project} holds no {FILE}; the smallest one is the line: base = "host-copy"') from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    _refuse_unknown(raw, Recipe, "", path)
    try:
        return msgspec.convert(raw, Recipe)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {error}") from None


def known_keys(kind: Any = Recipe, prefix: str = "") -> list[str]:
    """Every dotted key of a recipe."""
    keys: list[str] = []
    for field in msgspec.structs.fields(kind):
        inner = _struct(field.type)
        keys += [f"{prefix}{field.name}", *(known_keys(inner, f"{prefix}{field.name}.") if inner else ())]
    return keys


def _struct(kind: Any) -> Any:
    """The record in `Record`, `Record | None` or `tuple[Record, ...]`."""
    for part in (kind, *get_args(kind)):
        if isinstance(part, type) and issubclass(part, msgspec.Struct):
            return part
    return None


def _refuse_unknown(raw: Any, kind: Any, prefix: str, path: Path) -> None:
    if isinstance(raw, list):
        for item in raw:
            _refuse_unknown(item, kind, prefix, path)
    if not isinstance(raw, dict):
        return
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in raw.items():
        if key not in fields:
            known = known_keys()
            near = [k for k in known if k.rpartition(".")[2] == key] or difflib.get_close_matches(f"{prefix}{key}", known, 1, 0.0)
            raise ValueError(f"{path}: unknown key {prefix + key!r}; the nearest known key is {near[0]!r}")
        if (inner := _struct(fields[key])) is not None:
            _refuse_unknown(value, inner, f"{prefix}{key}.", path)
