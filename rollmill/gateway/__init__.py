"""The model-call seam: token-exact sessions over a set of replicas."""

from rollmill.gateway.gateway import Gateway
from rollmill.gateway.session import ContextFull, Reply, Session

__all__ = ["ContextFull", "Gateway", "Reply", "Session"]
