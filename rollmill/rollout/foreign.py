"""Plays attempts with agents that are not ours, over HTTP: a program for each of them, or a service that is told of them.

An attempt has an episode of its own at the gateway, sampled as the run says, and a key that opens nothing else. The episode is closed
before anything is judged: a late call finds it gone, so nothing is sampled after grading. No trouble of ours becomes a reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from typing import Any, Protocol

from rollmill.gateway import Gateway
from rollmill.gateway.sessions.episode import Episode, Sampling
from rollmill.harness.beside import run_beside, scratch
from rollmill.harness.program import Endpoint, Program, ProgramRun, check_exit, check_in_time, endpoint_inside, machine_for, run_inside
from rollmill.harness.remote import MAX_NOTE_CHARS, RemoteService, Report, Reports, check_finished, init_of
from rollmill.records import Boundary, Grade, RunFailure, StopReason, Task
from rollmill.rollout.grading import MAX_FILE_BYTES, MAX_FILES, collect
from rollmill.rollout.played import Played
from rollmill.rollout.worlds import Worlds
from rollmill.sandbox import SandboxBackend
from rollmill.sandbox.records import Capabilities, SandboxSpec
from rollmill.tasks import TaskFamily, machine_of
from rollmill.telemetry import Waits

SUCCESS_ABOVE = 0.5
"""A remote environment that gives a reward and does not say whether the task counts as solved."""


class Door(Protocol):
    """Where the gateway is reached over HTTP."""

    address: str
    """`127.0.0.1:PORT`, on this machine."""

    def base_url(self, episode: str) -> tuple[str, str]:
        """For OpenAI's clients, and for Anthropic's."""
        ...

    def episode_key(self, episode: str) -> str: ...


class Seat:
    """One attempt's episode at the gateway. It is opened when the attempt begins, so that one which never does leaves nothing open."""

    def __init__(self, name: str, endpoint: Endpoint, **options: Any) -> None:
        self.name, self.endpoint, self._options = name, endpoint, options
        self._episode: Episode | None = None

    @property
    def oldest_version(self) -> int | None:
        return None if self._episode is None else self._episode.oldest_version

    @property
    def episode(self) -> Episode:
        assert self._episode is not None, f"episode {self.name} has not begun"
        return self._episode

    @contextlib.contextmanager
    def taken(self, gateway: Gateway) -> Iterator[None]:
        self._episode = gateway.open_episode(self.name, is_owned=True, **self._options)
        try:
            yield
        finally:
            gateway.end_episode(self.name)


class _Foreign:
    """What programs and services have in common: how an episode is opened, closed and read."""

    def __init__(self, gateway: Gateway, door: Door, model: str, max_answer_tokens: int | None) -> None:
        self._gateway, self._door, self._model, self._max_answer_tokens = gateway, door, model, max_answer_tokens

    def open(self, key: str, *, seed: int, temperature: float, min_version: int | None) -> Seat:
        name = key.replace("/", ".")
        openai_url, anthropic_url = self._door.base_url(name)
        endpoint = Endpoint(
            openai_url=openai_url, anthropic_url=anthropic_url, key=self._door.episode_key(name), model=self._model or self._gateway.name
        )
        return Seat(
            name,
            endpoint,
            seed=seed,
            sampling=Sampling(temperature=temperature),
            min_version=min_version,
            max_answer_tokens=self._max_answer_tokens,
        )

    def _check_answered(self, seat: Seat) -> None:
        """RunFailure when a call got no answer by our fault: whatever the agent made of that says nothing about the policy."""
        if num := seat.episode.tally["failed"]:
            raise RunFailure(Boundary.MODEL, f"{num} model calls of the agent could not be answered")

    def _check_called(self, seat: Seat, said: str = "") -> None:
        if seat.episode.oldest_version is None:
            words = f"; it said last: {said}" if said else ""
            if num := seat.episode.num_calls:
                raise RunFailure(
                    Boundary.HARNESS, f"the agent waited for none of its {num} model calls: look at its own time limits{words}"
                )
            raise RunFailure(Boundary.HARNESS, f"the agent made no model call: point it at OPENAI_BASE_URL or ANTHROPIC_BASE_URL{words}")

    def _played(self, seat: Seat, **facts: Any) -> Played:
        episode = seat.episode
        return Played(
            windows=episode.windows(),
            messages=episode.messages(),
            answer=episode.answer(),
            tally=episode.tally,
            num_untrained=episode.untrained().total(),
            skew=episode.skew(),
            **facts,
        )


class ProgramAgent(_Foreign):
    """`rollout.played.Player` that runs a program per attempt, inside the task's box or beside it."""

    def __init__(
        self,
        program: Program,
        family: TaskFamily,
        gateway: Gateway,
        door: Door,
        sandboxes: SandboxBackend,
        waits: Waits,
        *,
        is_inside: bool,
        model: str = "",
        max_answer_tokens: int | None = None,
        time_s: float = 0.0,
        image: str = "",
        site: str = "",
        memory_bytes: int = 0,
    ) -> None:
        """`max_answer_tokens`: no answer of the policy has more, whatever the agent asks for."""
        super().__init__(gateway, door, model, max_answer_tokens)
        self._program, self._waits, self._is_inside, self._time_s = program, waits, is_inside, time_s
        if not is_inside and (hasattr(family, "machine") or hasattr(family, "setup")):
            raise ValueError(f'tasks of {family.name!r} live in a box of their own; set agent.where = "inside"')

        def machine(task: Task) -> SandboxSpec:
            spec = machine_of(family, task)
            return machine_for(
                spec, gateway=door.address, image=image, site=os.path.abspath(site) if site else "", memory_bytes=memory_bytes
            )

        self._worlds = Worlds(family, sandboxes, machine=machine)

    async def play(self, task: Task, key: str, seat: Seat, *, seed: int, deadline: float) -> Played:
        with seat.taken(self._gateway):
            return await (self._inside if self._is_inside else self._beside)(task, seat, deadline)

    async def _inside(self, task: Task, seat: Seat, deadline: float) -> Played:
        started = time.monotonic()
        with self._waits.of("sandbox", owner="sandbox backend", deadline_s=max(0.0, deadline - started)):
            box = await self._worlds.box(task, lifetime_s=max(1.0, deadline - started + 60.0))
        ready = time.monotonic()
        try:
            endpoint = endpoint_inside(seat.endpoint, seat.name)
            until = self._until(ready, deadline)
            run = await run_inside(self._program, task, endpoint, box, deadline=until)
            stop = self._judge(seat, run, has_limit=until < deadline)
            files = await collect(box)
        finally:
            await box.close()
        return self._played(seat, stop=stop, files=files, facts=_facts(run), timing_s={"agent": run.wall_s, "sandbox": ready - started})

    async def _beside(self, task: Task, seat: Seat, deadline: float) -> Played:
        async with scratch(task) as folders:
            until = self._until(time.monotonic(), deadline)
            run = await run_beside(self._program, task, seat.endpoint, folders, deadline=until)
            stop = self._judge(seat, run, has_limit=until < deadline)
            files = await asyncio.to_thread(folders.files, most=MAX_FILES, limit_bytes=MAX_FILE_BYTES)
        return self._played(seat, stop=stop, files=files, facts=_facts(run), timing_s={"agent": run.wall_s, "sandbox": 0.0})

    def _until(self, started: float, deadline: float) -> float:
        return min(deadline, started + self._time_s) if self._time_s else deadline

    def _judge(self, seat: Seat, run: ProgramRun, *, has_limit: bool) -> StopReason:
        """Why it ended, when that can be graded. `has_limit`: its own time limit comes before the episode's deadline."""
        self._gateway.end_episode(seat.name)  # before anything is judged
        self._check_answered(seat)
        tally = seat.episode.tally
        is_full = tally["context_full"] + tally["full"] + tally["oversized"] > 0
        is_out, is_flood = run.timed_out and has_limit, tally["flooded"] + tally["crowded"] > 0
        if not is_out:
            check_in_time(run)
        if not (is_out or is_full or is_flood):
            # Agents end in many ways when they meet a limit: that is their own doing, whatever the exit code.
            check_exit(self._program, run)
        self._check_called(seat, run.last_words())
        return StopReason.TIME_OUT if is_out else StopReason.MAX_TOKENS if is_full else StopReason.EXITED

    async def close(self) -> None:
        await self._worlds.close()


class RemoteAgent(_Foreign):
    """`rollout.played.Player` that has a service play."""

    def __init__(
        self,
        service: RemoteService,
        gateway: Gateway,
        door: Door,
        *,
        run: str,
        reports: Reports,
        model: str = "",
        max_answer_tokens: int | None = None,
    ) -> None:
        super().__init__(gateway, door, model, max_answer_tokens)
        self._service, self._run, self._reports = service, run, reports
        # A process that takes over after a crash must not find its episodes finished by those of the one before.
        self._process = f"{run}-{secrets.token_hex(4)}"

    async def play(self, task: Task, key: str, seat: Seat, *, seed: int, deadline: float) -> Played:
        started = time.monotonic()
        with seat.taken(self._gateway):
            report = await self._report(task, seat, deadline)
        check_finished(report)
        self._check_answered(seat)
        self._check_called(seat)
        return self._played(
            seat,
            stop=StopReason.EXITED,
            files=report.files,
            facts=report.facts,
            grade=_grade_of(report),
            timing_s={"agent": time.monotonic() - started},
        )

    async def _report(self, task: Task, seat: Seat, deadline: float) -> Report:
        status_url = seat.endpoint.anthropic_url + "/status"
        init = init_of(
            task,
            seat.endpoint,
            run=self._run,
            process=self._process,
            episode=seat.name,
            status_url=status_url,
            status_key=self._reports.key(seat.name),
            deadline=deadline,
        )
        return await self._service.play(init, self._reports, seat.name, deadline=deadline)

    async def close(self) -> None:
        await self._service.close()


def _facts(run: ProgramRun) -> dict[str, Any]:
    """What a grader may want to know of the program: some print their answer."""
    return {"exit_code": run.exit_code, "output": run.output}


def _grade_of(report: Report) -> Grade | None:
    if report.reward is None:
        return None
    success = report.reward > SUCCESS_ABOVE if report.success is None else report.success
    return Grade(reward=report.reward, success=success, parts=report.parts, note=report.note[:MAX_NOTE_CHARS])


def check_machine(able: Capabilities, *, site: str) -> None:
    """ValueError when boxes of this backend cannot hold an agent that calls a model."""
    if not able.egress:
        raise ValueError(
            f'agent.where = "inside" needs a sandbox that lets model calls out, {able.backend!r} does not; '
            'set rollout.sandbox = "namespace", or agent.where = "beside"'
        )
    if site and not able.shares:
        raise ValueError(f"agent.site needs a sandbox that shows folders, {able.backend!r} does not; put the packages into agent.image")
