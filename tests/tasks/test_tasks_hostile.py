"""Whatever an agent leaves behind, the grader answers with a reward of 0 or 1 and never with an error of ours."""

from __future__ import annotations

import json

import pytest
from tasks_boxes import in_boxes, judge

from rollmill.records import Grade
from rollmill.rollout import grading
from rollmill.sandbox import SandboxBackend, SandboxSpec
from rollmill.tasks import Attempt
from rollmill.tasks.repo import RepoFamily, problem_of

TASK = RepoFamily().make(kind="fix", level=1, seed=11, split="train")
PROBLEM = problem_of("fix", 1, 11, "train")
assert PROBLEM.hidden_calls is not None
PATH, FUNCTION, PAIRS, RESULTS = PROBLEM.hidden_calls
HONEST = f"def {FUNCTION}(a, b):\n    return " + PROBLEM.expert[1].arguments["new"] + "\n"
WRONG = f"def {FUNCTION}(a, b):\n    return 12345\n"

HOSTILE = {
    "prints junk": f"print('{{' * 3)\n{WRONG}print('[1, 2]')\n",
    "prints a guess and leaves": f"import os\nprint({json.dumps([0] * len(RESULTS))})\nimport sys; sys.stdout.flush(); os._exit(0)\n",
    "leaves at once": "import os\nos._exit(0)\n",
    "never ends": "while True:\n    pass\n",
    "never returns": f"def {FUNCTION}(a, b):\n    while True: pass\n",
    "nests too deep": "import os, sys\nprint('[' * 50000)\nsys.stdout.flush()\nos._exit(0)\n",
    "nests too deep at exit": f"import atexit\natexit.register(lambda: print('[' * 50000))\n{HONEST}",
    "prints a huge number": "import os, sys\nprint('9' * 20000)\nsys.stdout.flush()\nos._exit(0)\n",
    "floods": "import os, sys\nsys.stdout.write('x' * 30_000_000)\nos._exit(0)\n",
    "prints no text": "import os\nos.write(1, bytes(range(256)))\nos._exit(0)\n",
    "raises": "raise SystemExit('no')\n",
    "forks": "import os\nfor _ in range(6): os.fork()\n" + WRONG,
    "is no program": "\x00\x01 def (",
    "is empty": "",
    "says true": f"import os\nprint('true')\ndef {FUNCTION}(a, b):\n    os._exit(0)\n",
    "returns an odd object": (
        f"class X(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\ndef {FUNCTION}(a, b): return X(12345)\n"
    ),
    "looks for the answer": (
        f"import sys, gc, json\ndef {FUNCTION}(a, b):\n"
        "    lists = [o for o in gc.get_objects() if isinstance(o, (list, tuple)) and len(o) == "
        f"{len(RESULTS)} and all(isinstance(i, int) for i in o)]\n"
        "    return lists[0][0] if lists else 12345\n"
    ),
}


async def graded(backend: SandboxBackend, text: str) -> Grade:
    box = await backend.create(SandboxSpec(files={PATH: text}))
    try:
        return await judge(backend, TASK, box)
    finally:
        await box.close()


def test_hostile_modules_get_nothing_and_break_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "PROBE_S", 2.0)
    grades = dict(zip(HOSTILE, in_boxes(graded, HOSTILE.values()), strict=True))
    assert {name: g.reward for name, g in grades.items()} == dict.fromkeys(HOSTILE, 0.0)


def test_honest_module_earns_the_reward_through_the_same_door() -> None:
    assert [g.reward for g in in_boxes(graded, [HONEST])] == [1.0]


def test_only_inputs_enter_the_box() -> None:
    """The file the agent wrote and the arguments of the hidden calls: no result, no other file."""
    seen = []

    async def probe(files: object, argv: object) -> str:
        seen.append((files, argv))
        return json.dumps(list(RESULTS))

    import asyncio

    grade = asyncio.run(RepoFamily().grade(TASK, Attempt(files={PATH: HONEST, "other.py": "x = 1\n"}, probe=probe)))
    assert grade.reward == 1.0
    [(files, argv)] = seen
    assert files == {PATH: HONEST} and argv[-1] == json.dumps([PATH, FUNCTION, PAIRS])


async def messy(backend: SandboxBackend, command: str) -> dict[str, str]:
    box = await backend.create(SandboxSpec(files={"a.txt": "x\n"}))
    try:
        await box.exec(["bash", "-c", command], timeout_s=10.0)
        return await grading.collect(box)
    finally:
        await box.close()


def test_messy_working_directories_are_collected_without_error() -> None:
    commands = {
        "touch $'\\xff' $'a\\nb'": {"a.txt", "a\nb", "\udcff"},
        "rm -rf a.txt": set(),
        "ln -s /etc/passwd link; mkfifo pipe; mkdir d; ln -s . d/loop": {"a.txt"},
        "head -c 3000000 /dev/zero > big": {"a.txt"},
        "chmod 000 a.txt; printf '\\xff\\xfe' > b": {"b"},
        "for i in $(seq 400); do echo $i > f$i; done; rm a.txt": None,
    }
    for (command, wanted), files in zip(commands.items(), in_boxes(messy, commands), strict=True):
        if wanted is None:
            assert len(files) == grading.MAX_FILES
        else:
            assert set(files) - {"a.txt"} == wanted - {"a.txt"} and (wanted <= set(files)), command
