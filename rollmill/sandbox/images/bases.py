"""Where a build begins: a copy of this host's programs, a Debian from its packages, an imported archive, or an image by name.

Each base says what it depends on (`signature`), so that an unchanged one is not made again.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import blake3

from rollmill.sandbox.images import hostcopy, oci
from rollmill.sandbox.images.archive import Bounds, Forward
from rollmill.sandbox.images.layers import apply
from rollmill.sandbox.images.packages import fetch_debs, sources_for
from rollmill.sandbox.images.recipe import Recipe
from rollmill.sandbox.images.store import Image, ImageStore
from rollmill.sandbox.images.tree import Tree

DEBIAN_EXTRA = "apt ca-certificates less netbase procps tzdata".split()
"""On top of the packages that Debian calls essential, among them bash, find, tar and setpriv."""
DEBS = "var/cache/apt/archives"
_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
_MERGED = ("bin", "sbin", "lib", "lib64")


def signature(recipe: Recipe, project: Path, store: ImageStore) -> str:
    """What the base depends on."""
    if recipe.base == "host-copy":
        return hostcopy.signature(recipe.programs)
    if recipe.base.startswith("debian:"):
        return repr((recipe.base, recipe.mirror, DEBIAN_EXTRA))
    archive = project / recipe.base
    if archive.is_file():
        hasher = blake3.blake3()
        with archive.open("rb") as file:
            while chunk := file.read(1 << 20):
                hasher.update(chunk)
        return hasher.hexdigest()
    if archive.is_dir() and (archive / "index.json").is_file():
        return blake3.blake3((archive / "index.json").read_bytes()).hexdigest()
    return store.get(recipe.base).digest


def make_base(recipe: Recipe, project: Path, store: ImageStore) -> Image:
    """The tree before anything runs in it. A Debian is only unpacked: `needs_set_up` tells, and its packages wait in `DEBS`."""
    archive = project / recipe.base
    if recipe.base == "host-copy":
        with store.stage() as stage:
            (stage / "rootfs").mkdir()
            with Tree(stage / "rootfs") as tree:
                hostcopy.copy_host(tree, recipe.programs)
            return store.commit(stage, Image(env=_ENV))
    if recipe.base.startswith("debian:"):
        with store.stage() as stage:
            (stage / "rootfs").mkdir()
            _unpack_debian(stage, recipe)
            return store.commit(stage, Image(env=_ENV))
    if archive.is_file() or (archive / "index.json").is_file():
        return oci.take(archive, store=store)
    return store.get(recipe.base)


def needs_set_up(recipe: Recipe) -> bool:
    return recipe.base.startswith("debian:")


def _unpack_debian(stage: Path, recipe: Recipe) -> None:
    """What debootstrap calls its first stage: every package's files, none of its scripts, and the packages beside them."""
    sources = sources_for(recipe.base.partition(":")[2], recipe.mirror)
    debs = fetch_debs(["?essential", *DEBIAN_EXTRA], stage / "apt", status=b"", sources=sources)
    with Tree(stage / "rootfs") as tree:
        for top in _MERGED:
            tree.put_folder(f"usr/{top}")
            tree.put_link(top, f"usr/{top}")
        for deb in debs:
            with tempfile.TemporaryFile(dir=stage) as spool:
                subprocess.run(["dpkg-deb", "--fsys-tarfile", str(deb)], stdout=spool, timeout=300, check=True)
                spool.seek(0)
                apply(tree, Forward(spool, Bounds()), name=deb.name, whiteouts=False, keep_links=True)
            tree.put_file(f"{DEBS}/{deb.name}", [deb.read_bytes()])
        plain = [line.replace(line[line.index("[") : line.index("]") + 2], "") if "[" in line else line for line in sources]
        tree.put_file("etc/apt/sources.list", ["".join(f"{line}\n" for line in plain).encode()])
