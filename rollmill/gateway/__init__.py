"""The model-call seam: token-exact sessions over a set of replicas."""

from rollmill.gateway.gateway import Gateway
from rollmill.gateway.routing.replicas import NoAnswer, Replicas
from rollmill.gateway.sessions.episode import Episode
from rollmill.gateway.sessions.placement import Sampling
from rollmill.gateway.sessions.session import ContextFull, Reply, Session
from rollmill.gateway.sessions.skew import Skew

__all__ = ["ContextFull", "Episode", "Gateway", "NoAnswer", "Replicas", "Reply", "Sampling", "Session", "Skew"]
