"""Makes boxes that are virtual machines, a bounded number at a time; owns the table of living ones and nothing inside them."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from pathlib import Path

import msgspec

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.agent.native.build import binary
from rollmill.sandbox.images.store import Image
from rollmill.sandbox.microvm import detect, initramfs, stored
from rollmill.sandbox.microvm.assets import Assets
from rollmill.sandbox.microvm.box import MicrovmBox, MicrovmSnapshot
from rollmill.sandbox.microvm.disks import Disks
from rollmill.sandbox.microvm.machine import VSOCK_PORT, MachineConfig, Saved, last_words
from rollmill.sandbox.microvm.qemu import QemuVmm
from rollmill.sandbox.microvm.stored import Standing
from rollmill.sandbox.microvm.vmm import Machine, Vmm
from rollmill.sandbox.records import Capabilities, SandboxSpec
from rollmill.sandbox.snapshots.store import open_store

BOOT_DEADLINE_S = 120.0
_KERNEL_BYTES = 96 << 20
"""What the kernel, its tables and the agent take, on top of what a spec gives to programs and files: one spec fits every backend."""
_MIN_MEMORY_BYTES, _MIN_DISK_BYTES = 32 << 20, 64 << 10
_HOSTNAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,51}[A-Za-z0-9])?")
"""Short enough for the five characters a fork's name has more."""


class MicrovmBackend:
    """`SandboxBackend` on virtual machines. A spec's disk lies in its memory; the kernel's own comes on top."""

    def __init__(
        self, *, folder: Path | None = None, images: Path | None = None, vmm: Vmm | None = None, num_starting: int | None = None
    ) -> None:
        self._assets = Assets(folder)
        self._disks = Disks(self._assets, images)
        self._given = vmm
        self._vmm: Vmm | None = None
        self._why_not_kvm = ""
        self._initrd = b""
        self._preparing = asyncio.Lock()
        self._admission = asyncio.Semaphore(num_starting or 2 * (os.cpu_count() or 1))
        self._boxes: set[MicrovmBox] = set()
        self._num_created = 0
        self._closed = False

    @staticmethod
    def probe(folder: Path | None = None) -> str | None:
        """None when boxes can be made on this machine, else one sentence that says why not and what to change."""
        return detect.probe(folder) or (None if binary() else "the agent's binary cannot be built: there is no C compiler")

    async def capabilities(self) -> Capabilities:
        vmm = await self._monitor()
        facts = {"vmm": vmm.maker, "accelerator": vmm.accelerator, "diff": "since the machine booted"}
        if self._why_not_kvm:
            facts["kvm"] = self._why_not_kvm
        return Capabilities(
            backend="microvm",
            isolation="microvm",
            fork=True,
            live_fork=True,
            save=True,
            suspend=True,
            egress=False,
            images=True,
            facts=facts,
        )

    async def create(self, spec: SandboxSpec) -> MicrovmBox:
        _check(spec)
        async with self._admission:
            vmm = await self._monitor()
            image, disk = await self._disks.get(spec.image)
            hostname = spec.hostname or image.hostname
            config = MachineConfig(
                name=self._name(),
                kernel=str(self._assets.kernel),
                initrd=self._initrd + initramfs.box(_settings(spec, image, hostname, vmm), image.env),
                disk=str(disk),
                memory_bytes=spec.memory_bytes + _KERNEL_BYTES,
            )
            machine = await vmm.boot(config)
            box = self._adopt(config.name, spec, machine, hostname, image.shell)
            try:
                box.join()
                await box.ready(BOOT_DEADLINE_S)
                box.begin()
                await box.install(spec.files)
                for service in (*image.services, *spec.services):
                    await box.serve(service)
            except RunFailure as failure:
                await asyncio.shield(box.close())
                words = last_words(machine.console()) or "nothing"
                message = failure.message if words in failure.message else f"{failure.message}; its console said last: {words}"
                raise RunFailure(Boundary.SANDBOX, message) from None
            except BaseException:
                await asyncio.shield(box.close())
                raise
            return box

    async def restore(self, store: str, digest: str) -> MicrovmSnapshot:
        vmm = await self._monitor()
        cache = self._assets.folder.parent / "vm-disks"
        manifest, saved = await stored.load(open_store(store), digest, maker=vmm.maker, cache=cache)
        return MicrovmSnapshot(manifest.spec, saved, manifest.standing, maker=vmm.maker, wake=self._wake)

    async def close(self) -> None:
        """Kill every machine; again is harmless. Snapshots stay until they are closed."""
        self._closed = True
        await asyncio.gather(*(box.close() for box in list(self._boxes)))

    async def _monitor(self) -> Vmm:
        if self._closed:
            raise RunFailure(Boundary.SANDBOX, "the backend is closed")
        async with self._preparing:
            if self._vmm is None:
                self._vmm = await self._prepare()
            return self._vmm

    async def _prepare(self) -> Vmm:
        host = await asyncio.to_thread(detect.look, self._assets)
        why = detect.obstacle(host)
        if why is not None:
            raise RunFailure(Boundary.SANDBOX, why)
        agent = await asyncio.to_thread(binary)
        if agent is None:
            words = "the agent's binary cannot be built; install a C compiler (Debian: `apt-get install gcc libc6-dev`)"
            raise RunFailure(Boundary.SANDBOX, words)
        accelerator = detect.accelerator(host)
        self._why_not_kvm = accelerator.why
        vmm = self._given or QemuVmm(self._assets, accelerator)
        self._initrd = initramfs.base(agent.read_bytes(), self._assets.modules(vsock=vmm.is_vsock))
        await vmm.prepare()
        return vmm

    def _name(self) -> str:
        self._num_created += 1
        return f"vm-{self._num_created}"

    def _adopt(self, name: str, spec: SandboxSpec, machine: Machine, hostname: str, shell: str) -> MicrovmBox:
        box = MicrovmBox(name, spec, machine, hostname, self._keep)
        box.shell = (shell, "-c")
        self._boxes.add(box)
        machine.ended.add_done_callback(lambda _: self._boxes.discard(box))
        return box

    def _keep(self, box: MicrovmBox, saved: Saved, standing: Standing) -> MicrovmSnapshot:
        assert self._vmm is not None
        return MicrovmSnapshot(box.spec, saved, standing, maker=self._vmm.maker, wake=self._wake)

    async def _wake(self, snapshot: MicrovmSnapshot, spec: SandboxSpec) -> MicrovmBox:
        async with self._admission:
            vmm = await self._monitor()
            name, standing = self._name(), snapshot.standing
            # A spec that names another host is a wish for the name; forks of one snapshot still differ.
            wished = spec.hostname if spec.hostname != snapshot.spec.hostname else ""
            hostname = f"{wished or standing.hostname}-{secrets.token_hex(2)}"
            machine = await vmm.restore(snapshot.saved, name)
            box = self._adopt(name, spec, machine, hostname, standing.shell)
            try:
                box.join(msgspec.structs.replace(standing, begun=b"") if vmm.is_vsock else standing)
                box.begin()
                await box.renew()
            except BaseException:
                await asyncio.shield(box.close())
                raise
            return box


def _settings(spec: SandboxSpec, image: Image, hostname: str, vmm: Vmm) -> dict[str, str | int]:
    return {
        "hostname": hostname,
        "machine_id": secrets.token_hex(16),
        "disk_bytes": spec.disk_bytes,
        "workdir": image.workdir,
        "home": image.home,
        "uid": 0 if spec.root else image.uid,
        "gid": 0 if spec.root else image.gid,
        "num_processes": spec.num_processes,
        "vsock": VSOCK_PORT if vmm.is_vsock else 0,
    }


def _check(spec: SandboxSpec) -> None:
    if spec.shares:
        raise ValueError("the microvm sandbox shows no folders; put what it needs into the image, or use the namespace backend")
    if spec.egress is not None:
        raise ValueError("the microvm sandbox has no way out to other hosts; leave `egress` out, or use the namespace backend")
    if spec.memory_bytes < _MIN_MEMORY_BYTES or spec.disk_bytes < _MIN_DISK_BYTES:
        raise ValueError(
            f"a box of {spec.memory_bytes} bytes of memory and {spec.disk_bytes} of disk is too small to start; "
            f"give at least {_MIN_MEMORY_BYTES} and {_MIN_DISK_BYTES}"
        )
    if spec.disk_bytes > spec.memory_bytes:
        words = f"a disk of {spec.disk_bytes} bytes does not fit into a memory of {spec.memory_bytes}, where a machine's disk lies"
        raise ValueError(f"{words}; give as much memory_bytes at least")
    if spec.num_processes < 1 or spec.lifetime_s <= 0:
        raise ValueError(f"num_processes {spec.num_processes} and lifetime_s {spec.lifetime_s} must be positive")
    if 0 < spec.cpus < 1:
        raise ValueError(f"cpus {spec.cpus} cannot be kept: a machine has one processor, whole; leave it 0 or give 1")
    if spec.hostname and not _HOSTNAME.fullmatch(spec.hostname):
        raise ValueError(f"hostname {spec.hostname!r} is not usable: letters, digits and `-`, at most 53")
