"""The root of a box: a bounded tmpfs over layers, with what every root needs mounted in it; entered before the box is locked in."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from dataclasses import dataclass

from . import kernel as k
from .order import Order, OrderFlag
from .settings import Settings

_DEFAULT_DISK_BYTES = 64 << 20
_BYTES_PER_FILE, _MIN_FILES = 4096, 1024
_DISK_FOLDERS = (("upper", 0o755), ("work", 0o700), ("shm", 0o1777), ("bare", 0o755))
_TTY_GROUP = 5
_MAX_OPTION_BYTES = 4096
"""What one page holds: the bound of the old way to mount."""
_RESOLVER = b"nameserver 10.0.2.3\n"
_CERTIFICATES = b"etc/ssl/certs/ca-certificates.crt"


@dataclass(frozen=True, kw_only=True)
class Embryo:
    """What is made before the order, as descriptors; -1 where this kernel refuses."""

    userns: int
    proc: int
    pts: int
    disk: int


def prepare(settings: Settings) -> Embryo:
    proc = pts = -1
    # Some kernels refuse a /proc to a user namespace: the box then has none, and says so.
    with contextlib.suppress(OSError), k.FileSystem.new(b"proc") as fs:
        fs.create()
        proc = fs.mount(k.ATTR_NOSUID | k.ATTR_NODEV | k.ATTR_NOEXEC)
    with contextlib.suppress(OSError), k.FileSystem.new(b"devpts") as fs:
        if settings.num_ids > 1:
            fs.set(b"gid", settings.id_base + _TTY_GROUP)
        fs.set(b"mode", b"0620")
        fs.set(b"ptmxmode", b"0666")
        fs.create()
        pts = fs.mount(k.ATTR_NOSUID | k.ATTR_NOEXEC)
    with k.step("make a user namespace"):
        userns = settings.make_userns()
    disk = _make_disk(settings)
    if settings.by_path:
        with k.step("attach the disk"):
            k.attach(disk, b"/run")
    return Embryo(userns=userns, proc=proc, pts=pts, disk=disk)


def _make_disk(settings: Settings) -> int:
    with k.step("make a tmpfs"), k.FileSystem.new(b"tmpfs") as fs:
        _bound(fs, _DEFAULT_DISK_BYTES)
        fs.set(b"mode", b"0755")
        fs.create()
        disk = fs.mount(k.ATTR_NOSUID | k.ATTR_NODEV)
    for name, mode in _DISK_FOLDERS:
        with k.step("make folders on the disk"):
            os.mkdir(name, dir_fd=disk)
            os.chmod(name, mode, dir_fd=disk)
        if not settings.is_rootless:
            with k.step("give the disk to the box"):
                os.chown(name, settings.id_base, settings.id_base, dir_fd=disk)
    return disk


def _bound(fs: k.FileSystem, disk_bytes: int) -> None:
    with k.step("bound the disk"):
        fs.set(b"size", disk_bytes)
        fs.set(b"nr_inodes", max(_MIN_FILES, disk_bytes // _BYTES_PER_FILE))


def furnish(settings: Settings, embryo: Embryo, order: Order) -> int:
    """Make the root and enter it; the box's writable layer, as a mount that can be stacked."""
    if order.disk_bytes != _DEFAULT_DISK_BYTES:
        with k.step("size the disk"), k.FileSystem.of_mount(embryo.disk) as fs:
            _bound(fs, order.disk_bytes)
            fs.reconfigure()
    with k.step("hold the writable layer"):
        layer = k.open_tree(embryo.disk, b"bare" if order.flags & OrderFlag.BARE else b"upper", k.TREE_CLONE)
    if settings.by_path:
        _stack_by_path(settings, order)
    else:
        _stack(settings, embryo.disk, order)
    with k.step("enter the root"):
        os.chdir("/mnt")
    _mount_inside(settings, embryo, order)
    _show_layers(settings, embryo.disk, order)
    for path in (order.home, order.workdir):
        with k.step("make the working folder"):
            _make_home(settings, path, order)
    _furnish_network(settings, order)
    with k.step("pivot into the root"):
        k.pivot_here()
    if order.hostname:
        with k.step("set the host name"):
            socket.sethostname(order.hostname)  # type: ignore[arg-type]  # takes bytes as well
    return layer


def _stack_by_path(settings: Settings, order: Order) -> None:
    """Old kernels stack attached mounts only, named by path: the layers, clones of our own, are moved beside the writable one."""
    lower = []
    with k.step("attach a layer"):
        for number, layer in enumerate(order.layers):
            lower.append(b"/run/l%d" % number)
            os.mkdir(lower[-1], 0o700)
            k.attach(layer, lower[-1])
    if order.flags & OrderFlag.HOST:
        lower.append(b"/")
    options = b"upperdir=/run/upper,workdir=/run/work,lowerdir=" + b":".join(lower)
    if settings.has_user_xattr:
        options = b"userxattr," + options
    if len(options) >= _MAX_OPTION_BYTES:
        raise k.StepFailed(errno.E2BIG, "name the layers")
    with k.step("make the overlay"):
        k.mount(b"overlay", b"/mnt", b"overlay", k.MS_NOSUID | k.MS_NODEV, options)


def _stack(settings: Settings, disk: int, order: Order) -> None:
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    upper, work = (os.open(name, flags, dir_fd=disk) for name in ("upper", "work"))
    try:
        with k.step("make the overlay"), k.FileSystem.new(b"overlay") as fs:
            with k.step("stack a layer"):
                for layer in order.layers:
                    fs.set_fd(b"lowerdir+", layer)
                if order.flags & OrderFlag.HOST:
                    fs.set_fd(b"lowerdir+", settings.template_fd)
            with k.step("give the overlay its disk"):
                fs.set_fd(b"upperdir", upper)
                fs.set_fd(b"workdir", work)
            if settings.has_user_xattr:
                with k.step("ask the overlay for user attributes"):
                    fs.set_flag(b"userxattr")
            with contextlib.suppress(OSError):  # only saves time
                fs.set_flag(b"volatile")
            fs.create()
            root = fs.mount(k.ATTR_NOSUID | k.ATTR_NODEV)
    finally:
        os.close(upper)
        os.close(work)
    with k.step("attach the root"):
        k.attach(root, b"/mnt")
        os.close(root)


def _mount_inside(settings: Settings, embryo: Embryo, order: Order) -> None:
    is_host = order.flags & OrderFlag.HOST
    if not is_host:
        for path, mode in ((b"dev", 0o755), (b"proc", 0o555), (b"tmp", 0o1777)):
            if _make_folder(path, mode) and not settings.is_rootless:
                os.chown(path, settings.id_base, settings.id_base)
        with contextlib.suppress(OSError):  # a link, which the image may mean
            os.chmod(b"tmp", 0o1777)
    for path in settings.grafts:
        if is_host or path == b"/dev":
            with k.step("take along what the host shows"):
                k.move(path, b"." + path)
    if embryo.proc >= 0:
        with k.step("mount /proc"):
            k.attach(embryo.proc, b"./proc")
    if embryo.pts >= 0:
        with k.step("mount /dev/pts"):
            k.attach(embryo.pts, b"./dev/pts")
    with k.step("mount /dev/shm"):
        shm = k.open_tree(embryo.disk, b"shm", k.TREE_CLONE)
        k.attach(shm, b"./dev/shm")
        os.close(shm)


def _show_layers(settings: Settings, disk: int, order: Order) -> None:
    if order.flags & OrderFlag.BARE:
        with k.step("show the bare layer"):
            _make_folder(b"mnt/layer")
            bare = k.open_tree(disk, b"bare", k.TREE_CLONE)
            k.attach(bare, b"./mnt/layer")
            os.close(bare)
    if order.views:
        _make_folder(b"mnt/view")
    for number, view in enumerate(order.views):
        with k.step("show a layer"):
            at = b"mnt/view/%d" % number
            _make_folder(at)
            clone = _own(settings, view)
            k.set_attributes(clone, k.ATTR_RDONLY | k.ATTR_NODEV | k.ATTR_NOSUID)
            k.attach(clone, at)
            os.close(clone)


def _own(settings: Settings, view: int) -> int:
    """A mount that can be attached here. One that came from the opener is a clone of our own already, and nobody else may clone it."""
    if not settings.by_path:
        try:
            return k.open_tree(view, b"", k.TREE_CLONE | k.TREE_EMPTY)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.dup(view)


def _make_home(settings: Settings, path: bytes, order: Order) -> None:
    """The working folder and the home of images that lack them."""
    if not path.startswith(b"/"):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    at = b"."
    for name in path.strip(b"/").split(b"/"):
        at += b"/" + name
        if _make_folder(at) and not settings.is_rootless:
            os.chown(at, settings.id_base + order.uid, settings.id_base + order.gid)


def _make_folder(path: bytes, mode: int = 0o755) -> bool:
    """Whether it was not there."""
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        return False
    return True


def _furnish_network(settings: Settings, order: Order) -> None:
    if order.flags & OrderFlag.EGRESS:
        with k.step("write /etc/resolv.conf"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(b"etc/resolv.conf")
            _append(b"etc/resolv.conf", _RESOLVER, os.O_CREAT)
            if not settings.is_rootless:
                os.chown(b"etc/resolv.conf", settings.id_base, settings.id_base)
    if order.trust:
        with k.step("add to /etc/ssl/certs/ca-certificates.crt"):
            with open(_CERTIFICATES, "rb") as file:
                held = file.read()
            if order.trust not in held:  # a box that goes on above its snapshot has it already
                _append(_CERTIFICATES, order.trust, 0)


def _append(path: bytes, data: bytes, flags: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | flags, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)
