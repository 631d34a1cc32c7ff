"""Claims about the directory store: order of writes, one pointer that only grows, numbers given out once, damage that is named."""

from __future__ import annotations

import errno
import multiprocessing
import os
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
from weights_fakes import weights_at

from rollmill.weights import CorruptSnapshot, DirectoryStore, Kind, LatestMoved, Manifest, Publisher, PublishFailed, log, store, verify

DEADLINE_S = 60.0


def manifest(version: int, previous: int | None) -> Manifest:
    return Manifest(
        version=version, kind=Kind.FULL, base_version=None, previous=previous, packs=(), fingerprint="0" * 16,
        tensors=(), raw_bytes=0, step=0, run_id="r", created=0.0,
    )  # fmt: skip


def publish(path: Path, num: int, *, anchor_every: int = 16) -> DirectoryStore:
    found = DirectoryStore(path)
    with Publisher(found, run_id="r", anchor_every=anchor_every) as publisher:
        for step in range(num):
            publisher.submit(weights_at(step), step=step)
    return found


def test_numbers_are_never_given_out_twice_even_by_many_threads(tmp_path: Path) -> None:
    given: list[int] = []
    threads = [threading.Thread(target=lambda: given.extend(DirectoryStore(tmp_path).reserve() for _ in range(10))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert sorted(given) == list(range(40))


def test_a_lost_reservation_file_still_skips_every_number_that_left_a_trace(tmp_path: Path) -> None:
    found = DirectoryStore(tmp_path)
    found.put_pack("v00000006.full", [b"half-published"])
    (tmp_path / "reserved").write_bytes(b"garbage")
    assert found.reserve() == 7


def test_latest_moves_only_from_where_the_publisher_left_it(tmp_path: Path) -> None:
    found = DirectoryStore(tmp_path)
    found.publish(manifest(0, None), expected=None)
    with pytest.raises(LatestMoved, match="two trainers"):
        found.publish(manifest(1, None), expected=None)
    assert found.latest() == 0


def _race(path: str, go: object, out: multiprocessing.connection.Connection) -> None:
    racing = DirectoryStore(path)
    version = racing.reserve()
    go.wait(DEADLINE_S)  # type: ignore[attr-defined]
    try:
        racing.publish(manifest(version, None), expected=None)
        out.send((version, True))
    except LatestMoved:
        out.send((version, False))


def test_of_two_publishers_that_race_one_wins_and_the_other_is_told(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rollmill.weights"])
    go, (here, there) = context.Barrier(2), context.Pipe(duplex=False)
    racers = [context.Process(target=_race, args=(str(tmp_path), go, there)) for _ in range(2)]
    for racer in racers:
        racer.start()
    assert here.poll(DEADLINE_S)
    results = [here.recv(), here.recv() if here.poll(DEADLINE_S) else None]
    for racer in racers:
        racer.join(DEADLINE_S)
    (winner,) = [version for version, won in results if won]
    assert DirectoryStore(tmp_path).latest() == winner
    assert DirectoryStore(tmp_path).versions() == [winner]


def test_a_second_trainer_on_one_store_is_stopped_loudly(tmp_path: Path) -> None:
    first, second = (Publisher(DirectoryStore(tmp_path), run_id=name) for name in ("first", "second"))
    first.submit(weights_at(0), step=0)
    first.flush(DEADLINE_S)
    second.submit(weights_at(1), step=1)
    with pytest.raises(PublishFailed, match="two trainers"):
        second.flush(DEADLINE_S)
    with pytest.raises(PublishFailed):
        second.submit(weights_at(2), step=2)
    first.submit(weights_at(3), step=3)
    first.close(DEADLINE_S)
    assert DirectoryStore(tmp_path).latest() == 2


@pytest.mark.parametrize("name", ["latest", "manifests/v00000001.json"])
def test_every_flipped_bit_of_a_record_is_noticed(tmp_path: Path, name: str) -> None:
    found = publish(tmp_path, 2)
    good = (tmp_path / name).read_bytes()
    for at in range(0, len(good), max(1, len(good) // 60)):
        hurt = bytearray(good)
        hurt[at] ^= 4
        (tmp_path / name).write_bytes(hurt)
        with pytest.raises(CorruptSnapshot):
            found.latest() if name == "latest" else found.manifest(1)


def test_a_pack_name_cannot_lead_out_of_the_store(tmp_path: Path) -> None:
    with pytest.raises(CorruptSnapshot):
        DirectoryStore(tmp_path).read_pack("v00000001./../../latest")


def test_leftovers_of_a_killed_writer_are_swept_and_those_of_a_living_one_stay(tmp_path: Path) -> None:
    found = DirectoryStore(tmp_path)
    dead = tmp_path / "packs" / "v00000000.full.1-1.tmp"
    dead.write_bytes(b"half")
    with store._locked(tmp_path / "packs" / "v00000001.full.2-2.tmp"):
        found.reserve()
        assert [path.name for path in (tmp_path / "packs").iterdir()] == ["v00000001.full.2-2.tmp"]


class FullDisk(DirectoryStore):
    """A store whose disk has no room for packs."""

    def put_pack(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        def too_much() -> Iterable[bytes | memoryview]:
            yield from chunks
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        super().put_pack(name, too_much())


def test_a_full_disk_is_said_in_plain_words_and_leaves_no_litter(tmp_path: Path) -> None:
    publisher = Publisher(FullDisk(tmp_path), run_id="r")
    publisher.submit(weights_at(0), step=0)
    with pytest.raises(PublishFailed, match=r"no space left on device for .*free space there or move the store"):
        publisher.flush(DEADLINE_S)
    assert list((tmp_path / "packs").iterdir()) == []
    assert DirectoryStore(tmp_path).latest() is None
    with pytest.raises(PublishFailed):
        publisher.close(DEADLINE_S)


def test_verify_is_silent_on_a_good_store_and_names_each_damage(tmp_path: Path) -> None:
    found = publish(tmp_path, 8, anchor_every=4)
    assert verify(found) == []
    assert len(log(found)) == 8 and "<- latest" in log(found)[0]
    path = tmp_path / "packs" / "v00000002.delta"
    path.write_bytes(path.read_bytes()[:-1])
    problems = verify(found)
    assert problems[0].startswith("v00000002.delta is damaged") and "version 2 (delta) cannot be rebuilt" in problems
    assert not any("version 4" in line and "rebuilt" in line and line.startswith("version") for line in problems), "the anchor stands alone"
    found.quarantine("v00000002.delta", "for the test")
    assert verify(found)[0] == "v00000002.delta is quarantined: for the test"


def test_a_store_on_a_read_only_mount_cannot_be_marked_but_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, chunks: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    found = DirectoryStore(tmp_path)
    monkeypatch.setattr(store, "_write_durably", refuse)
    assert found.quarantine("v00000000.full", "bad") is False
