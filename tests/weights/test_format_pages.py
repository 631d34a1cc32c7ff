"""The pages on formats tell the truth where a machine can check it: their programs run, their vectors hold, every field is on the page."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rollmill.weights import manifest
from rollmill.weights.pack import Index
from rollmill.weights.proof import fingerprint_bytes
from rollmill.weights.quant import Scheme
from rollmill.weights.schema import Schema, TensorSpec

FORMATS = Path(__file__).parents[2] / "docs" / "formats"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
RECORDS = [
    kind
    for kind in vars(manifest).values()
    if isinstance(kind, type)
    and issubclass(kind, msgspec.Struct)
    and kind.__module__ == manifest.__name__
    and kind is not manifest.RouteName
]


@pytest.mark.parametrize("name", ["fingerprint.md", "quant.md", "store.md"])
def test_the_programs_of_a_page_run(name: str) -> None:
    blocks = BLOCK.findall((FORMATS / name).read_text())
    assert blocks
    exec(compile("\n".join(blocks), name, "exec"), {"__name__": name})


def test_the_written_definition_of_the_fingerprint_is_the_one_in_use() -> None:
    page = (FORMATS / "fingerprint.md").read_text()
    words = np.array([0x3F80, 0xBF80, 0x0000, 0x8000, 0x7FC0, 0x0001], np.uint16)
    many = (np.arange(5000) * 40503 % 65536).astype(np.uint16)
    for name, dtype, shape, data in (
        ("w", "bfloat16", (2, 3), words),
        ("größe", "uint16", (5000,), many),
        ("n", "int64", (), np.array([-2], np.int64)),
        ("w", "bfloat16", (2, 3), np.zeros(6, np.uint16)),
    ):
        assert f'"{fingerprint_bytes(name, dtype, shape, data.view(np.uint8))}"' in page, name


@pytest.mark.parametrize("kind", [*RECORDS, Schema, TensorSpec, Index], ids=lambda kind: kind.__name__)
def test_every_field_of_a_record_is_on_the_page(kind: type[msgspec.Struct]) -> None:
    page = (FORMATS / "store.md").read_text()
    assert [name for name in kind.__struct_fields__ if f"`{name}`" not in page] == []


def test_every_kind_of_object_is_on_the_page() -> None:
    page = (FORMATS / "store.md").read_text()
    named = set(re.findall(r"^\| `([a-z]+)[/.]", page, re.MULTILINE))
    source = (FORMATS.parents[1] / "rollmill" / "weights" / "manifest.py").read_text()
    assert set(re.findall(r'f"([a-z]+)/\{', source)) | {"latest", "reserved", "floor"} == named


def test_every_scheme_is_on_the_page() -> None:
    page = (FORMATS / "quant.md").read_text()
    assert set(re.findall(r"^\| `([^`]+/\d+)`", page, re.MULTILINE)) == set(Scheme)


def test_every_link_of_a_page_leads_to_a_file() -> None:
    for page in FORMATS.glob("*.md"):
        for target in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", page.read_text())):
            assert "://" in target or (page.parent / target.partition("#")[0]).exists(), f"{page.name}: {target}"
