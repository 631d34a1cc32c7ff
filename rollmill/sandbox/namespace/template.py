"""What a box of the host's image shows of this machine: a pure description, computed once by the owner and carried out by the zygote."""

from __future__ import annotations

import os
import stat
import struct
import sys
import sysconfig
from pathlib import Path

import msgspec

from rollmill.sandbox.agent import wire

USER, USER_ID, HOME, WORK = "dev", 1000, "/home/dev", "/home/dev/work"
HOSTNAME = "workstation"
PYTHON_BIN = "/opt/python/bin"
ENVIRON = {
    "PATH": f"{HOME}/.local/bin:{PYTHON_BIN}:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
    "HOME": HOME,
    "USER": USER,
    "LOGNAME": USER,
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "PWD": WORK,
    "TERM": "dumb",
}
_TOP = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_STAGES = ("/mnt", "/media", "/srv", "/tmp", "/run")
"""Where the template may be mounted while it is built: seen by the zygote alone, but it hides what lies below."""
_ETC = {
    "passwd": (
        "root:x:0:0:root:/root:/bin/bash\ndaemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n"
        f"{USER}:x:{USER_ID}:{USER_ID}:{USER}:{HOME}:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    ),
    "group": f"root:x:0:\ndaemon:x:1:\ntty:x:5:\n{USER}:x:{USER_ID}:\nnogroup:x:65534:\n",
    "hostname": f"{HOSTNAME}\n",
    "hosts": f"127.0.0.1\tlocalhost\n127.0.1.1\t{HOSTNAME}\n\n::1\tlocalhost ip6-localhost ip6-loopback\n",
    "nsswitch.conf": "passwd:\tfiles\ngroup:\tfiles\nhosts:\tfiles dns\nservices:\tfiles\n",
    "shells": "/bin/sh\n/bin/bash\n",
    "profile": 'if [ "${PS1-}" ] && [ -f /etc/bash.bashrc ]; then . /etc/bash.bashrc; fi\n',
}
_COPIED = (
    "ld.so.cache",
    "ld.so.conf",
    "bash.bashrc",
    "services",
    "protocols",
    "debian_version",
    "ssl/certs/ca-certificates.crt",
    "inputrc",
)
_COPIED_FOLDERS = ("ld.so.conf.d", "alternatives", "skel")
_MAX_COPIED_BYTES = 1 << 20


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the plan that follow its settings: see `docs/formats/agent.md`."""

    stage: str
    binds: tuple[str, ...]
    """Shown read-only at their own path."""
    links: dict[str, str]
    masks: tuple[str, ...]
    """Folders below a bind that appear empty."""
    files: dict[str, tuple[int, int, bytes]]
    """Path -> mode, owner inside the box, content."""
    folders: dict[str, tuple[int, int]]
    """Path -> mode, owner inside the box."""

    def pack(self) -> bytes:
        def many(items: list[bytes]) -> bytes:
            return struct.pack("<H", len(items)) + b"".join(items)

        name = lambda path: wire.text(os.fsencode(path))  # noqa: E731 - five uses on the next lines
        return (
            name(self.stage)
            + many([name(path) for path in self.binds])
            + many([name(path) + name(target) for path, target in self.links.items()])
            + many([name(path) for path in self.masks])
            + many([name(path) + struct.pack("<II", mode, owner) + wire.text(data) for path, (mode, owner, data) in self.files.items()])
            + many([name(path) + struct.pack("<II", mode, owner) for path, (mode, owner) in self.folders.items()])
        )


def host_template() -> Template:
    base = os.path.realpath(sys.base_prefix)
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    python = f"{base}/bin/{name}" if os.path.exists(f"{base}/bin/{name}") else os.path.realpath(sys.executable)
    binds = ["/usr", *(top for top in _TOP if os.path.isdir(top) and not os.path.islink(top))]
    if not _below(base, "/usr"):
        binds.append(base)
    links = {top: os.readlink(top) for top in _TOP if os.path.islink(top)}
    links |= {f"{PYTHON_BIN}/{alias}": python for alias in ("python", "python3", name)}
    files = {f"/etc/{path}": (0o644, 0, text.encode()) for path, text in _ETC.items()}
    for path in _COPIED:
        _copy(f"/etc/{path}", files, links)
    for folder in _COPIED_FOLDERS:
        for found in sorted([*Path("/etc", folder).glob("*"), *Path("/etc", folder).glob(".[!.]*")]):
            _copy(str(found), files, links)
    if os.path.exists("/usr/lib/os-release"):
        links["/etc/os-release"] = "../usr/lib/os-release"
    if os.path.islink("/etc/localtime"):
        links["/etc/localtime"] = os.path.realpath("/etc/localtime")
    for path, (mode, _, data) in list(files.items()):
        if path.startswith("/etc/skel/"):
            files[f"{HOME}/{os.path.basename(path)}"] = (mode, USER_ID, data)
    return Template(
        stage=next(top for top in _STAGES if os.path.isdir(top) and not any(_below(bind, top) for bind in binds)),
        binds=tuple(binds),
        links=links,
        masks=tuple(sorted(path for path in _installed(base, name) if os.path.isdir(path) and any(_below(path, bind) for bind in binds))),
        files=files,
        # A Python installed below /root must be reachable; what else lies there is not shown.
        folders={
            "/root": (0o711 if _below(base, "/root") else 0o700, 0),
            "/opt": (0o755, 0),
            HOME: (0o755, USER_ID),
            WORK: (0o755, USER_ID),
        },
    )


def _copy(path: str, files: dict[str, tuple[int, int, bytes]], links: dict[str, str]) -> None:
    try:
        if os.path.islink(path):
            links[path] = os.readlink(path)
            return
        found = os.stat(path)
        if stat.S_ISREG(found.st_mode) and found.st_size <= _MAX_COPIED_BYTES:
            files[path] = (stat.S_IMODE(found.st_mode) & 0o755, 0, Path(path).read_bytes())
    except OSError:
        return  # a host without it, or one that does not show it to us


def _installed(base: str, name: str) -> set[str]:
    """Where this interpreter keeps packages, ours among them: a box must show neither graders nor what the host happens to have."""
    found = {f"{base}/lib/{name}/site-packages", "/usr/lib/python3/dist-packages", f"/usr/local/lib/{name}/dist-packages"}
    found |= {sysconfig.get_path(key, vars={"base": base, "platbase": base}) for key in ("purelib", "platlib")}
    found |= {path for path in sys.path if path.endswith(("site-packages", "dist-packages"))}
    found.add(str(Path(__file__).resolve().parents[3]))
    return {os.path.realpath(path) for path in found}


def _below(path: str, top: str) -> bool:
    return path == top or path.startswith(top.rstrip("/") + "/")
