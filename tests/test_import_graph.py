"""Dependencies point downwards only, and what a rollout process needs does not drag torch in: read from the source, and tried."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rollmill"

ALLOWED: dict[str, tuple[str, ...]] = {
    "records": (),
    "algorithms": (),
    "config": ("records", "algorithms"),
    "telemetry": ("records",),
    "web": (),
    "ledger": ("records",),
    "weights": ("records",),
    "ops": ("records", "weights.quant"),
    "model": ("records", "ops"),
    "sandbox": ("records",),
    "chat": ("records", "model.tokenizer", "engine.protocol"),
    "tasks": ("records", "chat.messages", "harness.toolset", "sandbox.interface", "sandbox.records"),
    "engine": ("records", "web", "ops", "model", "weights"),
    "adapters": ("records", "weights", "model.route_record", "engine.protocol", "engine.client"),
    "gateway": ("records", "telemetry", "web", "chat", "model.tokenizer", "model.route_record", "engine.protocol", "engine.client"),
    "harness": ("records", "telemetry", "chat", "gateway", "model.tokenizer", "sandbox"),
    "rollout": (
        *("records", "config", "telemetry", "web", "chat", "gateway", "harness", "sandbox", "tasks", "ledger", "model"),
        *("engine.protocol", "engine.client"),
    ),
    "trackers": (),
    "tinker": ("trainer", "model", "engine", "weights", "web", "ops"),
    "trainer": ("records", "algorithms", "config", "telemetry", "ops", "model", "weights", "ledger"),
}
"""Part -> what it may import besides itself; `fleet`, `bench` and `cli` stand on top and may import anything but `cli`."""

TOP = ("fleet", "bench", "numerics", "cli")

WITHOUT_TORCH = (
    "records config telemetry web ledger sandbox engine.protocol engine.client tasks tasks.repo harness.tools gateway.sessions.session "
    "gateway harness rollout.dispatcher rollout.role model.tokenizer model.route_record chat.format chat.check gateway.front.server "
    "adapters.vllm adapters.sglang adapters.own"
).split()


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def imported(path: Path) -> set[str]:
    """Every module of the package that this file imports anywhere, functions and type-checking blocks included."""
    name, found = module_name(path), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name if path.name == "__init__.py" else name.rpartition(".")[0]
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            found |= {f"{base}.{alias.name}" if is_module(f"{base}.{alias.name}") else base for alias in node.names}
    return {f for f in found if f == "rollmill" or f.startswith("rollmill.")}


def is_within(module: str, part: str) -> bool:
    return module == f"rollmill.{part}" or module.startswith(f"rollmill.{part}.")


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: module_name(p))
def test_module_imports_only_what_lies_below_it(path: Path) -> None:
    part = [*module_name(path).split("."), ""][1]
    if not part:
        assert imported(path) == set()
        return
    assert part in ALLOWED or part in TOP, f"part {part!r} has no place in the graph yet: add it to ALLOWED"
    for module in imported(path):
        if part in TOP:
            assert not is_within(module, "cli") or part == "cli", f"{module_name(path)} imports {module}"
        else:
            assert any(is_within(module, p) for p in (part, *ALLOWED[part])), f"{module_name(path)} imports {module}"


def test_reader_of_imports_sees_functions_and_relative_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    file = tmp_path / "rollmill" / "ledger" / "x.py"
    file.parent.mkdir(parents=True)
    (tmp_path / "rollmill" / "trainer.py").write_text("")
    file.write_text("def f():\n    import rollmill.weights\n    from .. import trainer\n    from . import rows\nimport os\n")
    assert imported(file) == {"rollmill.weights", "rollmill.trainer", "rollmill.ledger"}


def test_rollout_side_is_importable_without_torch() -> None:
    code = (
        "import sys\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'triton', 'safetensors'): raise ImportError(f'{name} is blocked')\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        "import importlib\n"
        f"for name in {WITHOUT_TORCH!r}:\n"
        "    importlib.import_module('rollmill.' + name)\n"
        "print('fine')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "fine\n", done.stderr
