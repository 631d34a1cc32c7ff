"""The store keeps what it was given, under names and digests, through every kill."""

from __future__ import annotations

import os
import signal
import subprocess
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


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_image_store import put
from rollmill.sandbox.images.store import ImageStore
store = ImageStore(Path(sys.argv[1]))
print("ready", flush=True)
for i in range(1_000_000):
    put(store, f"n{i % 5}", str(i % 7))
    store.keep_step("k" * 64, store.get(f"n{i % 5}"))
    if i % 5 == 4:
        store.remove("n3")
        store.prune()
"""


def test_store_opens_after_kill_9_at_any_moment(tmp_path: Path) -> None:
    root, here = tmp_path / "s", str(Path(__file__).parent)
    for moment in range(8):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(root), here], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
            names = set()
            while len(names) < 3 + 5 * moment and writer.poll() is None:
                names |= {entry.stat(follow_symlinks=False).st_mtime_ns for entry in os.scandir(root)}
            writer.send_signal(signal.SIGKILL)
        store = ImageStore(root)
        for image in store.images():
            assert store.verify(image.name) == image
        put(store, "after", str(moment))
        assert list(root.glob(".new-*")) == [] and list(root.glob(".tmp-*")) == []


def test_sweep_spares_what_is_still_being_made(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "s")
    with store.stage() as stage:
        put(ImageStore(tmp_path / "s"), "other", "1")
        assert stage.is_dir()
    assert not stage.exists()
