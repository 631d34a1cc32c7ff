"""The backends the contract is held against: how each is opened for a test, or the sentence that says why it cannot be here."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import pytest
from e2b_face import KEY, Face

from rollmill.sandbox.container import ContainerBackend, DockerBackend, PodmanBackend
from rollmill.sandbox.hosted import HostedBackend
from rollmill.sandbox.interface import SandboxBackend
from rollmill.sandbox.kubernetes import KubernetesBackend
from rollmill.sandbox.microvm import MicrovmBackend
from rollmill.sandbox.namespace import NamespaceBackend

Opened = AbstractContextManager["SandboxBackend | str"]
STAND_IN = Path(__file__).with_name("stand_in_kubectl.py")
IMAGE = "localhost/rollmill-contract:1"


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    opened: Callable[[asyncio.Runner, Path], Opened]
    num_burst: int = 50
    is_isolated: bool = True
    """Whether what is tried here is the real thing also in what it keeps from a box."""
    marks: tuple[pytest.MarkDecorator, ...] = ()


def _busybox_image(program: str, folder: Path) -> str | None:
    """Import a small image into the engine, once; None, or why it could not be."""
    if subprocess.run([program, "image", "inspect", IMAGE], capture_output=True, timeout=60, check=False).returncode == 0:
        return None
    busybox = shutil.which("busybox")
    if busybox is None:
        return "there is no static busybox for a test image; Debian: `apt-get install busybox-static`"
    applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, timeout=60, check=True).stdout.split()
    archive = folder / "image.tar"
    with tarfile.open(archive, "w") as tar:
        for name in ("bin", "etc", "tmp", "home", "home/dev"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o777
            tar.addfile(entry)
        tar.add(busybox, "bin/busybox", filter=lambda entry: entry.replace(mode=0o755, uid=0, gid=0, deep=False))
        for applet in applets:
            if applet != "busybox":
                entry = tarfile.TarInfo(f"bin/{applet}")
                entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(entry)
    changes = ["--change", "WORKDIR /home/dev", "--change", "ENV PATH=/bin"]
    done = subprocess.run([program, "import", *changes, str(archive), IMAGE], capture_output=True, text=True, timeout=60, check=False)
    return None if done.returncode == 0 else f"`{program} import` says: {done.stderr.strip()}"


def _engine(kind: type[ContainerBackend]) -> Callable[[asyncio.Runner, Path], Opened]:
    program = kind.program

    @contextlib.contextmanager
    def opened(runner: asyncio.Runner, folder: Path) -> Iterator[SandboxBackend | str]:
        if shutil.which(program) is None:
            yield f"`{program}` is not installed"
            return
        why: str | None = _busybox_image(program, folder)
        # crun refuses machines with both generations of control groups; runc does not.
        tries = [(), ("--runtime", "runc")] if program == "podman" else [()]
        for options in tries if why is None else ():
            why = kind.probe(image=IMAGE, options=options)
            if why is None:
                yield kind(image=IMAGE, options=options)
                return
        yield why or ""

    return opened


@contextlib.contextmanager
def _namespace(runner: asyncio.Runner, folder: Path) -> Iterator[SandboxBackend | str]:
    yield NamespaceBackend.probe() or NamespaceBackend()


@contextlib.contextmanager
def _microvm(runner: asyncio.Runner, folder: Path) -> Iterator[SandboxBackend | str]:
    yield MicrovmBackend.probe() or MicrovmBackend()


@contextlib.contextmanager
def _hosted(runner: asyncio.Runner, folder: Path) -> Iterator[SandboxBackend | str]:
    """Our adapter before a provider's face, behind which are namespace boxes."""
    why = NamespaceBackend.probe()
    if why is not None:
        yield why
        return
    behind = NamespaceBackend()
    served = Face(behind, num_busy=3).served()
    url = runner.run(served.__aenter__())
    try:
        yield HostedBackend(api_url=url, sandbox_url=url, api_key=KEY)
    finally:
        runner.run(served.__aexit__(None, None, None))
        runner.run(behind.close())


@contextlib.contextmanager
def _kubernetes(runner: asyncio.Runner, folder: Path) -> Iterator[SandboxBackend | str]:
    """Against a stand-in for `kubectl`: what is shown is our side of the conversation, not a cluster."""
    program = folder / "kubectl"
    program.write_text(f'#!/bin/sh\nSTAND_IN_CLUSTER={folder} exec {sys.executable} -I -S {STAND_IN} "$@"\n')
    program.chmod(0o755)
    (folder / "pods").mkdir()
    yield KubernetesBackend.probe(str(program)) or KubernetesBackend(str(program), image="any")


STAGES = {
    "kubernetes": Stage(opened=_kubernetes, num_burst=12, is_isolated=False),
    "hosted": Stage(opened=_hosted),
    "microvm": Stage(opened=_microvm, num_burst=4, marks=(pytest.mark.vm,)),
    "namespace": Stage(opened=_namespace),
    "podman": Stage(opened=_engine(PodmanBackend), num_burst=12),
    "docker": Stage(opened=_engine(DockerBackend), num_burst=12),
}
