"""The blob store: whole or absent, verified, the same in a folder, in memory and on a real S3 server."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from blake3 import blake3

from rollmill.records import RunFailure
from rollmill.sandbox.snapshots.store import BlobDamaged, BlobMissing, BlobStore, open_store

DEADLINE_S = 60.0


def run(scene: object) -> None:
    async def whole() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scene  # type: ignore[misc]

    asyncio.run(whole())


def files(root: Path, name: str = "*") -> list[Path]:
    return [path for path in root.rglob(name) if path.is_file()]


async def stream(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def everything(store: BlobStore, digest: str) -> bytes:
    return b"".join([piece async for piece in store.get(digest)])


@pytest.mark.parametrize("num_bytes", [0, 1, 3 << 20, (17 << 20) + 5])
def test_blob_comes_back_bit_for_bit(where: str, num_bytes: int) -> None:
    data = random.Random(num_bytes).randbytes(num_bytes)

    async def scene() -> None:
        store = open_store(where)
        blob = await store.put(stream(*(data[at : at + 1_000_003] for at in range(0, num_bytes, 1_000_003))))
        assert (blob.digest, blob.num_bytes) == (blake3(data).hexdigest(), num_bytes)
        assert await store.has(blob.digest)
        assert await everything(open_store(where), blob.digest) == data
        assert await store.digests() == [blob.digest]

    run(scene())


def test_equal_streams_are_one_blob_and_deleting_twice_is_harmless(where: str) -> None:
    async def scene() -> None:
        store = open_store(where)
        one, two = await store.put(stream(b"ab", b"c")), await store.put(stream(b"a", b"bc"))
        assert one == two and await store.digests() == [one.digest]
        await store.delete(one.digest)
        await store.delete(one.digest)
        assert not await store.has(one.digest)
        with pytest.raises(BlobMissing, match=one.digest):
            await everything(store, one.digest)

    run(scene())


def test_manifests_are_found_by_their_digest(where: str) -> None:
    async def scene() -> None:
        store = open_store(where)
        digest = await store.put_manifest(b'{"a":1}')
        assert await store.put_manifest(b'{"a":1}') == digest
        assert await store.get_manifest(digest) == b'{"a":1}'
        assert await store.manifests() == [digest] and await store.digests() == []
        await store.delete_manifest(digest)
        with pytest.raises(BlobMissing):
            await store.get_manifest(digest)

    run(scene())


def test_stream_that_breaks_off_leaves_nothing(where: str) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"x" * (9 << 20)
        raise OSError("the box died")

    async def scene() -> None:
        store = open_store(where)
        with pytest.raises(OSError, match="the box died"):
            await store.put(broken())
        assert await store.digests() == []

    run(scene())


def test_cancelled_put_leaves_nothing(tmp_path: Path) -> None:
    async def scene() -> None:
        store = open_store(tmp_path)
        reached = asyncio.Event()

        async def endless() -> AsyncIterator[bytes]:
            while True:
                yield b"x" * 100_000
                reached.set()

        put = asyncio.create_task(store.put(endless()))
        await reached.wait()
        put.cancel()
        with pytest.raises(asyncio.CancelledError):
            await put
        assert files(tmp_path) == []

    run(scene())


def test_damaged_blob_is_named_before_a_byte_of_it_is_given(tmp_path: Path) -> None:
    async def scene() -> None:
        store = open_store(tmp_path)
        digest = (await store.put(stream(b"x" * (3 << 20)))).digest
        (path,) = files(tmp_path, digest)
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"y")
        given = []
        with pytest.raises(BlobDamaged, match=digest):
            async for piece in store.get(digest):
                given.append(piece)
        assert given == []

    run(scene())


def test_blob_cut_short_is_mended_by_the_next_put(tmp_path: Path) -> None:
    async def scene() -> None:
        store = open_store(tmp_path)
        digest = (await store.put(stream(b"whole"))).digest
        (path,) = files(tmp_path, digest)
        path.write_bytes(b"who")
        await store.put(stream(b"whole"))
        assert await everything(store, digest) == b"whole"

    run(scene())


def test_writer_that_was_killed_leaves_no_blob(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\n"
        "from rollmill.sandbox.snapshots.store import open_store\n"
        "async def endless():\n"
        "    while True:\n"
        "        yield b'x' * 100_000\n"
        "        print('written', flush=True)\n"
        "asyncio.run(open_store(sys.argv[1]).put(endless()))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        writer.wait(timeout=30)

    async def scene() -> None:
        store = open_store(tmp_path)
        assert await store.digests() == []
        (left,) = (tmp_path / ".tmp").iterdir()
        os.utime(left, (0, 0))
        await store.put(stream(b"next"))
        assert not left.exists()

    run(scene())


@pytest.mark.parametrize(
    "url", ["ftp://x/y", "s3:///prefix", "s3://b/p?colour=red", "s3://me:secret@b/p", "file://other/p", "s3://b/p?endpoint=x"]
)
def test_addresses_that_mean_nothing_are_refused_with_words(url: str) -> None:
    with pytest.raises(ValueError) as caught:
        open_store(url)
    assert "secret" not in str(caught.value) and len(str(caught.value)) > 20


def test_digest_cannot_name_a_path() -> None:
    with pytest.raises(ValueError, match="no digest"):
        run(open_store("memory://x").has("../../etc/passwd"))


def test_server_that_does_not_answer_is_a_failure_of_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    from rollmill.sandbox.snapshots import bucket

    monkeypatch.setattr(bucket, "_PATIENCE", timedelta(seconds=0.2))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "not-shown")
    store = open_store("s3://b/p?endpoint=http://127.0.0.1:9&region=us-east-1")
    with pytest.raises(RunFailure, match="check the endpoint") as caught:
        run(store.put(stream(b"x")))
    assert "not-shown" not in str(caught.value)
