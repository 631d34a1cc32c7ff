"""What may leave a box: an allow-list by host and method, kept by a proxy that the box does not see; the rest is refused."""

from rollmill.sandbox.egress.authority import Authority
from rollmill.sandbox.egress.guard import EgressGuard
from rollmill.sandbox.egress.policy import Policy
from rollmill.sandbox.egress.record import Kind, Limits, Record, Verdict

__all__ = ["Authority", "EgressGuard", "Kind", "Limits", "Policy", "Record", "Verdict"]
