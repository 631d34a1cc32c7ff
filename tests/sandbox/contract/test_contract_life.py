"""What every backend promises of a box's life: bursts wait, ends are final and have a reason, and no call is left hanging."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from contract_scene import SPEC, Scene

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.records import Egress

WAIT_S = 60.0


def test_closing_twice_is_harmless_and_every_later_call_fails_as_the_sandbox_s(scene: Scene) -> None:
    async def play() -> None:
        async with scene.fresh() as box:
            await box.close()
            await box.close()
            calls = [
                box.exec(["true"], timeout_s=WAIT_S),
                box.start(["true"]),
                box.read("x"),
                box.write("x", b""),
                box.list(),
                box.stat("x"),
            ]
            calls += [box.snapshot(), box.fork(1)] if scene.capabilities.fork else []
            calls += [box.suspend()] if scene.capabilities.suspend else []
            for call in calls:
                with pytest.raises(RunFailure) as caught:
                    await call
                assert caught.value.boundary == Boundary.SANDBOX

    scene.play(play)


def test_what_waits_for_a_box_hears_of_its_end(scene: Scene) -> None:
    async def play() -> None:
        async with scene.fresh() as box:
            running = await box.start("echo begun; exec sleep 1000")
            async with asyncio.timeout(WAIT_S):
                async for chunk in running:
                    assert chunk.data == b"begun\n"
                    break
            waiting = asyncio.ensure_future(box.exec(["sleep", "1000"], timeout_s=1000))
            await box.exec(["true"], timeout_s=WAIT_S)  # requests keep their order: the one before has been sent
            await box.close()
            with pytest.raises(RunFailure):
                await waiting
            with pytest.raises(RunFailure):
                await running.wait(timeout_s=WAIT_S)

    scene.play(play)


def test_a_box_ends_with_its_lifetime(scene: Scene) -> None:
    async def play() -> None:
        async with scene.fresh(lifetime_s=2.0) as box:
            with pytest.raises(RunFailure) as caught:
                await box.exec(["sleep", "1000"], timeout_s=1000)
            assert caught.value.boundary == Boundary.SANDBOX

    scene.play(play)


def test_a_suspended_box_does_nothing_until_it_is_resumed(scene: Scene) -> None:
    async def play() -> None:
        async with scene.fresh() as box:
            if not scene.capabilities.suspend:
                with pytest.raises(ValueError, match="suspend"):
                    await box.suspend()
                return
            waiting = await box.start(["cat"])
            await box.write("before", b"kept")
            await box.suspend()
            await box.resume()
            await waiting.write(b"still here")
            async with asyncio.timeout(WAIT_S):
                async for chunk in waiting:
                    assert chunk.data == b"still here"
                    break
            assert await box.read("before") == b"kept"

    scene.play(play)


def test_a_suspended_box_can_be_closed(scene: Scene) -> None:
    async def play() -> None:
        if not scene.capabilities.suspend:
            return
        async with scene.fresh() as box:
            await box.suspend()

    scene.play(play)


def test_a_burst_of_creations_waits_and_never_fails(scene: Scene) -> None:
    async def play() -> None:
        boxes = await asyncio.gather(*(scene.backend.create(SPEC) for _ in range(scene.num_burst)))
        try:
            results = await asyncio.gather(*(box.exec(["cat", "first.txt"], timeout_s=WAIT_S) for box in boxes))
            assert {result.stdout for result in results} == {"wörld\n".encode()}
        finally:
            await asyncio.gather(*(box.close() for box in boxes))

    scene.play(play)


def test_a_creation_given_up_leaves_the_backend_working(scene: Scene) -> None:
    async def play() -> None:
        creating = asyncio.ensure_future(scene.backend.create(SPEC))
        await asyncio.sleep(0)
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
        async with scene.fresh() as box:
            assert (await box.exec(["true"], timeout_s=WAIT_S)).exit_code == 0

    scene.play(play)


def test_what_a_backend_cannot_give_is_refused_before_anything_starts(scene: Scene) -> None:
    async def play() -> None:
        if not scene.capabilities.egress:
            with pytest.raises(ValueError, match="egress"):
                await scene.backend.create(msgspec.structs.replace(SPEC, egress=Egress()))

    scene.play(play)


def test_a_program_cannot_reach_the_network_without_being_let(scene: Scene) -> None:
    async def play() -> None:
        if not scene.is_isolated:
            return
        result = await scene.box.exec("cat /proc/net/route", timeout_s=WAIT_S)
        assert len(result.stdout.splitlines()) <= 1, "a route leads out"

    scene.play(play)


def test_using_up_the_memory_is_the_program_s_own_doing(scene: Scene) -> None:
    async def play() -> None:
        if not scene.is_isolated:
            return
        async with scene.fresh(memory_bytes=64 << 20) as box:
            result = await box.exec(["tail", "/dev/zero"], timeout_s=WAIT_S)
            assert result.exit_code != 0 and not result.timed_out

    scene.play(play)


def test_a_full_process_table_is_the_program_s_own_doing(scene: Scene) -> None:
    async def play() -> None:
        if not scene.is_isolated:
            return
        async with scene.fresh(num_processes=16) as box:
            filled = await box.exec(["sh", "-c", "for i in $(seq 300); do sleep 1000 & done"], timeout_s=WAIT_S)
            assert filled.exit_code != 0, "more programs than the box may have"
            again = await box.exec(["true"], timeout_s=WAIT_S)
            assert again.exit_code in (0, 126), "it runs, or it is said that it cannot; the box has not failed"

    scene.play(play)
