"""What every backend promises of services: started in order, waited for, and a service that fails says what it printed."""

from __future__ import annotations

import pytest
from contract_scene import Scene

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.records import Service

WAIT_S = 60.0
SLOW = Service(name="slow", argv=("sh", "-c", "sleep 0.2; echo up > slow-ready; exec sleep 1000"), ready_argv=("test", "-f", "slow-ready"))
AFTER = Service(name="after", argv=("sh", "-c", "cp slow-ready after-ready; exec sleep 1000"), ready_argv=("test", "-f", "after-ready"))


def test_services_of_a_spec_are_ready_in_order_when_the_box_is(scene: Scene) -> None:
    async def play() -> None:
        async with scene.fresh(services=(SLOW, AFTER)) as box:
            assert await box.read("slow-ready") == b"up\n"
            assert await box.read("after-ready") == b"up\n", "the second started after the first was ready"

    scene.play(play)


def test_a_service_can_be_added_later(scene: Scene) -> None:
    async def play() -> None:
        await scene.box.serve(
            Service(
                name="late", argv=("sh", "-c", "echo $WHO > late; exec sleep 1000"), ready_argv=("test", "-s", "late"), env={"WHO": "me"}
            )
        )
        assert await scene.box.read("late") == b"me\n"

    scene.play(play)


def test_a_service_that_ends_before_it_is_ready_fails_with_its_words(scene: Scene) -> None:
    async def play() -> None:
        with pytest.raises(RunFailure, match="no port for me") as caught:
            await scene.box.serve(Service(name="broken", argv=("sh", "-c", "echo no port for me >&2; exit 1"), ready_argv=("false",)))
        assert caught.value.boundary == Boundary.SANDBOX

    scene.play(play)


def test_a_service_that_is_never_ready_fails_at_its_deadline(scene: Scene) -> None:
    async def play() -> None:
        with pytest.raises(RunFailure, match="still thinking"):
            await scene.box.serve(
                Service(name="never", argv=("sh", "-c", "echo still thinking; exec sleep 1000"), ready_argv=("false",), ready_s=0.5)
            )

    scene.play(play)
