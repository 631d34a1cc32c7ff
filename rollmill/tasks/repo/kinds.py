"""The kinds of micro-repository problem: how each is built, solved, botched and judged.

A kind gives a `Problem`: its world, what a finished world must look like, and two ways of playing it, an expert's and a
novice's, written as tool calls with the results the real tools would give. A test runs them through the real tools.
Difficulty `level` sets how much there is to handle: files, functions, lines, and from level 2 on more operations.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rollmill.tasks.repo.words import draw

NO_OUTPUT = "(no output)"


@dataclass(frozen=True, kw_only=True)
class Play:
    """One tool call of a scripted trace and the result the real tool gives."""

    tool: str
    arguments: Mapping[str, str]
    result: str = ""


@dataclass(frozen=True, kw_only=True)
class Problem:
    instruction: str
    files: Mapping[str, str]
    expected: Mapping[str, str] = field(default_factory=dict)
    """path -> text the finished world must hold, compared without surrounding white space."""
    absent: tuple[str, ...] = ()
    """Paths that must be gone."""
    hidden_calls: tuple[str, str, tuple[tuple[int, int], ...], tuple[int, ...]] | None = None
    """(file, function, arguments, results): hidden tests for a function; only file, function and arguments enter a box."""
    expert: tuple[Play, ...]
    novice: tuple[Play, ...]


def bash(command: str, result: str = NO_OUTPUT) -> Play:
    return Play(tool="bash", arguments={"command": command}, result=result)


def read(path: str, result: str) -> Play:
    return Play(tool="read", arguments={"path": path}, result=result)


def write(path: str, content: str) -> Play:
    return Play(tool="write", arguments={"path": path, "content": content}, result="ok")


def edit(path: str, old: str, new: str, result: str = "ok") -> Play:
    return Play(tool="edit", arguments={"path": path, "old": old, "new": new}, result=result)


SUBMIT = Play(tool="submit", arguments={})

OPERATIONS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "the sum of a and b": ("a + b", lambda a, b: a + b),
    "the product of a and b": ("a * b", lambda a, b: a * b),
    "the difference of a and b": ("a - b", lambda a, b: a - b),
    "the larger of a and b": ("max(a, b)", max),
    "the smaller of a and b": ("min(a, b)", min),
}


def fix(rng: random.Random, level: int) -> Problem:
    """Mend a function that computes the wrong thing; judged by hidden calls."""
    module, name, *others = draw(rng, 1 + level)
    wanted = rng.choice(list(OPERATIONS)[: 3 if level == 1 else None])
    right, compute = OPERATIONS[wanted]
    (_, (wrong, _)), *spare = rng.sample([o for o in OPERATIONS.items() if o[0] != wanted], 1 + len(others))
    functions = [(name, wrong), *((o, s[1][0]) for o, s in zip(others, spare, strict=True))]
    rng.shuffle(functions)
    path = f"{module}.py"
    text = "\n".join(f"def {f}(a, b):\n    return {body}\n" for f, body in functions)
    say = rng.choice(["fix {f} in {p}, it must return {w}", "{f} in {p} is wrong, it must return {w}"])
    pairs = (*((rng.randint(-20, 20), rng.randint(-20, 20)) for _ in range(6)), (3, 5), (5, 3), (2, 2))
    look, mend = read(path, text), edit(path, wrong, right)
    guess = rng.choice([e for e, _ in OPERATIONS.values() if e != right and e not in text])
    botched = rng.choice(
        [
            (look, edit(path, wrong, rng.choice([e for e, _ in OPERATIONS.values() if e not in (right, wrong)])), SUBMIT),
            (look, SUBMIT),
            (edit(path, guess, right, f"error: old text not found in {path}"), SUBMIT),
        ]
    )
    return Problem(
        instruction=say.format(f=name, p=path, w=wanted),
        files={path: text},
        hidden_calls=(path, name, pairs, tuple(compute(a, b) for a, b in pairs)),
        expert=(look, mend, SUBMIT),
        novice=botched,
    )


AGGREGATES: dict[str, tuple[str, Callable[[list[int]], int]]] = {
    "the sum of the numbers": ("cat {f} | awk '{{s+=$1}} END {{print s}}' > {o}", sum),
    "the largest number": ("cat {f} | sort -n | tail -n 1 > {o}", max),
    "the smallest number": ("cat {f} | sort -n | head -n 1 > {o}", min),
    "the count of numbers": ("cat {f} | wc -l > {o}", len),
}


def aggregate(rng: random.Random, level: int) -> Problem:
    """Combine the numbers of several files into one."""
    *sources, target = draw(rng, 2 + level)
    paths, out = [f"{s}.txt" for s in sources], f"{target}.txt"
    numbers = {p: [rng.randint(1, 99) for _ in range(rng.randint(2, 2 + 2 * level))] for p in paths}
    wanted = rng.choice(list(AGGREGATES)[: 2 if level == 1 else None])
    command, combine = AGGREGATES[wanted]
    answer = combine([n for p in paths for n in numbers[p]])
    files = {p: "".join(f"{n}\n" for n in ns) for p, ns in numbers.items()}
    do = bash(command.format(f=" ".join(paths), o=out))
    other_command, _ = rng.choice([a for name, a in AGGREGATES.items() if name != wanted])
    botched = rng.choice(
        [
            (bash(command.format(f=rng.choice(paths), o=out)), SUBMIT),
            (bash(other_command.format(f=" ".join(paths), o=out)), SUBMIT),
            (read(paths[0], files[paths[0]]), SUBMIT),
        ]
    )
    check = (read(out, f"{answer}\n"),) if rng.random() < 0.5 else ()
    return Problem(
        instruction=f"write {wanted} in {' and '.join(paths)} to {out}",
        files=files,
        expected={**files, out: str(answer)},
        expert=(do, *check, SUBMIT),
        novice=botched,
    )


def rename(rng: random.Random, level: int) -> Problem:
    """Give a function a new name in every file that uses it."""
    old, new, *modules = draw(rng, 3 + level)
    paths = [f"{m}.py" for m in modules]
    lines = [f"def {old}(a):", f"    return {old}(a) + {old}(1)", f"print({old}(2))", "x = 1"]
    files = {p: "".join(f"{rng.choice(lines[:3])}\n" for _ in range(level)) + f"{rng.choice(lines)}\n" for p in paths}
    botched = rng.choice(
        [
            (bash(f"sed -i 's/{old}/{new}/g' {rng.choice(paths)}"), SUBMIT),
            (bash(f"sed -i 's/{new}/{old}/g' *.py"), SUBMIT),
            (read(paths[0], files[paths[0]]), SUBMIT),
        ]
    )
    return Problem(
        instruction=f"rename {old} to {new} in all .py files",
        files=files,
        expected={p: t.replace(old, new) for p, t in files.items()},
        expert=(bash(f"sed -i 's/{old}/{new}/g' *.py"), SUBMIT),
        novice=botched,
    )


def count(rng: random.Random, level: int) -> Problem:
    """Count the lines of a log that mention a word."""
    log, out, *words = draw(rng, 5)
    path, target = f"{log}.log", f"{out}.txt"
    lines = [rng.choice(words) for _ in range(3 + 2 * level)]
    word = rng.choice(lines)
    text = "".join(f"{line}\n" for line in lines)
    answer = lines.count(word)
    botched = rng.choice(
        [
            (bash(f"grep {word} {path} > {target}"), SUBMIT),
            (bash(f"grep -c {word} {path}", f"{answer}\n"), SUBMIT),
            (read(path, text), SUBMIT),
        ]
    )
    return Problem(
        instruction=f"write how many lines of {path} contain {word} to {target}",
        files={path: text},
        expected={path: text, target: str(answer)},
        expert=(bash(f"grep -c {word} {path} > {target}"), SUBMIT),
        novice=botched,
    )


def configure(rng: random.Random, level: int) -> Problem:
    """Change one setting of a file and leave the others alone."""
    name, *keys = draw(rng, 3 + level)
    path = f"{name}.cfg"
    numbers = range(1, 10 if level == 1 else 100)
    values = dict(zip(keys, rng.sample(numbers, len(keys)), strict=True))
    key = rng.choice(keys)
    new = rng.choice([n for n in numbers if n not in values.values()])
    text = "".join(f"{k} = {v}\n" for k, v in values.items())
    look, mend = read(path, text), bash(f"sed -i 's/{key} = .*/{key} = {new}/' {path}")
    wrong = rng.choice([n for n in numbers if n not in (new, values[key])])
    botched = rng.choice(
        [
            (bash(f"sed -i 's/{key} = .*/{key} = {wrong}/' {path}"), SUBMIT),
            (write(path, f"{key} = {new}\n"), SUBMIT),
            (look, SUBMIT),
        ]
    )
    return Problem(
        instruction=f"set {key} to {new} in {path}",
        files={path: text},
        expected={path: text.replace(f"{key} = {values[key]}\n", f"{key} = {new}\n")},
        expert=(look, mend, SUBMIT) if rng.random() < 0.5 else (mend, SUBMIT),
        novice=botched,
    )


def move(rng: random.Random, level: int) -> Problem:
    """Move files into a folder that is not there yet."""
    folder, content, *names = draw(rng, 2 + level)
    paths = [f"{n}.txt" for n in names]
    files = {p: f"{content}\n" for p in paths}
    listed = " ".join(paths)
    do = bash(f"mkdir -p {folder} && mv {listed} {folder}/")
    botched = rng.choice(
        [
            (bash(f"mkdir -p {folder} && cp {listed} {folder}/"), SUBMIT),
            (bash(f"mkdir -p {folder}"), SUBMIT),
            (bash("ls", "".join(f"{p}\n" for p in sorted(paths))), SUBMIT),
        ]
    )
    return Problem(
        instruction=f"move {' and '.join(paths)} into the folder {folder}",
        files=files,
        expected={f"{folder}/{p}": t for p, t in files.items()},
        absent=tuple(paths),
        expert=(do, SUBMIT),
        novice=botched,
    )


def note(rng: random.Random, level: int) -> Problem:
    """Create a file with a given text beside one that must stay."""
    name, kept, *words = draw(rng, 4 + level)
    path, other = f"{name}.txt", f"{kept}.txt"
    text = " ".join(words)
    files = {other: f"{rng.choice(words)}\n"}
    botched = rng.choice(
        [
            (write(path, " ".join(words[:-1]) + "\n"), SUBMIT),
            (write(other, text + "\n"), SUBMIT),
            (read(other, files[other]), SUBMIT),
        ]
    )
    return Problem(
        instruction=f"create {path} with the text {text}",
        files=files,
        expected={**files, path: text},
        expert=(write(path, text + "\n"), SUBMIT),
        novice=botched,
    )


KINDS: dict[str, Callable[[random.Random, int], Problem]] = {
    "fix": fix,
    "aggregate": aggregate,
    "rename": rename,
    "count": count,
    "configure": configure,
    "move": move,
    "note": note,
}

PROBE = """
import json, runpy, sys
path, function, pairs = json.loads(sys.argv[1])
f = runpy.run_path(path)[function]
print(json.dumps([f(a, b) for a, b in pairs]))
"""


def probe_argv(problem: Problem) -> list[str]:
    assert problem.hidden_calls is not None
    path, function, pairs, _ = problem.hidden_calls
    return ["python3", "-I", "-c", PROBE, json.dumps([path, function, pairs])]
