"""The frozen records that cross a process boundary, with their schema numbers.

Knows no other module of the package: every other module may import this one.

Life cycles (one owner changes each state; `ledger` refuses every other transition):

    episode   QUEUED -> RUNNING -> GRADED | FAILED(boundary) | CANCELLED(reason)      owner: rollout
    group     OPEN -> READY | DROPPED(reason)                                         owner: rollout
              READY -> ADMITTED -> TRAINED | DROPPED(reason)                          owner: trainer
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
import numpy as np

TRACE_SCHEMA = 1
TASK_SCHEMA = 1


class Role(StrEnum):
    """A process of a run."""

    TRAINER = "trainer"
    ENGINE = "engine"
    ROLLOUT = "rollout"
    COMPACTOR = "compactor"
    SUPERVISOR = "supervisor"


class EpisodeState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    GRADED = "graded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class GroupState(StrEnum):
    OPEN = "open"
    READY = "ready"
    ADMITTED = "admitted"
    TRAINED = "trained"
    DROPPED = "dropped"


class Boundary(StrEnum):
    """Where an episode failed. A failure is never a reward."""

    MODEL = "model"
    HARNESS = "harness"
    SANDBOX = "sandbox"
    GRADER = "grader"
    TASK = "task"


class CancelReason(StrEnum):
    STALE = "stale"
    """The group's oldest token fell behind by more than `max_staleness` versions."""
    DEADLINE = "deadline"
    """The episode outlived its deadline."""
    OVERLOAD = "overload"
    """The concurrency limit shrank and this was the youngest episode."""
    SHUTDOWN = "shutdown"
    """The run was asked to stop."""
    PROCESS_DIED = "process_died"
    """The rollout process died while the episode ran."""
    GROUP_DROPPED = "group_dropped"
    """The group had been dropped already."""


class DropReason(StrEnum):
    STALE = "stale"
    TOO_FEW_VALID = "too_few_valid"
    CORRUPT_BLOB = "corrupt_blob"


class StopReason(StrEnum):
    """Why an episode ended. Every one of them is graded: running out of budget is the agent's own doing."""

    SUBMITTED = "submitted"
    ANSWERED = "answered"
    """A reply without a tool call, where none is needed."""
    EXITED = "exited"
    """A foreign agent ended by itself."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    """The episode's token budget or the model's context is used up."""
    BAD_CALLS = "bad_calls"
    """Too many replies that are no valid tool call."""
    TIME_OUT = "time_out"
    """The agent's tools used up the episode's time. Its own doing, so it is graded; a slow machine of ours is not."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One problem. The answer is not in here: the grader derives it again from (family, kind, level, seed).

    >>> Task(task_id="repo/fix/1/17", family="repo", kind="fix", level=1, seed=17, split="train",
    ...      instruction="fix add in calc.py", files={"calc.py": "def add(a, b):\\n    return a - b\\n"}).kind
    'fix'
    """

    schema: int = TASK_SCHEMA
    task_id: str
    """Unique within a run's task source, e.g. `repo/fix/1/17`."""
    family: str
    """Who generates and grades it."""
    kind: str
    """The sort of problem within the family."""
    level: int
    """Difficulty, from 1."""
    seed: int
    """What the generator was seeded with."""
    split: str
    """`train` or `heldout`; the two never share a seed."""
    instruction: str
    """What the agent is told."""
    files: dict[str, str]
    """The initial world: path below the working directory -> text."""
    tools: tuple[str, ...] = ("bash", "read", "write", "edit", "submit")
    """The tools the agent may call."""


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """What the grader decided about one episode."""

    reward: float
    """What the trainer compares within the group; finite."""
    success: bool
    """Whether the task counts as solved on the success curve."""
    parts: dict[str, float] = {}
    """Named components of the reward, for people."""
    note: str = ""
    """One line that says why."""
    role: str = ""
    """The part that the episode played in a group of several agents; only episodes of the same role are compared."""
    environment: str = ""
    """Version of the environment, where it can change during a run; only episodes of the same one are compared."""
    chain_root: str = ""
    """The state that the episode was forked from; only episodes from the same one are compared."""


class SourceSpan(msgspec.Struct, frozen=True, array_like=True):
    """The sampled tokens within [start, end) came from this replica; context between its turns may lie in the span too."""

    start: int
    end: int
    replica: str


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """One context window of a trace, as flat arrays of equal length T, exactly as the replica saw and sampled it.

    >>> w = Window.of(tokens=[5, 6, 7], sampled=[0, 1, 1], logprobs=[0.0, -0.5, -0.1], versions=[-1, 3, 3])
    >>> w.num_tokens, w.versions_T.tolist()
    (3, [-1, 3, 3])
    """

    parent: int | None = None
    """Index of the window this one was forked from, or None for the root."""
    tokens: bytes
    """int32[T] little-endian: token ids."""
    sampled: bytes
    """uint8[T]: 1 where the policy sampled the token and it is trained here; 0 for context."""
    logprobs: bytes
    """float32[T]: the sampler's logprob of each sampled token; 0 for context."""
    versions: bytes
    """int32[T]: the weight version stamped by the replica on each sampled token; -1 for context."""
    routes: bytes = b""
    """The experts of every token as a routing record of T rows (docs/formats/routes.md); empty when none was asked for."""
    sources: tuple[SourceSpan, ...] = ()
    """Who sampled, in order and without overlap; empty when not known."""
    stale: tuple[tuple[int, int], ...] = ()
    """[start, end) of sampled tokens whose context was in part computed by older weights: a swap that kept the replica's cache."""

    @classmethod
    def of(
        cls,
        *,
        tokens: list[int],
        sampled: list[int],
        logprobs: list[float],
        versions: list[int],
        parent: int | None = None,
        routes: bytes = b"",
        sources: tuple[SourceSpan, ...] = (),
        stale: tuple[tuple[int, int], ...] = (),
    ) -> Window:
        assert len(tokens) == len(sampled) == len(logprobs) == len(versions)
        return cls(
            parent=parent,
            tokens=np.asarray(tokens, "<i4").tobytes(),
            sampled=np.asarray(sampled, "u1").tobytes(),
            logprobs=np.asarray(logprobs, "<f4").tobytes(),
            versions=np.asarray(versions, "<i4").tobytes(),
            routes=routes,
            sources=sources,
            stale=stale,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.sampled)

    @property
    def tokens_T(self) -> np.ndarray:
        return np.frombuffer(self.tokens, "<i4")

    @property
    def sampled_T(self) -> np.ndarray:
        return np.frombuffer(self.sampled, "u1")

    @property
    def logprobs_T(self) -> np.ndarray:
        return np.frombuffer(self.logprobs, "<f4")

    @property
    def versions_T(self) -> np.ndarray:
        return np.frombuffer(self.versions, "<i4")

    def check(self) -> None:
        """Raise ValueError when the arrays contradict each other."""
        n = self.num_tokens
        if not (len(self.tokens) == len(self.logprobs) == len(self.versions) == 4 * n):
            sizes = f"{len(self.tokens)}, {len(self.logprobs)}, {len(self.versions)} bytes"
            raise ValueError(f"window arrays disagree on their length: {sizes} for {n} tokens")
        if n and int(self.tokens_T.min()) < 0:
            raise ValueError(f"a window holds the token id {int(self.tokens_T.min())}")
        mask = self.sampled_T != 0
        if n and mask[0]:
            raise ValueError("a window starts with a sampled token, which nothing could have predicted")
        if mask.any() and int(self.versions_T[mask].min()) < 0:
            raise ValueError("a sampled token carries no weight version")
        for name, spans in (("sources", [(s.start, s.end) for s in self.sources]), ("stale", self.stale)):
            edges = [edge for span in spans for edge in span]
            if edges and (edges != sorted(edges) or edges[0] < 0 or edges[-1] > n):
                raise ValueError(f"a window's {name} {edges} are not spans in order within its {n} tokens")


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """The token-exact record of one episode: its context windows and, for people, the conversation."""

    schema: int = TRACE_SCHEMA
    episode_id: str
    windows: tuple[Window, ...]
    messages: tuple[dict, ...] = ()
    """The conversation as chat messages, for the viewer; never re-tokenised for training."""
    stop: StopReason
    timing_s: dict[str, float] = {}
    """Seconds spent per named wait: model, tool, sandbox, grade."""

    @property
    def num_sampled(self) -> int:
        return sum(int(w.sampled_T.sum()) for w in self.windows)

    def version_range(self) -> tuple[int, int]:
        """(oldest, newest) weight version over all sampled tokens; (-1, -1) when nothing was sampled."""
        spans = [w.versions_T[w.sampled_T != 0] for w in self.windows]
        flat = np.concatenate(spans) if spans else np.empty(0, np.int32)
        return (int(flat.min()), int(flat.max())) if flat.size else (-1, -1)


class BlobRef(msgspec.Struct, frozen=True, kw_only=True):
    """A content address in the run's blob folder."""

    digest: str
    """BLAKE3 of the stored bytes, hex."""
    num_bytes: int


class RunFailure(Exception):
    """A failure of our own machinery, attributed to one boundary. It is recorded and retried, never scored."""

    def __init__(self, boundary: Boundary, message: str) -> None:
        super().__init__(f"{boundary}: {message}")
        self.boundary = boundary
        self.message = message


def encode(record: msgspec.Struct) -> bytes:
    """The wire form of a record: MessagePack with field names."""
    return msgspec.msgpack.encode(record)
