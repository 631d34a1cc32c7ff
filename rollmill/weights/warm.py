"""`python -m rollmill.weights.warm` compiles the loops of the common dtypes into the cache of numba, so that no run waits for it."""

from __future__ import annotations

import time

import numpy as np

from rollmill.weights import chunk, proof


def warm() -> None:
    rng = np.random.default_rng(0)
    for dtype, words in (("bfloat16", np.uint16), ("float8_e4m3fn", np.uint8), ("float32", np.uint32)):
        old = rng.integers(0, 200, 4096, dtype=words)
        new = old.copy()
        new[::50] += 1
        data = chunk.encode(new.view(np.uint8), old.view(np.uint8), dtype).data
        chunk.decode_patch(data, num_bytes=old.nbytes, dtype=dtype, old=old.view(np.uint8))
        assert np.array_equal(chunk.decode(data, num_bytes=old.nbytes, dtype=dtype, old=old.view(np.uint8)), new.view(np.uint8))
        proof.part(new, 0, (1, 2))


if __name__ == "__main__":
    began = time.monotonic()
    warm()
    print(f"loops of the weight codecs compiled in {time.monotonic() - began:.0f} s")
