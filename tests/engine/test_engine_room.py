"""Claims about how much memory pages may take."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_worlds import tiny_model

from rollmill.engine import room


def test_a_containers_limit_counts_and_no_limit_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "CGROUPS", tmp_path / "none")
    free = room.host_memory()
    assert free > 1 << 20
    monkeypatch.setattr(room, "CGROUPS", tmp_path)
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert room.host_memory() > 1 << 20
    (tmp_path / "memory.max").write_text("501000\n")
    assert room.host_memory() == 500_000


def test_pages_are_as_many_as_asked_for_or_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    assert room.pages_that_fit(model, most=3) == 3
    # Two layers of keys and values, 2 heads of 12, 64 positions, float32.
    page_bytes = 2 * 2 * 2 * 12 * 64 * 4
    monkeypatch.setattr(room, "host_memory", lambda: int(10 * page_bytes / room.HOST_SHARE) + 1)
    assert room.pages_that_fit(model, most=1000) == 10
