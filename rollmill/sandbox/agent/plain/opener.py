"""Turns folders of the host into layers: a process that stayed where the host's paths can be seen, with the rights to clone mounts."""

from __future__ import annotations

import errno
import os
import struct
from typing import NoReturn

from . import kernel as k
from .settings import Settings

_PLAIN = k.ATTR_RDONLY | k.ATTR_NOSUID | k.ATTR_NODEV
_ERRNO = struct.Struct("<I")


def open_layers(settings: Settings, fd: int) -> NoReturn:
    """A request is a path; the answer an errno, with the layer as a descriptor when it is 0."""
    try:
        k.die_with_parent()
        k.keep_only({settings.proc_fd, fd})
        userns = settings.make_userns() if settings.num_ids > 1 else -1
        going = True
        while going and (path := k.receive(fd)[0]):
            try:
                layer = _open(path, userns)
            except (OSError, ValueError) as error:
                number = error.errno if isinstance(error, OSError) else errno.EINVAL
                going = k.send(fd, _ERRNO.pack(number or errno.EIO))
            else:
                going = k.send(fd, _ERRNO.pack(0), (layer,))
                os.close(layer)
    finally:
        os._exit(0)  # never back into the zygote's frames


def _open(path: bytes, userns: int) -> int:
    if b"\0" in path:
        raise ValueError(path)
    layer = k.open_tree(k.HERE, path, k.TREE_CLONE)
    try:
        show_read_only(layer, userns)
    except OSError:
        os.close(layer)
        raise
    return layer


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
