"""Lays what a project brings over a tree: its repository in the home, and its folder of files."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rollmill.sandbox.images.recipe import Recipe
from rollmill.sandbox.images.repository import check_out
from rollmill.sandbox.images.tree import Tree


def lay_repository(tree: Tree, recipe: Recipe, project: Path) -> None:
    assert recipe.repository is not None
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "checkout"
        check_out(recipe.repository.source, recipe.repository.commit, target, project=project)
        tree.remove(recipe.repository_path)
        _lay(tree, target, recipe.repository_path, recipe)


def lay_files(tree: Tree, recipe: Recipe, files: Path) -> None:
    """The folder over the root, and the working directory where none of it made one."""
    if files.is_dir():
        _lay(tree, files, "/", recipe)
    if tree.stat(recipe.workdir_path) is None:
        owner = recipe.uid if _is_below(recipe.workdir_path, recipe.home_path) else 0
        tree.put_folder(recipe.workdir_path, uid=owner, gid=owner)


def _lay(tree: Tree, source: Path, top: str, recipe: Recipe) -> None:
    for folder, folders, files in os.walk(source):
        below = os.path.relpath(folder, source)
        here = top if below == "." else f"{top.rstrip('/')}/{below}"
        for name in [*sorted(folders), *sorted(files)]:
            path, target = os.path.join(folder, name), f"{here.rstrip('/')}/{name}"
            owner = recipe.uid if _is_below(target, recipe.home_path) else 0
            mode = os.lstat(path).st_mode
            if stat.S_ISLNK(mode):
                tree.put_link(target, os.readlink(path), uid=owner, gid=owner)
            elif stat.S_ISDIR(mode):
                if tree.stat(target) is None:
                    tree.put_folder(target, uid=owner, gid=owner)
            elif stat.S_ISREG(mode):
                tree.put_file(target, _chunks(path), mode=0o755 if mode & 0o100 else 0o644, uid=owner, gid=owner)
            else:
                raise ValueError(f"{path} is neither a file, a folder nor a link; take it out of the project")
    if top != "/":
        owner = recipe.uid if _is_below(top, recipe.home_path) else 0
        tree.put_folder(top, uid=owner, gid=owner)


def _is_below(path: str, top: str) -> bool:
    return path == top or path.startswith(f"{top}/")


def _chunks(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            yield chunk
