"""Starts a vLLM server in its own environment and stops it; what the tests against a real vLLM and the engine benchmark share."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".venv-vllm"
PACKED = "rollmill.adapters.vllm_worker.RollmillWorker"
PLAIN = "rollmill.adapters.vllm_plain.RollmillWorker"
POLL_S = 0.2
STOP_S = 15.0


@dataclass(frozen=True, kw_only=True)
class VllmServer:
    """A running server."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """As if the machine had lost it: the server and its workers end at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_S)


def has_vllm(venv: Path = VENV) -> bool:
    return (venv / "bin" / "vllm").exists()


@contextlib.contextmanager
def start_vllm(
    model_dir: Path,
    *,
    log: Path,
    dtype: str = "float32",
    is_eager: bool = True,
    max_len: int = 512,
    max_seqs: int = 32,
    kv_gib: int = 1,
    cores: str = "0-1",
    extension: str = PACKED,
    more: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    venv: Path = VENV,
    ready_s: float = 300.0,
) -> Iterator[VllmServer]:
    """A `vllm serve` on a free port of this machine, ready to answer; `cores` are the ones it binds its threads to."""
    if not has_vllm(venv):
        raise ValueError(f"there is no vLLM in {venv}; build it with `make setup-vllm`")
    port = _free_port()
    command = [
        str(venv / "bin" / "vllm"), "serve", str(model_dir), "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype,
        "--max-model-len", str(max_len), "--max-num-seqs", str(max_seqs), "--logprobs-mode", "processed_logprobs",
        "--enable-scale-out", "--enable-prompt-tokens-details", "--worker-extension-cls", extension,
        *(("--enforce-eager",) if is_eager else ()), *more,
    ]  # fmt: skip
    settings = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"} if extension == PLAIN else {}),
        # Two versions of numba on one cache would throw each other's loops away.
        "NUMBA_CACHE_DIR": str(venv / "numba"),
        # The sampler would compile a counting kernel, for 40 s, at the first request that wants logprobs.
        **({"TORCHDYNAMO_DISABLE": "1"} if is_eager else {}),
    }
    with log.open("ab") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **settings, **(env or {})},
            cwd=log.parent,
            start_new_session=True,
        )
    server = VllmServer(url=f"http://127.0.0.1:{port}", log=log, process=process)
    try:
        _wait_ready(server, ready_s)
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
        # Its workers are in the same session, and outlive a parent that was killed.
        server.kill()


def _wait_ready(server: VllmServer, ready_s: float) -> None:
    deadline = time.monotonic() + ready_s
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise RuntimeError(f"vLLM ended with {server.process.returncode} while starting:\n{_tail(server.log)}")
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_S)
    raise RuntimeError(f"vLLM was not ready after {ready_s:.0f} s:\n{_tail(server.log)}")


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
