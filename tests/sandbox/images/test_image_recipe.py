"""A recipe says what it means or is refused with words; a furnished tree looks like a machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from rollmill.sandbox.images.machine import Account, furnish
from rollmill.sandbox.images.packages import fetch_debs, fetch_wheels, sources_for
from rollmill.sandbox.images.recipe import Recipe, known_keys, read_recipe
from rollmill.sandbox.images.tree import Tree


def recipe(tmp_path: Path, text: str) -> Recipe:
    (tmp_path / "sandbox.toml").write_text(text)
    return read_recipe(tmp_path)


def test_smallest_recipe_has_defaults_that_work(tmp_path: Path) -> None:
    found = recipe(tmp_path, 'base = "host-copy"\n')
    assert (found.home_path, found.workdir_path, found.user, found.uid) == ("/home/dev", "/home/dev", "dev", 1000)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('bas = "x"', "unknown key 'bas'; the nearest known key is 'base'"),
        ('[packages]\nat = ["x"]', "unknown key 'packages.at'; the nearest known key is 'packages.apt'"),
        ('[[services]]\nname = "a"\nargv = ["b"]\nreddy_argv = ["c"]', "the nearest known key is 'services.ready_argv'"),
        ('[[run]]\ncomand = "x"', "unknown key 'run.comand'; the nearest known key is 'run.command'"),
        ('[[run]]\nuser = "root"', "command"),
        ('base = 3', "Expected `str`"),
        ('base = ', "is not TOML"),
        ('user = "Root"', "is no user name"),
        ('home = "../x"', "not usable"),
        ('hostname = "a b"', "no host name"),
        ('[[run]]\ncommand = "x"\nuser = "eve"', "neither `root` nor"),
        ('[repository]\nsource = "x"\ncommit = "main"', "40 hex digits"),
        ('base = "debian:bookworm"\nprograms = ["jq"]', "only with base = 'host-copy'"),
    ],
)  # fmt: skip
def test_unusable_recipe_is_refused_with_words(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"sandbox\.toml") as refused:
        recipe(tmp_path, text)
    assert words in str(refused.value)


def test_folder_without_a_recipe_is_told_how_to_begin(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no sandbox\.toml; the smallest one is"):
        read_recipe(tmp_path)


def test_every_key_of_a_recipe_is_on_its_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "images.md").read_text()
    assert [key for key in known_keys() if f"`{key}`" not in page] == []


def test_furnished_tree_looks_like_a_machine_and_names_no_one_else(tmp_path: Path) -> None:
    with Tree(tmp_path) as tree:
        furnish(tree, Account(user="mira", home="/home/mira", hostname="atlas"))
        assert b"mira:x:1000:1000:mira,,,:/home/mira:/bin/bash\n" in (tree.read("etc/passwd") or b"")
        for path in "hostname hosts resolv.conf machine-id profile shells group nsswitch.conf fstab".split():
            assert tree.read(f"etc/{path}"), path
        assert tree.read("home/mira/.bashrc") == tree.read("etc/skel/.bashrc")
    texts = [path.read_text().lower() for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert not [text for text in texts if "rollmill" in text or "sandbox" in text or os.uname().nodename in text.split()]


def test_furnishing_keeps_what_a_base_has_and_replaces_a_clashing_account(tmp_path: Path) -> None:
    with Tree(tmp_path) as tree:
        tree.put_file("etc/passwd", [b"root:x:0:0::/root:/bin/ash\nnode:x:1000:1000::/home/node:/bin/sh\n"])
        tree.put_file("etc/profile", [b"mine\n"])
        furnish(tree, Account())
        furnish(tree, Account())
        assert tree.read("etc/profile") == b"mine\n"
        assert (tree.read("etc/passwd") or b"").decode().split("\n")[:2] == [
            "root:x:0:0::/root:/bin/ash", "dev:x:1000:1000:dev,,,:/home/dev:/bin/bash",
        ]  # fmt: skip


def test_base_whose_folders_are_links_is_furnished_inside_its_tree(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "t").mkdir()
    with Tree(tmp_path / "t") as tree:
        tree.put_link("etc", str(tmp_path / "out"))
        tree.put_link("home", "../../../out")
        furnish(tree, Account())
        assert tree.read("etc/hostname") == b"workstation\n"
    assert list((tmp_path / "out").iterdir()) == []


def test_mirror_of_a_recipe_is_the_only_source_of_packages() -> None:
    lines = sources_for("bookworm", "http://mirror.example.org/debian")
    assert all("http://mirror.example.org/debian bookworm" in line for line in lines)
    with pytest.raises(ValueError, match="not the name of a Debian release"):
        sources_for("book worm; x", "")


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt-get")
def test_unreachable_mirror_is_told_and_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    sources = sources_for("bookworm", "http://127.0.0.1:9/debian")
    with pytest.raises(ValueError, match=r"the lists of Debian packages could not be fetched: .*127"):
        fetch_debs(["hello"], tmp_path, status=b"", sources=sources)


def test_option_in_place_of_a_requirement_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is an option"):
        fetch_wheels(["--index-url=http://example.org"], tmp_path, python="3.11", glibc="2.36")
