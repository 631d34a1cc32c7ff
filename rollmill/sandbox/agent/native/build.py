"""Builds the agent's binary from the C files beside it, when there is a compiler; knows whether a binary is the one of these sources."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
BINARY = FOLDER / "rollmill-box"
_COMPILE_S = 120.0
_FLAGS = ("-O2", "-std=gnu11", "-Wall", "-Wextra", "-D_GNU_SOURCE")


def source_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted([*FOLDER.glob("*.c"), *FOLDER.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def compiler() -> str | None:
    return next((found for name in (os.environ.get("CC") or "cc", "gcc", "clang") if (found := shutil.which(name))), None)


def build(target: Path = BINARY) -> None:
    """Compile, statically where the machine has a static C library; atomic, so that two processes may build at once."""
    program = compiler()
    if program is None:
        raise FileNotFoundError("there is no C compiler; install one (Debian: `apt-get install gcc libc6-dev`)")
    sources = sorted(str(path) for path in FOLDER.glob("*.c"))
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "rollmill-box"
        command = [program, *_FLAGS, f'-DSOURCE_DIGEST="{source_digest()}"', "-o", str(made), *sources]
        for link in (["-static"], []):
            done = subprocess.run([*command, *link], capture_output=True, text=True, timeout=_COMPILE_S, check=False)
            if done.returncode == 0:
                made.chmod(0o755)
                os.replace(made, target)
                return
    raise RuntimeError(f"the C compiler {program} failed on the box agent:\n{done.stderr[-2000:]}")


def is_current(path: Path) -> bool:
    """Whether the binary was made from the sources that lie here; one from another machine type cannot even say."""
    try:
        done = subprocess.run([str(path), "source"], capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        return False
    return done.stdout.strip() == source_digest()


@lru_cache(maxsize=1)
def binary() -> Path | None:
    """The agent's binary, built now if the installed one is missing or old; None where it cannot be: then the plain agent serves.

    `ROLLMILL_BOX_AGENT=plain` asks for the plain agent.
    """
    if os.environ.get("ROLLMILL_BOX_AGENT") == "plain" or not sys.platform.startswith("linux"):
        return None
    for path in (BINARY, _cached()):
        if path.exists() and is_current(path):
            return path
    if compiler() is None:
        return None
    for path in (BINARY, _cached()):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            build(path)
        except PermissionError:
            continue  # an installation that this user may not write to
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            print(f"rollmill: {error}; boxes will be slower", file=sys.stderr)
            return None
        return path
    return None


def _cached() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "rollmill" / "agent" / source_digest() / "rollmill-box"


if __name__ == "__main__":
    build()
    print(BINARY)
