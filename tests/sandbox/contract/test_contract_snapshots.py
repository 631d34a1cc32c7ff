"""What every backend promises of states: children start from one and never see one another; one that cannot says so at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from contract_scene import SPEC, Scene

from rollmill.sandbox.interface import Sandbox
from rollmill.sandbox.records import Service

WAIT_S = 60.0


@contextlib.asynccontextmanager
async def _all(boxes: Sequence[Sandbox]) -> AsyncIterator[Sequence[Sandbox]]:
    try:
        yield boxes
    finally:
        await asyncio.gather(*(box.close() for box in boxes))


def test_a_backend_that_cannot_fork_names_what_it_lacks(scene: Scene) -> None:
    async def play() -> None:
        if scene.capabilities.fork:
            return
        for call in (scene.box.snapshot(), scene.box.fork(2)):
            with pytest.raises(ValueError, match="snapshot"):
                await call
        with pytest.raises(ValueError, match="snapshot"):
            await scene.backend.restore("memory://", "0" * 64)

    scene.play(play)


def test_children_start_from_one_state_and_never_see_one_another(scene: Scene) -> None:
    async def play() -> None:
        if not scene.capabilities.fork:
            return
        async with scene.fresh() as box:
            await box.exec("mkdir state && for i in 1 2 3 4 5; do echo $i > state/$i; done", timeout_s=WAIT_S)
            snapshot = await box.snapshot()
            async with _all(await snapshot.fork(3)) as (first, second, third):
                await first.exec("rm -r state/1 && echo changed > state/2 && echo new > state/6", timeout_s=WAIT_S)
                await box.write("state/3", b"the parent went on")
                assert await first.list("state") == ["2", "3", "4", "5", "6"]
                for child in (second, third):
                    assert await child.list("state") == ["1", "2", "3", "4", "5"]
                    assert (await child.read("state/2"), await child.read("state/3")) == (b"2\n", b"3\n")
                assert await box.read("state/1") == b"1\n" and await first.read("state/3") == b"3\n"
                result = await second.exec('echo "$OF_BOX"', timeout_s=WAIT_S)
                assert result.stdout == b"of the box\n", "what the box was given holds in its children"
            await snapshot.close()
            await snapshot.close()

    scene.play(play)


def test_states_stack_on_states(scene: Scene) -> None:
    async def play() -> None:
        if not scene.capabilities.fork:
            return
        async with scene.fresh() as box:
            await box.write("turn", b"1")
            async with _all(await box.fork(1)) as (child,):
                await child.write("turn", b"2")
                await child.write("only-below", b"")
                async with _all(await child.fork(2)) as grandchildren:
                    await child.exec(["rm", "only-below"], timeout_s=WAIT_S)
                    for grandchild in grandchildren:
                        assert await grandchild.read("turn") == b"2"
                        assert "only-below" in await grandchild.list()
            assert await box.read("turn") == b"1"

    scene.play(play)


def test_services_run_again_in_the_parent_and_in_every_child(scene: Scene) -> None:
    async def play() -> None:
        if not scene.capabilities.fork:
            return
        # Counts its starts, ends only when told to stop, and says so: a state taken under it would miss the last line.
        script = "trap 'echo stopped >> log; exit 0' TERM; echo started >> log; touch up; while :; do sleep 0.05; done"
        service = Service(name="counter", argv=("sh", "-c", script), ready_argv=("test", "-f", "up"))
        async with scene.fresh(services=(service,)) as box, _all(await box.fork(2)) as children:
            expected = b"started\n" if scene.capabilities.live_fork else b"started\nstopped\nstarted\n"
            for each in (box, *children):
                await each.exec(f"until [ $(wc -c < log) -ge {len(expected)} ]; do sleep 0.02; done", timeout_s=WAIT_S)
                assert await each.read("log") == expected

    scene.play(play)


def test_live_processes_are_carried_over_or_refused(scene: Scene) -> None:
    async def play() -> None:
        if not scene.capabilities.fork or scene.capabilities.live_fork:
            return
        with pytest.raises(ValueError, match="live"):
            await scene.box.snapshot(live=True)

    scene.play(play)


def test_a_saved_state_is_restored_from_its_digest_alone(scene: Scene, tmp_path: Path) -> None:
    async def play() -> None:
        if not scene.capabilities.fork:
            return
        async with scene.fresh() as box:
            await box.exec("printf kept > kept && rm first.txt && ln -s kept link && chmod 600 kept", timeout_s=WAIT_S)
            snapshot = await box.snapshot()
            if not scene.capabilities.save:
                with pytest.raises(ValueError, match="save"):
                    await snapshot.save(str(tmp_path))
                with pytest.raises(ValueError, match="save"):
                    await scene.backend.restore(str(tmp_path), "0" * 64)
                await snapshot.close()
                return
            digest = await snapshot.save(str(tmp_path))
            await snapshot.close()
        restored = await scene.backend.restore(str(tmp_path), digest)
        async with _all(await restored.fork(2)) as children:
            for child in children:
                assert await child.read("link") == b"kept"
                assert (await child.stat("kept")).mode == 0o600
                assert "first.txt" not in await child.list()
                assert (await child.exec('echo "$OF_BOX"', timeout_s=WAIT_S)).stdout == f"{SPEC.env['OF_BOX']}\n".encode()
        await restored.close()

    scene.play(play)
