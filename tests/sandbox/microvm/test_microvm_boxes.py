"""Boxes that are real virtual machines: few tests, each with several claims, because an emulated machine takes seconds to boot."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from rollmill.records import RunFailure
from rollmill.sandbox.images.store import Image, ImageStore
from rollmill.sandbox.microvm import MicrovmBackend
from rollmill.sandbox.microvm.box import MicrovmBox
from rollmill.sandbox.records import ChangeKind, Egress, FileKind, SandboxSpec, Service

DEADLINE_S = 400.0
COMMAND_S = 120.0
SMALL = SandboxSpec(memory_bytes=160 << 20, disk_bytes=32 << 20)
Scene = Callable[[MicrovmBackend], Awaitable[None]]


@pytest.fixture
def play() -> Callable[[Scene], None]:
    reason = MicrovmBackend.probe()
    if reason is not None:
        pytest.skip(reason)

    def run(scene: Scene) -> None:
        async def whole() -> None:
            backend = MicrovmBackend()
            try:
                async with asyncio.timeout(DEADLINE_S):
                    await scene(backend)
            finally:
                await backend.close()

        asyncio.run(whole())

    return run


async def said(box: MicrovmBox, command: str) -> str:
    result = await box.exec(command, timeout_s=COMMAND_S)
    assert result.exit_code == 0, result
    return result.stdout.decode().strip()


async def until(box: MicrovmBox, command: str, is_so: Callable[[str], bool]) -> str:
    async with asyncio.timeout(DEADLINE_S):
        while not is_so(found := await said(box, command)):
            pass
    return found


@pytest.mark.vm
def test_machine_runs_commands_keeps_files_and_stands_still_on_request(play: Callable[[Scene], None]) -> None:
    async def scene(backend: MicrovmBackend) -> None:
        service = Service(name="beat", argv=("sh", "-c", "touch /tmp/beat; exec sleep 1000"), ready_argv=("test", "-e", "/tmp/beat"))
        spec = SandboxSpec(
            files={"deep/a.txt": "alpha\n"}, env={"MARK": "here"}, services=(service,), hostname="atelier",
            memory_bytes=160 << 20, disk_bytes=32 << 20,
        )  # fmt: skip
        box = await backend.create(spec)
        assert await said(box, "id -un; pwd; hostname; cat /etc/hostname; echo $MARK; cat deep/a.txt; nproc") == "\n".join(
            ["dev", "/home/dev/work", "atelier", "atelier", "here", "alpha", "1"]
        )
        apart = await box.exec("cat; echo oops >&2; exit 7", stdin=b"fed", timeout_s=COMMAND_S, stderr_apart=True)
        assert (apart.exit_code, apart.stdout, apart.stderr) == (7, b"fed", b"oops\n")
        assert (await box.exec(["no-such-program"], timeout_s=COMMAND_S)).exit_code == 127
        assert (await box.exec(["sleep", "1000"], timeout_s=0.2)).timed_out
        assert await said(box, 'python3 -c "import json; print(json.dumps([6 * 7]))"') == "[42]"

        big = bytes(range(256)) * 8192
        await box.write("big.bin", big, mode=0o600)
        assert await box.read("big.bin", limit_bytes=len(big)) == big
        assert (await box.stat("big.bin")).kind is FileKind.FILE
        assert await box.list() == ["big.bin", "deep/a.txt"]
        with pytest.raises(OSError) as raised:
            await box.read("/etc/shadow-")
        assert raised.value.errno == errno.ENOENT
        await said(box, "rm ~/.bashrc")
        changes = {change.path: change.kind for change in await box.diff()}
        assert changes["/home/dev/work/big.bin"] is ChangeKind.WRITTEN
        assert changes["/home/dev/.bashrc"] is ChangeKind.REMOVED
        assert "/etc/hostname" not in changes
        full = await box.exec("head -c 100000000 /dev/zero > fill", timeout_s=COMMAND_S)
        assert full.exit_code != 0 and b"No space" in full.stdout
        await said(box, "rm fill; ! ls -la /dev/vport* | grep -v '^crw------- 1 root'; ! touch /etc/x 2> /dev/null")

        ticking = await box.start("while :; do echo tick; sleep 0.1; done")
        await anext(aiter(ticking))
        await box.suspend()
        ping = asyncio.ensure_future(box.exec(["true"], timeout_s=COMMAND_S))
        done, _ = await asyncio.wait([ping], timeout=1.0)
        assert not done
        await box.resume()
        assert (await ping).exit_code == 0
        await ticking.kill()
        await box.close()
        with pytest.raises(RunFailure, match="its owner closed it"):
            await box.exec(["true"], timeout_s=1.0)

    play(scene)


@pytest.mark.vm
def test_forks_go_on_with_running_processes_and_have_names_and_numbers_of_their_own(play: Callable[[Scene], None], tmp_path: Path) -> None:
    async def scene(backend: MicrovmBackend) -> None:
        parent = await backend.create(msgspec.structs.replace(SMALL, files={"count": "0"}))
        # A snapshot may fall into the middle of what a command prints: its reader must not notice, nor must the forks.
        flood = await parent.start("while :; do echo 0123456789; done")
        heard: list[bytes] = []

        async def listen() -> None:
            async for chunk in flood:
                heard.append(chunk.data)

        listening = asyncio.create_task(listen())
        counting = await parent.start("i=0; while :; do i=$((i+1)); echo $i > count.new; mv count.new count; sleep 0.5; done")
        await until(parent, "cat count", lambda text: int(text) >= 2)
        snapshot = await parent.snapshot()
        await flood.kill()
        await listening
        text = b"".join(heard)
        assert text == b"0123456789\n" * (len(text) // 11) + b"0123456789\n"[: len(text) % 11]

        begun = int(await said(parent, "cat count"))
        forks = await snapshot.fork(3)
        for fork in forks:
            await said(fork, "pkill -f '[0]123456789'")
        boxes = [parent, *forks]
        names = [await said(box, "hostname") for box in boxes]
        assert len(set(names)) == 4 and all(name.startswith(f"{names[0]}-") for name in names[1:])
        assert len({await said(box, "cat /etc/machine-id; head -c 16 /dev/urandom | od -An -tx1") for box in boxes}) == 4
        for box in boxes:
            await until(box, "cat count", lambda count: int(count) > begun + 1)
        await forks[0].write("mine", b"1\n")
        assert [await said(box, "ls | grep -c mine || true") for box in boxes] == ["0", "1", "0", "0"]
        await asyncio.gather(*(fork.close() for fork in forks[1:]))
        assert (await parent.stat("count")).num_bytes

        (grandchild,) = await forks[0].fork(1)
        assert await said(grandchild, "cat mine; hostname") == f"1\n{grandchild.hostname}"
        await counting.kill()
        await asyncio.gather(parent.close(), forks[0].close(), grandchild.close())

        digest = await snapshot.save(str(tmp_path / "store"))
        await snapshot.close()
        with pytest.raises(ValueError, match="closed"):
            await snapshot.fork(1)
        other = MicrovmBackend()
        again = await other.restore(str(tmp_path / "store"), digest)
        (box,) = await again.fork(1)
        seen = int(await said(box, "cat count"))
        await until(box, "cat count", lambda count: int(count) > seen)
        with pytest.raises(ValueError, match="memory_bytes"):
            await again.fork(1, SandboxSpec(memory_bytes=300 << 20, disk_bytes=32 << 20))
        await again.close()
        await other.close()

    play(scene)


@pytest.mark.vm
def test_guest_that_destroys_itself_is_an_observation_and_one_that_stops_answering_is_killed(play: Callable[[Scene], None]) -> None:
    async def scene(backend: MicrovmBackend) -> None:
        spec = SandboxSpec(root=True, memory_bytes=160 << 20, disk_bytes=32 << 20)
        wild, silent = await asyncio.gather(backend.create(spec), backend.create(SMALL))
        assert await said(wild, "id -un") == "root"
        panic = await wild.exec("echo c > /proc/sysrq-trigger", timeout_s=COMMAND_S)
        assert panic.exit_code == -9 and not panic.timed_out
        assert b"the guest ended" in panic.stdout and b"Kernel panic" in panic.stdout
        with pytest.raises(OSError) as raised:
            await wild.read("anything")
        assert raised.value.errno == errno.EIO
        assert (await wild.machine.ended).by_guest

        await silent.machine.pause()
        result = await silent.exec(["true"], timeout_s=0.1)
        assert result.timed_out and result.exit_code == -9
        await silent.machine.ended
        with pytest.raises(RunFailure, match="did not end a command"):
            await silent.exec(["true"], timeout_s=1.0)

    play(scene)


@pytest.mark.vm
def test_guest_that_does_not_come_up_fails_with_the_last_lines_of_its_console(play: Callable[[Scene], None], tmp_path: Path) -> None:
    async def scene(backend: MicrovmBackend) -> None:
        blank = tmp_path / "blank"
        blank.write_bytes(b"\0" * (1 << 20))
        image, _ = await backend._disks.get("host")

        async def broken(name: str) -> tuple[object, Path]:
            return image, blank

        backend._disks.get = broken  # type: ignore[method-assign, assignment]
        with pytest.raises(RunFailure, match="cannot mount the disk"):
            await backend.create(SMALL)

    play(scene)


@pytest.mark.vm
def test_image_of_the_store_is_packed_once_and_booted(play: Callable[[Scene], None], tmp_path: Path) -> None:
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("there is no static busybox for a small image; Debian: `apt-get install busybox-static`")
    store = ImageStore(tmp_path / "images")
    with store.stage() as folder:
        for name in ("bin", "etc", "home/ada", "proc", "sys", "dev", "tmp"):
            (folder / "rootfs" / name).mkdir(parents=True)
        shutil.copy(busybox, folder / "rootfs" / "bin" / "busybox")
        for name in ("sh", "cat", "id", "pwd", "touch"):
            (folder / "rootfs" / "bin" / name).symlink_to("busybox")
        image = Image(env={"KIND": "small"}, workdir="/home/ada", home="/home/ada", user="ada", uid=1234, gid=1234, hostname="tiny")
        store.name("small", store.commit(folder, image))

    async def scene(_: MicrovmBackend) -> None:
        backend = MicrovmBackend(images=tmp_path / "images")
        box = await backend.create(msgspec.structs.replace(SMALL, image="small"))
        assert await said(box, "touch mine; id -u; pwd; echo $KIND; cat /proc/sys/kernel/hostname") == "1234\n/home/ada\nsmall\ntiny"
        with pytest.raises(ValueError, match="not in the store"):
            await backend.create(SandboxSpec(image="absent"))
        await backend.close()

    play(scene)


OWNER = """
import asyncio
from rollmill.sandbox.microvm import MicrovmBackend
from rollmill.sandbox.records import SandboxSpec

async def main():
    backend = MicrovmBackend()
    box = await backend.create(SandboxSpec(memory_bytes=160 << 20, disk_bytes=32 << 20))
    forks = await box.fork(1)
    print(*(each.machine.process.pid for each in (box, *forks)), flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.mark.vm
def test_killed_owner_leaves_no_machine_and_no_file(play: Callable[[Scene], None], tmp_path: Path) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(folder)})
    try:
        assert owner.stdout is not None
        line = owner.stdout.readline()
        machines = [os.pidfd_open(int(pid)) for pid in line.split()]
        assert len(machines) == 2
        owner.send_signal(signal.SIGKILL)
        for machine in machines:
            assert select.select([machine], [], [], 60.0)[0], "a machine outlived its owner"
            os.close(machine)
    finally:
        owner.kill()
        owner.wait()
    assert list(folder.iterdir()) == []


def test_what_a_machine_cannot_give_is_refused_before_anything_starts(tmp_path: Path) -> None:
    async def scene() -> None:
        backend = MicrovmBackend(folder=tmp_path)
        for spec, words in (
            (SandboxSpec(egress=Egress()), "no way out"),
            (SandboxSpec(memory_bytes=63 << 20), "does not fit into a memory"),
            (SandboxSpec(memory_bytes=1 << 20, disk_bytes=1 << 20), "too small to start"),
            (SandboxSpec(cpus=0.5), "one processor"),
            (SandboxSpec(hostname="no spaces"), "not usable"),
            (SandboxSpec(lifetime_s=0.0), "must be positive"),
        ):
            with pytest.raises(ValueError, match=words):
                await backend.create(spec)
        with pytest.raises(RunFailure, match="make setup-vm"):
            await backend.create(SandboxSpec())
        await backend.close()

    asyncio.run(scene())
