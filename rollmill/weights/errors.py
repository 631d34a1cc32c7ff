"""The refusals of the weight path, one class per way that bytes or versions can be wrong; knows nothing else."""

from __future__ import annotations


class CorruptSnapshot(ValueError):
    """Stored bytes are not those that were published: truncated, flipped, missing or not ours."""


class UnknownFormat(ValueError):
    """Stored bytes are whole but in a form this version of Rollmill or torch cannot read; nothing is wrong with them."""


class WrongBase(ValueError):
    """A delta was about to be applied to other bytes than those it was made from."""


class LatestMoved(ValueError):
    """Another publisher moved `latest` between our look and our write."""


class PublishFailed(RuntimeError):
    """The publishing thread stopped; the cause is chained and the trainer must not go on unheard."""


class WrongWeights(RuntimeError):
    """The weights an engine really runs are not those of the version it was about to serve."""

    def __init__(self, message: str, *, tensors: tuple[str, ...] = (), is_lost: bool = False) -> None:
        super().__init__(message)
        self.tensors = tensors
        """Names of the tensors whose fingerprint differs."""
        self.is_lost = is_lost
        """The old version could not be put back either: nothing may be served."""
