"""Small models as tensors and as files, for the tests of the ways in and out of a store; needs no torch."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

from rollmill.weights.interop.intake import take_in
from rollmill.weights.interop.tensor_file import Tensor, Tensors, write_file
from rollmill.weights.reader import materialise
from rollmill.weights.store import WeightStore


def model_at(step: int) -> dict[str, Tensor]:
    """Depends on nothing but the step: a few elements move each time, among them NaNs; one tensor never moves."""
    rng = np.random.default_rng(7)
    shapes: dict[str, tuple[str, tuple[int, ...], int]] = {
        "layers.0.wide": ("bfloat16", (24, 16), 2), "norm": ("float32", (9,), 4), "still": ("int64", (5,), 8),
        "empty": ("float16", (0, 4), 2), "codes": ("float8_e4m3fn", (6, 5), 1), "scalar": ("float32", (), 4), "flags": ("bool", (3,), 1),
    }  # fmt: skip
    found = {}
    for name, (dtype, shape, size) in shapes.items():
        data = rng.integers(0, 2 if dtype == "bool" else 256, int(np.prod(shape)) * size, dtype=np.uint8)
        if name != "still" and data.size:
            for at in range(1, step + 1):
                data[(at * 37) % data.size] ^= 1
        found[name] = Tensor(dtype=dtype, shape=shape, data=data)
    found["norm"].data[4:8] = np.frombuffer(np.float32(np.nan).tobytes(), np.uint8)
    found["norm"].data[4] = step % 256
    return found


def write_model(folder: Path, step: int) -> Path:
    folder.mkdir(parents=True)
    write_file(folder / "model.safetensors", model_at(step), {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny"}))
    return folder


def publish_steps(store: WeightStore, *steps: int) -> None:
    for step in steps:
        take_in(store, model_at(step), step=step, run_id="test")


def same_bits(left: Tensors, right: Tensors) -> bool:
    def plain(tensors: Tensors) -> dict[str, Any]:
        return {name: (tensor.dtype, tensor.shape, tensor.data.tobytes()) for name, tensor in tensors.items()}

    return plain(left) == plain(right)


def bytes_in(store: WeightStore, version: int) -> dict[str, bytes]:
    return {name: data.tobytes() for name, data in materialise(store, version)[2].items()}


def bytes_at(step: int) -> dict[str, bytes]:
    return {name: tensor.data.tobytes() for name, tensor in model_at(step).items()}


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def copy_of(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


@contextmanager
def served(app: Any) -> Iterator[str]:
    """A real server on a free port; the URL it answers at."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline and thread.is_alive(), "the server did not start"
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
        assert not thread.is_alive()
