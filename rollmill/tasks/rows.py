"""Families made of rows: a list of dicts, a JSONL file or a Hugging Face dataset, each row one task, columns kept for the grader.

A row belongs to `train` or `heldout` by a hash of its prompt, so that a data set may grow without a prompt changing sides.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollmill.chat.messages import Call, ChatMessage, ChatRole
from rollmill.harness.toolset import AgentSpec, FunctionTools, Toolset, called
from rollmill.records import Grade, Task
from rollmill.sandbox.interface import Sandbox
from rollmill.tasks.family import SPLITS, Attempt, Family

Row = Mapping[str, Any]
Reward = Callable[[Attempt, Row], Any]
"""(attempt, row) -> a number or a Grade; may be a coroutine. Blocking ones run in a thread."""

Rows = Sequence[Row] | str | Path
"""Rows in memory, anything with `len` and row access by number (a `datasets.Dataset`), or the path of a JSONL file."""


class RowFamily(Family):
    """
    >>> family = RowFamily([{"prompt": "2 + 2 = ?", "answer": "4"}], lambda attempt, row: attempt.answer.strip() == row["answer"])
    >>> family.listed("train")
    [('default', 1, 0)]

    Columns with a meaning: `prompt` (text, or chat messages), and optionally `kind`, `level` (from 1), `files` (path -> text).
    """

    name = "rows"

    def __init__(
        self,
        rows: Rows,
        reward: Reward,
        *,
        name: str = "",
        heldout: Rows | None = None,
        heldout_frac: float = 0.1,
        system: str = "",
        tools: Sequence[str] = (),
        functions: Sequence[Callable[..., Any]] = (),
        strict: bool = True,
        success_at: float = 1.0,
        prompt: str = "prompt",
    ) -> None:
        """`tools`: default tools in a box of the row's `files`. `functions`: Python functions of your own as tools, without a box.
        `strict=False`: their arguments are coerced where that is safe. `success_at`: the reward from which a task counts as solved.
        `prompt`: the column that holds it."""
        if tools and functions:
            raise ValueError("rows have either tools in a box or functions of your own; override `toolset` to have both")
        self.name = name or self.name
        self._reward, self._system, self._tools, self._functions = reward, system, tuple(tools), tuple(functions)
        self._success_at, self._prompt, self._strict = success_at, prompt, strict
        train = read_rows(rows)
        self._tables = {"train": train, "heldout": train if heldout is None else read_rows(heldout)}
        if heldout is None:
            self._numbers = self._divided(train, heldout_frac)
        else:
            self._numbers = {split: list(range(len(table))) for split, table in self._tables.items()}
        known = {str(kind) for table in self._tables.values() for kind in column(table, "kind", "default")}
        self.kinds = tuple(sorted(known)) or ("default",)

    def listed(self, split: str) -> list[tuple[str, int, int]]:
        table = self._tables[split]
        kinds, levels = column(table, "kind", "default"), column(table, "level", 1)
        return [(str(kinds[n]), int(levels[n]), n) for n in self._numbers[split]]

    def make(self, *, kind: str, level: int, seed: int, split: str) -> Task:
        """The task of row number `seed`."""
        if split not in SPLITS:
            raise ValueError(f"there is no split {split!r}; known: {', '.join(SPLITS)}")
        row = self._row(split, seed)
        own = row.get("kind"), row.get("level")
        if ("default" if own[0] is None else str(own[0]), 1 if own[1] is None else int(own[1])) != (kind, level):
            raise ValueError(f"row {seed} of {self.name!r} is not of kind {kind!r} and level {level}; take tasks as `listed` gives them")
        return self.task(
            _words(self.prompt_of(row)), kind=kind, level=level, seed=seed, split=split, files=row.get("files"), tools=self._tools
        )

    def row(self, task: Task) -> Row:
        return self._row(task.split, task.seed)

    def prompt_of(self, row: Row) -> str | list[dict[str, Any]]:
        found = row.get(self._prompt)
        if not isinstance(found, str | list):
            raise ValueError(f"a row of {self.name!r} has no column {self._prompt!r} with text or messages; it has: {', '.join(row)}")
        return found

    def agent(self, task: Task) -> AgentSpec:
        prompt = self.prompt_of(self.row(task))
        if isinstance(prompt, str):
            return AgentSpec(system=self._system, strict=self._strict)
        opening = [message_of(m) for m in prompt]
        if self._system and opening[0].role is not ChatRole.SYSTEM:
            opening.insert(0, ChatMessage(role=ChatRole.SYSTEM, text=self._system))
        return AgentSpec(opening=tuple(opening), strict=self._strict)

    def toolset(self, task: Task, box: Sandbox | None) -> Toolset | None:
        return FunctionTools(self._functions, strict=self._strict) if self._functions else None

    async def grade(self, task: Task, attempt: Attempt) -> Grade:
        found = await called(self._reward, attempt, self.row(task))
        if isinstance(found, Grade):
            return found
        if found is None:
            raise ValueError(f"the reward function returned nothing for {task.task_id}; it must return a number or a Grade")
        return Grade(reward=float(found), success=float(found) >= self._success_at)

    def _row(self, split: str, number: int) -> Row:
        table = self._tables[split]
        if not 0 <= number < len(table):
            raise ValueError(f"{self.name!r} has {len(table)} {split} rows, no row {number}")
        return table[number]

    def _divided(self, table: Sequence[Row], heldout_frac: float) -> dict[str, list[int]]:
        if not 0.0 <= heldout_frac < 1.0:
            raise ValueError(f"heldout_frac {heldout_frac} is not in 0..1")
        places = [_place(p) for p in column(table, self._prompt, "")]
        if len(set(places)) == 1:
            # Environments often share one prompt: their rows differ in other columns.
            places = [_place(dict(table[n])) for n in range(len(table))]
        if len(set(places)) == 1:
            # Nothing tells the rows apart: the environment itself must make every episode another one.
            return {split: list(range(len(table))) for split in SPLITS}
        # A small data set may have none below the limit: its lowest is held out, so that there is always something to judge by.
        limit = max(heldout_frac, min(places) + 1e-12) if heldout_frac > 0 else 0.0
        return {
            "train": [n for n, place in enumerate(places) if place >= limit],
            "heldout": [n for n, place in enumerate(places) if place < limit],
        }


def _place(prompt: Any) -> float:
    """Where a prompt lies in 0..1, evenly spread and the same for ever."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:6], "big") / 2**48


def column(table: Sequence[Row], name: str, default: Any) -> Sequence[Any]:
    names = getattr(table, "column_names", None)
    if names is not None:
        # A data set reads one column at a time, which is far cheaper than row by row.
        found = list(table[name]) if name in names else [None] * len(table)  # type: ignore[call-overload]
    else:
        found = [row.get(name) for row in table]
    return [default if value is None else value for value in found]


def read_rows(rows: Rows) -> Sequence[Row]:
    if isinstance(rows, str | Path):
        found = []
        for number, line in enumerate(Path(rows).read_text().splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{rows} line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{rows} line {number} is no JSON object")
            found.append(row)
        rows = found
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        raise ValueError(f"rows of type {type(rows).__name__} cannot be counted; give a list, e.g. list(rows.take(10_000))")
    if not len(rows):
        raise ValueError("there are no rows; a family needs at least one")
    return rows


def message_of(raw: Mapping[str, Any]) -> ChatMessage:
    """A chat message as data sets hold it."""
    role = "system" if raw.get("role") == "developer" else raw.get("role")
    if role not in set(ChatRole):
        raise ValueError(f"a message of a prompt has the role {role!r}; known: {', '.join(ChatRole)}")
    calls = []
    for number, call in enumerate(raw.get("tool_calls") or ()):
        function = call.get("function") or call
        arguments = function.get("arguments") or {}
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        calls.append(Call(id=call.get("id") or f"call_{number}", name=function["name"], arguments=text))
    return ChatMessage(
        role=ChatRole(role),
        text=_content(raw.get("content")),
        calls=tuple(calls),
        call_id=raw.get("tool_call_id") or "",
        name=raw.get("name") or "",
        reasoning=raw.get("reasoning_content") or "",
    )


def _content(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None for part in content]
    if None in texts:
        raise ValueError("a prompt holds something that is no text; images and audio cannot be trained on")
    return "".join(str(t) for t in texts)


def _words(prompt: str | list[dict[str, Any]]) -> str:
    """What a person reads as the instruction."""
    if isinstance(prompt, str):
        return prompt
    asked = [m for m in prompt if m.get("role") == "user"] or prompt
    return _content(asked[-1].get("content")) if asked else ""
