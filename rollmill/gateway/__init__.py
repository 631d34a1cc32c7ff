"""The model-call seam: token-exact sessions over a set of replicas."""

from rollmill.gateway.gateway import Gateway
from rollmill.gateway.session import Reply, Session

__all__ = ["Gateway", "Reply", "Session"]
