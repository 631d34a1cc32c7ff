"""A whole run whose weights go through a real bucket: trainer, engine and compactor meet in it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollmill.weights import open_store, verify
from rollmill.weights.check import fsck

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_run_trains_through_a_bucket_and_leaves_it_whole(tmp_path: Path, s3_url: str) -> None:
    sets = [
        f"run.dir={tmp_path / 'run'}", "run.steps=10", "tasks.num_heldout=4", f'weights.store="{s3_url}"',
        "weights.compact_every_s=3", "weights.peers=true",
    ]  # fmt: skip
    command = [sys.executable, "-m", "rollmill.cli", "train", str(ROOT / "examples" / "demo.toml")]
    done = subprocess.run([*command, *(x for s in sets for x in ("--set", s))], cwd=ROOT, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    store = open_store(s3_url)
    pointer = store.latest()
    assert pointer is not None and pointer.version >= 8 and not (tmp_path / "run" / "weights").exists()
    assert verify(store) == [] and not [f for f in fsck(store, deep=True, now=time.time()) if f.is_fatal]
    assert any(name.base is not None and name.version - name.base > 1 for name in store.routes()), "the compactor made a fold"
    (lease,) = store.leases()
    assert lease.replica == "engine-0" and lease.fingerprint == store.version(lease.version or 0).fingerprint
