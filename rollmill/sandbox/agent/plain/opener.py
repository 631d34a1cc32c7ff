"""Turns folders of the host into layers: a process that stayed where the host's paths can be seen, with the rights to clone mounts.

Where layers can be stacked as descriptors it only opens them. On kernels that stack attached mounts only (before Linux 6.15) it also
keeps every layer attached, by number, and gives a box clones of them to move into its own mount namespace.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable
from typing import NoReturn

from . import kernel as k
from .settings import Settings

_PLAIN = k.ATTR_RDONLY | k.ATTR_NOSUID | k.ATTR_NODEV
_REPLY = struct.Struct("<II")
"""Errno, number of the layer; descriptors come beside when the first is 0."""
_OPEN, _ADOPT, _CLONE, _DROP = b"O", b"A", b"C", b"D"

Reply = tuple[int, tuple[int, ...]]


def open_layers(settings: Settings, fd: int) -> NoReturn:
    try:
        k.die_with_parent()
        # A mount namespace of its own: the zygote is about to change the root of the one they shared.
        k.unshare(k.CLONE_NEWNS)
        k.mount(None, b"/", None, k.MS_REC | (k.MS_PRIVATE if settings.by_path else k.MS_SLAVE))
        if settings.by_path:
            k.mount(b"tmpfs", settings.stage, b"tmpfs", k.MS_NOSUID | k.MS_NODEV, b"mode=700,size=4m")
        k.keep_only({settings.proc_fd, fd})
        Opener(settings).serve(fd)
    finally:
        os._exit(0)  # never back into the zygote's frames


class Opener:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._userns = settings.make_userns() if settings.num_ids > 1 else -1
        self._last = 0
        self._answers: dict[bytes, Callable[[bytes, list[int]], Reply]] = {
            _OPEN: self._open, _ADOPT: self._adopt, _CLONE: self._clone, _DROP: self._drop,
        }  # fmt: skip

    def serve(self, fd: int) -> None:
        """Until the owner hangs up. A request is a letter and what it needs."""
        is_heard = True
        while is_heard:
            request, fds = k.receive(fd)
            if not request:
                return
            given: tuple[int, ...] = ()
            try:
                number, given = self._answers[request[:1]](request[1:], fds)
            except (OSError, ValueError, KeyError, struct.error) as error:
                is_heard = k.send(fd, _REPLY.pack((error.errno if isinstance(error, OSError) else None) or errno.EINVAL, 0))
            else:
                is_heard = k.send(fd, _REPLY.pack(0, number), given)
            for each in (*fds, *given):
                os.close(each)

    def _open(self, path: bytes, fds: list[int]) -> Reply:
        if b"\0" in path:
            raise ValueError(path)
        layer = k.open_tree(k.HERE, path, k.TREE_CLONE)
        try:
            show_read_only(layer, self._userns)
            if self._settings.by_path:
                return self._attach(layer), ()
            return 0, (os.dup(layer),)
        finally:
            os.close(layer)

    def _adopt(self, _: bytes, fds: list[int]) -> Reply:
        (layer,) = fds
        return self._attach(layer), ()

    def _clone(self, numbers: bytes, fds: list[int]) -> Reply:
        found: list[int] = []
        try:
            for (number,) in struct.iter_unpack("<I", numbers):
                found.append(k.open_tree(k.HERE, self._place(number), k.TREE_CLONE))
        except OSError:
            for fd in found:
                os.close(fd)
            raise
        return 0, tuple(found)

    def _drop(self, numbers: bytes, fds: list[int]) -> Reply:
        for (number,) in struct.iter_unpack("<I", numbers):
            k.unmount(self._place(number))
            os.rmdir(self._place(number))
        return 0, ()

    def _attach(self, layer: int) -> int:
        self._last += 1
        os.mkdir(self._place(self._last), 0o700)
        k.attach(layer, self._place(self._last))
        return self._last

    def _place(self, number: int) -> bytes:
        return b"%b/%d" % (self._settings.stage, number)


def show_read_only(fd: int, userns: int, *, recursive: bool = False) -> bool:
    """Whether the ids of the host's files are shown as the box's: not every file system can."""
    if userns >= 0:
        try:
            k.set_attributes(fd, _PLAIN, userns=userns, recursive=recursive)
            return True
        except OSError:
            pass
    k.set_attributes(fd, _PLAIN, recursive=recursive)
    return False
