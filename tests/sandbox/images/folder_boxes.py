"""A backend for builds alone: an overlay over the image in a mount namespace of its own, chroot, and the real agent inside.

Isolates nothing and limits nothing; needs root. It keeps the builder's tests apart from the backends' own.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
from pathlib import Path

from rollmill.sandbox.agent.client import AgentBox
from rollmill.sandbox.agent.native.build import binary
from rollmill.sandbox.agent.streams import SocketStream
from rollmill.sandbox.images.store import ImageStore
from rollmill.sandbox.records import Change, ChangeKind, SandboxSpec

_ENTER = """
set -e
cd "$1"; lower="$2"; agent="$3"; shift 3
mount -t overlay overlay -o "lowerdir=$lower,upperdir=$PWD/upper,workdir=$PWD/work" merged
mount -t tmpfs tmpfs merged/run; mount -t tmpfs tmpfs merged/tmp; mount --rbind /dev merged/dev; mount -t proc proc merged/proc
chmod 1777 merged/tmp
cp "$agent" merged/run/agent
exec /usr/sbin/chroot "$@"
"""


def why_not() -> str | None:
    if os.geteuid() != 0:
        return "needs root for mounts"
    if binary() is None:
        return "needs a C compiler for the agent"
    trial = "mount -t tmpfs t /mnt && cd /mnt && mkdir u w m && mount -t overlay o -o lowerdir=/etc,upperdir=u,workdir=w m"
    done = subprocess.run(["unshare", "--mount", "sh", "-c", trial], capture_output=True, timeout=20, check=False)
    return None if done.returncode == 0 else f"cannot mount an overlay: {done.stderr.decode()[-200:]}"


def _changes(upper: str) -> list[Change]:
    found = []
    for top, _, files in os.walk(upper):
        for path in (os.path.join(top, name) for name in files):
            kind = ChangeKind.REMOVED if stat.S_ISCHR(os.lstat(path).st_mode) else ChangeKind.WRITTEN
            found.append(Change(path=f"/{os.path.relpath(path, upper)}", kind=kind))
    return found


class FolderBox(AgentBox):
    def __init__(self, name: str, spec: SandboxSpec, folder: Path, process: subprocess.Popen[bytes]) -> None:
        super().__init__(name, spec, kill=self._end)
        self._folder, self._process = folder, process
        self.shell = ("/bin/sh", "-c")

    def _end(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        asyncio.get_running_loop().call_soon(self.gone, "it was killed")

    def hung_up(self) -> None:
        self.gone("its agent ended")

    async def diff(self) -> list[Change]:
        return await asyncio.to_thread(_changes, str(self._folder / "upper"))

    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(self._process.wait, 20)
        shutil.rmtree(self._folder)


class FolderBackend:
    def __init__(self, store: ImageStore) -> None:
        self._store = store
        self.num_made = 0

    async def create(self, spec: SandboxSpec) -> FolderBox:
        self.num_made += 1
        image = self._store.get(spec.image)
        folder = Path(tempfile.mkdtemp())
        for name in ("upper", "work", "merged"):
            (folder / name).mkdir()
        (folder / "upper").chmod(0o755)
        who = [] if spec.root else [f"--userspec={image.uid}:{image.gid}"]
        ours, theirs = socket.socketpair()
        agent = ["/run/agent", "serve", "--contained", image.workdir]
        rest = [str(folder), str(self._store.rootfs(image)), str(binary()), *who, "merged", *agent]
        env = {**image.env, "HOME": image.home, "USER": image.user}
        argv = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", _ENTER, "sh", *rest]
        process = await asyncio.to_thread(subprocess.Popen, argv, stdin=theirs, stdout=theirs, env=env)
        theirs.close()
        box = FolderBox(f"folder-{self.num_made}", spec, folder, process)
        box.attach(SocketStream(ours))
        await box.ready(20.0)
        return box

    async def close(self) -> None:
        pass
