"""The pages tell the truth where a machine can check it: links, run-file keys and defaults, verbs, metrics, and the code blocks."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

from rollmill.cli import app
from rollmill.config import RunConfig, known_keys
from rollmill.trainer.learn import METRICS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUNNABLE = (
    "environments.md",
    "formats/calls.md",
    "gateway.md",
    "harness.md",
    "models.md",
    "sessions.md",
    "stages.md",
    "trackers.md",
    "tasks.md",
    "templates.md",
    "trainer.md",
    "weights.md",
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
by_name = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: Path, language: str) -> list[str]:
    return [body for found, body in BLOCK.findall(page.read_text()) if found == language]


def verbs() -> set[str]:
    """Every command a person can type, as `weights log`."""
    found = set()
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        found |= {f"{name} {verb}" for verb in inner} if inner else {name}
    return found


@by_name
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    prose = BLOCK.sub("", page.read_text())
    targets = [t.partition("#")[0] for t in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in t]
    assert [t for t in targets if t and not (page.parent / t).exists()] == []


@by_name
def test_every_toml_block_is_a_valid_run_file(page: Path) -> None:
    for block in blocks(page, "toml"):
        RunConfig.model_validate(tomllib.loads(block))


@by_name
def test_every_python_block_compiles(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("name", RUNNABLE)
def test_the_python_blocks_of_a_page_run(name: str) -> None:
    found = blocks(ROOT / "docs" / name, "python")
    assert found
    done = subprocess.run([sys.executable, "-c", "\n".join(found)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_every_run_file_key_is_documented_with_its_default() -> None:
    text = (ROOT / "docs" / "runfile.md").read_text()
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (\S.*?) \| \S", text, re.MULTILINE))
    values = RunConfig.model_validate({"model": {"path": "x"}}).model_dump(mode="json")
    for key in known_keys():
        section, _, name = key.partition(".")
        if not name:
            assert f"\n## [{section}]\n" in text, f"runfile.md has no section [{section}]"
            continue
        is_required = RunConfig.model_fields[section].annotation.model_fields[name].is_required()  # type: ignore[union-attr]
        assert rows.pop(key, "not documented") == ("required" if is_required else f"`{json.dumps(values[section][name])}`"), key
    assert rows == {}, "runfile.md documents keys that do not exist"


def test_the_readme_names_every_verb_and_no_other() -> None:
    table = re.findall(r"^\| `rollmill ([a-z ]+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {words.strip() for words in table} == verbs()


@by_name
def test_every_command_line_on_a_page_names_a_real_verb(page: Path) -> None:
    for found in re.findall(r"(?:\.venv/bin/|`)rollmill ([a-z]+(?: [a-z]+)?)", page.read_text()):
        words = found.split()
        assert words[0] in verbs() or " ".join(words) in verbs(), f"rollmill {found}"


def test_every_metric_written_is_documented() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    kinds = "reward|staleness|timing_s|perf|weights|rollout|engine|mm|route|corr|pol|loss|grad"
    written = set(METRICS)
    for module in ("trainer/loop.py", "trainer/learn.py", "rollout/dispatcher.py"):
        written |= set(re.findall(rf'"((?:{kinds})/\w+)":', (ROOT / "rollmill" / module).read_text()))
    assert len(written) > 40
    assert sorted(name for name in written if f"`{name}`" not in text) == []
