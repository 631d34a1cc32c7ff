"""Boxes that are virtual machines: QEMU here, Firecracker where it is installed, the same agent inside."""

from rollmill.sandbox.microvm.backend import MicrovmBackend

__all__ = ["MicrovmBackend"]
