"""`rollmill doctor`: runs small checks of this machine, each under a deadline, and says in one line each what works and what to do.

A check never raises and never hangs the rest: what it trips over is its finding. The status is 0 when boxes can be made here.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from enum import StrEnum

import msgspec

CHECK_S = 60.0
"""More than a cold import of torch on a busy laptop takes."""


class Health(StrEnum):
    OK = "ok"
    MISSING = "missing"
    """Not installed or not given: what needs it is off, the rest works."""
    BROKEN = "broken"
    """There, and does not work."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report, such as `missing  qemu  no virtual machines  ->  apt-get install qemu-system-x86`."""

    name: str
    health: Health
    detail: str
    fix: str = ""
    """A command, or what a person must change; empty when nothing is to be done."""


Check = Callable[[], Finding]


def ok(name: str, detail: str) -> Finding:
    return Finding(name=name, health=Health.OK, detail=detail)


def missing(name: str, detail: str, fix: str) -> Finding:
    return Finding(name=name, health=Health.MISSING, detail=detail, fix=fix)


def broken(name: str, detail: str, fix: str) -> Finding:
    return Finding(name=name, health=Health.BROKEN, detail=detail, fix=fix)


def run_checks(checks: Sequence[tuple[str, Check]], *, within_s: float = CHECK_S) -> list[Finding]:
    """All at once, in the order given; one that does not end in time is broken and is not waited for."""
    end = time.monotonic() + within_s
    waiting = []
    for name, check in checks:
        answer: queue.SimpleQueue[Finding] = queue.SimpleQueue()
        # A thread that nobody joins: a check stuck in the kernel must not hold the report.
        threading.Thread(target=_answer, args=(name, check, answer), daemon=True).start()
        waiting.append((name, answer))
    found = []
    for name, answer in waiting:
        try:
            found.append(answer.get(timeout=max(0.0, end - time.monotonic())))
        except queue.Empty:
            found.append(broken(name, f"no answer within {within_s:g} s", "look at the load of this machine, then try again"))
    return found


def _answer(name: str, check: Check, answer: queue.SimpleQueue[Finding]) -> None:
    try:
        answer.put(check())
    except Exception as error:  # noqa: BLE001 (a check that fails is a finding, and the report goes on)
        answer.put(broken(name, f"the check failed: {type(error).__name__}: {error}", "report this line"))


def report(findings: Sequence[Finding], *, decisive: str, as_json: bool) -> int:
    """Print them; the exit status says whether the decisive one is well."""
    works = any(found.name == decisive and found.health is Health.OK for found in findings)
    if as_json:
        print(json.dumps({"works": works, "checks": [msgspec.to_builtins(found) for found in findings]}, indent=2))
        return int(not works)
    width = max(len(found.name) for found in findings)
    colours = {Health.OK: "32", Health.MISSING: "33", Health.BROKEN: "31"} if os.isatty(1) else {}
    for found in findings:
        state = f"{found.health:8}"
        if found.health in colours:
            state = f"\033[{colours[found.health]}m{state}\033[0m"
        print(f"{state} {found.name:{width}}  {found.detail}{f'  ->  {found.fix}' if found.fix else ''}")
    print(f"\n{decisive} {'can be made on this machine' if works else 'cannot be made on this machine; mend the lines above'}")
    return int(not works)
