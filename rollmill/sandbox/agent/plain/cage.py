"""A box, from its fork to its end: prepared ahead of any order, furnished when one comes, locked in, then served as its first process.

Order matters: mounts first, user namespace last, so that even all capabilities inside the box hold no power over its mounts and
its network. After `lock_in` nothing of the host can be reached or gained.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import struct
from typing import NoReturn

from .. import wire
from . import kernel as k
from . import lifetime, network, order, root, serve
from .commands import Surroundings
from .order import Order, OrderFlag
from .processes import Everyone
from .settings import News, Settings

_NAMESPACES = k.CLONE_NEWNS | k.CLONE_NEWIPC | k.CLONE_NEWUTS | k.CLONE_NEWNET
_NUM_RESERVED = 4
"""Processes beyond the box's bound that the agent may start, so that a full table still lets one `kill` run."""
_MAX_MEMLOCK_BYTES = 8 << 20
_MAX_OPEN_FILES = 1024
_ROOT_CAPABILITIES = sum(1 << bit for bit in (0, 1, 2, 3, 4, 5, 6, 7, 31))
"""chown, dac_override, dac_read_search, fowner, fsetid, kill, setgid, setuid, setfcap."""
_ERRNO = struct.Struct("<i")


def live(settings: Settings, box_id: int, serial: int) -> NoReturn:
    """Never returns into the zygote's frames; what fails is told to the owner, or to the zygote while there is none."""
    cage = Cage(settings, box_id, serial)
    status = 1
    try:
        cage.live()
        status = 0
    except Exception as error:  # noqa: BLE001 - there is no caller above: what failed is told, and the box ends
        cage.tell(error)
    finally:
        os._exit(status)


class Cage:
    def __init__(self, settings: Settings, box_id: int, serial: int) -> None:
        self._settings = settings
        self._id = box_id
        self._group = f"b{serial}"
        self._socket = -1
        """Once there is an owner to tell."""

    def live(self) -> None:
        s = self._settings
        k.keep_only({s.orders_fd, s.news_fd, s.proc_fd, s.template_fd, s.memory_fd, s.cpu_fd})
        embryo, oom_fd = self._prepare()
        s.tell(self._id, News.PREPARED)
        order = self._await_order()
        self._limit_group(order)
        with k.step("unshare the control-group namespace"):
            # Only now: the root of a control-group namespace may be closed to bounds from inside.
            k.unshare(k.CLONE_NEWCGROUP)
        ports = network.open_ports(order.ports) if order.flags & OrderFlag.EGRESS else ()
        layer = root.furnish(s, embryo, order)
        self._lock_in(embryo.userns, order)
        k.keep_only({self._socket, layer, oom_fd, *ports})
        gc.enable()
        facts = (
            (wire.Fact.PROC if embryo.proc >= 0 else 0)
            | (wire.Fact.IDMAP if s.has_idmap else 0)
            | (wire.Fact.MEMORY_GROUP if s.memory_fd >= 0 else 0)
            | (wire.Fact.SECCOMP if s.program else 0)
        )
        surroundings = Surroundings(workdir=order.workdir, env=order.env, num_processes=order.num_processes, oom_fd=oom_fd)
        lifetime.end_after(order.lifetime_s, self._socket)
        serve.serve_socket(
            serve.Box(
                surroundings=surroundings, others=Everyone(), slot=self._id, facts=facts, hello_fds=ports, upper_fd=layer, layer_fd=layer
            ),
            self._socket,
        )  # fmt: skip

    def tell(self, error: Exception) -> None:
        is_step = isinstance(error, k.StepFailed)
        number = error.errno if isinstance(error, OSError) and error.errno else errno.EINVAL
        words = str(error.strerror) if isinstance(error, k.StepFailed) else repr(error)
        if self._socket < 0:
            self._settings.tell(self._id, News.FAILED, number, words)
            return
        message = f"{words}: {os.strerror(number)}" if is_step else words
        k.send(self._socket, wire.frame(0, wire.Say.LAST_WORDS, _ERRNO.pack(number) + wire.text(message.encode())))

    def _prepare(self) -> tuple[root.Embryo, int]:
        s = self._settings
        k.die_with_parent()
        os.setsid()
        if s.memory_fd >= 0:
            with k.step("make a control group"):
                self._make_group(s.memory_fd)
            with k.step("enter a control group"):
                k.write_at(s.memory_fd, f"{self._group}/cgroup.procs", "0")
        with k.step("unshare mount, ipc, uts, network and control-group namespaces"):
            k.unshare(_NAMESPACES)
        network.loopback_up()
        # Opened while it is ours to open: commands get the worst score through it, so that the kernel takes them and never the agent.
        with k.step("open the memory score"):
            oom_fd = os.open("self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC, dir_fd=s.proc_fd)
        return root.prepare(s), oom_fd

    def _make_group(self, parent: int) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._group, 0o755, dir_fd=parent)

    def _await_order(self) -> Order:
        """The next one; the process ends quietly when the owner has gone."""
        message, fds = k.receive(self._settings.orders_fd)
        if not message:
            os._exit(0)
        self._settings.tell(self._id, News.TAKEN)
        if not fds:
            os._exit(1)
        self._socket = fds[0]
        try:
            return order.parse(message, fds[1:])
        except (ValueError, struct.error) as error:
            raise k.StepFailed(errno.EINVAL, f"read the order ({error})") from None

    def _limit_group(self, order: Order) -> None:
        s, is_second = self._settings, self._settings.group_version == 2
        if s.memory_fd >= 0:
            # Pages of the disk count as memory; without this allowance a full disk would look like a memory bomb.
            most = str(order.memory_bytes + order.disk_bytes)
            with k.step("bound the memory"):
                k.write_at(s.memory_fd, f"{self._group}/{'memory.max' if is_second else 'memory.limit_in_bytes'}", most)
            swap, bound = ("memory.swap.max", "0") if is_second else ("memory.memsw.limit_in_bytes", most)
            with contextlib.suppress(OSError):  # absent without swap accounting
                k.write_at(s.memory_fd, f"{self._group}/{swap}", bound)
        if not order.cpu_milli:
            return
        with k.step("bound the CPU time (this machine gives no cpu controller)"):
            if (s.memory_fd if is_second else s.cpu_fd) < 0:
                raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
            if is_second:
                k.write_at(s.memory_fd, f"{self._group}/cpu.max", f"{order.cpu_milli * 100} 100000")
                return
            self._make_group(s.cpu_fd)
        with k.step("bound the CPU time"):
            k.write_at(s.cpu_fd, f"{self._group}/cpu.cfs_quota_us", str(order.cpu_milli * 100))
            k.write_at(s.cpu_fd, f"{self._group}/cgroup.procs", "0")

    def _lock_in(self, userns: int, order: Order) -> None:
        s = self._settings
        kept = _ROOT_CAPABILITIES if order.flags & OrderFlag.ROOT else 0
        own_bytes = self._own_bytes()
        with k.step("enter the user namespace"):
            k.setns(userns, k.CLONE_NEWUSER)
        k.bound_capabilities(kept)
        if s.num_ids > 1:
            with k.step("drop groups"):
                os.setgroups([])
        with k.step("become the group of the box"):
            os.setresgid(order.gid, order.gid, order.gid)
        with k.step("become the user of the box"):
            k.prctl(k.PR_SET_KEEPCAPS, 1, "keep capabilities over the change of user")
            os.setresuid(order.uid, order.uid, order.uid)
        with k.step("set a limit"):
            _limit(resource.RLIMIT_CORE, 0)
            _limit(resource.RLIMIT_FSIZE, order.disk_bytes)
            _limit(resource.RLIMIT_NOFILE, _MAX_OPEN_FILES)
            _limit(resource.RLIMIT_NPROC, order.num_processes + _NUM_RESERVED)
            _limit(resource.RLIMIT_MEMLOCK, _MAX_MEMLOCK_BYTES)
            if s.memory_fd < 0:
                # An interpreter needs room of its own: without it the smallest box could not even start a command.
                _limit(resource.RLIMIT_AS, order.memory_bytes + own_bytes)
        with k.step("give up capabilities"):
            k.set_capabilities(kept)
        k.prctl(k.PR_SET_NO_NEW_PRIVS, 1, "give up new privileges")
        # A program of the box, same user as the agent, can neither trace it nor reach its descriptors.
        k.prctl(k.PR_SET_DUMPABLE, 0, "become untraceable")
        k.die_with_parent()  # a change of user made it forget
        if s.program:
            with k.step("install the system-call filter"):
                k.install_seccomp(s.program)

    def _own_bytes(self) -> int:
        fd = os.open("self/statm", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._settings.proc_fd)
        try:
            return int(os.read(fd, 256).split()[0]) * resource.getpagesize()
        finally:
            os.close(fd)


def _limit(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (bound, bound))
