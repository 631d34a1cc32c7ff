"""Tasks: families that generate and grade them, and streams of them."""

from rollmill.records import Grade, Task
from rollmill.tasks.family import (
    Attempt,
    Family,
    FamilyWithMachine,
    Probe,
    TaskFamily,
    agent_of,
    machine_of,
    needs_box,
    set_up,
    toolset_of,
)
from rollmill.tasks.loading import open_family
from rollmill.tasks.rows import RowFamily
from rollmill.tasks.source import TaskSource

__all__ = [
    "Attempt", "Family", "FamilyWithMachine", "Grade", "Probe", "RowFamily", "Task", "TaskFamily", "TaskSource", "agent_of", "machine_of",
    "needs_box", "open_family", "set_up", "toolset_of",
]  # fmt: skip
