"""The root file system: one read-only template per zygote, one private tmpfs per box; shows of the host only what the plan names."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from . import kernel as k

USER, HOME, WORK = "dev", "/home/dev", "/home/dev/work"
USER_ID = 1000
PYTHON_BIN = "/opt/python/bin"
_STAGES = ("/mnt", "/media", "/srv", "/tmp")
"""Where the new root may be mounted while it is built: seen by the zygote alone, but it hides what lies below."""
_DEVICES = ("null", "zero", "full", "random", "urandom")
_ETC = {
    "passwd": (
        "root:x:0:0:root:/root:/bin/sh\n"
        f"{USER}:x:{USER_ID}:{USER_ID}:{USER}:{HOME}:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/bin/false\n"
    ),
    "group": f"root:x:0:\n{USER}:x:{USER_ID}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_BYTES_PER_INODE = 4096
_MIN_INODES = 1024


def enter_template(plan: dict[str, Any], *, keep_proc: bool) -> None:
    """Build the read-only root in a tmpfs of this mount namespace and make it the root of this process.

    `keep_proc`: an unprivileged mount of /proc is granted only where a /proc is already in sight.
    """
    k.mount(None, "/", None, k.MS_REC | k.MS_PRIVATE)
    stage = next(top for top in _STAGES if os.path.isdir(top) and not any(bind.startswith(f"{top}/") for bind in plan["binds"]))
    k.mount("tmpfs", stage, "tmpfs", k.MS_NOSUID | k.MS_NODEV, "mode=755,size=4m,nr_inodes=4096")
    for path in ("dev/shm", "etc", "home", "proc", "run", "tmp", "var/empty", "var/lib", PYTHON_BIN.lstrip("/")):
        os.makedirs(f"{stage}/{path}", exist_ok=True)
    os.symlink("/tmp", f"{stage}/var/tmp")
    for path in plan["binds"]:
        _bind_read_only(path, stage + path)
    for path, target in plan["links"].items():
        os.symlink(target, stage + path)
    for path in plan["masks"]:
        _bind_read_only(f"{stage}/var/empty", stage + path)
    _fill_etc(f"{stage}/etc")
    _fill_dev(f"{stage}/dev")
    if keep_proc:
        k.mount("/proc", f"{stage}/proc", None, k.MS_BIND | k.MS_REC)
    k.pivot_into(stage)
    k.mount(None, "/", None, k.MS_REMOUNT | k.MS_BIND | k.MS_RDONLY | k.MS_NOSUID | k.MS_NODEV)


def _bind_read_only(source: str, target: str) -> None:
    os.makedirs(target, exist_ok=True)
    k.mount(source, target, None, k.MS_BIND | k.MS_REC)
    k.make_read_only(target)


def _fill_etc(etc: str) -> None:
    for name, text in _ETC.items():
        with open(f"{etc}/{name}", "w") as out:
            out.write(text)
    for name in ("ld.so.cache", "ld.so.conf"):
        with contextlib.suppress(FileNotFoundError), open(f"/etc/{name}", "rb") as source, open(f"{etc}/{name}", "wb") as out:
            out.write(source.read())
    for name in ("ld.so.conf.d", "alternatives"):
        if os.path.isdir(f"/etc/{name}"):
            _bind_read_only(f"/etc/{name}", f"{etc}/{name}")
    if os.path.exists("/usr/lib/os-release"):
        os.symlink("../usr/lib/os-release", f"{etc}/os-release")


def _fill_dev(dev: str) -> None:
    for name in _DEVICES:
        open(f"{dev}/{name}", "x").close()
        k.mount(f"/dev/{name}", f"{dev}/{name}", None, k.MS_BIND)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"{dev}/{name}")


def mount_private(*, disk_bytes: int, owner_id: int) -> None:
    """Give the box its own writable places: /home, /tmp and /dev/shm share one tmpfs and so one bound."""
    inodes = max(_MIN_INODES, disk_bytes // _BYTES_PER_INODE)
    k.mount("tmpfs", "/run", "tmpfs", k.MS_NOSUID | k.MS_NODEV, f"mode=755,size={disk_bytes},nr_inodes={inodes}")
    for path, target, mode in (("home", "/home", 0o755), ("tmp", "/tmp", 0o1777), ("shm", "/dev/shm", 0o1777)):
        os.mkdir(f"/run/{path}")
        os.chmod(f"/run/{path}", mode)
        k.mount(f"/run/{path}", target, None, k.MS_BIND)
    k.umount("/run")
    for path in (HOME, WORK):
        os.mkdir(path, 0o755)
        os.chown(path, owner_id, owner_id)


def mount_proc(*, kept: bool) -> bool:
    """A /proc that shows only the box; False, and an empty /proc, where the kernel refuses to mount one."""
    try:
        k.mount("proc", "/proc", "proc", k.MS_NOSUID | k.MS_NODEV | k.MS_NOEXEC)
    except PermissionError:
        if kept:
            k.umount("/proc")
        return False
    return True
