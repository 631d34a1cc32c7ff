"""CRIU, run inside boxes it cannot see from: dumps one tree of processes into a folder, restores it in another box; knows no snapshots.

It dumps as root of this machine, who alone may read system-call filters, and restores as root of the box, whose users the processes have.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rollmill.records import Boundary, RunFailure

CALL_DEADLINE_S = 60.0
INSTALL = "install CRIU 4 (Debian: `apt-get install criu`, or `scripts/setup_criu.sh DIR` and put DIR/bin on the PATH)"
_COMMON = ("--manage-cgroups=ignore", "--tcp-established", "--file-locks", "-v2")
_DUMP = ("--network-lock", "skip", "--ghost-limit", "1G", "--link-remap")
_RESTORE = ("-d", "--unprivileged")
"""Not told so, a CRIU that is root of a user namespace demands rights over the machine."""
_SHOWN_LINES = 4
_HARMLESS = ("RLIMIT_NOFILE for self", "suspend seccomp", "suspending seccomp", "stats-restore", "Unable to create tun")
"""Complaints about what root of a box may not do, and need not."""
_USER_NAMESPACE, _ROOT_IDS = 10, 3
"""Numbers of the fields in CRIU's images."""
_INVENTORY_HEAD, _IDS_HEAD = 8, 12
"""One magic number or two, then the size of the message."""
_GAP = 1000
"""How far from every restored process number CRIU's own lie."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where CRIU runs: a box, by its first process as this machine counts, and the files through which its control groups are entered."""

    pid: int
    groups: tuple[str, ...] = ()


class Criu:
    """`join`: the program that enters boxes; `root_id`: who the root of a box is on this machine."""

    def __init__(self, program: str, join: Path, root_id: int, scratch: Path) -> None:
        self._join = join
        self._kit = os.open(_stage(Path(program), scratch), os.O_RDONLY | os.O_DIRECTORY)
        # CRIU asks the kernel dozens of questions; a restore finds the answers here from the second one on.
        answers = scratch / "answers"
        answers.mkdir(exist_ok=True)
        answers.chmod(0o755)
        os.chown(answers, root_id, root_id)
        self._answers = os.open(answers, os.O_RDONLY | os.O_DIRECTORY)

    def close(self) -> None:
        os.close(self._kit)
        os.close(self._answers)

    async def dump(self, place: Place, root: int, images: Path) -> None:
        """Write the tree below process `root`, as the box counts, and end it; it goes on when that fails."""
        await self._run(place, images, "dump", ("-t", str(root), *_DUMP), inside=False, last=0)
        await asyncio.to_thread(_settle, images, root)

    async def restore(self, place: Place, images: Path) -> None:
        """Continue the tree; the box must be empty."""
        await self._run(place, images, "restore", _RESTORE, inside=True, last=_free_number(images))

    async def _run(self, place: Place, images: Path, verb: str, options: Sequence[str], *, inside: bool, last: int) -> None:
        folder = os.open(images, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fds = (self._kit, folder, self._answers)
            kit, work, answers = (f"/proc/self/fd/{fd}" for fd in fds)
            groups = place.groups if inside else ()
            process = await asyncio.create_subprocess_exec(
                str(self._join), "join", str(place.pid), str(int(inside)), str(last), str(self._kit), *groups, "--",
                "criu", "--library-path", kit, f"{kit}/criu", verb, "-D", work, *options, *_COMMON,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=fds,
                env={"XDG_RUNTIME_DIR": answers, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            )  # fmt: skip
        finally:
            os.close(folder)
        try:
            async with asyncio.timeout(CALL_DEADLINE_S):
                said, _ = await process.communicate()
        except BaseException as error:
            process.kill()  # and CRIU with it; processes it held go on
            if isinstance(error, TimeoutError):
                raise RunFailure(Boundary.SANDBOX, f"CRIU took longer than {CALL_DEADLINE_S:g} s to {verb} processes") from None
            raise
        if process.returncode:
            raise RunFailure(Boundary.SANDBOX, f"CRIU could not {verb} the processes of a box: {_errors(said)}")


def _errors(said: bytes) -> str:
    lines = said.decode(errors="replace").splitlines()
    found = [line.partition("): ")[2] or line for line in lines if "Error (" in line and not any(words in line for words in _HARMLESS)]
    return "; ".join(found[:_SHOWN_LINES] or lines[-_SHOWN_LINES:]) or "it said nothing"


def _stage(program: Path, scratch: Path) -> Path:
    """A folder with the program, its loader and its libraries, found by asking the loader: boxes show neither."""
    name = hashlib.sha256(f"{program}\0{program.stat().st_mtime_ns}".encode()).hexdigest()[:16]
    kit = scratch / f"criu-{name}"
    if kit.is_dir():
        return kit
    done = subprocess.run(
        [program], env={**os.environ, "LD_TRACE_LOADED_OBJECTS": "1"}, capture_output=True, text=True, timeout=CALL_DEADLINE_S, check=False
    )
    libraries = [found[1] for line in done.stdout.splitlines() if (found := re.search(r"(/\S+) \(0x", line))]
    loader = next((path for path in libraries if os.path.basename(path).startswith(("ld-", "ld64"))), None)
    if loader is None:
        raise ValueError(f"{program} does not name its loader and libraries ({done.stdout.strip()!r}); {INSTALL}")
    with tempfile.TemporaryDirectory(dir=scratch) as made:
        copies = {"ld.so": loader, "criu": str(program), **{os.path.basename(path): path for path in libraries}}
        for copy, source in copies.items():
            shutil.copyfile(source, f"{made}/{copy}")
            os.chmod(f"{made}/{copy}", 0o755)
        os.chmod(made, 0o755)
        try:
            os.rename(made, kit)
        except OSError:
            assert kit.is_dir()  # another owner was faster
        else:
            os.mkdir(made)  # for its own end
    return kit


def _numbers(images: Path) -> set[int]:
    """Of every process and thread of a dump."""
    return {int(found[1]) for path in images.iterdir() if (found := re.fullmatch(r"core-(\d+)\.img", path.name))}


def _free_number(images: Path) -> int:
    taken = sorted(_numbers(images))
    top = int(Path("/proc/sys/kernel/pid_max").read_text())
    return next(n for n in (taken[-1] + _GAP, *range(_GAP, top, _GAP)) if n + 2 * _GAP < top and not any(n < t <= n + _GAP for t in taken))


def _settle(images: Path, root: int) -> None:
    """Make the dump readable for the root of a box, and say that its processes are in the user namespace that CRIU itself will be in:
    told otherwise, it would make one below, where it may not choose process numbers."""
    for path in images.iterdir():
        path.chmod(0o644)
    inventory = images / "inventory.img"
    inventory.write_bytes(at_home(inventory.read_bytes(), (images / f"ids-{root}.img").read_bytes()))


def at_home(inventory: bytes, ids: bytes) -> bytes:
    """The inventory with CRIU's own user namespace replaced by the one of the process whose ids these are."""
    home = dict(_fields(ids[_IDS_HEAD:]))[_USER_NAMESPACE]
    assert isinstance(home, int)
    fields: list[tuple[int, int | bytes]] = []
    for number, value in _fields(inventory[_INVENTORY_HEAD:]):
        if number == _ROOT_IDS:
            assert isinstance(value, bytes)
            value = _packed([(n, home if n == _USER_NAMESPACE else v) for n, v in _fields(value)])
        fields.append((number, value))
    body = _packed(fields)
    return inventory[: _INVENTORY_HEAD - 4] + struct.pack("<I", len(body)) + body


def _fields(data: bytes) -> list[tuple[int, int | bytes]]:
    """Numbers and values of a protobuf message that has varints and bytes only."""
    found: list[tuple[int, int | bytes]] = []
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        value, at = _varint(data, at)
        if tag & 7 == 2:
            found.append((tag >> 3, data[at : at + value]))
            at += value
        elif tag & 7 == 0:
            found.append((tag >> 3, value))
        else:
            raise RunFailure(Boundary.SANDBOX, f"an image of CRIU has a field of kind {tag & 7}: a newer CRIU than this program knows")
    return found


def _packed(fields: Sequence[tuple[int, int | bytes]]) -> bytes:
    out = b""
    for number, value in fields:
        if isinstance(value, bytes):
            out += _packed_int(number << 3 | 2) + _packed_int(len(value)) + value
        else:
            out += _packed_int(number << 3) + _packed_int(value)
    return out


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def _packed_int(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])
