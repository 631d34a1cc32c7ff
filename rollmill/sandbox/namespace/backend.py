"""Makes boxes through one zygote, admitting a bounded number at a time; owns the table of living boxes and nothing inside them.

The zygote starts with the first box and is started again when it died; its boxes die with it, and their owners hear why.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections import OrderedDict
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.agent.link import Link
from rollmill.sandbox.agent.streams import SocketStream
from rollmill.sandbox.egress.upstream import Resolve, resolve_public
from rollmill.sandbox.images.store import Image, ImageStore
from rollmill.sandbox.namespace.box import NamespaceBox
from rollmill.sandbox.namespace.courier import NamespaceCourier
from rollmill.sandbox.namespace.criu import Place
from rollmill.sandbox.namespace.flatten import Flattener
from rollmill.sandbox.namespace.layers import MAX_STACK, Layer, Machine, Stack, let_go, order
from rollmill.sandbox.namespace.live import Live, LiveImage
from rollmill.sandbox.namespace.snapshot import NamespaceSnapshot
from rollmill.sandbox.namespace.zygote import Zygote
from rollmill.sandbox.records import Capabilities, SandboxSpec, Service
from rollmill.sandbox.snapshots import saved
from rollmill.sandbox.snapshots.saved import LayerRef
from rollmill.sandbox.snapshots.store import open_store

if TYPE_CHECKING:
    from rollmill.sandbox.egress.authority import Authority
    from rollmill.sandbox.interface import Sandbox

CREATE_DEADLINE_S = 60.0
_MIN_MEMORY_BYTES, _MIN_DISK_BYTES = 32 << 20, 64 << 10
_MAX_EARLY = 1024
_COURIER_BYTES = 256 << 20
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PREPARED_PER_CORE = 64
"""A prepared box costs about a quarter of a MiB, so that a burst of this many finds its boxes half made."""


class NamespaceBackend:
    """`SandboxBackend` on Linux namespaces.

    More than 2 x cores creations at once only lengthen the slowest (measured), so the rest waits first come, first served.
    """

    def __init__(
        self,
        *,
        num_creating: int | None = None,
        num_prepared: int | None = None,
        images: Path | None = None,
        resolve: Resolve = resolve_public,
    ) -> None:
        """`num_prepared`: boxes kept half made; `images`: the image store; `resolve`: how egress finds hosts outside."""
        cores = os.cpu_count() or 1
        self._admission = asyncio.Semaphore(num_creating or 2 * cores)
        self._num_prepared = _PREPARED_PER_CORE * cores if num_prepared is None else num_prepared
        self._starting = asyncio.Lock()
        self._zygote: Zygote | None = None
        self._lives: dict[int, tuple[Link, asyncio.Future[None]]] = {}
        """By the number the zygote gave the box: its life, and its end."""
        self._early: OrderedDict[int, tuple[str, bool]] = OrderedDict()
        """Boxes whose end was heard of before their first word: two sockets keep no order between them."""
        self._images: dict[str, tuple[Machine, Layer]] = {}
        self._image_root, self._resolve = images, resolve
        self._authority: Authority | None = None
        self._known: MutableMapping[Layer, LayerRef] = WeakKeyDictionary()
        """Layers that some store already holds."""
        self._live: Live | None = None
        self._live_tried: str | None = None
        """Why live forks do not work here; empty: they do; None: nobody has asked."""
        self.flattener = Flattener(self._courier)
        self._num_created = 0
        self._closed = False

    @staticmethod
    def probe() -> str | None:
        """None when boxes can be made on this machine, else one sentence that says why not and what to change. Blocks briefly."""
        if not sys.platform.startswith("linux"):
            return f"the namespace sandbox needs Linux, this is {sys.platform}; run Rollmill in a Linux virtual machine or container"
        found: list[str | None] = []

        async def try_one() -> str | None:
            backend = NamespaceBackend(num_prepared=1)
            try:
                await (await backend.create(SandboxSpec())).close()
            except RunFailure as failure:
                return failure.message
            finally:
                await backend.close()
            return None

        # A thread of its own: the caller may be inside an event loop.
        trial = threading.Thread(target=lambda: found.append(asyncio.run(try_one())), name="sandbox probe")
        trial.start()
        trial.join(2 * CREATE_DEADLINE_S)
        return (
            found[0]
            if found
            else f"the namespace sandbox did not answer within {2 * CREATE_DEADLINE_S:g} s; look at the load of this machine"
        )

    async def capabilities(self) -> Capabilities:
        """`facts`: `privilege` (root, rootless), `helper` (native, plain), `memory` (cgroup-v1, cgroup-v2: per box; rlimit-as: per
        process), `cpu`, `ids`, `live_fork` (works, or why not: tried once)."""
        zygote = await self._running()
        if self._live_tried is None:
            self._live_tried = await self._try_live()
        return Capabilities(
            backend="namespace", isolation="namespace", fork=True, live_fork=not self._live_tried, save=zygote.can_save, suspend=True,
            egress=True, images=True, shares=True, facts={**zygote.facts, "live_fork": self._live_tried or "works"},
        )  # fmt: skip

    async def start(self) -> None:
        """Start the zygote now and not with the first box."""
        await self._running()

    @property
    def zygote_pid(self) -> int | None:
        return self._zygote.process.pid if self._zygote is not None and not self._zygote.lost else None

    async def _running(self) -> Zygote:
        """The living zygote, started when there is none."""
        if self._zygote is not None and not self._zygote.lost and not self._closed:
            return self._zygote
        if not sys.platform.startswith("linux"):
            raise RunFailure(Boundary.SANDBOX, self.probe() or "")
        async with self._starting:
            if self._closed:
                raise RunFailure(Boundary.SANDBOX, "the backend is closed")
            if self._zygote is None or self._zygote.lost:
                if self._zygote is not None:
                    await self._zygote.stop()
                self._zygote = await Zygote.start(pool=self._num_prepared, on_gone=self._box_gone, on_lost=self._zygote_lost)
            return self._zygote

    async def create(self, spec: SandboxSpec) -> NamespaceBox:
        _check(spec)
        machine, stack = await self._machine(spec)
        return await self.stand(spec, machine, stack, (*machine.services, *spec.services), install=True)

    async def stand(
        self, spec: SandboxSpec, machine: Machine, stack: Stack, services: Sequence[Service], *, install: bool = False,
        views: Stack = (), bare: bool = False, live: LiveImage | None = None,
    ) -> NamespaceBox:  # fmt: skip
        """A box on this stack, its services running; `views` are shown read-only below /mnt/view, `bare`: its own layer at /mnt/layer;
        `live`: with these processes, the services among them."""
        self._num_created += 1
        box = NamespaceBox(f"box-{self._num_created}", spec, self, machine, stack)
        try:
            async with self._admission:
                await self._begin(box, views=views, bare=bare)
                if install and spec.files:
                    await box.install(spec.files, deadline_s=CREATE_DEADLINE_S)
                if live is not None:
                    await self._revive(box, live)
            if live is not None:
                for running in live.services:
                    await box.services.adopt(running.service, running.pid)
                return box
            for service in services:
                await box.serve(service)
        except BaseException:
            await asyncio.shield(box.close())
            raise
        return box

    async def _begin(self, box: NamespaceBox, *, views: Stack = (), bare: bool = False) -> None:
        """Give the box a life: order it, and wait until its agent has spoken."""
        zygote = await self._running()
        if len(box.stack) + len(views) + len(box.spec.shares) > MAX_STACK:
            raise RunFailure(Boundary.SANDBOX, f"a stack of {len(box.stack)} layers is higher than {MAX_STACK}")
        fds, lent = await zygote.lend((*box.stack, *views), box.spec.shares)
        num_views = len(views) + len(box.spec.shares)
        message = order(box.spec, box.machine, num_layers=len(box.stack), num_views=num_views, bare=bare, trust=self._trust(box.spec))
        ours, theirs = socket.socketpair()
        box.slot = None
        stream = SocketStream(ours, identify=box.spec.live)
        box.attach(stream)
        zygote.order(message, fds, theirs, lent=lent)
        if zygote.lost:
            box.gone("the zygote that made it died")
        hello = await box.ready(CREATE_DEADLINE_S)
        box.slot, box.pid = hello.slot, stream.peer_pid
        assert box.link is not None
        self._lives[hello.slot] = (box.link, asyncio.get_running_loop().create_future())
        if hello.slot in self._early:
            self._box_gone(hello.slot, *self._early.pop(hello.slot))
        if box.spec.egress is not None:
            await self._guard(box, hello.fds)

    async def snapshot(self, box: NamespaceBox, *, live: bool) -> NamespaceSnapshot:
        """Freeze the box's layer and let the box go on above it."""
        if live and not box.spec.live:
            raise ValueError("snapshot(live=True) of a namespace box needs SandboxSpec(live=True); or use the microvm backend")
        async with box.changing:
            box.check_open()
            image = await (await self._live_forks()).take(box, self._place(box)) if live else None
            running = box.services
            services = tuple(running) if image is not None else await box.quiesce()
            try:
                box.restack(await self.freeze(box))
            except BaseException:
                if image is not None:
                    image.let_go()
                raise
            snapshot = NamespaceSnapshot(self, box.spec, box.machine, box.stack, services, live=image)
            self.flattener.watch(box)
            self.flattener.watch(snapshot)
            try:
                async with self._admission:
                    await self._begin(box)
                    if image is not None:
                        box.services = running
                        await self._revive(box, image)
                if image is None:
                    for service in services:
                        await box.serve(service)
            except BaseException:
                await snapshot.close()
                raise
            return snapshot

    async def _live_forks(self) -> Live:
        """ValueError where this machine does not give them."""
        if self._live is None:
            self._live = await asyncio.to_thread(Live.open, await self._running())
        return self._live

    def _place(self, box: NamespaceBox) -> Place:
        assert self._zygote is not None and box.slot is not None
        return Place(pid=box.pid, groups=self._zygote.groups_of(box.slot))

    async def _revive(self, box: NamespaceBox, image: LiveImage) -> None:
        await (await self._live_forks()).put(box, self._place(box), image)

    async def _try_live(self) -> str:
        """Why a running program cannot be forked here; empty when it can, which takes a trial: much of it depends on the kernel."""
        made: list[Sandbox] = []
        try:
            box = await self.create(SandboxSpec(live=True))
            made.append(box)
            await box.start(["sleep", "1000"])
            snapshot = await box.snapshot(live=True)
            try:
                made += await snapshot.fork(1)
            finally:
                await snapshot.close()
            child = made[-1]
            assert isinstance(child, NamespaceBox)
            found = [line for _, line in await child.processes()]
        except (ValueError, RunFailure) as error:
            return str(error)
        finally:
            await asyncio.gather(*(box.close() for box in made))
        return "" if found == ["sleep 1000"] else f"a fork of one program came up with {found}"

    async def freeze(self, box: NamespaceBox) -> Layer:
        """The box's writable layer, which from now on nothing writes to; the box has no life until it is given another one."""
        slot = box.slot
        if slot is None or slot not in self._lives:
            raise RunFailure(Boundary.SANDBOX, f"box {box.name} is gone: it cannot be frozen")
        ended = self._lives[slot][1]
        assert self._zygote is not None
        layer = await self._zygote.keep(await box.freeze())
        try:
            # The kernel lets go of the old overlay with its last process.
            async with asyncio.timeout(CREATE_DEADLINE_S):
                await asyncio.shield(ended)
        except TimeoutError:
            layer.let_go()
            raise RunFailure(Boundary.SANDBOX, f"the end of frozen box {box.name} took longer than {CREATE_DEADLINE_S:g} s") from None
        return layer

    async def save(self, snapshot: NamespaceSnapshot, store: str) -> str:
        """Store what the image does not hold; only layers that the store lacks travel."""
        machine = snapshot.machine
        if not (await self._running()).can_save:
            raise ValueError("this kernel cannot save snapshots: it needs Linux 6.6; forks work")
        return await saved.save(
            open_store(store), self._courier(snapshot.spec), [*reversed(snapshot.stack[: machine.num_own(len(snapshot.stack))])],
            image=snapshot.spec.image, image_digest=machine.digest, spec=snapshot.spec, services=snapshot.services,
            created=snapshot.created, known=self._known,
        )  # fmt: skip

    async def restore(self, store: str, digest: str) -> NamespaceSnapshot:
        blobs = open_store(store)
        manifest = await saved.load(blobs, digest)
        machine, image = await self._machine(manifest.spec)
        if machine.digest != manifest.image_digest:
            raise ValueError(
                f"snapshot {digest} lies on image {manifest.image!r} with digest {manifest.image_digest}, this store has {machine.digest}; "
                "bring the image it was made with"
            )
        chain = await saved.restore(blobs, manifest, self._courier(manifest.spec))
        snapshot = NamespaceSnapshot(self, manifest.spec, machine, (*reversed(chain), *image), manifest.services, created=manifest.created)
        let_go(chain)  # the snapshot holds them now
        return snapshot

    def _courier(self, spec: SandboxSpec, num_layers: int = 1) -> NamespaceCourier:
        """`num_layers`: how many full disks what it carries may hold together."""
        assert self._zygote is not None
        return NamespaceCourier(self, disk_bytes=(1 + num_layers) * spec.disk_bytes + _COURIER_BYTES, root=not self._zygote.has_one_id)

    def kill(self, slot: int) -> None:
        if self._zygote is not None:
            self._zygote.kill(slot)

    async def close(self) -> None:
        """Kill every box and the zygote; again is harmless."""
        self._closed = True
        await self.flattener.close()
        async with self._starting:
            zygote, self._zygote = self._zygote, None
        if zygote is not None:
            await zygote.stop()
        if self._live is not None:
            self._live.close()
            self._live = None
        let_go(layer for _, layer in self._images.values())
        self._images = {}

    async def _machine(self, spec: SandboxSpec) -> tuple[Machine, Stack]:
        """What the spec's image is stacked on: each image is opened once."""
        zygote = await self._running()
        if spec.root and zygote.has_one_id:
            raise ValueError("root=True needs a range of user ids, which this user does not have; run as root")
        if spec.live:
            await self._live_forks()
        if spec.image == "host":
            return Machine(), ()
        if spec.image not in self._images:
            store = ImageStore(self._image_root)
            image = store.get(spec.image)
            layer = await zygote.open_layer(str(store.rootfs(image)))
            self._images[spec.image] = (_machine_of(image), layer)
        machine, layer = self._images[spec.image]
        return machine, (layer,)

    def _trust(self, spec: SandboxSpec) -> str:
        """The certificate authority that a box with intercepted egress believes; one for all, so that forks go on believing it."""
        if spec.egress is None or not spec.egress.intercept:
            return ""
        if self._authority is None:
            from rollmill.sandbox.egress.authority import Authority

            self._authority = Authority()
        return self._authority.pem.decode()

    async def _guard(self, box: NamespaceBox, fds: tuple[int, ...]) -> None:
        from rollmill.sandbox.egress.guard import EgressGuard

        assert box.spec.egress is not None
        if box.guard is not None:
            await box.guard.close()
        box.guard = await EgressGuard.start(box.name, box.spec.egress, fds, authority=self._authority, resolve=self._resolve)

    def _box_gone(self, slot: int, why: str, ruined: bool) -> None:
        life = self._lives.pop(slot, None)
        if life is None:
            self._early[slot] = (why, ruined)
            while len(self._early) > _MAX_EARLY:
                self._early.popitem(last=False)
            return
        link, ended = life
        link.gone(why, ruined=ruined)
        if not ended.done():
            ended.set_result(None)

    def _zygote_lost(self, why: str) -> None:
        lives, self._lives = self._lives, {}
        self._early.clear()
        for link, ended in lives.values():
            link.gone("the backend was closed" if self._closed else why)
            if not ended.done():
                ended.set_result(None)


def _check(spec: SandboxSpec) -> None:
    if spec.memory_bytes < _MIN_MEMORY_BYTES or spec.disk_bytes < _MIN_DISK_BYTES:
        raise ValueError(
            f"a box of {spec.memory_bytes} bytes of memory and {spec.disk_bytes} of disk is too small to start; "
            f"give at least {_MIN_MEMORY_BYTES} and {_MIN_DISK_BYTES}"
        )
    if bad := [path for path in spec.shares if not os.path.isabs(path) or not os.path.isdir(path)]:
        raise ValueError(f"SandboxSpec.shares names {bad[0]!r}, which is no folder of this machine; give the absolute path of one")
    if spec.num_processes < 1 or spec.lifetime_s <= 0 or spec.cpus < 0:
        raise ValueError(
            f"num_processes {spec.num_processes} and lifetime_s {spec.lifetime_s} must be positive, cpus {spec.cpus} not negative"
        )


def _machine_of(image: Image) -> Machine:
    names = {"HOME": image.home, "USER": image.user, "LOGNAME": image.user, "SHELL": image.shell, "LANG": "C.UTF-8", "TERM": "dumb"}
    return Machine(
        is_host=False, digest=image.digest, user_id=image.uid, group_id=image.gid, home=image.home, workdir=image.workdir,
        hostname=image.hostname, shell=(image.shell, "-c"), env={"PATH": _PATH, **names, "PWD": image.workdir, **image.env},
        services=image.services,
    )  # fmt: skip
