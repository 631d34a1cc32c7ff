"""Boxes in Docker or Podman containers, driven through the engine's own command line."""

from rollmill.sandbox.container.backend import ContainerBackend, DockerBackend, PodmanBackend

__all__ = ["ContainerBackend", "DockerBackend", "PodmanBackend"]
