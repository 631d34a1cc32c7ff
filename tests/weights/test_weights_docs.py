"""Claim: the examples on the page run as printed."""

from __future__ import annotations

import re
from pathlib import Path


def test_the_examples_on_the_page_run() -> None:
    page = (Path(__file__).parents[2] / "docs" / "weights.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        exec(compile(example, "docs/weights.md", "exec"), {})
