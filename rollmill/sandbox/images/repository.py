"""A git checkout at exactly one commit: its past, nothing newer, no remote, no trace of where it came from."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

_CLONE_S = 1800.0
_SAFE = {
    "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "GIT_TERMINAL_PROMPT": "0",
    "GIT_ALLOW_PROTOCOL": "file:git:http:https:ssh", "GIT_LFS_SKIP_SMUDGE": "1",
}  # fmt: skip


def check_out(source: str, commit: str, target: Path, *, project: Path) -> None:
    """Fill `target`. An agent that looks for the answer in the history finds only what led to the commit."""
    if source.startswith("-"):
        raise ValueError(f"repository.source = {source!r} is an option, not a repository")
    if not re.match(r"[a-z+]+://|[^/]+@[^/]+:", source):
        source = str((project / source).resolve())
    mirror = target.parent / f"{target.name}.mirror"
    try:
        _git("clone", "--quiet", "--mirror", "--", source, str(mirror))
        # A commit is asked for by its number, not by a branch that leads to more.
        _git("-C", str(mirror), "config", "uploadpack.allowAnySHA1InWant", "true")
        _git("init", "--quiet", "--initial-branch=main", str(target))
        _git("-C", str(target), "fetch", "--quiet", "--no-tags", "--", str(mirror), commit)
        _git("-C", str(target), "-c", "core.hooksPath=/dev/null", "reset", "--quiet", "--hard", commit)
    finally:
        shutil.rmtree(mirror, ignore_errors=True)
    for name in ("FETCH_HEAD", "ORIG_HEAD"):
        (target / ".git" / name).unlink(missing_ok=True)
    shutil.rmtree(target / ".git" / "logs", ignore_errors=True)
    shutil.rmtree(target / ".git" / "hooks", ignore_errors=True)


def _git(*words: str) -> None:
    if shutil.which("git") is None:
        raise ValueError("a repository needs `git` on this host; install it")
    done = subprocess.run(
        ["git", *words], env=os.environ | _SAFE, capture_output=True, text=True, timeout=_CLONE_S, check=False, stdin=subprocess.DEVNULL
    )  # fmt: skip
    if done.returncode != 0:
        raise ValueError(f"`git {' '.join(w for w in words[:6] if not w.startswith('/'))}` failed: {done.stderr.strip()[-400:]}")
