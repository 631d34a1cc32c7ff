"""What a box cannot see, reach or change."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

import rollmill
from rollmill.sandbox import SandboxSpec


async def _shell(box, line: str) -> tuple[int, str]:
    result = await box.exec(["bash", "-c", line], timeout_s=30)
    return result.exit_code, result.stdout.decode()


def test_host_files_are_invisible(play, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("host")
    repository = Path(rollmill.__file__).resolve().parent

    async def scene(backend):
        box = await backend.create(SandboxSpec())
        for path in (
            secret,
            repository,
            Path("/etc/shadow"),
            Path("/sys/kernel"),
            Path("/dev/mem"),
            Path("/root/.ssh"),
            Path("/var/log/dpkg.log"),
        ):
            assert (await _shell(box, f"ls {path}"))[0] != 0, path
        assert (await _shell(box, "ls -A /home /tmp /run /dev/shm"))[1].split() == ["/dev/shm:", "/home:", "dev", "/run:", "/tmp:"]
        code, text = await _shell(box, "python3 -c 'import msgspec'")
        assert code == 1 and "ModuleNotFoundError" in text

    play(scene)


def test_host_processes_and_the_owners_environment_are_invisible(play, monkeypatch):
    monkeypatch.setenv("ROLLMILL_TEST_SECRET", "hunter2-hunter2")

    async def scene(backend):
        box = await backend.create(SandboxSpec())
        code, text = await _shell(box, "for p in /proc/[0-9]*; do echo ${p#/proc/}; done")
        assert code == 0 and {int(word) for word in text.split()} <= set(range(1, 10))
        assert (await _shell(box, "cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n' | grep -E 'hunter2-hunter[2]|rollmil[l]'"))[0] != 0
        # PID 1 is ours: same user, yet neither its descriptors nor its memory can be reached, and no signal ends it.
        assert (await _shell(box, "ls -l /proc/1/fd/"))[0] != 0
        assert (await _shell(box, "head -c1 /proc/1/mem"))[0] != 0
        await _shell(box, "kill -9 1; kill -TERM 1; kill -INT 1; kill -CHLD 1")
        assert (await _shell(box, f"kill -0 {os.getpid()}"))[0] != 0
        assert (await _shell(box, "echo alive"))[1] == "alive\n"

    play(scene)


def test_network_is_a_lone_loopback(play):
    async def scene(backend):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            box = await backend.create(SandboxSpec())
            assert (await _shell(box, f"echo > /dev/tcp/127.0.0.1/{port}"))[0] != 0
            assert (await _shell(box, "echo > /dev/tcp/192.0.2.1/80"))[0] != 0
            assert (await _shell(box, "tail -n +3 /proc/net/dev | cut -d: -f1"))[1].split() == ["lo"]
            loopback = (
                "import socket; s = socket.create_server(('127.0.0.1', 0)); c = socket.create_connection(s.getsockname()); "
                "c.send(b'x'); print(s.accept()[0].recv(1))"
            )
            assert (await box.exec(["python3", "-c", loopback], timeout_s=30)).stdout == b"b'x'\n"
            vsock = await box.exec(["python3", "-c", "import socket; socket.socket(40, socket.SOCK_STREAM)"], timeout_s=30)
            assert vsock.exit_code == 1 and b"not supported" in vsock.stdout

    play(scene)


@pytest.mark.parametrize(
    "line",
    [
        "touch /usr/x",
        "touch /etc/x",
        "touch /x",
        "mount -t tmpfs none /tmp",
        "umount /proc",
        "unshare -U true",
        "unshare -m true",
        "chroot / true",
        "mknod /tmp/d b 254 0",
        "hostname other",
        "echo 1 > /proc/sys/kernel/panic",
        "echo b > /proc/sysrq-trigger",
        "dmesg",
        "su -c true",
        "chown 0 .",
    ],
)
def test_box_cannot(play, line):
    async def scene(backend):
        box = await backend.create(SandboxSpec())
        assert (await _shell(box, line))[0] != 0

    play(scene)


def test_links_do_not_lead_out(play, tmp_path):
    host = tmp_path / "host"
    host.write_text("untouched")

    async def scene(backend):
        box = await backend.create(SandboxSpec())
        await _shell(box, f"ln -s {host} out; ln -s /etc/passwd passwd; ln -s {tmp_path} dir; ln -s / root")
        for path in ("out", "dir/host", f"root/{host}", f"../../..{host}"):
            with pytest.raises(FileNotFoundError):
                await box.read(path)
        assert b"dev:x:1000" in await box.read("passwd")
        for path in ("out", "dir/new", "passwd", "../../../etc/new"):
            with pytest.raises(OSError):
                await box.write(path, b"escaped")

    play(scene)
    assert host.read_text() == "untouched" and os.listdir(tmp_path) == ["host"]


def test_boxes_do_not_see_each_other(play):
    async def scene(backend):
        one, two = await backend.create(SandboxSpec()), await backend.create(SandboxSpec())
        await _shell(one, "touch /tmp/mark ~/mark /dev/shm/mark; sleep 1000 &")
        assert (await _shell(two, "ls /tmp/mark ~/mark /dev/shm/mark 2>/dev/null"))[1] == ""
        assert "sleep" not in (await _shell(two, "cat /proc/[0-9]*/comm"))[1]

    play(scene)
