"""Namespace boxes on the kernel of a stable distribution: made, forked and frozen inside a virtual machine that runs it."""

from __future__ import annotations

import asyncio
import io
import tarfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import rollmill
from rollmill.sandbox import SandboxSpec
from rollmill.sandbox.microvm import MicrovmBackend

PACKAGES = ("msgspec", "zstandard", "blake3", "obstore", "httptools")
NO_ARRAYS = "def __getattr__(name):\n    return object\n"
"""The disk of the machine has no C++ library, and boxes need no arrays."""

INSIDE = """
import asyncio, sys
sys.path.insert(0, "packages")
from rollmill.sandbox import SandboxSpec
from rollmill.sandbox.namespace import NamespaceBackend

async def main():
    backend = NamespaceBackend(num_prepared=1, num_creating=1)
    box = await backend.create(SandboxSpec(files={"a": "1", "d/x": "2"}))
    facts = (await backend.capabilities()).facts
    assert facts["stacking"] == "by path" and facts["helper"] == "native", facts
    assert (await box.exec("id -un; rm -r d; mkdir d; echo 3 > d/y; ls d", timeout_s=60)).stdout == b"dev\\ny\\n"
    snapshot = await box.snapshot()
    children = await snapshot.fork(2)
    for number, child in enumerate(children):
        await child.write("mine", str(number).encode())
    assert [(await child.exec("cat mine; ls d", timeout_s=60)).stdout for child in children] == [b"0y\\n", b"1y\\n"]
    (grandchild,) = await children[0].fork(1)
    assert (await grandchild.exec("rm mine; rm -r d; mkdir d; ls -R", timeout_s=60)).stdout == b".:\\na\\nd\\n\\n./d:\\n"
    try:
        await snapshot.save("store")
    except ValueError as error:
        assert "6.6" in str(error)
    else:
        raise AssertionError("a layer was saved whose removals nobody can read")
    await backend.close()

asyncio.run(main())
"""


def _packages() -> bytes:
    archive = io.BytesIO()

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if "__pycache__" in member.name else member

    with tarfile.open(fileobj=archive, mode="w:gz", compresslevel=1) as tar:
        package = Path(rollmill.__file__).parent
        for name in ("__init__.py", "records.py", "sandbox"):
            tar.add(package / name, f"packages/rollmill/{name}", filter=plain)
        for name in PACKAGES:
            spec = find_spec(name)
            assert spec is not None and spec.origin is not None
            tar.add(Path(spec.origin).parent, f"packages/{name}", filter=plain)
        for name, text in (("packages/numpy/__init__.py", NO_ARRAYS), ("packages/numpy/typing.py", NO_ARRAYS), ("inside.py", INSIDE)):
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return archive.getvalue()


@pytest.mark.vm
def test_boxes_on_the_kernel_of_a_stable_distribution():
    if (reason := MicrovmBackend.probe()) is not None:
        pytest.skip(reason)

    async def scene() -> None:
        backend = MicrovmBackend()
        try:
            machine = await backend.create(SandboxSpec(memory_bytes=1 << 30, disk_bytes=400 << 20, lifetime_s=1200, root=True))
            release = (await machine.exec(["uname", "-r"], timeout_s=60)).stdout.decode()
            major, minor = (int(part) for part in release.split(".")[:2])
            if (major, minor) >= (6, 15):
                pytest.skip(f"the machine runs Linux {release.strip()}, which stacks layers by descriptor")
            await machine.write("packages.tgz", _packages())
            result = await machine.exec("tar -xzf packages.tgz && python3 inside.py 2>&1", timeout_s=600)
            assert result.exit_code == 0, result.stdout.decode()
        finally:
            await backend.close()

    asyncio.run(scene())
