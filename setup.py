"""Compiles the box agent into the package while it is built, when there is a C compiler; without one the plain agent serves."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

NATIVE = Path(__file__).resolve().parent / "rollmill" / "sandbox" / "agent" / "native"


class BuildWithAgent(build_py):
    def run(self) -> None:
        super().run()
        folder = NATIVE if self.editable_mode else Path(self.build_lib) / NATIVE.relative_to(Path(__file__).resolve().parent)
        spec = importlib.util.spec_from_file_location("agent_build", NATIVE / "build.py")
        assert spec is not None and spec.loader is not None
        builder = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(builder)
        try:
            builder.build(folder / "rollmill-box")
        except (OSError, RuntimeError) as error:
            print(f"rollmill: the box agent was not compiled ({error}); boxes will use the plain one", file=sys.stderr)


setup(cmdclass={"build_py": BuildWithAgent})
