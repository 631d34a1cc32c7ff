"""Finds a task family by name, by import path or in a file, and says what it lacks before a run begins."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from rollmill.tasks.family import TaskFamily

_METHODS = ("make", "grade")


def open_family(name: str) -> TaskFamily:
    """A known family, or one of your own: `package.module:Name` or `path/to/file.py:Name`, a class, an instance or a function."""
    from rollmill.tasks.repo import RepoFamily

    known: dict[str, type[TaskFamily]] = {"repo": RepoFamily}
    place, colon, attribute = name.rpartition(":")
    if not colon:
        if name not in known:
            raise ValueError(
                f"there is no task family {name!r}; known: {', '.join(sorted(known))}. "
                "Set `tasks.family` to one of them, or to your own as package.module:Class or path/to/file.py:Class"
            )
        return known[name]()
    with _own_signals():
        try:
            found = getattr(_module(place), attribute)
        except (ImportError, AttributeError, SyntaxError, OSError) as error:
            raise ValueError(f"tasks.family = {name!r} cannot be loaded: {error}") from error
        if isinstance(found, type) or (callable(found) and not hasattr(found, "make")):
            found = found()
    return checked(found, name)


def checked(family: Any, name: str) -> TaskFamily:
    """The family itself, or ValueError with everything it lacks."""
    lacking = [f"{m}()" for m in _METHODS if not callable(getattr(family, m, None))]
    if not isinstance(getattr(family, "name", None), str) or not family.name:
        lacking.append("`name`, a text")
    if not (isinstance(kinds := getattr(family, "kinds", None), tuple) and kinds):
        lacking.append("`kinds`, a tuple of texts")
    if lacking:
        raise ValueError(f"tasks.family = {name!r} is no task family: {type(family).__name__} lacks {', '.join(lacking)}")
    found: TaskFamily = family
    return found


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place).resolve()
    # A name of its own, so that two files called `env.py` do not meet; known to `sys.modules`, since type hints are looked up there.
    name = f"family_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _own_signals() -> Iterator[None]:
    """A library that a family imports may take the signals by which a run is stopped; they are given back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
