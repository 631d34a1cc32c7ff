"""The plain agent of a box that has a writable layer: what changed, what is handed over, what comes with its first word."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from agent_boxes import SANDBOX

from rollmill.records import RunFailure
from rollmill.sandbox.agent.client import AgentBox
from rollmill.sandbox.agent.plain.files import changes
from rollmill.sandbox.agent.streams import SocketStream
from rollmill.sandbox.records import Change, ChangeKind, SandboxSpec

SERVE = """
import os, sys
sys.path.append(sys.argv[1])
from agent.plain.commands import Surroundings
from agent.plain.processes import Descendants
from agent.plain.serve import Box, serve_socket
fd, folder = int(sys.argv[2]), sys.argv[3]
upper = os.open(folder, os.O_RDONLY)
surroundings = Surroundings(workdir=os.fsencode(folder), env=dict(os.environb), num_processes=4096)
serve_socket(Box(surroundings=surroundings, others=Descendants(), slot=9, facts=5, hello_fds=(os.dup(upper),), upper_fd=upper,
                 layer_fd=upper), fd)
"""


def mark(path: Path, name: str) -> None:
    try:
        os.setxattr(path, f"user.overlay.{name}", b"y")
    except OSError as error:
        pytest.skip(f"no user attributes here: {error}")


def whiteout(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR, 0)
    except PermissionError:
        pytest.skip("device nodes are for root")


def upper(folder: Path) -> None:
    (folder / "home/dev/made/inner").mkdir(parents=True)
    mark(folder / "home/dev/made", "opaque")
    (folder / "home/dev/made/inner/new").write_text("")
    (folder / "home/dev/edited").write_text("")
    (folder / "home/dev/link").symlink_to("/nowhere")
    whiteout(folder / "home/dev/removed")
    (folder / "etc").mkdir()
    whiteout(folder / "etc/motd")
    for path in ("etc", "home", "home/dev"):
        mark(folder / path, "origin")  # the kernel notes on folders that it copied up where they came from


EXPECTED = [
    (True, "/etc/motd"),
    (False, "/home/dev/edited"),
    (False, "/home/dev/link"),
    (False, "/home/dev/made"),
    (False, "/home/dev/made/inner"),
    (False, "/home/dev/made/inner/new"),
    (True, "/home/dev/removed"),
]


def test_changes_tell_made_folders_from_those_that_only_lead_to_a_change(tmp_path):
    upper(tmp_path)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        assert changes(fd, 100) == [(is_removed, path.encode()) for is_removed, path in EXPECTED]
        assert changes(fd, 3) == changes(fd, 100)[:3]
    finally:
        os.close(fd)


def test_layer_is_compared_and_handed_over_to_the_owner(tmp_path):
    upper(tmp_path)

    ours, theirs = socket.socketpair()
    with theirs:
        argv = [sys.executable, "-I", "-S", "-B", "-c", SERVE, str(SANDBOX), str(theirs.fileno()), str(tmp_path)]
        program = subprocess.Popen(argv, pass_fds=[theirs.fileno()])

    async def whole() -> None:
        box = AgentBox("layered", SandboxSpec(), kill=program.kill)
        box.attach(SocketStream(ours))
        async with asyncio.timeout(60):
            hello = await box.ready(30)
            assert (hello.slot, int(hello.facts), len(hello.fds)) == (9, 5, 1)
            os.close(hello.fds[0])
            kinds = {True: ChangeKind.REMOVED, False: ChangeKind.WRITTEN}
            assert await box.diff() == [Change(path=path, kind=kinds[is_removed]) for is_removed, path in EXPECTED]
            inherited = await box.exec(["bash", "-c", "ls /proc/self/fd | wc -l; ulimit -u"], timeout_s=30)
            assert inherited.stdout.split() == [b"4", b"4096"], "a command inherits nothing of the agent's"
            running = await box.start(["sleep", "1000"])
            layer = await box.freeze()
            assert os.listdir(layer) and os.path.samestat(os.fstat(layer), os.stat(tmp_path))
            os.close(layer)
            with pytest.raises(RunFailure, match="handed over"):
                await running.wait(timeout_s=30)
            assert await asyncio.to_thread(program.wait, 30) == 0
            box.gone("it ended")
            await box.close()
            with contextlib.suppress(ProcessLookupError):
                await _until_ended(os.pidfd_open(running.pid))

    asyncio.run(whole())


async def _until_ended(pidfd: int) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(pidfd, ended.set)
    await ended.wait()
    asyncio.get_running_loop().remove_reader(pidfd)
    os.close(pidfd)
