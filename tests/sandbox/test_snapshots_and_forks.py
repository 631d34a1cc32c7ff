"""Frozen states: forks share them and change nothing of them, boxes go on above them, stacks stay shallow, and they travel."""

from __future__ import annotations

import asyncio

import pytest

from rollmill.records import RunFailure
from rollmill.sandbox import ChangeKind, SandboxSpec, Service
from rollmill.sandbox.namespace import NamespaceBackend
from rollmill.sandbox.namespace.flatten import Flattener
from tests.sandbox.conftest import until


async def _shell(box, line: str) -> str:
    result = await box.exec(line, timeout_s=60)
    assert result.exit_code == 0, result.stdout
    return result.stdout.decode()


def test_forks_share_a_state_and_none_sees_anothers_changes(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec(files={"kept": "1", "gone": "2", "d/x": "3"}))
        await _shell(box, "rm gone; echo more >> kept; mkdir e; ln -s kept link; chmod 600 d/x")
        snapshot = await box.snapshot()
        first, second = await snapshot.fork(2)
        await _shell(first, "rm -r d; mkdir d; echo new > d/y; rm kept; mv e f")
        await _shell(box, "echo parent > parent")
        assert await _shell(second, "ls; cat kept; stat -c %a d/x; readlink link") == "d\ne\nkept\nlink\n1more\n600\nkept\n"
        assert await _shell(first, "ls -p; ls d") == "d/\nf/\nlink\ny\n"
        (third,) = await snapshot.fork(1)
        assert await third.list() == ["d/x", "kept"]
        changes = {(change.path.removeprefix("/home/dev/work/"), change.kind) for change in await first.diff()}
        assert {("kept", ChangeKind.REMOVED), ("d", ChangeKind.WRITTEN), ("d/y", ChangeKind.WRITTEN), ("e", ChangeKind.REMOVED)} <= changes
        assert await second.diff() == []

    play(scene)


def test_box_goes_on_above_its_snapshot_with_its_services(play):
    counter = Service(
        name="counter",
        argv=("sh", "-c", "n=$(cat n 2>/dev/null || echo 0); echo $((n+1)) > n; touch /dev/shm/up; exec sleep 1000"),
        ready_argv=("test", "-e", "/dev/shm/up"),
    )

    async def scene(backend):
        box = await backend.create(SandboxSpec(services=(counter,)))
        await box.exec("sleep 1000 & echo left behind", timeout_s=10)
        snapshot = await box.snapshot()
        assert await _shell(box, "cat n; pgrep -c sleep") == "2\n1\n", "the service was started again, what was left behind was ended"
        children = await snapshot.fork(3)
        assert [await _shell(child, "cat n; pgrep -c sleep") for child in children] == ["2\n1\n"] * 3
        grandchild = (await children[0].fork(1))[0]
        assert await _shell(grandchild, "cat n") == "3\n"

    play(scene)


def test_service_that_does_not_come_up_fails_with_its_words(play):
    async def scene(backend):
        broken = Service(name="db", argv=("sh", "-c", "echo no such cluster; exit 3"), ready_argv=("true",), ready_s=5)
        with pytest.raises(RunFailure, match=r"db ended with status 3.*no such cluster"):
            await backend.create(SandboxSpec(services=(broken,)))
        deaf = Service(name="deaf", argv=("sleep", "1000"), ready_argv=("false",), ready_s=0.3)
        with pytest.raises(RunFailure, match=r"deaf was not ready within 0\.3 s"):
            await backend.create(SandboxSpec(services=(deaf,)))

    play(scene)


def test_closing_a_snapshot_takes_nothing_from_its_forks_and_refuses_new_ones(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec(files={"a": "1"}))
        snapshot = await box.snapshot()
        (child,) = await snapshot.fork(1)
        await snapshot.close()
        await box.close()
        assert await child.read("a") == b"1"
        (again,) = await child.fork(1)
        assert await again.read("a") == b"1"
        with pytest.raises(RunFailure, match="closed"):
            await snapshot.fork(1)
        with pytest.raises(ValueError, match="at least one"):
            await (await child.snapshot()).fork(0)

    play(scene)


def test_group_of_128_is_whole(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec(files={f"f{n}": str(n) for n in range(200)}))
        children = await (await box.snapshot()).fork(128)
        counts = await asyncio.gather(*(child.list() for child in children))
        assert all(len(names) == 200 for names in counts)
        await asyncio.gather(*(child.close() for child in children))

    play(scene)


def test_deep_stacks_are_flattened_behind_the_scenes(play):
    async def scene(backend):
        backend.flattener = Flattener(backend._courier, max_depth=6)
        box = await backend.create(SandboxSpec(files={"a": "0"}))
        kept = []
        for n in range(12):
            await _shell(box, f"echo {n} > f{n}; rm -f f{n - 2}; mkdir -p d; rm -r d; mkdir d; touch d/{n}; echo {n} >> a")
            kept.append(await box.snapshot())
        await until(lambda: backend.flattener.num_flattened > 0 and len(box.stack) <= 6)
        assert await _shell(box, "ls; ls d; tail -n1 a") == "a\nd\nf10\nf11\n11\n11\n"
        (old,) = await kept[3].fork(1)
        assert await _shell(old, "ls; ls d; tail -n1 a") == "a\nd\nf2\nf3\n3\n3\n"
        (young,) = await kept[-1].fork(1)
        assert await _shell(young, "ls; ls d; tail -n1 a") == "a\nd\nf10\nf11\n11\n11\n"

    play(scene)


def test_saved_snapshot_is_restored_by_another_owner_and_layers_travel_once(play, tmp_path):
    store = str(tmp_path / "store")
    digests: list[str] = []

    async def save(backend):
        box = await backend.create(SandboxSpec(files={"a": "1", "b/c": "x"}))
        await _shell(box, "rm a; ln b/c b/hard; ln -s ../x b/soft; chmod 640 b/c; touch -d @1000000001 b/c; touch -d @1000000000 b")
        await _shell(box, "mkfifo p; printf '\\377' > \"$(printf 'n\\303\\251')\"")
        first = await box.snapshot()
        digests.append(await first.save(store))
        blobs = {path.name for path in (tmp_path / "store").rglob("*") if path.is_file()}
        await _shell(box, "rm -r b; mkdir b; echo 2 > b/new")
        digests.append(await (await box.snapshot()).save(store))
        assert digests[0] == await first.save(store), "one state, one digest"
        new = {path.name for path in (tmp_path / "store").rglob("*") if path.is_file()} - blobs
        assert len(new) == 2, f"one layer and one manifest: {new}"

    async def restore(backend):
        (first,) = await (await backend.restore(store, digests[0])).fork(1)
        assert await _shell(first, "ls; stat -c '%a %h %Y' b/c; stat -c '%a %Y' b; readlink b/soft; test -p p && od -An -tx1 n*") == (
            "b\nné\np\n640 2 1000000001\n755 1000000000\n../x\n ff\n"
        )
        snapshot = await backend.restore(store, digests[1])
        (second,) = await snapshot.fork(1)
        assert await second.list() == ["b/new", "né"] and await second.read("b/new") == b"2\n"
        assert await snapshot.save(store) == digests[1]
        with pytest.raises(ValueError):
            await backend.restore(store, "0" * 64)

    play(save)
    play(restore)


def test_snapshot_of_a_box_that_is_gone_fails_loudly(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec())
        await box.close()
        with pytest.raises(RunFailure, match="closed"):
            await box.snapshot()
        with pytest.raises(ValueError, match="live"):
            await (await backend.create(SandboxSpec())).snapshot(live=True)

    play(scene)


def test_suspended_processes_stand_still_until_resumed(play):
    async def scene(backend: NamespaceBackend):
        box = await backend.create(SandboxSpec())
        await box.exec("(while :; do echo x >> ticks; sleep 0.005; done) &", timeout_s=10)
        await box.exec("until [ -s ticks ]; do sleep 0.01; done", timeout_s=30)
        await box.suspend()
        before = await box.stat("ticks")
        await asyncio.sleep(0.1)
        assert (await box.stat("ticks")).num_bytes == before.num_bytes
        await box.resume()
        line = f"until [ $(stat -c %s ticks) -gt {before.num_bytes} ]; do sleep 0.01; done"
        assert (await box.exec(line, timeout_s=30)).exit_code == 0

    play(scene)
