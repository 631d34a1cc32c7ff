"""The provider's face that our adapter is tried against speaks the real protocol: the provider's own SDK works with it unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from e2b_face import KEY, Face

from rollmill.sandbox.namespace import NamespaceBackend

e2b = pytest.importorskip("e2b", reason="the provider's SDK is not installed: pip install e2b")

DEADLINE_S = 120.0
Claim = Callable[["type[e2b.AsyncSandbox]", dict], Awaitable[None]]


@pytest.fixture
def play() -> Callable[[Claim], None]:
    why = NamespaceBackend.probe()
    if why is not None:
        pytest.skip(why)

    async def whole(claim: Claim) -> None:
        backend = NamespaceBackend()
        try:
            async with asyncio.timeout(DEADLINE_S), Face(backend, num_busy=1).served() as url:
                await claim(e2b.AsyncSandbox, {"api_key": KEY, "api_url": url, "sandbox_url": url, "http_version": "1.1"})
        finally:
            await backend.close()

    return lambda claim: asyncio.run(whole(claim))


def test_sdk_runs_commands_and_feeds_them(play) -> None:
    async def claim(Sandbox, opts: dict) -> None:
        box = await Sandbox.create("base", timeout=60, **opts)
        done = await box.commands.run("echo out; echo err >&2; echo $WHO", envs={"WHO": "me"})
        assert (done.stdout, done.stderr, done.exit_code) == ("out\nme\n", "err\n", 0)
        with pytest.raises(e2b.CommandExitException) as caught:
            await box.commands.run("exit 7")
        assert caught.value.exit_code == 7
        cat = await box.commands.run("cat", background=True, stdin=True)
        assert cat.pid in [process.pid for process in await box.commands.list()]
        await box.commands.send_stdin(cat.pid, "fed")
        await box.commands.close_stdin(cat.pid)
        assert (await cat.wait()).stdout == "fed"
        sleep = await box.commands.run("sleep 1000", background=True)
        assert await box.commands.kill(sleep.pid)
        assert await box.kill() and not await box.kill()

    play(claim)


def test_sdk_handles_files(play) -> None:
    async def claim(Sandbox, opts: dict) -> None:
        box = await Sandbox.create("base", timeout=60, **opts)
        await box.files.write("folder/a.txt", "text")
        await box.files.write("folder/b.bin", b"\0\xff")
        assert await box.files.read("folder/a.txt") == "text"
        assert bytes(await box.files.read("folder/b.bin", format="bytes")) == b"\0\xff"
        assert sorted(entry.name for entry in await box.files.list("folder")) == ["a.txt", "b.bin"]
        assert (await box.files.get_info("folder/b.bin")).size == 2
        assert await box.files.make_dir("made") and not await box.files.make_dir("made")
        await box.files.rename("folder/a.txt", "made/c.txt")
        assert not await box.files.exists("folder/a.txt") and await box.files.exists("made/c.txt")
        await box.files.remove("made")
        with pytest.raises(e2b.NotFoundException):
            await box.files.read("made/c.txt")

    play(claim)


def test_sdk_pauses_copies_and_outlives(play) -> None:
    async def claim(Sandbox, opts: dict) -> None:
        box = await Sandbox.create("base", timeout=60, **opts)
        await box.files.write("state", "1")
        snapshot = await box.create_snapshot()
        await box.files.write("state", "2")
        copy = await Sandbox.create(snapshot.snapshot_id, timeout=60, **opts)
        assert (await copy.files.read("state"), await box.files.read("state")) == ("1", "2")
        assert await Sandbox.delete_snapshot(snapshot.snapshot_id, **opts)
        await box.pause()
        again = await Sandbox.connect(box.sandbox_id, **opts)
        assert await again.files.read("state") == "2"
        assert await again.is_running()
        await again.set_timeout(0)
        async with asyncio.timeout(DEADLINE_S):
            while await again.is_running():  # noqa: ASYNC110 - the SDK has no event for it
                await asyncio.sleep(0.02)

    play(claim)
