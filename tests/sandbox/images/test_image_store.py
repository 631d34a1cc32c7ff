"""The store keeps what it was given, under names and digests, through every kill."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from rollmill.sandbox.images.store import Image, ImageStore
from rollmill.sandbox.images.tree import Tree


def put(store: ImageStore, name: str, text: str, **fields: object) -> Image:
    with store.stage() as stage:
        (stage / "rootfs").mkdir()
        with Tree(stage / "rootfs") as tree:
            tree.put_file("etc/motd", [text.encode()])
        return store.name(name, store.commit(stage, Image(**fields)))  # type: ignore[arg-type]


def test_image_is_found_by_name_and_by_digest(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "s")
    image = put(store, "shop", "1", user="dev", env={"A": "b"})
    assert ImageStore(tmp_path / "s").get("shop") == image
    assert store.get(image.digest).env == {"A": "b"} and store.get(image.digest).name == ""
    assert (store.rootfs(image) / "etc/motd").read_text() == "1" and store.images() == [image]


def test_digest_covers_contents_modes_and_configuration_but_no_times(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "s")
    one = put(store, "a", "1")
    assert put(store, "b", "1").digest == one.digest
    digests = {one.digest, put(store, "c", "2").digest, put(store, "d", "1", workdir="/srv").digest}
    os.chmod(store.rootfs(one) / "etc/motd", 0o600)
    with pytest.raises(ValueError, match="changed or damaged"):
        store.verify("a")
    assert len(digests) == 3


def test_missing_image_is_told_with_what_to_do(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "s")
    put(store, "shop", "1")
    with pytest.raises(
        ValueError, match=r"image shp is not in the store at .*\(shop\); build it with `rollmill sandbox build DIR --name shp`"
    ):
        store.get("shp")
    for name in ("../x", "A", "", ".new-x", "host/"):
        with pytest.raises(ValueError, match="not usable"):
            store.get(name)
    with pytest.raises(ValueError, match="not `host`"):
        store.name("host", store.get("shop"))


def test_unreadable_or_newer_record_is_told(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "s")
    put(store, "shop", "1")
    (tmp_path / "s/shop/image.json").write_text('{"schema": 2}')
    with pytest.raises(ValueError, match="has schema 2"):
        store.get("shop")
    (tmp_path / "s/shop/image.json").write_text('{"colour": 2}')
    with pytest.raises(ValueError, match="cannot be read"):
        store.get("shop")
    assert store.images() == []


def test_removing_a_name_keeps_the_tree_until_it_is_pruned(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "s")
    one, two = put(store, "a", "1"), put(store, "b", "2")
    store.keep_step("k" * 64, one)
    store.keep_step("l" * 64, two)
    store.remove("a")
    assert store.get(one.digest).digest == one.digest
    assert store.prune() == [one.digest]
    assert not store.has(one.digest) and store.step("k" * 64) is None and store.step("l" * 64) is not None and store.get("b") == two
    with pytest.raises(ValueError, match="not in the store"):
        store.remove("a")


def test_only_its_owner_may_enter_the_store(tmp_path: Path) -> None:
    assert ImageStore(tmp_path / "s").root.stat().st_mode & 0o777 == 0o700


def live(root: Path) -> None:
    """A life in which every change a store knows happens once."""
    store = ImageStore(root)
    one = put(store, "a", "1")
    store.keep_step("k" * 64, one)
    put(store, "a", "2")
    put(store, "b", "1")
    store.remove("b")
    store.prune()


def die_at(moment: int, root: Path) -> bool:
    """Live in a child that kills itself before its `moment`-th step of the file system; False: it came to its end."""
    child = os.fork()
    if child == 0:
        left = moment

        def hook(event: str, _: object) -> None:
            nonlocal left
            if event in ("open", "fcntl.flock") or event.startswith(("os.", "shutil.")):
                left -= 1
                if left == -1:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(hook)
            live(root)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


def test_store_opens_after_kill_9_at_every_moment(tmp_path: Path) -> None:
    root = tmp_path / "s"
    moment = 0
    while die_at(moment, root):
        store = ImageStore(root)
        for image in store.images():
            assert store.verify(image.name) == image
        for path in root.glob("[0-9a-f]*"):
            if len(path.name) == 64:
                store.verify(path.name)
        put(store, "after", str(moment % 3))
        assert list(root.glob(".new-*")) == [] and list(root.glob(".tmp-*")) == []
        moment += 1
    assert moment > 100


def test_sweep_spares_what_is_still_being_made(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "s")
    with store.stage() as stage:
        put(ImageStore(tmp_path / "s"), "other", "1")
        assert stage.is_dir()
    assert not stage.exists()
