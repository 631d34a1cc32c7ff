"""The supervisor of one machine: starts the roles, watches them, restarts the dead, and never leaves an orphan.

A role that ends with status 0 is done; one that asks for a person (status 2) or dies on a full disk stops the run with its
message; any other end is a crash and is answered by a new process, a bounded number of times.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollmill.config import RunConfig
from rollmill.fleet.disk import full_disks, left, places, room_for
from rollmill.fleet.role import EXIT_DONE, EXIT_FIX, EXIT_UNHEARD, PARENT_ENV, role_command
from rollmill.fleet.rundir import announced
from rollmill.records import Role

log = logging.getLogger("rollmill.supervisor")
POLL_S = 0.1
HEALTH_EVERY_S = 3.0
UNRESPONSIVE_S = 60.0
MAX_RESTARTS, RESTART_WINDOW_S = 8, 900.0
"""The window holds MAX_RESTARTS lives that end by UNRESPONSIVE_S: a role that never answers must not be started for ever."""
STOP_S = 15.0


class RoleFailed(RuntimeError):
    """A role cannot go on; the text carries its last words."""


def _health(url: str) -> dict[str, Any] | None:
    """What a role says of itself; None when it does not answer. A role that is not ready yet answers with an error status."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5.0) as response:
            return json.load(response)
    except urllib.error.HTTPError:
        return {}
    except (OSError, ValueError):
        return None


class RoleProcess:
    """One role and its current process."""

    def __init__(self, role: str, index: int, run_file: Path, config: RunConfig) -> None:
        self.name = f"engine-{index}" if role == Role.ENGINE else str(role)
        self.role, self._command, self._run_dir = role, role_command(role, run_file, index), config.run.dir
        self._places = places(config)
        self._restarts: list[float] = []
        self._not_before = 0.0
        self.is_done = False
        self.last_health = time.monotonic()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def num_restarts(self) -> int:
        return len(self._restarts)

    def start(self) -> None:
        (self._run_dir / "roles" / f"{self.name}.json").unlink(missing_ok=True)
        with room_for(self._log), self._log.open("ab") as log_file:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                env={**os.environ, PARENT_ENV: str(os.getpid())},
                start_new_session=True,
            )
        self.last_health = time.monotonic()

    def watch(self, now: float) -> str | None:
        """Look at the process; start it again when it crashed. Returns what happened, if anything."""
        if self.is_done:
            return None
        if self.process is None:
            if now >= self._not_before:
                self.start()
                return f"{self.name} started again"
            return None
        status = self.process.poll()
        if status is None:
            return None
        if status == EXIT_DONE:
            self.is_done = True
            return f"{self.name} is done"
        if status == EXIT_FIX:
            raise RoleFailed(f"{self.name} cannot go on:\n{self.last_words(3)}{self._full()}")
        how = f"signal {-status}" if status < 0 else f"status {status}"
        if status == EXIT_UNHEARD or full_disks(self._places):
            # Also where the log has no room for the reason: a new process would fill what is left and die as this one did.
            full = self._full() or f"\nits log {self._log} could not be written ({left(self._places)})"
            raise RoleFailed(f"{self.name} died ({how}); its last words:\n{self.last_words(20)}{full}")
        self._restarts = [t for t in self._restarts if now - t < RESTART_WINDOW_S] + [now]
        if len(self._restarts) > MAX_RESTARTS:
            often = f"{len(self._restarts)} times in {RESTART_WINDOW_S:.0f} s"
            raise RoleFailed(f"{self.name} died {often}; its last words:\n{self.last_words(20)}")
        self._not_before = now + min(5.0, 0.2 * 2 ** (len(self._restarts) - 1))
        self.process = None
        return f"{self.name} died ({how}); starting it again"

    @property
    def _log(self) -> Path:
        return self._run_dir / "logs" / f"{self.name}.log"

    def _full(self) -> str:
        """What its last words may have had no room to say; empty when no disk is full."""
        full = full_disks(self._places)
        return f"\nthe disk is full: {left(full)}; free some space and go on with --resume" if full else ""

    def last_words(self, num_lines: int) -> str:
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - 16384))
            return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-num_lines:])

    def send(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)


class Supervisor:
    """Runs all roles of a run on this machine until trainer and rollout are done."""

    def __init__(self, config: RunConfig, run_file: Path, *, say: Callable[[str], None], tick: Callable[[], None] = lambda: None) -> None:
        self._config, self._say, self._tick = config, say, tick
        make = lambda role, index=0: RoleProcess(role, index, run_file, config)  # noqa: E731
        engines = [make(Role.ENGINE, i) for i in range(config.engine.num_replicas)]
        compactors = [make(Role.COMPACTOR)] if config.weights.compact_every_s else []
        self.roles: list[RoleProcess] = [make(Role.TRAINER), *engines, make(Role.ROLLOUT), *compactors]
        self._is_stopping = False
        self._next_health = time.monotonic() + HEALTH_EVERY_S

    def run(self) -> bool:
        """True when the run came to its end, False when it was asked to stop."""
        previous = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            for role in self.roles:
                role.start()
            while not self._is_stopping:
                now = time.monotonic()
                for role in self.roles:
                    if said := role.watch(now):
                        self._say(said)
                if all(role.is_done for role in self.roles if role.role in (Role.TRAINER, Role.ROLLOUT)):
                    return True
                if now >= self._next_health:
                    self._check_health(now)
                    self._next_health = time.monotonic() + HEALTH_EVERY_S
                self._tick()
                time.sleep(POLL_S)
            return False
        finally:
            self._stop_all()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def who_waits(self) -> list[str]:
        """Every current wait of every role, in words."""
        said = []
        for role in self.roles:
            facts = announced(self._config.run.dir, role.name)
            health = _health(facts["url"]) if facts else None
            said += [f"{role.name} waits {w['waited_s']:.1f} s for {w['name']} from {w['owner']}" for w in (health or {}).get("waits", [])]
        return said

    def _check_health(self, now: float) -> None:
        """A role that stopped answering is killed and started again: a hang must not look like work."""
        for role in self.roles:
            if role.is_done or role.process is None:
                continue
            facts = announced(self._config.run.dir, role.name)
            if facts and facts["pid"] == role.process.pid and _health(facts["url"]) is not None:
                role.last_health = now
            if now - role.last_health > UNRESPONSIVE_S:
                self._say(f"{role.name} has not answered for {UNRESPONSIVE_S:.0f} s; killing it")
                role.send(signal.SIGKILL)

    def _on_signal(self, number: int, frame: object) -> None:
        self._is_stopping = True

    def _stop_all(self) -> None:
        """Rollout first, so that nothing it does fails for want of the others; then the rest; then by force."""
        order = sorted(self.roles, key=lambda r: r.role != Role.ROLLOUT)
        until = time.monotonic() + STOP_S
        for role in order:
            role.send(signal.SIGTERM)
            if role.process is not None:
                try:
                    role.process.wait(max(0.1, min(5.0, until - time.monotonic())) if role.role == Role.ROLLOUT else 0.1)
                except subprocess.TimeoutExpired:
                    continue
        for role in order:
            if role.process is None:
                continue
            try:
                role.process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                role.send(signal.SIGKILL)
                role.process.wait(5.0)
