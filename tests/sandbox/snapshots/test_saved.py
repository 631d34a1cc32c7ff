"""Saved snapshots: a digest is given only for what is whole, equal states have equal digests, and a restore is exact or leaves nothing."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncGenerator, Awaitable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from folder_courier import FolderCourier
from layer_worlds import view

from rollmill.records import RunFailure
from rollmill.sandbox.records import SandboxSpec, Service
from rollmill.sandbox.snapshots.saved import LayerRef, Manifest, flatten, load, restore, save
from rollmill.sandbox.snapshots.store import BlobDamaged, BlobMissing, BlobStore, open_store

DEADLINE_S = 60.0
SPEC = SandboxSpec(env={"B": "2", "A": "1"}, services=(Service(name="db", argv=("db", "--port", "1")),))


def run(scene: Awaitable[None]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scene

    asyncio.run(whole())


async def save_to(store: BlobStore, courier: FolderCourier, chain: list[Path], **changes: Any) -> str:
    fields = {"image": "host", "image_digest": "", "spec": SPEC, "services": SPEC.services, "created": 1.75e9}
    return await save(store, courier, chain, **(fields | changes))  # type: ignore[arg-type]


def two_layers(courier: FolderCourier, seed: int = 0) -> list[Path]:
    rng = random.Random(seed)
    low, top = courier.fresh(), courier.fresh()
    (low / "d").mkdir()
    for number in range(30):
        (low / "d" / f"f{number}").write_bytes(rng.randbytes(rng.randint(0, 9000)))
    (top / "d").mkdir()
    (top / "d" / "f3").write_text("changed")
    os.link(top / "d" / "f3", top / "same")
    (top / "link").symlink_to("d/f3")
    for path in (low, top):
        for entry in [*path.rglob("*"), path]:
            os.utime(entry, ns=(10**18 + seed, 10**18 + 123), follow_symlinks=False)
    return [low, top]


def test_state_comes_back_bit_for_bit_from_another_machine(where: str, tmp_path: Path) -> None:
    async def scene() -> None:
        here, there = FolderCourier(tmp_path / "here"), FolderCourier(tmp_path / "there")
        chain = two_layers(here)
        digest = await save_to(open_store(where), here, chain)
        store = open_store(where)
        manifest = await load(store, digest)
        assert (manifest.spec, manifest.services, manifest.image, manifest.created) == (SPEC, SPEC.services, "host", 1.75e9)
        layers = await restore(store, manifest, there)
        assert [view(layer) for layer in layers] == [view(layer) for layer in chain]

    run(scene())


def test_equal_states_saved_apart_have_one_digest(tmp_path: Path) -> None:
    async def scene() -> None:
        one, two = FolderCourier(tmp_path / "one"), FolderCourier(tmp_path / "two")
        store = open_store(tmp_path / "store")
        spec = msgspec.structs.replace(SPEC, env={"A": "1", "B": "2"})
        assert await save_to(store, one, two_layers(one)) == await save_to(store, two, two_layers(two), spec=spec)
        assert len(await store.digests()) == 2

    run(scene())


def test_layer_known_to_lie_in_the_store_is_not_packed_again(tmp_path: Path) -> None:
    async def scene() -> None:
        courier = FolderCourier(tmp_path / "layers")
        store = open_store(tmp_path / "store")
        chain, known = two_layers(courier), dict[Path, LayerRef]()
        digest = await save_to(store, courier, chain, known=known)
        assert courier.num_packed == 2
        assert await save_to(store, courier, chain, known=known) == digest and courier.num_packed == 2
        await store.delete(known[chain[0]].digest)
        assert await save_to(store, courier, chain, known=known) == digest and courier.num_packed == 3

    run(scene())


def test_layer_already_on_this_machine_is_used_as_it_is(tmp_path: Path) -> None:
    async def scene() -> None:
        courier, there = FolderCourier(tmp_path / "layers"), FolderCourier(tmp_path / "there")
        store = open_store(tmp_path / "store")
        chain, known = two_layers(courier), dict[Path, LayerRef]()
        manifest = await load(store, await save_to(store, courier, chain, known=known))
        layers = await restore(store, manifest, there, have={known[chain[0]].digest: chain[0]})
        assert layers[0] == chain[0] and view(layers[1]) == view(chain[1]) and there.left() == ["layer1"]

    run(scene())


class DyingCourier(FolderCourier):
    """Loses the box within the second layer."""

    async def pack(self, layer: Path) -> AsyncGenerator[bytes, None]:
        async for chunk in super().pack(layer):
            if self.num_packed == 2:
                yield chunk[: len(chunk) // 2]
                raise ConnectionResetError("the box died")
            yield chunk


class TruncatingCourier(FolderCourier):
    """Hands over half an archive as if it were all."""

    async def pack(self, layer: Path) -> AsyncGenerator[bytes, None]:
        whole = b"".join([chunk async for chunk in super().pack(layer)])
        yield whole[: len(whole) // 1024 * 512]


@pytest.mark.parametrize(("kind", "error"), [(DyingCourier, ConnectionResetError), (TruncatingCourier, ValueError)])
def test_save_that_breaks_off_writes_no_manifest(kind: type[FolderCourier], error: type[Exception], tmp_path: Path) -> None:
    async def scene() -> None:
        courier = kind(tmp_path / "layers")
        store = open_store(tmp_path / "store")
        with pytest.raises(error):
            await save_to(store, courier, two_layers(courier))
        assert await store.manifests() == []

    run(scene())


def test_restore_that_fails_leaves_no_layer(tmp_path: Path) -> None:
    async def scene() -> None:
        courier, there = FolderCourier(tmp_path / "layers"), FolderCourier(tmp_path / "there")
        store = open_store(tmp_path / "store")
        manifest = await load(store, await save_to(store, courier, two_layers(courier)))
        (blob,) = (tmp_path / "store").rglob(manifest.layers[1].digest)
        blob.write_bytes(blob.read_bytes()[:-1] + b"!")
        with pytest.raises(BlobDamaged, match=manifest.layers[1].digest):
            await restore(store, manifest, there)
        assert there.left() == []
        await store.delete(manifest.layers[1].digest)
        with pytest.raises(BlobMissing):
            await restore(store, manifest, there)
        assert there.left() == []

    run(scene())


def test_blob_that_holds_more_than_its_manifest_says_is_refused(tmp_path: Path) -> None:
    async def scene() -> None:
        courier = FolderCourier(tmp_path / "layers")
        store = open_store(tmp_path / "store")
        manifest = await load(store, await save_to(store, courier, two_layers(courier)))
        lying = msgspec.structs.replace(manifest.layers[0], num_tar_bytes=1024)
        with pytest.raises(BlobDamaged, match="more than the 1024"):
            await restore(store, msgspec.structs.replace(manifest, layers=(lying,)), courier)

    run(scene())


def test_what_is_no_manifest_or_a_later_one_is_refused_with_words(tmp_path: Path) -> None:
    async def scene() -> None:
        store = open_store(tmp_path)
        for data, words in (
            (b"[]", "no snapshot"),
            (b'{"schema":1}', "no snapshot"),
            (b'{"schema":2}', "schema 2"),
            (b"\xff", "no snapshot"),
        ):
            with pytest.raises(ValueError, match=words):
                await load(store, await store.put_manifest(data))

    run(scene())


def test_save_has_a_deadline(tmp_path: Path) -> None:
    class SilentCourier(FolderCourier):
        async def pack(self, layer: Path) -> AsyncGenerator[bytes, None]:
            yield b""
            await asyncio.Event().wait()

    async def scene() -> None:
        courier = SilentCourier(tmp_path / "layers")
        with pytest.raises(RunFailure, match="took longer than"):
            await save_to(open_store(tmp_path / "store"), courier, two_layers(courier), deadline_s=0.05)

    run(scene())


def test_flattened_chain_is_one_layer_with_the_top_on_top(tmp_path: Path) -> None:
    async def scene() -> None:
        courier = FolderCourier(tmp_path / "layers")
        low, top = two_layers(courier)
        whole = await flatten(courier, [low, top])
        assert (whole / "d" / "f3").read_text() == "changed" and (whole / "same").samefile(whole / "d" / "f3")
        assert {path.name for path in (whole / "d").iterdir()} == {path.name for path in (low / "d").iterdir()}
        assert (whole / "d" / "f7").read_bytes() == (low / "d" / "f7").read_bytes()

    run(scene())


def test_manifest_says_what_it_is_in_plain_json() -> None:
    ref = LayerRef(digest="a" * 64, diff="b" * 64, num_bytes=1, num_tar_bytes=2)
    manifest = Manifest(image="i", image_digest="", layers=(ref,), spec=SandboxSpec(), created=1.0)
    assert msgspec.json.decode(msgspec.json.encode(manifest), type=Manifest) == manifest
