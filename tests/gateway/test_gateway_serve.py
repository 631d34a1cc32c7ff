"""`rollmill serve` as a person starts it: one command, an engine and a gateway, and both are gone when either ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from stub_replica import DEMO

DEADLINE_S = 90.0


class Serving:
    """The command's process and what it says."""

    def __init__(self, record: Path) -> None:
        command = [sys.executable, "-m", "rollmill.cli", "serve", str(DEMO), "--port", "0", "--record", str(record), "--num-threads", "1"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline()
        found = re.search(r"http://\S+/v1", self.said)
        assert found, self.said + self.process.stdout.read()
        self.url = found[0]

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (pid,) = [int(p) for p in children if b"rollmill.fleet.serve" in Path(f"/proc/{p}/cmdline").read_bytes()]
        return pid

    def end(self) -> int:
        self.process.kill()
        return self.process.wait(DEADLINE_S)


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    serving = Serving(tmp_path)
    yield serving
    serving.end()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_gone(pid: int) -> None:
    until = time.monotonic() + DEADLINE_S
    while is_alive(pid):
        assert time.monotonic() < until, f"process {pid} is still there"
        time.sleep(0.02)


def test_serve_answers_and_ends_with_its_engine_on_sigterm(serving: Serving, tmp_path: Path) -> None:
    with openai.OpenAI(base_url=serving.url, api_key="none", max_retries=0) as ai:
        reply = ai.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Hello"}], max_tokens=4)
        assert reply.usage is not None and 0 < reply.usage.completion_tokens <= 4
    engine = serving.engine_pid()
    serving.process.send_signal(signal.SIGTERM)
    assert serving.process.wait(DEADLINE_S) == 0
    wait_gone(engine)
    assert (tmp_path / "calls.db").is_file()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="death signals are Linux's")
def test_whichever_dies_takes_the_other_with_it(serving: Serving) -> None:
    os.kill(serving.engine_pid(), signal.SIGKILL)
    assert serving.process.wait(DEADLINE_S) != 0
    assert serving.process.stdout is not None and "the engine ended" in serving.process.stdout.read()
