"""The operating system of an environment: the seam (`SandboxBackend.create -> Sandbox`) and the backends behind it, by name.

Names are looked up when first used: the command line starts without loading any of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollmill.sandbox.interface import Process, Sandbox, SandboxBackend, Snapshot
    from rollmill.sandbox.records import (
        Allow,
        Capabilities,
        Change,
        ChangeKind,
        Chunk,
        Egress,
        ExecResult,
        FileKind,
        FileStat,
        SandboxSpec,
        Service,
    )

__all__ = [
    "BACKENDS", "Allow", "Capabilities", "Change", "ChangeKind", "Chunk", "Egress", "ExecResult", "FileKind", "FileStat", "Process",
    "Sandbox", "SandboxBackend", "SandboxSpec", "Service", "Snapshot", "backend_class", "open_backend",
]  # fmt: skip

_INTERFACE = ("Process", "Sandbox", "SandboxBackend", "Snapshot")

BACKENDS = {
    "namespace": "rollmill.sandbox.namespace:NamespaceBackend",
    "microvm": "rollmill.sandbox.microvm:MicrovmBackend",
    "docker": "rollmill.sandbox.container:DockerBackend",
    "podman": "rollmill.sandbox.container:PodmanBackend",
    "kubernetes": "rollmill.sandbox.kubernetes:KubernetesBackend",
    "hosted": "rollmill.sandbox.hosted:HostedBackend",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "interface" if name in _INTERFACE else "records"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def backend_class(name: str) -> type[SandboxBackend]:
    """The class of that name; `probe()` on it says whether it works here: None, or why not and what to change."""
    if name not in BACKENDS:
        raise ValueError(f"sandbox backend {name!r} is unknown; choose one of: {', '.join(BACKENDS)}")
    module, _, attribute = BACKENDS[name].partition(":")
    found: type[SandboxBackend] = getattr(importlib.import_module(module), attribute)
    return found


def open_backend(name: str = "namespace") -> SandboxBackend:
    """The backend of that name; it starts what it needs with the first box."""
    return backend_class(name)()
