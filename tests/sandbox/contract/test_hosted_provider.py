"""Our side of a provider: a busy one is waited for, a wrong key is said, and one that goes away fails what waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from e2b_face import KEY, Face

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox import SandboxSpec
from rollmill.sandbox.hosted import HostedBackend
from rollmill.sandbox.namespace import NamespaceBackend

DEADLINE_S = 120.0
WAIT_S = 60.0
Claim = Callable[[Face, str], Awaitable[None]]


@pytest.fixture
def play() -> Callable[[Claim], None]:
    why = NamespaceBackend.probe()
    if why is not None:
        pytest.skip(why)

    async def whole(claim: Claim) -> None:
        behind = NamespaceBackend()
        try:
            async with asyncio.timeout(DEADLINE_S):
                face = Face(behind)
                async with face.served() as url:
                    await claim(face, url)
        finally:
            await behind.close()

    return lambda claim: asyncio.run(whole(claim))


def test_a_busy_provider_is_asked_again(play) -> None:
    async def claim(face: Face, url: str) -> None:
        face.num_busy = 5
        backend = HostedBackend(api_url=url, sandbox_url=url, api_key=KEY)
        boxes = await asyncio.gather(*(backend.create(SandboxSpec()) for _ in range(3)))
        assert face.num_busy == 0 and len({box.name for box in boxes}) == 3
        await backend.close()
        assert not face.sandboxes, "a closed backend leaves nothing at the provider"

    play(claim)


def test_a_wrong_key_and_an_unknown_template_are_said(play) -> None:
    async def claim(face: Face, url: str) -> None:
        stranger = HostedBackend(api_url=url, sandbox_url=url, api_key="wrong")
        with pytest.raises(RunFailure, match="401"):
            await stranger.create(SandboxSpec())
        await stranger.close()
        backend = HostedBackend(api_url=url, sandbox_url=url, api_key=KEY)
        with pytest.raises(RunFailure, match="template other not found") as caught:
            await backend.create(SandboxSpec(image="other"))
        assert caught.value.boundary == Boundary.SANDBOX
        await backend.close()

    play(claim)


def test_a_sandbox_that_the_provider_ends_fails_what_waits_in_it(play) -> None:
    async def claim(face: Face, url: str) -> None:
        backend = HostedBackend(api_url=url, sandbox_url=url, api_key=KEY)
        box = await backend.create(SandboxSpec())
        waiting = asyncio.ensure_future(box.exec(["sleep", "1000"], timeout_s=1000))
        await box.exec(["true"], timeout_s=WAIT_S)
        await face._end(box.name)
        with pytest.raises(RunFailure, match="is gone") as caught:
            await waiting
        assert caught.value.boundary == Boundary.SANDBOX
        await box.close()
        await backend.close()

    play(claim)


def test_a_creation_given_up_leaves_nothing_at_the_provider(play) -> None:
    async def claim(face: Face, url: str) -> None:
        backend = HostedBackend(api_url=url, sandbox_url=url, api_key=KEY)
        await (await backend.create(SandboxSpec())).close()
        for num_turns in (1, 3, 10, 30):
            creating = asyncio.ensure_future(backend.create(SandboxSpec()))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            creating.cancel()
            with pytest.raises(asyncio.CancelledError):
                await creating
        await backend.close()
        assert not face.sandboxes

    play(claim)


def test_a_provider_that_is_not_there_is_a_failure_of_the_sandbox() -> None:
    async def whole() -> None:
        backend = HostedBackend(api_url="http://127.0.0.1:9", sandbox_url="http://127.0.0.1:9", api_key=KEY)
        with pytest.raises(RunFailure, match="failed"):
            await backend.create(SandboxSpec())
        await backend.close()

    asyncio.run(whole())


def test_no_key_is_said_by_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    assert "E2B_API_KEY" in (HostedBackend.probe() or "")
