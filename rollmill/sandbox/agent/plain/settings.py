"""What the zygote was told and found at its start, as its boxes read it; and the plan it is read from, laid out in the owner's words."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from enum import IntEnum

from .. import wire
from . import kernel as k

_HEAD = struct.Struct("<9I")
_NEWS = struct.Struct("<III")
_MAX_STEP_BYTES = 128


class News(IntEnum):
    """What a box tells its zygote."""

    PREPARED = 1
    TAKEN = 2
    FAILED = 3


@dataclass(kw_only=True)
class Settings:
    is_rootless: bool
    group_version: int
    """Of control groups; 0: there are none."""
    pool: int
    """Boxes kept prepared: a process of this twin costs a MiB and more, so only the lower of the plan's two bounds."""
    num_preparing: int
    id_base: int
    """Ids 0.. of a box are these here; with one id it is the box's user."""
    num_ids: int
    by_path: bool
    """This kernel stacks attached mounts only: layers are moved into the box before they are stacked."""
    has_user_xattr: bool
    """Overlays may note what they hide in user attributes."""
    program: bytes
    """The system-call filter; empty: none for this machine type."""
    own: str
    memory: str
    cpu: str
    stage: bytes
    """A folder that nothing shown lies below: where mounts are put together."""
    memory_fd: int = -1
    cpu_fd: int = -1
    """Folders of our control groups, or -1."""
    orders_fd: int = -1
    news_fd: int = -1
    proc_fd: int = -1
    template_fd: int = -1
    grafts: list[bytes] = field(default_factory=list)
    """Mounts of the template that a box of the host's image takes along."""
    has_idmap: bool = False

    @classmethod
    def parse(cls, plan: wire.Body) -> Settings:
        rootless, version, low, high, num_preparing, id_base, num_ids, by_path, has_user_xattr = plan.take(_HEAD)
        program = plan.text()
        own, memory, cpu = (os.fsdecode(plan.text()) for _ in range(3))
        return cls(
            is_rootless=bool(rootless), group_version=version, pool=min(low, high), num_preparing=num_preparing, id_base=id_base,
            num_ids=num_ids, by_path=bool(by_path), has_user_xattr=bool(has_user_xattr), program=program, own=own, memory=memory, cpu=cpu,
            stage=plan.text(),
        )  # fmt: skip

    def make_userns(self) -> int:
        return k.make_userns(self.proc_fd, first_inside=1000 if self.num_ids == 1 else 0, first_outside=self.id_base, num_ids=self.num_ids)

    def tell(self, box: int, what: News, number: int = 0, words: str = "") -> None:
        k.send(self.news_fd, _NEWS.pack(box, what, number) + words.encode()[:_MAX_STEP_BYTES])


def parse_news(message: bytes) -> tuple[int, int, int, str]:
    """Box, what, errno, step."""
    box, what, number = _NEWS.unpack_from(message)
    return box, what, number, message[_NEWS.size :].decode(errors="replace")
