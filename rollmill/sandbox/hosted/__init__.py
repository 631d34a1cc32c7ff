"""Boxes at a provider that speaks the E2B protocol, over HTTP."""

from rollmill.sandbox.hosted.backend import HostedBackend

__all__ = ["HostedBackend"]
