"""What a box does for its owner: commands, their output and status, files."""

from __future__ import annotations

import asyncio
import errno

import pytest

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox import SandboxSpec, open_backend


def test_box_starts_with_its_world_and_a_plain_user(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec(files={"src/a.py": "print('hé')\n", "b": ""}))
        result = await box.exec(["sh", "-c", "whoami; pwd; echo $HOME; id -u; python3 src/a.py"], timeout_s=30)
        assert result.exit_code == 0 and not result.timed_out
        assert result.stdout.decode().split() == ["dev", "/home/dev/work", "/home/dev", "1000", "hé"]
        assert result.num_output_bytes == len(result.stdout)
        assert await box.list() == ["b", "src/a.py"]

    play(scene)


def test_streams_are_merged_in_order_and_stdin_is_fed(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec())
        result = await box.exec(["sh", "-c", "echo one; echo two >&2; cat"], timeout_s=30, stdin=b"three\n")
        assert result.stdout == b"one\ntwo\nthree\n"
        big = b"x" * 3_000_000
        assert (await box.exec(["wc", "-c"], timeout_s=30, stdin=big)).stdout.split() == [b"3000000"]
        assert (await box.exec(["true"], timeout_s=30, stdin=big)).exit_code == 0

    play(scene)


@pytest.mark.parametrize(
    ("argv", "exit_code"),
    [
        (["false"], 1),
        (["sh", "-c", "exit 42"], 42),
        (["sh", "-c", "kill -SEGV $$"], -11),
        (["no-such-program"], 127),
        (["/etc/passwd"], 126),
        (["./missing"], 127),
    ],
)
def test_exit_status_is_an_observation(play, argv, exit_code):
    async def scene(backend):
        box = await backend.create(SandboxSpec())
        assert (await box.exec(argv, timeout_s=30)).exit_code == exit_code

    play(scene)


def test_files_written_by_the_owner_and_by_commands_are_the_same_files(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec())
        data = bytes(range(256)) * 4096
        await box.write("deep/er/blob", data)
        assert await box.read("deep/er/blob") == data
        assert (await box.exec(["sh", "-c", "wc -c < deep/er/blob; echo new > deep/er/blob"], timeout_s=30)).stdout.strip() == b"1048576"
        assert await box.read("/home/dev/work/deep/er/blob") == b"new\n"
        await box.write("deep/er/blob", b"")
        assert await box.read("deep/er/blob") == b""
        assert await box.read("/proc/version")

    play(scene)


def test_path_errors_are_observations_with_an_errno(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec(files={"a": "x" * 100}))
        with pytest.raises(FileNotFoundError):
            await box.read("missing")
        with pytest.raises(IsADirectoryError):
            await box.read(".")
        with pytest.raises(IsADirectoryError):
            await box.write("/tmp", b"")
        with pytest.raises(NotADirectoryError):
            await box.read("a/b")
        with pytest.raises(OSError) as too_large:
            await box.read("a", limit_bytes=99)
        assert too_large.value.errno == errno.EFBIG
        assert await box.read("a", limit_bytes=100) == b"x" * 100
        await box.exec(["mkfifo", "pipe"], timeout_s=30)
        for special in ("/dev/zero", "pipe"):
            with pytest.raises(OSError) as not_regular:
                await box.read(special)
            assert not_regular.value.errno == errno.EINVAL
        with pytest.raises(OSError):
            await box.write("pipe", b"x")
        with pytest.raises(OSError) as bad:
            await box.read("a\0b")
        assert bad.value.errno == errno.EINVAL
        assert await box.list() == ["a"]

    play(scene)


def test_listing_is_bounded_and_follows_no_link(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec())
        await box.exec(["python3", "-c", "for i in range(10500): open(f'f{i:05}', 'w')"], timeout_s=60)
        await box.exec(["ln", "-s", "/usr", "0link"], timeout_s=30)
        names = await box.list()
        assert len(names) == 10_000 and names[0] == "f00000" and names == sorted(names)

    play(scene)


def test_commands_of_one_box_run_beside_each_other(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec())
        waiting = asyncio.create_task(box.exec(["sh", "-c", "until [ -e go ]; do sleep 0.01; done; echo went"], timeout_s=60))
        await box.write("go", b"")
        assert (await waiting).stdout == b"went\n"

    play(scene)


def test_closed_box_refuses_and_closing_again_is_harmless(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec())
        await asyncio.gather(box.close(), box.close())
        await box.close()
        with pytest.raises(RunFailure) as failure:
            await box.exec(["true"], timeout_s=30)
        assert failure.value.boundary is Boundary.SANDBOX
        await backend.close()
        await backend.close()
        with pytest.raises(RunFailure):
            await backend.create(SandboxSpec())

    play(scene)


def test_unknown_backend_is_refused_with_the_known_names():
    with pytest.raises(ValueError, match="namespace"):
        open_backend("chroot")


def test_nonsense_specs_and_commands_are_refused(play):
    async def scene(backend):
        with pytest.raises(ValueError, match="too small"):
            await backend.create(SandboxSpec(memory_bytes=1))
        with pytest.raises(ValueError, match="positive"):
            await backend.create(SandboxSpec(lifetime_s=0))
        box = await backend.create(SandboxSpec())
        with pytest.raises(ValueError, match="argv"):
            await box.exec([], timeout_s=30)
        with pytest.raises(ValueError, match="NUL"):
            await box.exec(["echo", "a\0b"], timeout_s=30)

    play(scene)


def test_large_files_travel_whole_and_odd_names_are_observations(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec())
        data = bytes(range(251)) * 50_000
        await box.write("big", data)
        assert await box.read("big", limit_bytes=len(data)) == data
        with pytest.raises(OSError) as odd:
            await box.read("\ud800")
        assert odd.value.errno == errno.EINVAL
        assert (await box.exec(["\ud800"], timeout_s=30)).exit_code == 126
        await box.exec(["python3", "-c", "open(b'\\xff', 'w')"], timeout_s=30)
        assert await box.list() == ["big", "\udcff"]
        assert await box.read("\udcff") == b""
        with pytest.raises(ValueError, match="standard input"):
            await box.exec(["cat"], timeout_s=30, stdin=bytes(17 << 20))

    play(scene)
