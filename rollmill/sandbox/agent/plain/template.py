"""The root that boxes of the host's image are stacked on: a small tmpfs with the host's programs bound into it, read-only."""

from __future__ import annotations

import os
import struct

from .. import wire
from . import kernel as k
from .opener import show_read_only
from .settings import Settings

_FOLDERS = (b"/dev", b"/etc", b"/home", b"/mnt", b"/proc", b"/run", b"/tmp", b"/var/empty", b"/var/lib", b"/var/log", b"/var/tmp")
_DEVICES = (b"null", b"zero", b"full", b"random", b"urandom", b"tty")
_LINKS = (
    (b"/proc/self/fd", b"fd"),
    (b"/proc/self/fd/0", b"stdin"),
    (b"/proc/self/fd/1", b"stdout"),
    (b"/proc/self/fd/2", b"stderr"),
    (b"pts/ptmx", b"ptmx"),
)
_MANY = struct.Struct("<H")


def enter_template(settings: Settings, plan: wire.Body) -> None:
    """Build it in this mount namespace, make it the root of this process, and hold it as a layer."""
    userns = settings.make_userns() if settings.num_ids > 1 else -1
    with k.step("make the mounts private"):
        k.mount(None, b"/", None, k.MS_REC | k.MS_PRIVATE)
    template = _Template(settings, userns)
    template.fill(plan)
    if userns >= 0:
        os.close(userns)
    settings.grafts.append(b"/dev")
    if settings.is_rootless:
        # Without rights on the host a new /proc may be mounted only where one is in sight.
        with k.step("show /proc while the template is built"):
            k.mount(b"/proc", template.stage + b"/proc", None, k.MS_BIND | k.MS_REC)
    with k.step("enter the template"):
        os.chdir(template.stage)
        k.pivot_here()
        k.mount(None, b"/", None, k.MS_REMOUNT | k.MS_BIND | k.MS_RDONLY | k.MS_NOSUID | k.MS_NODEV)
    with k.step("take the template as a layer"):
        settings.template_fd = k.open_tree(k.HERE, b"/", k.TREE_CLONE)


class _Template:
    def __init__(self, settings: Settings, userns: int) -> None:
        self.stage = stage = settings.stage
        self._settings, self._userns = settings, userns
        settings.has_idmap = userns >= 0
        with k.step("mount a tmpfs for the template"):
            k.mount(b"tmpfs", stage, b"tmpfs", k.MS_NOSUID | k.MS_NODEV, b"mode=755,size=16m,nr_inodes=16384")
        self._own(stage, 0)

    def fill(self, plan: wire.Body) -> None:
        with k.step("make the folders of the template"):
            for path in _FOLDERS:
                self._make_folders(path)
            for path in (b"/tmp", b"/var/tmp"):
                os.chmod(self.stage + path, 0o1777)
        for _ in range(_many(plan)):
            path = plan.text()
            with k.step(os.fsdecode(path)):
                self._make_folders(path)
                if not self._bind(path, path, self._userns) and self._userns >= 0:
                    self._settings.has_idmap = False
            self._settings.grafts.append(path)
        for _ in range(_many(plan)):
            path, target = plan.text(), plan.text()
            with k.step(os.fsdecode(path)):
                self._link(target, path)
        for _ in range(_many(plan)):
            path = plan.text()
            with k.step(os.fsdecode(path)):
                self._bind(self.stage + b"/var/empty", path, -1)
        for _ in range(_many(plan)):
            path, mode, owner, data = plan.text(), plan.u32(), plan.u32(), plan.text()
            with k.step(os.fsdecode(path)):
                self._put_file(path, mode, owner, data)
        for _ in range(_many(plan)):
            path, mode, owner = plan.text(), plan.u32(), plan.u32()
            with k.step(os.fsdecode(path)):
                self._make_folders(path)
                os.chmod(self.stage + path, mode)
                self._own(self.stage + path, owner)
        self._fill_dev()

    def _own(self, path: bytes, owner: int) -> None:
        if not self._settings.is_rootless:
            owner += self._settings.id_base
            os.chown(path, owner, owner, follow_symlinks=False)

    def _make_folders(self, path: bytes) -> None:
        at = self.stage
        for name in path.strip(b"/").split(b"/"):
            at += b"/" + name
            try:
                os.mkdir(at, 0o755)
            except FileExistsError:
                continue
            self._own(at, 0)

    def _link(self, target: bytes, path: bytes) -> None:
        self._make_parents(path)
        os.symlink(target, self.stage + path)
        self._own(self.stage + path, 0)

    def _make_parents(self, path: bytes) -> None:
        folder = os.path.dirname(path)
        if folder != b"/":
            self._make_folders(folder)

    def _put_file(self, path: bytes, mode: int, owner: int, data: bytes) -> None:
        self._make_parents(path)
        with open(self.stage + path, "wb") as out:
            out.write(data)
            os.fchmod(out.fileno(), mode)
        self._own(self.stage + path, owner)

    def _bind(self, source: bytes, path: bytes, userns: int) -> bool:
        """Show a folder of the host read-only; whether its ids are the box's."""
        fd = k.open_tree(k.HERE, source, k.TREE_CLONE | k.TREE_RECURSIVE)
        try:
            has_idmap = show_read_only(fd, userns, recursive=True)
            k.attach(fd, self.stage + path)
        finally:
            os.close(fd)
        return has_idmap

    def _fill_dev(self) -> None:
        dev = self.stage + b"/dev"
        with k.step("mount a tmpfs on /dev"):
            k.mount(b"tmpfs", dev, b"tmpfs", k.MS_NOSUID, b"mode=755,size=64k,nr_inodes=64")
            self._own(dev, 0)
        for name in _DEVICES:
            with k.step(name.decode()):
                open(dev + b"/" + name, "xb").close()
                k.mount(b"/dev/" + name, dev + b"/" + name, None, k.MS_BIND)
        with k.step("fill /dev"):
            for target, name in _LINKS:
                self._link(target, b"/dev/" + name)
            for path in (b"/dev/shm", b"/dev/pts"):
                self._make_folders(path)
            k.mount(None, dev, None, k.MS_REMOUNT | k.MS_BIND | k.MS_RDONLY | k.MS_NOSUID)


def _many(plan: wire.Body) -> int:
    (num,) = plan.take(_MANY)
    return int(num)
