"""Boxes in Kubernetes pods, driven through `kubectl`. No cluster was tried: the tests hold it against a stand-in for `kubectl`."""

from rollmill.sandbox.kubernetes.backend import KubernetesBackend

__all__ = ["KubernetesBackend"]
