"""Rollmill: asynchronous reinforcement learning of LLM agents, from a laptop to several clusters."""

__version__ = "0.1.0"
