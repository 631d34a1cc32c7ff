"""What `doctor` looks at, one small function for each thing that boxes, or the rest of Rollmill, ask of a machine."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from rollmill.records import RunFailure
from rollmill.sandbox import SandboxBackend, SandboxSpec, open_backend
from rollmill.sandbox.agent.native import build
from rollmill.sandbox.doctor import Check, Finding, broken, missing, ok
from rollmill.sandbox.microvm.assets import Assets
from rollmill.sandbox.microvm.detect import accelerator, look

BOXES = 5000
"""Boxes that one machine should be able to hold."""
KERNEL, SAVING_KERNEL, FAST_KERNEL = (6, 1), (6, 6), (6, 15)
"""Overlays of layers that are mounted nowhere."""
TOOL_S = 15.0
BOX_S = 50.0
_LOADING = threading.Lock()
_EXTRAS = {"interop": ("xxhash",), "gguf": ("gguf",)}
_TORCH = (
    "import json, torch; print(json.dumps([torch.__version__, [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]]))"
)


def python() -> Finding:
    found = f"{platform.python_version()} at {sys.executable}"
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        return broken("python", f"{found}; 3.11 to 3.13 is tested", "make the environment with one of these")
    return ok("python", found)


def torch() -> Finding:
    """In a process of its own: a broken installation may end it, and its import is slow."""
    if importlib.util.find_spec("torch") is None:
        return missing("torch", "no training and no engine here; boxes work", "pip install torch")
    done = _tool([sys.executable, "-c", _TORCH], within_s=50.0)
    if done.returncode:
        return broken("torch", _last_line(done.stderr), "pip install --force-reinstall torch")
    version, devices = json.loads(done.stdout)
    return ok("torch", f"{version} on {', '.join(devices) or 'the CPU alone'}")


def extras() -> Finding:
    absent = [extra for extra, modules in _EXTRAS.items() if any(importlib.util.find_spec(m) is None for m in modules)]
    if absent:
        return missing("extras", f"not installed: {', '.join(absent)}", f"pip install 'rollmill[{','.join(absent)}]'")
    return ok("extras", ", ".join(_EXTRAS))


def disk_space() -> Finding:
    cache = Path(os.environ.get("ROLLMILL_HOME") or Path.home() / ".cache" / "rollmill")
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = {str(folder): shutil.disk_usage(folder).free for folder in (there, Path(tempfile.gettempdir()))}
    said = ", ".join(f"{size / 2**30:.1f} GiB free in {folder}" for folder, size in free.items())
    if min(free.values()) < 2**30:
        return broken("disk space", said, "free some, or set ROLLMILL_HOME and TMPDIR to folders with more")
    return ok("disk space", said)


def compiler() -> Finding:
    found = build.compiler()
    if found is None:
        return missing("C compiler", "boxes are made by the slower helper in Python", "apt-get install gcc libc6-dev")
    return ok("C compiler", found)


def helper() -> Finding:
    path = build.binary()
    if path is None:
        return missing(
            "native helper", "not built: boxes are made by the slower one in Python", "python -m rollmill.sandbox.agent.native.build"
        )
    return ok("native helper", f"{path} ({path.stat().st_size / 1024:.0f} KiB)")


def boxes(backend: str) -> Finding:
    """The one that decides: a box is made, runs a command and is ended."""
    name = f"{backend} boxes"
    try:
        return asyncio.run(asyncio.wait_for(_trial(name, backend), BOX_S))
    except (RunFailure, ValueError) as error:
        return broken(name, getattr(error, "message", str(error)), "see the lines about the kernel below")
    except TimeoutError:
        return broken(name, f"no box within {BOX_S:g} s", "look at the load of this machine")


async def _trial(name: str, backend_name: str) -> Finding:
    backend = _opened(backend_name)
    try:
        able = await backend.capabilities()
        begun = time.perf_counter()
        box = await backend.create(SandboxSpec())
        made_s = time.perf_counter() - begun
        result = await box.exec(["true"], timeout_s=10)
        await box.close()
    finally:
        await backend.close()
    if result.exit_code:
        return broken(name, f"`true` ended with {result.exit_code}: {result.stdout[:200].decode(errors='replace')}", "report this line")
    verbs = [verb for verb in ("fork", "live_fork", "save", "suspend", "egress", "images") if getattr(able, verb)]
    facts = ", ".join(f"{key} {value}" for key, value in able.facts.items())
    return ok(name, f"made in {made_s * 1e3:.1f} ms; gives {', '.join(verbs) or 'no forks'}{f'; {facts}' if facts else ''}")


def _opened(backend: str) -> SandboxBackend:
    """Checks run in threads, and two that load parts which need each other at once would stop each other."""
    with _LOADING:
        return open_backend(backend)


def kernel() -> Finding:
    if sys.platform != "linux":
        return missing("kernel", f"{sys.platform}: no boxes of our own", "run Rollmill in a Linux virtual machine or container")
    release = platform.release()
    if version_of(release) < KERNEL:
        return broken(
            "kernel", f"Linux {release}; namespace boxes need {KERNEL[0]}.{KERNEL[1]}", "upgrade the kernel, or use another backend"
        )
    if version_of(release) < FAST_KERNEL:
        cannot = "" if version_of(release) >= SAVING_KERNEL else ", and snapshots cannot be saved"
        return ok("kernel", f"Linux {release}; before {FAST_KERNEL[0]}.{FAST_KERNEL[1]} forks are slower{cannot}")
    return ok("kernel", f"Linux {release}")


def privilege() -> Finding:
    if os.geteuid() == 0:
        return ok("privilege", "root")
    return ok("privilege", f"user {os.geteuid()}: boxes are made rootless")


def user_namespaces(proc: Path = Path("/proc")) -> Finding:
    name = "user namespaces"
    most = _number(proc / "sys/user/max_user_namespaces")
    if most is None:
        return broken(name, "the kernel has none", "use a kernel with CONFIG_USER_NS")
    if most < BOXES:
        return broken(name, f"at most {most:,} on this machine", f"sysctl -w user.max_user_namespaces={4 * BOXES}")
    if os.geteuid() != 0:
        for path, bad in (("kernel/unprivileged_userns_clone", 0), ("kernel/apparmor_restrict_unprivileged_userns", 1)):
            if _number(proc / "sys" / path) == bad:
                return broken(name, "only root may make them here", f"sysctl -w {path.replace('/', '.')}={1 - bad}")
    return ok(name, f"up to {most:,}")


def overlay(proc: Path = Path("/proc")) -> Finding:
    listed = (proc / "filesystems").read_text().split()
    if "overlay" not in listed:
        return broken("overlay", "the kernel does not list it", "modprobe overlay")
    return ok("overlay", "forks share files instead of copying them")


def idmapped_mounts() -> Finding:
    if os.geteuid() != 0:
        return missing(
            "idmapped mounts", "only root may make them; images are shown as they are owned", "run as root for images with many owners"
        )
    return ok("idmapped mounts", "one image serves every range of users")


def seccomp(proc: Path = Path("/proc")) -> Finding:
    path = proc / "sys/kernel/seccomp/actions_avail"
    if not path.exists():
        return broken("seccomp", "the kernel filters no system calls", "use a kernel with CONFIG_SECCOMP_FILTER")
    if platform.machine() not in ("x86_64", "aarch64"):
        return missing("seccomp", f"our filter does not know {platform.machine()}", "use x86_64 or aarch64")
    return ok("seccomp", "system calls are filtered")


def control_groups(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Finding:
    """Which of memory, pids and cpu can be bounded for a box as a whole, found by making a group and removing it."""
    if not own.exists():
        return missing("control groups", "the kernel has none: memory is bounded per process", "mount them at /sys/fs/cgroup")
    given = {kind: found for kind in ("memory", "pids", "cpu") if (found := _group_for(kind, root, own.read_text()))}
    said = ", ".join(f"{kind} ({version})" for kind, version in given.items())
    absent = [kind for kind in ("memory", "pids", "cpu") if kind not in given]
    if absent:
        lost = f"not writable: {', '.join(absent)}"
        return missing(
            "control groups", f"{said or 'none'}; {lost}", "run as root, or `systemd-run --user --scope -p Delegate=yes rollmill ...`"
        )
    return ok("control groups", said)


def _group_for(kind: str, root: Path, own: str) -> str:
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and kind in controllers.split(","):
            tops = [(root / kind, "v1"), (root / controllers, "v1")]
        elif not controllers:
            tops = [(root, "v2"), (root / "unified", "v2")]
        else:
            continue
        for top, version in tops:
            group = top / path.strip("/")
            if version == "v2" and kind not in _words(group / "cgroup.controllers"):
                continue
            if _can_make(group) or _can_make(top):
                return version
    return ""


def _can_make(group: Path) -> bool:
    trial = group / f"rollmill-doctor-{os.getpid()}"
    try:
        trial.mkdir()
        trial.rmdir()
    except OSError:
        return False
    return True


def room(proc: Path = Path("/proc")) -> Finding:
    """Whether processes, descriptors and namespaces suffice for thousands of boxes."""
    name = f"room for {BOXES:,} boxes"
    limits = {
        "kernel.pid_max": _number(proc / "sys/kernel/pid_max"),
        "kernel.threads-max": _number(proc / "sys/kernel/threads-max"),
        **{f"user.max_{kind}_namespaces": _number(proc / f"sys/user/max_{kind}_namespaces") for kind in ("user", "mnt", "net", "pid")},
    }
    needed = {"kernel.pid_max": 3 * BOXES, "kernel.threads-max": 3 * BOXES}
    short = [f"sysctl -w {key}={4 * BOXES}" for key, value in limits.items() if value is not None and value < needed.get(key, BOXES)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = hard if hard != resource.RLIM_INFINITY else 1 << 30
    if files < 2 * BOXES:
        short.append(f"ulimit -Hn {4 * BOXES}")
    said = f"{limits['kernel.pid_max'] or 0:,} processes, {soft:,} to {files:,} open files"
    return missing(name, said, "; ".join(short)) if short else ok(name, said)


def criu() -> Finding:
    program = shutil.which("criu")
    if program is None:
        return missing("criu", "no forks of running processes; files fork without it", "apt-get install criu")
    done = _tool([program, "check"])
    version = _tool([program, "--version"]).stdout.split("\n")[0].removeprefix("Version: ")
    if done.returncode:
        return broken(
            "criu", f"{version}: {_last_line(done.stderr or done.stdout)}", "run as root, on a kernel with CONFIG_CHECKPOINT_RESTORE"
        )
    return ok("criu", f"{version}, `criu check` is content")


def kvm() -> Finding:
    found = accelerator(look(Assets(None)))
    if found.name != "kvm":
        return missing("/dev/kvm", f"virtual machines are translated, slowly: {found.why}", "nothing, or a machine with VT-x or AMD-V")
    return ok("/dev/kvm", "virtual machines run on the processor itself")


def microvm() -> Finding:
    return _probed("microvm")


def hosted() -> Finding:
    return _probed("hosted")


def _probed(backend: str) -> Finding:
    """A backend's own word; asked only of those that start nothing to find out."""
    why = _opened(backend).probe()
    if why is None:
        return ok(backend, "boxes can be made")
    said, _, fix = why.partition("; ")
    said, _, fix = why.partition(": ") if not fix else (said, "", fix)
    return missing(backend, said, fix)


def _program(name: str, executable: str, without: str, fix: str) -> Finding:
    """A program that is there or not; its version is what it prints first."""
    path = shutil.which(executable)
    if path is None:
        return missing(name, without, fix)
    done = _tool([path, "--version"])
    if done.returncode:
        return broken(name, _last_line(done.stderr or done.stdout), fix)
    return ok(name, f"{done.stdout.splitlines()[0].strip() if done.stdout else 'installed'} at {path}")


def firecracker() -> Finding:
    return _program("firecracker", "firecracker", "no Firecracker virtual machines; qemu serves too", "put its release binary on the PATH")


def container(program: str) -> Finding:
    """Docker or Podman: the program and what it must reach."""
    path = shutil.which(program)
    if path is None:
        return missing(program, f"no boxes by {program}", f"apt-get install {'docker.io' if program == 'docker' else program}")
    done = _tool([path, "info", "--format", "{{json .}}"])
    if done.returncode:
        fix = "start its daemon: systemctl start docker" if program == "docker" else "podman system migrate"
        return broken(program, _last_line(done.stderr or done.stdout), fix)
    return ok(program, f"answers at {path}")


def kubernetes() -> Finding:
    path = shutil.which("kubectl")
    if path is None:
        return missing("kubectl", "no boxes in pods", "install kubectl and give it a cluster")
    done = _tool([path, "get", "--raw", "/version", "--request-timeout=5s"])
    if done.returncode:
        return missing("kubectl", f"reaches no cluster: {_last_line(done.stderr)}", "set KUBECONFIG")
    return ok("kubectl", f"reaches a cluster of version {json.loads(done.stdout).get('gitVersion', 'unknown')}")


def sandbox_checks(backend: str = "namespace") -> list[tuple[str, Check]]:
    """Everything that boxes need or can use; the first one decides."""
    named: list[tuple[str, Check]] = [(f"{backend} boxes", functools.partial(boxes, backend))]
    for check in (kernel, privilege, user_namespaces, overlay, idmapped_mounts, seccomp, control_groups, room, compiler, helper):
        named.append((check.__name__.replace("_", " "), check))
    named += [("criu", criu), ("/dev/kvm", kvm), ("microvm", microvm), ("firecracker", firecracker)]
    named += [(program, functools.partial(container, program)) for program in ("docker", "podman")]
    return [*named, ("kubectl", kubernetes), ("hosted", hosted), ("disk space", disk_space)]


def all_checks(backend: str = "namespace") -> list[tuple[str, Check]]:
    return [("python", python), ("torch", torch), ("extras", extras), *sandbox_checks(backend)]


def version_of(release: str) -> tuple[int, int]:
    """`6.18.44-fc` -> (6, 18)."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _tool(argv: list[str], *, within_s: float = TOOL_S) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=within_s, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 124, "", f"no answer within {within_s:g} s")
    except OSError as error:
        return subprocess.CompletedProcess(argv, 126, "", str(error))


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:160] if lines else "it said nothing"


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
