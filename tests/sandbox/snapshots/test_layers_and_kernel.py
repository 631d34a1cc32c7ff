"""The kernel's overlay is the judge of what a layer means."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PRIVATE = ["unshare", "--mount", "--propagation=private"] + ([] if os.geteuid() == 0 else ["--user", "--map-root-user"])
TRIAL = (
    "mount -t tmpfs x {0} && mkdir {0}/l {0}/u {0}/w {0}/m && "
    "mount -t overlay o -o userxattr,lowerdir={0}/l,upperdir={0}/u,workdir={0}/w {0}/m"
)
NUM_WORLDS = 12


def test_saved_and_merged_layers_look_to_the_kernel_like_the_box_did(tmp_path: Path) -> None:
    trial = subprocess.run([*PRIVATE, "sh", "-c", TRIAL.format(tmp_path)], capture_output=True, text=True, timeout=30, check=False)
    if trial.returncode:
        pytest.skip(f"this machine lets us mount no overlay: {trial.stderr.strip()}")
    done = subprocess.run(
        [*PRIVATE, sys.executable, str(HERE / "overlay_child.py"), str(tmp_path), str(NUM_WORLDS)],
        env={**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parents[2]}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    num_seen = int(done.stdout.split()[1])
    assert num_seen > 8 * NUM_WORLDS, "the random work left too little to look at"
