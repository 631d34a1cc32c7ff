"""What a box shows of this host: a pure description, computed once by the owner and carried out by the zygote."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from rollmill.sandbox.namespace.inside.root import PYTHON_BIN

_TOP = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")


def host_plan() -> dict[str, list[str] | dict[str, str]]:
    """`binds` are shown read-only at their own path, `links` are made, `masks` appear empty."""
    base = os.path.realpath(sys.base_prefix)
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    python = f"{base}/bin/{name}" if os.path.exists(f"{base}/bin/{name}") else os.path.realpath(sys.executable)
    binds = ["/usr", *(top for top in _TOP if os.path.isdir(top) and not os.path.islink(top))]
    if not _below(base, "/usr"):
        binds.append(base)
    links = {top: os.readlink(top) for top in _TOP if os.path.islink(top)}
    links |= {f"{PYTHON_BIN}/{alias}": python for alias in ("python", "python3", name)}
    masks = sorted(path for path in _installed(base, name) if os.path.isdir(path) and any(_below(path, bind) for bind in binds))
    return {"binds": binds, "links": links, "masks": masks}


def _installed(base: str, name: str) -> set[str]:
    """Where this interpreter keeps packages, ours among them: a box must show neither graders nor what the host happens to have."""
    found = {f"{base}/lib/{name}/site-packages", "/usr/lib/python3/dist-packages", f"/usr/local/lib/{name}/dist-packages"}
    found |= {sysconfig.get_path(key, vars={"base": base, "platbase": base}) for key in ("purelib", "platlib")}
    found |= {path for path in sys.path if path.endswith(("site-packages", "dist-packages"))}
    found.add(str(Path(__file__).resolve().parents[3]))
    return {os.path.realpath(path) for path in found}


def _below(path: str, top: str) -> bool:
    return path == top or path.startswith(top.rstrip("/") + "/")
