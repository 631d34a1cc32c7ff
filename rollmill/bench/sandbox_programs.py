"""Sandboxes that are programs, started as cheaply as Python can: a plain subprocess, bubblewrap, crun, runsc; and `cp -a`.

Run by `sandbox_driver` in a process of its own; standard library only.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from rollmill.bench.sandbox_driver import HOME, Cannot, Peer

_MNT_DETACH, _CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 2, 0x20000, 1 << 14, 1 << 18
_names = itertools.count()


class Live:
    """A command that runs and echoes."""

    def __init__(self, argv: list[str], name: str = "") -> None:
        self.name = name
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, close_fds=False
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        try:
            self._process.stdin.write(b"x")
            if self._process.stdout.read(1) == b"x":
                return
        except BrokenPipeError:
            pass
        words = self._process.stderr.read().decode(errors="replace").strip().splitlines()
        raise Cannot(f"it did not start: {words[-1][:200] if words else f'status {self._process.wait()}'}")

    def close(self) -> None:
        process = self._process
        assert process.stdin and process.stdout and process.stderr
        process.stdin.close()
        process.stdout.close()
        process.stderr.close()
        process.wait()


class Plain(Peer):
    """No isolation at all: the floor under everybody who starts a program."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def command(self, inner: list[str], state: str, name: str) -> list[str]:
        if state:
            raise Cannot("without isolation there is no state to fork")
        return [shutil.which(inner[0]) or inner[0], *inner[1:]]

    def start(self, state: str) -> Live:
        name = fresh_name()
        return Live(self.command(["cat"], state, name), name)

    def once(self) -> None:
        run_program(self.command(["true"], "", fresh_name()))

    def run_in(self, box: Any) -> None:
        run_program(self.command(["true"], "", ""))

    def num_files(self, state: str) -> int:
        count = run_program(self.command(["sh", "-c", f"find {HOME} -type f | wc -l"], state, fresh_name()))
        return int(count.split()[-1])


class Bubblewrap(Plain):
    """Every namespace, `/usr` and the home under overlays whose upper is its own tmpfs."""

    def __init__(self, *, program: str, **_: Any) -> None:
        super().__init__()
        self._base = [program, "--unshare-all", "--die-with-parent", "--overlay-src", "/usr", "--tmp-overlay", "/usr"]
        for name in ("bin", "sbin", "lib", "lib64"):
            self._base += ["--symlink", f"usr/{name}", f"/{name}"]
        self._base += ["--ro-bind", "/etc", "/etc", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]

    def command(self, inner: list[str], state: str, name: str) -> list[str]:
        home = ["--overlay-src", state, "--tmp-overlay", HOME] if state else ["--tmpfs", HOME]
        return [*self._base, *home, *inner]

    def run_in(self, box: Any) -> None:
        raise Cannot("it has no way to run a second command in a live box")


class Oci(Plain):
    """crun or runsc: a bundle whose root shows the host's `/usr` read-only; a state is the lower layer of the home."""

    def __init__(self, *, program: str, kind: str, **_: Any) -> None:
        super().__init__()
        self._scratch = Path(tempfile.mkdtemp(prefix="oci-", dir=memory_folder()))
        root = self._scratch / "rootfs"
        for folder in ("usr", "etc", "proc", "dev", "tmp", HOME.strip("/")):
            (root / folder).mkdir(parents=True)
        for name in ("bin", "sbin", "lib", "lib64"):
            (root / name).symlink_to(f"usr/{name}")
        self._root, self._is_runsc = root, kind == "runsc"
        self._bundles: dict[str, Path] = {}
        own = ["--root", str(self._scratch / "state")]
        if self._is_runsc:
            # All mounts get a layer in memory, so that a shared state can be written by each.
            self._program = [program, *own, "--platform=systrap", "--network=none", "--ignore-cgroups", "--overlay2=all:memory"]
        else:
            self._program = [program, *own, "--cgroup-manager=disabled"]
            _hide_unified_cgroups()

    def command(self, inner: list[str], state: str, name: str) -> list[str]:
        key = json.dumps([inner, state])
        bundle = self._bundles.get(key)
        # crun mounts an overlay by paths: every fork needs folders, and so a description, of its own.
        if bundle is None or (state and not self._is_runsc):
            bundle = self._bundles[key] = self._describe(inner, state, name)
        return [*self._program, "run", "--bundle", str(bundle), name]

    def _describe(self, inner: list[str], state: str, name: str) -> Path:
        bundle = self._scratch / f"bundle-{name}"
        bundle.mkdir()
        home: dict[str, Any] = {"destination": HOME, "type": "tmpfs", "source": "tmpfs"}
        if state and self._is_runsc:
            home = {"destination": HOME, "type": "bind", "source": state, "options": ["bind", "rw"]}
        elif state:
            for folder in ("upper", "work"):
                (bundle / folder).mkdir()
            layers = [f"lowerdir={state}", f"upperdir={bundle}/upper", f"workdir={bundle}/work"]
            home = {"destination": HOME, "type": "overlay", "source": "overlay", "options": layers}
        none: dict[str, list[str]] = {kind: [] for kind in ("bounding", "effective", "permitted")}
        document = {
            "ociVersion": "1.0.0",
            "process": {
                "terminal": False,
                "user": {"uid": 0, "gid": 0},
                "args": inner,
                "env": ["PATH=/usr/bin:/bin"],
                "cwd": "/",
                "noNewPrivileges": True,
                "capabilities": none,
            },
            "root": {"path": str(self._root), "readonly": True},
            "hostname": "box",
            "mounts": [
                {"destination": "/usr", "type": "bind", "source": "/usr", "options": ["bind", "ro"]},
                {"destination": "/etc", "type": "bind", "source": "/etc", "options": ["bind", "ro"]},
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
                {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs"},
                home,
            ],
            "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
        }
        (bundle / "config.json").write_text(json.dumps(document))
        return bundle

    def run_in(self, box: Any) -> None:
        run_program([*self._program, "exec", box.name, "true"])

    def close(self) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)


class Copy(Peer):
    """`cp -a` of a state: what a fork costs when files are copied; no box is started."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self._scratch = tempfile.mkdtemp(prefix="copies-", dir=memory_folder())

    def start(self, state: str) -> str:
        if not state:
            raise Cannot("it copies files and starts nothing")
        made = os.path.join(self._scratch, fresh_name())
        run_program([shutil.which("cp") or "cp", "-a", state, made])
        return made

    def end(self, box: Any) -> None:
        shutil.rmtree(box)

    def once(self) -> None:
        raise Cannot("it copies files and starts nothing")

    def num_files(self, state: str) -> int:
        made = self.start(state)
        found = sum(len(files) for _, _, files in os.walk(made))
        self.end(made)
        return found

    def close(self) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)


def fresh_name() -> str:
    return f"b{os.getpid()}-{next(_names)}"


def memory_folder() -> str | None:
    """A file system in memory, where there is one: no peer waits for a disk."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def run_program(argv: list[str]) -> bytes:
    """What it printed. Without a time-out, since Python would then poll for the end; whoever asks has one, and ends this process."""
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0, close_fds=False
    ) as process:  # fmt: skip
        assert process.stdout
        said = process.stdout.read()
        status = process.wait()
    if status:
        words = said.decode(errors="replace").strip().splitlines()
        raise Cannot(f"status {status}: {words[-1][:200] if words else 'it said nothing'}")
    return said


def _hide_unified_cgroups() -> None:
    """crun refuses machines that have both kinds of control groups, though it is told to use none: it gets a view with one."""
    libc = ctypes.CDLL(None, use_errno=True)
    if Path("/sys/fs/cgroup/unified").exists() and libc.unshare(_CLONE_NEWNS) == 0:
        libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None)
        libc.umount2(b"/sys/fs/cgroup/unified", _MNT_DETACH)
