"""The namespace backend: boxes made of Linux namespaces by a zygote process, without a daemon, an image or a compiler."""

from rollmill.sandbox.namespace.backend import NamespaceBackend

__all__ = ["NamespaceBackend"]
