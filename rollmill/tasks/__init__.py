"""Tasks: families that generate and grade them, and streams of them."""

from rollmill.tasks.family import FamilyWithMachine, Probe, TaskFamily, machine_of, open_family, set_up
from rollmill.tasks.source import TaskSource

__all__ = ["FamilyWithMachine", "Probe", "TaskFamily", "TaskSource", "machine_of", "open_family", "set_up"]
