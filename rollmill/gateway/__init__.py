"""The model-call seam: token-exact sessions over a set of replicas."""

from rollmill.gateway.episode import Episode
from rollmill.gateway.gateway import Gateway
from rollmill.gateway.placement import Sampling
from rollmill.gateway.replicas import NoAnswer, Replicas
from rollmill.gateway.session import ContextFull, Reply, Session
from rollmill.gateway.skew import Skew

__all__ = ["ContextFull", "Episode", "Gateway", "NoAnswer", "Replicas", "Reply", "Sampling", "Session", "Skew"]
