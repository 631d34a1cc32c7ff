"""vLLM beside us: its own server in its own environment over the same weights, asked for a whole batch in one HTTP request."""

from __future__ import annotations

import contextlib
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollmill.bench.beside import PeerFailed
from rollmill.bench.vllm_server import VENV, has_vllm, start_vllm

READY_S = 1200.0
"""Compiling a model of 30 layers takes minutes on two busy cores."""
ASK_S = 1800.0


class VllmPeer:
    """Answers as the other peers do; the seconds are those of the request, HTTP included, which is how vLLM is used here."""

    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = url, model

    def ask(self, *, prompts: list[list[int]], num_new: int) -> dict[str, Any]:
        body = {"model": self._model, "prompt": prompts, "max_tokens": num_new, "temperature": 1.0, "ignore_eos": True, "detokenize": False}
        request = urllib.request.Request(
            f"{self._url}/v1/completions", json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        began = time.perf_counter()
        try:
            with urllib.request.urlopen(request, timeout=ASK_S) as reply:
                found = json.loads(reply.read())
        except (urllib.error.URLError, OSError) as error:
            raise PeerFailed(f"vLLM did not answer: {error}") from error
        return {"seconds": time.perf_counter() - began, "num_tokens": found["usage"]["completion_tokens"]}


@contextlib.contextmanager
def vllm_peer(model_dir: Path, *, folder: Path, threads: int, max_len: int, num_seqs: int, kv_gib: int) -> Iterator[VllmPeer]:
    if not has_vllm():
        raise PeerFailed(f"there is no vLLM in {VENV.name}; build it with `make setup-vllm`")
    if not (model_dir / "tokenizer.json").is_file():
        raise PeerFailed("vLLM needs a tokenizer beside the weights; give --model")
    cores = sorted(os.sched_getaffinity(0))[:threads]
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(
                start_vllm(
                    model_dir,
                    log=folder / "vllm.log",
                    is_eager=False,
                    max_len=max_len,
                    max_seqs=num_seqs,
                    kv_gib=kv_gib,
                    cores=",".join(map(str, cores)),
                    ready_s=READY_S,
                )
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise PeerFailed(str(error).strip().splitlines()[-1][:300]) from error
        yield VllmPeer(server.url, str(model_dir))
