"""A task is set up once and every attempt starts from a fork of it, in real boxes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rollmill.records import Boundary, RunFailure, Task
from rollmill.rollout.worlds import Worlds
from rollmill.sandbox import Capabilities, Sandbox, SandboxSpec, Service
from rollmill.sandbox.namespace import NamespaceBackend

DEADLINE_S = 60.0


def task(number: int = 0) -> Task:
    return Task(
        task_id=f"t/{number}", family="t", kind="k", level=1, seed=number, split="train", instruction="x", files={"a": f"{number}\n"}
    )


class CountingFamily:
    """Its tasks have a service, and a set-up that is counted and fails as often as it is told."""

    name, kinds = "t", ("k",)

    def __init__(self, *, num_failures: int = 0) -> None:
        self.num_setups, self.num_failures = 0, num_failures

    def machine(self, task: Task) -> SandboxSpec:
        clock = Service(name="clock", argv=("sh", "-c", "touch /dev/shm/up; exec sleep 1000"), ready_argv=("test", "-e", "/dev/shm/up"))
        return SandboxSpec(files=task.files, services=(clock,))

    async def setup(self, task: Task, box: Sandbox) -> None:
        self.num_setups += 1
        if self.num_setups <= self.num_failures:
            raise OSError("the migration failed")
        await box.exec("echo migrated >> a", timeout_s=10)


class BackendWithoutForks:
    """The namespace backend, said to be unable to fork."""

    def __init__(self, backend: NamespaceBackend) -> None:
        self._backend, self.create = backend, backend.create

    async def capabilities(self) -> Capabilities:
        return Capabilities(backend="fake", isolation="namespace", fork=False)


@pytest.fixture(scope="module")
def machine() -> None:
    if (reason := NamespaceBackend.probe()) is not None:
        pytest.skip(reason)


def play(scene: Callable[[NamespaceBackend], Awaitable[None]]) -> None:
    async def whole() -> None:
        backend = NamespaceBackend(num_prepared=4)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await scene(backend)
        finally:
            await backend.close()

    asyncio.run(whole())


def test_group_is_set_up_once_and_its_attempts_keep_apart(machine):
    async def scene(backend: NamespaceBackend) -> None:
        family = CountingFamily()
        worlds = Worlds(family, backend)  # type: ignore[arg-type]
        boxes = await asyncio.gather(*(worlds.box(task(), lifetime_s=60) for _ in range(8)))
        for number, box in enumerate(boxes):
            await box.write("mine", str(number).encode())
        for number, box in enumerate(boxes):
            result = await box.exec("cat a mine; pgrep -xc sleep", timeout_s=10)
            assert result.stdout == f"0\nmigrated\n{number}1\n".encode(), "the state, its own file and its own service"
        assert family.num_setups == 1
        await worlds.close()
        assert (await boxes[0].read("a")) == b"0\nmigrated\n", "a fork keeps what it stands on"

    play(scene)


def test_failed_setup_is_the_tasks_failure_and_is_tried_again(machine):
    async def scene(backend: NamespaceBackend) -> None:
        family = CountingFamily(num_failures=1)
        worlds = Worlds(family, backend)  # type: ignore[arg-type]
        outcomes = await asyncio.gather(*(worlds.box(task(), lifetime_s=60) for _ in range(3)), return_exceptions=True)
        assert all(isinstance(o, RunFailure) and o.boundary == Boundary.TASK and "migration failed" in o.message for o in outcomes)
        assert await (await worlds.box(task(), lifetime_s=60)).read("a") == b"0\nmigrated\n"
        assert family.num_setups == 2
        await worlds.close()

    play(scene)


def test_attempt_that_is_cancelled_leaves_the_setup_to_its_siblings(machine):
    async def scene(backend: NamespaceBackend) -> None:
        worlds = Worlds(CountingFamily(), backend)  # type: ignore[arg-type]
        first, second = (asyncio.create_task(worlds.box(task(), lifetime_s=60)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert await (await second).read("a") == b"0\nmigrated\n"
        assert first.cancelled() or isinstance((await asyncio.gather(first, return_exceptions=True))[0], asyncio.CancelledError)
        await worlds.close()

    play(scene)


def test_only_the_newest_states_are_kept(machine):
    async def scene(backend: NamespaceBackend) -> None:
        family = CountingFamily()
        worlds = Worlds(family, backend, num_kept=2)  # type: ignore[arg-type]
        for number in (0, 1, 2, 2, 1, 0):
            box = await worlds.box(task(number), lifetime_s=60)
            assert await box.read("a") == f"{number}\nmigrated\n".encode()
            await box.close()
        assert family.num_setups == 4
        await worlds.close()

    play(scene)


def test_backend_that_cannot_fork_sets_every_attempt_up(machine):
    async def scene(backend: NamespaceBackend) -> None:
        family = CountingFamily()
        worlds = Worlds(family, BackendWithoutForks(backend))  # type: ignore[arg-type]
        boxes = [await worlds.box(task(), lifetime_s=60) for _ in range(2)]
        assert [await box.read("a") for box in boxes] == [b"0\nmigrated\n"] * 2 and family.num_setups == 2
        await worlds.close()

    play(scene)
