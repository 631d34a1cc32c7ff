"""`rollmill bench gateway`: what our gateway adds to a model call, beside LiteLLM's proxy in front of the same replica, in turns.

The replica costs nothing (`gateway_stub`), so nothing hides behind sampling. Called directly and by LiteLLM it answers in OpenAI's shape
without touching a tokenizer; behind ours it gets and gives token ids, so our figures include rendering, encoding and decoding.
A row's ratio is how many times ours is ahead of the peer.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from rollmill.bench.beside import PeerFailed, Spoken
from rollmill.bench.gateway_load import NUM_WARM
from rollmill.bench.report import Row, result, rounded, say

OURS, DIRECT, LITELLM = "rollmill", "direct", "litellm"
KEY = "sk-bench-0123456789abcdef"
START_S = 120.0
TICK = os.sysconf("SC_CLK_TCK")


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much of everything."""

    rounds: int = 5
    num: int = 300
    limit_s: float = 5.0
    """No call is begun later in a round."""
    at_once: int = 32
    num_streams: int = 1000
    num_tokens: int = 32
    stream_tokens: int = 64
    token_s: float = 0.1
    """Between two tokens of each of the many streams: ten tokens a second and stream."""


QUICK = Sizes(rounds=1, num=20, limit_s=1.0, at_once=8, num_streams=40, stream_tokens=8, token_s=0.05)


class Server:
    """A process that serves HTTP, and what it costs."""

    def __init__(self, argv: list[str], *, port: int, ready: str, env: dict[str, str] | None = None) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self.url, self._argv = f"http://127.0.0.1:{port}", argv
        self._process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env={**os.environ, **(env or {})}, start_new_session=True
        )
        try:
            self._wait(ready)
        except PeerFailed:
            self.close()
            raise

    def _wait(self, ready: str) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end and self._process.poll() is None:
            with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(self.url + ready, timeout=5) as reply:
                if reply.status == 200:
                    return
            time.sleep(0.1)
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        raise PeerFailed(f"{self._argv[0]} did not start: {lines[-1][:300] if lines else 'it said nothing'}")

    def cpu_s(self) -> float:
        """Processor seconds of the process and its threads so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICK

    def rss_bytes(self) -> int:
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._log.close()


class Stub:
    """The replica's process."""

    def __init__(self, model: Path, *, num_tokens: int, token_s: float) -> None:
        argv = [sys.executable, "-m", "rollmill.bench.gateway_stub", str(model)]
        self._process = subprocess.Popen(
            [*argv, "--num-tokens", str(num_tokens), "--token-s", str(token_s)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailed("the stub replica did not start")
        self.url = f"http://127.0.0.1:{json.loads(line)['port']}"

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._process.stdout.close()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def open_ours(folder: Path, model: Path, replica: str) -> Server:
    keys, port = folder / "keys.toml", free_port()
    keys.write_text(f'[[key]]\nname = "bench"\nkey = "{KEY}"\n')
    argv = [sys.executable, "-m", "rollmill.cli", "gateway", str(model), "--replica", replica, "--port", str(port), "--keys", str(keys)]
    return Server([*argv, "--name", "policy"], port=port, ready="/health")


def open_litellm(folder: Path, peers: Path | None, replica: str) -> Server:
    program = (peers / "bin" / "litellm") if peers else Path("litellm")
    if peers and not program.exists():
        raise PeerFailed(f"there is no {program}; `scripts/setup_gateway_peers.sh {peers}` installs it")
    config, port = folder / f"litellm-{free_port()}.yaml", free_port()
    config.write_text(
        "model_list:\n- model_name: policy\n  litellm_params:\n    model: openai/policy\n"
        f"    api_base: {replica}/v1\n    api_key: none\nlitellm_settings:\n  telemetry: false\n"
        f"general_settings:\n  master_key: {KEY}\n"
    )
    argv = [str(program), "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    return Server(argv, port=port, ready="/health/liveliness", env={"LITELLM_LOG": "ERROR"})


def conversation(num_messages: int, num_chars: int) -> list[dict[str, str]]:
    """Turns of an agent, the last from the user."""
    said = ("look at the next file and say what is wrong with it " * (num_chars // 40 + 1))[:num_chars]
    roles = ["user" if i % 2 == 0 else "assistant" for i in range(num_messages - 1)]
    return [{"role": "system", "content": "You are a coding agent."}, *({"role": r, "content": f"{i} {said}"} for i, r in enumerate(roles))]


def body(messages: list[dict[str, str]], *, stream: bool) -> str:
    return json.dumps({"model": "policy", "messages": messages, "max_tokens": 128, **({"stream": True} if stream else {})})


class Bench:
    def __init__(self, servers: dict[str, Server | str], load: Spoken, missing: dict[str, str], sizes: Sizes) -> None:
        """A server by name, or the plain base URL of what is called directly."""
        self._servers, self._load, self._missing, self._sizes = servers, load, missing, sizes
        self.rows: list[Row] = []

    def _url(self, peer: str) -> str:
        server = self._servers[peer]
        return (server if isinstance(server, str) else server.url) + "/v1/chat/completions"

    def _turns(self, name: str, rounds: int, **question: Any) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
        """Everybody's answers, round by round in turns, with the processor time of the server; and why somebody has none."""
        found: dict[str, list[dict[str, Any]]] = {peer: [] for peer in self._servers}
        why = dict(self._missing)
        for index in range(rounds):
            say(f"{name}: round {index + 1} of {rounds}")
            for peer, server in self._servers.items():
                if peer in why:
                    continue
                before = server.cpu_s() if isinstance(server, Server) else 0.0
                answer = self._load.ask(url=self._url(peer), key=KEY, **question)
                if "failed" in answer:
                    why[peer] = answer["failed"]
                    continue
                answer["cpu_s"] = server.cpu_s() - before if isinstance(server, Server) else 0.0
                found[peer].append(answer)
        return {peer: answers for peer, answers in found.items() if answers and peer not in why}, why

    def _tell(self, name: str, unit: str, values: dict[str, float], why: dict[str, str], *, more: bool = False, note: str = "") -> None:
        ours = values.get(OURS)
        for peer in (DIRECT, OURS, LITELLM):
            if peer in values:
                value, ratio = values[peer], None
                if peer == LITELLM and ours and value > 0:
                    ratio = rounded(ours / value if more else value / ours, 3)
                self.rows.append(Row(name=name, peer=peer, value=rounded(value), unit=unit, ratio=ratio, note=note))
            elif peer in why:
                self.rows.append(Row(name=name, peer=peer, value=None, unit=unit, note=why[peer]))

    def latency(self, name: str, messages: list[dict[str, str]]) -> None:
        size = self._sizes
        found, why = self._turns(
            name, size.rounds, what="one_by_one", body=body(messages, stream=False), num=size.num, limit_s=size.limit_s
        )
        samples = {peer: [s * 1e3 for a in answers for s in a["seconds"]] for peer, answers in found.items()}
        for q in (50, 99):
            values = {peer: percentile(s, q) for peer, s in samples.items()}
            self._tell(f"{name}, p{q}", "ms", values, why)
            direct = values.pop(DIRECT)
            self._tell(f"added to {name}, p{q}", "ms", {peer: max(v - direct, 0.0) for peer, v in values.items()}, why)
        cpu = {
            peer: 1e3 * sum(a["cpu_s"] for a in answers) / sum(len(a["seconds"]) + NUM_WARM for a in answers)
            for peer, answers in found.items()
            if peer != DIRECT
        }
        self._tell(f"processor time of {name}", "ms", cpu, why)

    def rate(self, name: str, messages: list[dict[str, str]]) -> None:
        size = self._sizes
        found, why = self._turns(
            name, size.rounds, what="at_once", body=body(messages, stream=False), num=10**6, limit_s=size.limit_s / 2, at_once=size.at_once
        )
        self._tell(name, "1/s", {p: statistics.median(a["per_s"] for a in answers) for p, answers in found.items()}, why, more=True)

    def streams(self, name: str, num: int, *, spread_s: float, rounds: int) -> None:
        text = body(conversation(4, 200), stream=True)
        found, why = self._turns(name, rounds, what="streams", body=text, num=num, spread_s=spread_s)
        whole = {p: float(sum(len(a["first_s"]) for a in answers)) / len(answers) for p, answers in found.items()}
        told = {p: answers[0]["errors"][0] for p, answers in found.items() if answers[0]["errors"]}
        for peer, value in whole.items():
            ratio = rounded(whole[OURS] / value, 3) if peer == LITELLM and OURS in whole and value else None
            self.rows.append(Row(name=f"{name}: ended whole", peer=peer, value=value, unit="streams", ratio=ratio, note=told.get(peer, "")))
        for label, key, q in (
            ("first text, p50", "first_s", 50),
            ("first text, p99", "first_s", 99),
            ("longest silence, p99", "gap_s", 99),
        ):
            values = {p: percentile([1e3 * s for a in answers for s in a[key]], q) for p, answers in found.items() if whole[p]}
            self._tell(f"{name}: {label}", "ms", values, why)
        reads = {p: statistics.mean(r for a in answers for r in a["reads"]) for p, answers in found.items() if whole[p]}
        self._tell(f"{name}: pieces a client read", "1/stream", reads, why, more=True)
        cpu = {p: 1e3 * sum(a["cpu_s"] for a in answers) / sum(len(a["first_s"]) or 1 for a in answers) for p, answers in found.items()}
        cpu.pop(DIRECT, None)
        self._tell(f"{name}: processor time of a stream", "ms", cpu, why)

    def memory(self, name: str) -> None:
        used = {p: s.rss_bytes() / 2**20 for p, s in self._servers.items() if isinstance(s, Server)}
        self._tell(name, "MiB", used, self._missing)


def percentile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(q / 100 * (len(ordered) - 1)))]


@contextlib.contextmanager
def opened(model: Path, peers: Path | None, *, num_tokens: int, token_s: float) -> Iterator[tuple[dict[str, Server | str], dict[str, str]]]:
    """The three ways to one stub replica; who could not be started is named with the reason."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stub = Stub(model, num_tokens=num_tokens, token_s=token_s)
        stack.callback(stub.close)
        servers: dict[str, Server | str] = {DIRECT: stub.url}
        missing: dict[str, str] = {}
        makers: dict[str, Callable[[], Server]] = {
            OURS: lambda: open_ours(folder, model, stub.url),
            LITELLM: lambda: open_litellm(folder, peers, stub.url),
        }
        for peer, make in makers.items():
            try:
                say(f"starting {peer}")
                server = make()
            except (PeerFailed, FileNotFoundError) as failure:
                if peer == OURS:
                    raise
                missing[peer] = str(failure)
                continue
            stack.callback(server.close)
            servers[peer] = server
        yield servers, missing


def bench_gateway(model: Path, *, command: str, peers: Path | None, sizes: Sizes) -> dict[str, Any]:
    rows: list[Row] = []
    with Spoken([sys.executable, "-m", "rollmill.bench.gateway_load"]) as load:
        with opened(model, peers, num_tokens=sizes.num_tokens, token_s=0.0) as (servers, missing):
            bench = Bench(servers, load, missing, sizes)
            bench.latency("a call of 4 messages", conversation(4, 200))
            bench.latency("a call of 60 messages, 24 KB", conversation(60, 400))
            bench.rate(f"calls of 4 messages, {sizes.at_once} at once", conversation(4, 200))
            bench.memory("memory after that")
            rows += bench.rows
        with opened(model, peers, num_tokens=sizes.stream_tokens, token_s=sizes.token_s) as (servers, missing):
            bench = Bench(servers, load, missing, sizes)
            bench.streams("one stream", 1, spread_s=0.0, rounds=3)
            spread_s = sizes.stream_tokens * sizes.token_s / 2
            bench.streams(f"{sizes.num_streams:,} streams at once", sizes.num_streams, spread_s=spread_s, rounds=1)
            bench.memory("memory after the streams")
            rows += bench.rows
    facts = {"model": model.name, "sizes": msgspec.to_builtins(sizes), "litellm": _litellm_version(peers)}
    return result(command, rows, **facts)


def _litellm_version(peers: Path | None) -> str | None:
    python = (peers / "bin" / "python") if peers else None
    if python is None or not python.exists():
        return None
    code = "import importlib.metadata as m; print(m.version('litellm'))"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=60, check=False).stdout.strip() or None
