"""Tasks: families that generate and grade them, and streams of them."""

from rollmill.tasks.family import Probe, TaskFamily, open_family
from rollmill.tasks.source import TaskSource

__all__ = ["Probe", "TaskFamily", "TaskSource", "open_family"]
