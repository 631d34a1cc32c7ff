"""Run in its own mount namespace: does random things to real overlays, then looks at what our layers make of them; prints what it saw."""

from __future__ import annotations

import io
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from layer_worlds import view

from rollmill.sandbox.snapshots.layers import PACK, UNPACK, Layer, read_portable, read_raw, write_portable, write_raw
from rollmill.sandbox.snapshots.merge import merge

NAMES = ("a", "b", "c", ".wh.a")


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, timeout=30)


class Machine:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.merged = root / "merged"
        mount("-t", "tmpfs", "layers", str(root))
        self.merged.mkdir()
        self.num_layers = 0

    def fresh(self) -> Path:
        self.num_layers += 1
        path = self.root / f"l{self.num_layers}"
        path.mkdir()
        return path

    def seen(self, lowers: Sequence[Path]) -> dict[str, tuple]:
        """What a box stacked on `lowers`, bottom to top, would see."""
        upper, work = self.fresh(), self.fresh()
        self.stack(lowers, upper, work)
        found = view(self.merged, with_links=False)
        self.unstack()
        return found

    def stack(self, lowers: Sequence[Path], upper: Path, work: Path) -> None:
        shutil.copystat(lowers[-1], upper)  # a box's root looks like the one it was made from
        below = ":".join(str(path) for path in reversed(lowers))
        mount("-t", "overlay", "-o", f"userxattr,lowerdir={below},upperdir={upper},workdir={work}", "box", str(self.merged))

    def unstack(self) -> None:
        subprocess.run(["umount", str(self.merged)], check=True, timeout=30)

    def unpack(self, layer: Layer) -> Path:
        folder = self.fresh()
        data = b"".join(write_raw(layer))
        subprocess.run([word.format(folder=folder) for word in UNPACK], input=data, check=True, timeout=30)
        return folder


def disturb(box: Path, rng: random.Random, num: int) -> None:
    """Ordinary file work; what the kernel refuses is nothing to us."""

    def somewhere() -> Path:
        return box.joinpath(*(rng.choice(NAMES) for _ in range(rng.randint(1, 3))))

    for _ in range(num):
        path, other = somewhere(), somewhere()
        with suppress(OSError):
            match rng.randrange(11):
                case 0 | 1:
                    path.write_bytes(rng.randbytes(rng.randint(0, 60)))
                case 2 | 3:
                    path.mkdir(parents=True)
                case 4:
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
                case 5:
                    path.rename(other)
                case 6:
                    path.symlink_to(rng.choice(NAMES))
                case 7:
                    os.link(path, other, follow_symlinks=False)
                case 8:
                    path.chmod(rng.choice((0o700, 0o755, 0o4711)))
                case 9:
                    os.setxattr(path, "user.note", rng.randbytes(4))
                case 10:
                    shutil.rmtree(path)
                    path.mkdir()
                    (path / rng.choice(NAMES)).write_bytes(b"in a folder made again")


def play(root: Path, seed: int) -> int:
    rng = random.Random(seed)
    machine = Machine(root)
    base = machine.fresh()
    disturb(base, rng, 60)
    uppers: list[Path] = []
    for _ in range(rng.randint(2, 4)):
        upper = machine.fresh()
        machine.stack([base, *uppers], upper, machine.fresh())
        disturb(machine.merged, rng, 60)
        machine.unstack()
        uppers.append(upper)
    layers = []
    for upper in uppers:
        done = subprocess.run([word.format(folder=upper) for word in PACK], stdout=subprocess.PIPE, check=True, timeout=30)
        layer = read_raw(io.BytesIO(done.stdout))
        layers.append(read_portable(io.BytesIO(b"".join(write_portable(layer)))))
    truth = machine.seen([base, *uppers])
    assert machine.seen([base, *(machine.unpack(layer) for layer in layers)]) == truth, f"seed {seed}: layers saved one by one"
    assert machine.seen([base, machine.unpack(merge(layers))]) == truth, f"seed {seed}: all merged"
    cut = rng.randint(1, len(layers) - 1)
    halves = [merge(layers[:cut]), merge(layers[cut:])]
    assert machine.seen([base, *(machine.unpack(half) for half in halves)]) == truth, f"seed {seed}: merged in two at {cut}"
    subprocess.run(["umount", str(root)], check=True, timeout=30)
    return len(truth)


if __name__ == "__main__":
    print("seen", sum(play(Path(sys.argv[1]), seed) for seed in range(int(sys.argv[2]))))
