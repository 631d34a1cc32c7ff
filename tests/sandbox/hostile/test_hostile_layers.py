"""Marks of the overlay made by hand, and layers made to mislead whoever stacks, packs or compares them."""

from __future__ import annotations

import pytest

from rollmill.sandbox import ChangeKind, Egress
from tests.sandbox.hostile.conftest import attack, works

MARK_BY_HAND = """
import os
os.makedirs("made/inner")
open("made/inner/file", "w").write("kept")
for name in ("opaque", "redirect", "metacopy", "origin", "whiteout", "overlay.opaque"):
    for path in ("made", "made/inner", "/home/dev"):
        for kind in ("user", "trusted"):
            try: os.setxattr(path, f"{kind}.overlay.{name}", b"y" if name == "opaque" else b"/etc")
            except OSError: pass
for path in ("white", "/dev/shm/white", "made/white"):
    try: os.mknod(path, 0o020666, os.makedev(0, 0))
    except OSError: pass
for name in (".wh.made", ".wh..wh..opq", "made/.wh.inner"):
    open(name, "w").write("a plain name")
"""


@pytest.mark.parametrize("root", [False, True])
def test_marks_made_by_hand_change_no_fork(perform, root, tmp_path_factory):
    async def act(stage):
        box = await stage.box(root=root)
        assert (await box.exec(["python3", "-c", MARK_BY_HAND], timeout_s=60)).exit_code == 0
        before = {change.path: change.kind for change in await box.diff()}
        assert not [path for path, kind in before.items() if kind is ChangeKind.REMOVED]
        names = await box.list()
        assert "made/inner/file" in names and ".wh.made" in names
        snapshot = await box.snapshot()
        children = await snapshot.fork(2)
        for child in (box, *children):
            assert await child.list() == names
            assert await child.read("made/inner/file") == b"kept"
            assert b"dev:x:1000" in await child.read("/etc/passwd")
            # Removing and making again what carries a mark goes through the overlay as well.
            assert (await child.exec("rm -rf made && mkdir -p made/inner && ls -A made/inner", timeout_s=60)).stdout == b""
            await works(child)
        store = tmp_path_factory.mktemp("store")
        restored = await stage.backend.restore(str(store), await snapshot.save(str(store)))
        (again,) = await restored.fork(1)
        assert await again.list() == names and await again.read("made/inner/file") == b"kept"
        await restored.close()
        await snapshot.close()

    perform(act)


def test_whiteout_cannot_be_made_where_it_would_count(perform):
    async def act(stage):
        for root in (False, True):
            box = await stage.box(root=root)
            for path in ("w", "/tmp/w", "/home/dev/w"):
                assert (await box.exec(["mknod", path, "c", "0", "0"], timeout_s=60)).exit_code != 0
            # In shared memory it is a file like any other, and no layer.
            await box.exec(["mknod", "/dev/shm/w", "c", "0", "0"], timeout_s=60)
            assert (await box.exec("mv /dev/shm/w ./w", timeout_s=60)).exit_code != 0
            assert [change for change in await box.diff() if change.path != "/tmp/attacks"] == []

    perform(act)


def test_deep_and_odd_layer_is_saved_and_restored(perform, tmp_path_factory):
    async def act(stage):
        box = await stage.box()
        assert (await attack(box, "deep", "600")).stdout == b"600\n"
        await box.exec(
            "mkfifo pipe; ln -s /etc/shadow link; touch -- '-rf' $'new\\nline' $'\\377'; truncate -s 60M sparse; chmod 0 d", timeout_s=60
        )
        names = await box.list()
        store = tmp_path_factory.mktemp("store")
        snapshot = await box.snapshot()
        restored = await stage.backend.restore(str(store), await snapshot.save(str(store)))
        (again,) = await restored.fork(1)
        assert await again.list() == names
        assert (await again.stat("sparse")).num_bytes == 60 << 20
        assert (await again.exec("chmod 700 d && find d -type d | wc -l", timeout_s=60)).stdout == b"600\n"
        await restored.close()
        await snapshot.close()

    perform(act)


def test_link_in_a_layer_is_not_followed_while_a_box_is_made(perform):
    """The domain name is the box's own, so that nothing of the host is changed when this fails; any file below /proc/sys would do."""

    async def act(stage):
        stage.backend._trust = lambda spec: "-----BEGIN CERTIFICATE-----\n" if spec.egress is not None else ""
        box = await stage.box(root=True, egress=Egress())
        where = "/etc/ssl/certs/ca-certificates.crt"
        await box.exec(f"rm {where}; ln -s /mnt/proc/sys/kernel/domainname {where}", timeout_s=60)
        (child,) = await box.fork(1)
        assert (await child.exec(["cat", "/proc/sys/kernel/domainname"], timeout_s=60)).stdout == b"(none)\n"

    perform(act)


@pytest.mark.parametrize(
    "line",
    [
        "rm -rf /home /etc /root /tmp",
        "rm -rf /etc && ln -s usr /etc",
        "rm -rf /tmp && ln -s /dev/null /tmp",
        "rm -rf /home && ln -s /proc /home",
        "rm -rf /home && touch /home",
    ],
)
def test_box_whose_root_removed_what_boxes_need_can_still_be_forked(perform, line):
    async def act(stage):
        box = await stage.box(root=True)
        await box.exec(line, timeout_s=60)
        (child,) = await box.fork(1)
        assert (await child.exec(["/usr/bin/true"], timeout_s=60)).exit_code == 0

    perform(act)
