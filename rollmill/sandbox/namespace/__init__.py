"""The namespace backend: boxes made of Linux namespaces by a zygote process, stacked from layers, without a daemon or an image."""

from rollmill.sandbox.namespace.backend import NamespaceBackend

__all__ = ["NamespaceBackend"]
