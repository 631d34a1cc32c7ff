"""Where there is no C compiler, boxes are made by the zygote in plain Python: the same scenes, seen from outside and from inside."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rollmill
from rollmill.records import RunFailure
from rollmill.sandbox import SandboxSpec
from rollmill.sandbox.agent.native import build
from rollmill.sandbox.agent.plain import order
from rollmill.sandbox.agent.plain.order import OrderFlag
from rollmill.sandbox.namespace import NamespaceBackend, layers
from rollmill.sandbox.namespace import groups as cgroups
from rollmill.sandbox.namespace.layers import Machine
from rollmill.sandbox.records import Allow, ChangeKind, Egress
from tests.sandbox.conftest import descendants, first_process, settled

DEADLINE_S = 60.0
REPOSITORY = Path(rollmill.__file__).resolve().parent.parent


def use_twin(monkeypatch: pytest.MonkeyPatch, twin: str) -> None:
    if twin == "plain":
        monkeypatch.setenv("ROLLMILL_BOX_AGENT", "plain")
    else:
        monkeypatch.delenv("ROLLMILL_BOX_AGENT", raising=False)
    build.binary.cache_clear()
    if twin == "native" and build.binary() is None:
        pytest.skip("there is no native agent on this machine")


@pytest.fixture(autouse=True, scope="module")
def plain():
    with pytest.MonkeyPatch.context() as patch:
        use_twin(patch, "plain")
        yield
    build.binary.cache_clear()


@settings(max_examples=50, derandomize=True, deadline=None)
@given(
    num_layers=st.integers(0, 5), num_views=st.integers(0, 3), root=st.booleans(), bare=st.booleans(), hostname=st.text("ab-ö", max_size=9),
    ports=st.none() | st.lists(st.integers(1, 65535), max_size=8), memory=st.integers(1, 1 << 45), cpus=st.floats(0, 64),
    env=st.dictionaries(st.text("AB_", min_size=1, max_size=4), st.text("xö= ", max_size=6), max_size=4), trust=st.text(max_size=40),
)  # fmt: skip
def test_order_is_read_as_its_owner_packed_it(num_layers, num_views, root, bare, hostname, ports, memory, cpus, env, trust):
    egress = None if ports is None else Egress(allow=tuple(Allow(host="a.example", port=port) for port in ports))
    spec = SandboxSpec(root=root, hostname=hostname, egress=egress, memory_bytes=memory, cpus=cpus)
    machine = Machine(is_host=False, user_id=7, group_id=8, home="/h", workdir="/w", hostname="of-image", env=env)
    message = layers.order(spec, machine, num_layers=num_layers, num_views=num_views, bare=bare, trust=trust)
    read = order.parse(message, list(range(10, 10 + num_layers + num_views)))
    assert read.flags == (OrderFlag.ROOT * root | OrderFlag.EGRESS * (ports is not None) | OrderFlag.BARE * bare)
    assert (read.uid, read.gid) == ((0, 0) if root else (7, 8))
    assert (read.memory_bytes, read.disk_bytes, read.lifetime_s, read.num_processes) == (memory, spec.disk_bytes, spec.lifetime_s, 64)
    assert read.cpu_milli == round(cpus * 1000) and read.ports == layers.ports_of(spec)
    assert (read.hostname.decode(), read.workdir, read.trust.decode()) == (hostname or "of-image", b"/w", trust)
    assert all(read.env[name.encode()] == value.encode() for name, value in env.items())
    assert read.layers == tuple(range(10, 10 + num_layers)) and len(read.views) == num_views
    with pytest.raises(ValueError, match="descriptors"):
        order.parse(message, list(range(num_layers + num_views + 1)))


@pytest.fixture(params=["descriptor", "path"])
def stacking(request, monkeypatch) -> None:
    """How layers are stacked: as new kernels can, and as old ones need it."""
    monkeypatch.setenv("ROLLMILL_BOX_STACK", request.param)


async def said(box, line: str) -> str:
    result = await box.exec(line, timeout_s=DEADLINE_S)
    return result.stdout.decode()


def test_box_runs_commands_and_holds_files(play):
    async def scene(backend):
        assert (await backend.capabilities()).facts["helper"] == "plain"
        box = await backend.create(SandboxSpec(files={"a/b": "1"}, env={"OF_BOX": "x"}, hostname="here"))
        assert await said(box, "whoami; pwd; cat a/b; hostname; echo $OF_BOX") == "dev\n/home/dev/work\n1here\nx\n"
        await box.write("new/deep", b"\0\xff", mode=0o600)
        assert await box.read("new/deep") == b"\0\xff" and await box.list() == ["a/b", "new/deep"]
        assert (await box.exec(["sleep", "1000"], timeout_s=0.2)).timed_out
        assert (await box.exec(["absent"], timeout_s=DEADLINE_S)).exit_code == 127

    play(scene)


def test_first_process_looks_like_a_machines_and_cannot_be_touched(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec())
        assert await said(box, "tr -d '\\0' < /proc/1/cmdline; cat /proc/1/comm") == "/sbin/initinit\n"
        line = (
            "for n in HUP INT TERM ALRM CHLD USR1 STOP KILL; do kill -$n 1; done; cat /proc/1/environ /proc/1/maps; ls /proc/1/fd; echo on"
        )
        assert (await said(box, line)).endswith("on\n")
        assert await said(box, "ls /proc/1/fd /proc/1/cwd/ 2>&1 | grep -c 'Permission denied'") == "2\n"
        assert "on" in await said(box, "echo on")

    play(scene)


def test_box_holds_no_capabilities_and_cannot_gain_any(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec())
        status = dict(line.split(":\t") for line in (await said(box, "grep -E 'Cap|NoNew|Seccomp:' /proc/self/status")).splitlines())
        assert {name: int(value, 16) for name, value in status.items()} == {
            **dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), 0), "NoNewPrivs": 1, "Seccomp": 2,
        }  # fmt: skip
        for line in ("mount -t tmpfs x /tmp", "unshare -r true", "touch /usr/x", "mknod /tmp/m c 1 1"):
            assert (await box.exec(line, timeout_s=DEADLINE_S)).exit_code != 0, line
        assert await said(box, "ls /sys/class/net 2>/dev/null; cat /proc/net/dev | grep -c :") == "1\n"

    play(scene)


def test_root_of_a_box_rules_its_files_and_users_only(play):
    async def scene(backend):
        if (await backend.capabilities()).facts["privilege"] != "root":
            pytest.skip("an ordinary user has no range of ids to give")
        box = await backend.create(SandboxSpec(root=True))
        assert await said(box, "id -u; touch /x && chown 33:33 /x; stat -c %u:%g /x") == "0\n33:33\n"
        for line in ("mount -t tmpfs x /tmp", "ip link add d type dummy", "chroot / true", "umount /proc"):
            assert (await box.exec(line, timeout_s=DEADLINE_S)).exit_code != 0, line

    play(scene)


def test_forks_start_from_one_state_and_keep_apart(play, stacking):
    async def scene(backend):
        box = await backend.create(SandboxSpec(files={"kept": "1", "gone": "2"}))
        snapshot = await box.snapshot()
        children = await snapshot.fork(3)
        for n, child in enumerate(children):
            await said(child, f"echo {n} >> kept; rm gone; echo {n} > own")
        assert [await said(child, "cat kept own; ls") for child in children] == [f"1{n}\n{n}\nkept\nown\n" for n in range(3)]
        assert {c.path: c.kind for c in await children[0].diff()} == {
            "/home/dev/work/kept": ChangeKind.WRITTEN,
            "/home/dev/work/own": ChangeKind.WRITTEN,
            "/home/dev/work/gone": ChangeKind.REMOVED,
        }
        (grandchild,) = await children[2].fork(1)
        assert await said(grandchild, "cat kept own") == "12\n2\n"
        assert await said(box, "cat kept gone") == "12"
        await snapshot.close()

    play(scene)


def test_saved_state_comes_back_through_couriers(play, stacking, tmp_path):
    async def scene(backend):
        box = await backend.create(SandboxSpec())
        await said(box, "mkdir -p d/e; echo 1 > d/e/f; chmod 700 d; ln -s d/e/f l; rm ~/.bashrc")
        snapshot = await box.snapshot()
        restored = await backend.restore(str(tmp_path), await snapshot.save(str(tmp_path)))
        (child,) = await restored.fork(1)
        assert await said(child, "cat l; stat -c %a d; ls -A ~") == "1\n700\n.bash_logout\n.profile\nwork\n"
        await restored.close()
        await snapshot.close()

    play(scene)


def test_view_of_a_frozen_layer_is_read_only_and_a_bare_layer_is_not(play, stacking):
    async def scene(backend):
        box = await backend.create(SandboxSpec(files={"seen": "1"}))
        snapshot = await box.snapshot()
        seer = await backend.stand(SandboxSpec(), Machine(), (), (), views=snapshot.stack)
        assert await said(seer, "cat /mnt/view/0/home/dev/work/seen; echo 2 > /mnt/view/0/home/dev/work/seen || echo refused") == (
            "1/bin/bash: line 1: /mnt/view/0/home/dev/work/seen: Read-only file system\nrefused\n"
        )
        is_root = (await backend.capabilities()).facts["privilege"] == "root"
        filler = await backend.stand(SandboxSpec(root=is_root), Machine(), (), (), bare=True)
        await said(filler, "mkdir -p /mnt/layer/made; echo 3 > /mnt/layer/made/f")
        layer = await backend.freeze(filler)
        above = await backend.stand(SandboxSpec(), Machine(), (layer,), ())
        assert await said(above, "cat /made/f; ls /mnt") == "3\n"
        layer.let_go()
        await snapshot.close()

    play(scene)


def test_folder_that_is_not_there_cannot_be_a_layer(play, stacking, tmp_path):
    async def scene(backend):
        await backend.start()
        with pytest.raises(RunFailure, match="cannot be a layer: No such file or directory"):
            await backend._zygote.open_layer(str(tmp_path / "absent"))
        (await backend._zygote.open_layer(str(tmp_path))).let_go()

    play(scene)


@pytest.mark.parametrize("twin", ["native", "plain"])
def test_image_of_the_store_is_the_root_of_a_box(machine, stacking, tmp_path, twin):
    with pytest.MonkeyPatch.context() as patch:
        use_twin(patch, twin)
        _try_image(tmp_path)
    build.binary.cache_clear()


def _try_image(tmp_path: Path) -> None:
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("there is no static busybox for a test image")
    programs = tmp_path / "tree" / "rootfs" / "bin"
    programs.mkdir(parents=True)
    shutil.copy(busybox, programs)
    for name in ("sh", "ls", "cat", "id"):
        (programs / name).symlink_to("busybox")
    (programs.parent / "etc").mkdir()
    (tmp_path / "small").mkdir()
    image = {
        "name": "small",
        "digest": "0" * 64,
        "rootfs": "tree/rootfs",
        "env": {"PATH": "/bin"},
        "workdir": "/w/d",
        "uid": 1000,
        "gid": 1000,
    }
    (tmp_path / "small" / "image.json").write_text(json.dumps(image))

    async def scene():
        backend = NamespaceBackend(num_prepared=1, images=tmp_path)
        try:
            async with asyncio.timeout(DEADLINE_S):
                box = await backend.create(SandboxSpec(image="small", files={"a": "1"}))
                assert await said(box, "id -u; cat a; echo >> a; ls /; ls /usr") == (
                    "1000\n1bin\ndev\netc\nproc\nroot\ntmp\nw\nls: /usr: No such file or directory\n"
                )
                (child,) = await box.fork(1)
                assert await said(child, "cat a; echo 2 > /dev/shm/x; cat /dev/shm/x; echo 3 > /tmp/y; cat /tmp/y") == "1\n2\n3\n"
        finally:
            await backend.close()

    asyncio.run(scene())


def test_egress_finds_listeners_behind_every_address(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec(egress=Egress(allow=(Allow(host="example.org", port=8080),))))
        listening = await said(box, "awk '$4 == \"0A\" {print $2}' /proc/net/tcp | sort; awk 'NR > 1 {print $2}' /proc/net/udp")
        assert listening.split() == [*(f"00000000:{port:04X}" for port in (53, 80, 443, 8080)), "00000000:0035"]
        line = "import socket; s = socket.create_connection(('203.0.113.9', 8080), 30); print(s.getpeername())"
        assert (await box.exec(["python3", "-c", line], timeout_s=DEADLINE_S)).stdout == b"('203.0.113.9', 8080)\n"
        assert "nameserver" in await said(box, "cat /etc/resolv.conf")
        shut = await backend.create(SandboxSpec())
        assert b"unreachable" in (await shut.exec(["python3", "-c", line], timeout_s=DEADLINE_S)).stdout

    play(scene)


def test_bounds_on_disk_memory_and_processes_hold(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec(memory_bytes=64 << 20, disk_bytes=1 << 20, num_processes=16))
        assert "No space left" in await said(box, "for n in 1 2 3; do head -c 600000 /dev/zero > f$n; done 2>&1; rm f?")
        hog = await box.exec(["python3", "-c", "x = bytearray(400 << 20); print('got it')"], timeout_s=DEADLINE_S)
        assert hog.exit_code != 0 and b"got it" not in hog.stdout
        assert await said(box, "echo on") == "on\n"
        bomb = await box.exec("for n in $(seq 40); do sleep 1000 & done 2>&1; wait", timeout_s=2)
        assert bomb.timed_out or b"Resource temporarily unavailable" in bomb.stdout

    play(scene)


def test_smallest_box_starts_commands(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec(memory_bytes=32 << 20, disk_bytes=64 << 10, num_processes=2))
        assert await said(box, "echo $((1 + 1))") == "2\n"

    play(scene)


def test_lifetime_ends_a_box_that_is_busy_talking(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec(lifetime_s=0.5))
        with pytest.raises(RunFailure, match="lifetime"):
            while True:
                await box.exec("head -c 200000 /dev/zero", timeout_s=DEADLINE_S, max_output_bytes=200_000)

    play(scene)


def test_order_that_cannot_be_carried_out_is_told_and_leaves_no_box(play):
    async def scene(backend):
        with pytest.raises(RunFailure, match="set the host name: Invalid argument"):
            await backend.create(SandboxSpec(hostname="x" * 100))
        await settled(backend, num_boxes=0)
        assert await said(await backend.create(SandboxSpec()), "echo on") == "on\n"

    play(scene)


def test_killed_first_process_is_a_lost_box_and_others_go_on(play):
    async def scene(backend):
        lost, other = await backend.create(SandboxSpec()), await backend.create(SandboxSpec())
        os.kill(await first_process(lost), signal.SIGKILL)
        with pytest.raises(RunFailure, match="signal 9 ended its first process"):
            await lost.exec(["sleep", "1000"], timeout_s=DEADLINE_S)
        assert await said(other, "echo on") == "on\n"
        await lost.close()
        await settled(backend, num_boxes=1)

    play(scene)


def test_burst_of_60_creates_waits_and_never_fails(play):
    async def scene(backend):
        boxes = await asyncio.gather(*(backend.create(SandboxSpec(files={"n": str(n)})) for n in range(60)))
        assert [await box.read("n") for box in boxes] == [str(n).encode() for n in range(60)]
        await asyncio.gather(*(box.close() for box in boxes))
        await settled(backend, num_boxes=0)

    play(scene)


OWNER = """
import asyncio
from rollmill.sandbox import SandboxSpec
from rollmill.sandbox.namespace import NamespaceBackend

async def main():
    backend = NamespaceBackend(num_prepared=2)
    for _ in range(2):
        box = await backend.create(SandboxSpec())
        await box.exec("setsid sleep 1000 & sleep 1000 &", timeout_s=60)
    print(backend.zygote_pid, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


def test_owner_killed_with_9_leaves_nothing(machine):
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    assert owner.stdout is not None
    zygote = int(owner.stdout.readline())
    mine = [zygote, *descendants(zygote)]
    assert len(mine) >= 1 + 2 * 3
    owner.kill()
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + DEADLINE_S
    parents = [parent for _, found in cgroups._candidates() for parent in found.values()]
    while [pid for pid in mine if _lives(pid)] or [n for p in parents for n in os.listdir(p) if n.startswith(f"rollmill-{owner.pid}-")]:
        assert time.monotonic() < deadline, "something outlived its owner"
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    """What has ended and waits for a parent that does not look counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
