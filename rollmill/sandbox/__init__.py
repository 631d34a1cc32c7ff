"""The operating system of an environment: the seam (`SandboxBackend.create -> Sandbox`) and the backends behind it, by name."""

from __future__ import annotations

from rollmill.sandbox.interface import ExecResult, Sandbox, SandboxBackend, SandboxSpec

__all__ = ["ExecResult", "Sandbox", "SandboxBackend", "SandboxSpec", "open_backend"]

_KNOWN = ("namespace",)


def open_backend(name: str = "namespace") -> SandboxBackend:
    """The backend of that name; it starts what it needs with the first box."""
    if name not in _KNOWN:
        raise ValueError(f"sandbox backend {name!r} is unknown; choose one of: {', '.join(_KNOWN)}")
    from rollmill.sandbox.namespace import NamespaceBackend

    return NamespaceBackend()
