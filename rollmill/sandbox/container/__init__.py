"""Boxes in Docker or Podman containers, driven through the engine's own command line."""

from rollmill.sandbox.container.backend import ContainerBackend

__all__ = ["ContainerBackend"]
