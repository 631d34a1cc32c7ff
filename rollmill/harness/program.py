"""A program of anybody's as the agent of an episode: what it is told, where it finds the model, and how it ended; it is never changed.

It runs inside the episode's box (`run_inside`) or beside it (`harness.beside`), and knows of us only what its environment says.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping

import msgspec

from rollmill.records import Boundary, RunFailure, Task
from rollmill.sandbox.interface import Sandbox
from rollmill.sandbox.records import Allow, Egress, SandboxSpec

MODEL_HOST = "model.internal"
"""The name by which a box reaches the gateway."""
MODEL_PORT = 80
SITE = "/mnt/view/0"
"""Where a box sees the folder of installed packages."""
TASK_FILE = "/tmp/task.json"
KEPT_BYTES = 64 << 10
"""Of the program's output."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where one episode's agent finds its model."""

    openai_url: str
    """Ends in `/v1`."""
    anthropic_url: str
    """Without `/v1`, which its clients add themselves."""
    key: str
    """Opens this episode and no other."""
    model: str

    def environment(self) -> dict[str, str]:
        """Under the names that clients look at."""
        return {
            "OPENAI_BASE_URL": self.openai_url,
            "OPENAI_API_BASE": self.openai_url,
            "OPENAI_API_KEY": self.key,
            "OPENAI_MODEL": self.model,
            "OPENAI_DEFAULT_MODEL": self.model,
            "ANTHROPIC_BASE_URL": self.anthropic_url,
            "ANTHROPIC_API_KEY": self.key,
            "ANTHROPIC_MODEL": self.model,
            "ANTHROPIC_SMALL_FAST_MODEL": self.model,
        }


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """What to run for every episode."""

    command: tuple[str, ...]
    """`{instruction}`, `{task}` and `{model}` are filled in; other braces are left alone."""
    env: Mapping[str, str] = {}
    stdin: bool = False
    """The instruction is its standard input."""
    graded_exit_codes: tuple[int, ...] = (0,)
    """Empty: all."""

    def argv(self, task: Task, *, task_file: str, model: str) -> list[str]:
        filled = {"{instruction}": task.instruction, "{task}": task_file, "{model}": model}
        return [_fill(word, filled) for word in self.command]

    def input(self, task: Task) -> bytes:
        return task.instruction.encode() if self.stdin else b""


class ProgramRun(msgspec.Struct, frozen=True, kw_only=True):
    exit_code: int
    """-N when signal N ended it."""
    output: str
    """The end of what it printed, both streams together."""
    timed_out: bool
    """It was still running at the deadline, and was killed."""
    wall_s: float

    def last_words(self) -> str:
        return " ".join(self.output.split())[-300:] or "nothing"


def task_facts(task: Task) -> bytes:
    """The file at `ROLLMILL_TASK`. Neither the seed nor anything else the answer could be derived from."""
    metadata = {"family": task.family, "kind": task.kind, "level": task.level, "split": task.split}
    return json.dumps({"task_id": task.task_id, "instruction": task.instruction, "metadata": metadata}, ensure_ascii=False).encode()


def machine_for(spec: SandboxSpec, *, gateway: str, image: str = "", site: str = "", memory_bytes: int = 0) -> SandboxSpec:
    """The box of a task with a way to the gateway at `gateway` (`address:port` on this machine) and, if given, the agent's packages."""
    door = Allow(host=MODEL_HOST, port=MODEL_PORT, upstream=gateway)
    egress = Egress(allow=(door,)) if spec.egress is None else msgspec.structs.replace(spec.egress, allow=(*spec.egress.allow, door))
    shares, env = ((site, *spec.shares), {**spec.env, "PYTHONPATH": SITE}) if site else (spec.shares, spec.env)
    return msgspec.structs.replace(
        spec, egress=egress, shares=shares, env=env, image=image or spec.image, memory_bytes=max(memory_bytes, spec.memory_bytes)
    )


def endpoint_inside(endpoint: Endpoint, episode: str) -> Endpoint:
    """The same, by the names that hold inside a box."""
    root = f"http://{MODEL_HOST}/e/{episode}"
    return msgspec.structs.replace(endpoint, openai_url=f"{root}/v1", anthropic_url=root)


async def run_inside(program: Program, task: Task, endpoint: Endpoint, box: Sandbox, *, deadline: float) -> ProgramRun:
    """In the box, as its user, in its working directory; killed at `deadline` (`time.monotonic()`)."""
    env = {**endpoint.environment(), "ROLLMILL_TASK": TASK_FILE, **program.env}
    argv = program.argv(task, task_file=TASK_FILE, model=endpoint.model)
    try:
        await box.write(TASK_FILE, task_facts(task))
        result = await box.exec(
            argv, timeout_s=max(0.01, deadline - time.monotonic()), stdin=program.input(task), env=env, max_output_bytes=KEPT_BYTES
        )
    except ValueError as error:
        # A zero byte or half a character: no command line and no file can hold it.
        raise RunFailure(Boundary.TASK, f"{task.task_id} cannot be told to a program: {error}") from error
    output = result.stdout.decode("utf-8", "replace")
    return ProgramRun(exit_code=result.exit_code, output=output, timed_out=result.timed_out, wall_s=result.wall_s)


def check_in_time(run: ProgramRun) -> None:
    if run.timed_out:
        raise TimeoutError(f"the agent was still running after {run.wall_s:.0f} s and was killed")


def check_exit(program: Program, run: ProgramRun) -> None:
    """RunFailure when its exit code says that it did not work."""
    if program.graded_exit_codes and run.exit_code not in program.graded_exit_codes:
        codes = ", ".join(map(str, program.graded_exit_codes))
        raise RunFailure(
            Boundary.HARNESS,
            f"the agent {program.command[0]!r} ended with {run.exit_code}, graded are {codes} (agent.graded_exit_codes); "
            f"it said last: {run.last_words()}",
        )


def _fill(word: str, filled: Mapping[str, str]) -> str:
    """In one pass: an instruction that holds `{model}` is not filled in itself."""
    return re.sub("|".join(map(re.escape, filled)), lambda found: filled[found.group()], word)
