"""Claim: the example on the format page runs as printed."""

from __future__ import annotations

import re
from pathlib import Path


def test_the_example_on_the_page_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "weights.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(example, "docs/weights.md", "exec"), {})
