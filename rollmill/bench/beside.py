"""A peer in a process of its own: one JSON line in, one out. Importing this loads nothing of the system that is measured.

In one process a peer would multiply in the strict mode that `rollmill.ops` asks of the CPU's matrix library, where a single row costs
twice as much; its process multiplies once before anything of ours is imported, which leaves the library in its own mode.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

START_S = 600.0
STOP_S = 10.0


class PeerFailed(RuntimeError):
    """What is to be measured beside us does not run here."""


class Spoken:
    """A process that says one JSON line when it is ready and one for each that it is asked."""

    def __init__(self, argv: Sequence[str]) -> None:
        # Whatever the peer's packages say goes to a file and is shown when they fail.
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True)
        try:
            self._answer(START_S)
        except PeerFailed:
            self.close()
            raise

    def ask(self, *, answer_s: float | None = None, **question: Any) -> dict[str, Any]:
        """None: the answer may take as long as it takes. Who does not answer in time is ended."""
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise PeerFailed(self._last_words()) from error
        return self._answer(answer_s)

    def _answer(self, within_s: float | None) -> dict[str, Any]:
        assert self._process.stdout
        # Each answer is one line and was read whole, so nothing of the next can wait in the buffer.
        if not select.select([self._process.stdout], [], [], within_s)[0]:
            self._process.kill()
            self._process.wait(STOP_S)
            raise PeerFailed(f"it did not answer within {within_s:g} s")
        line = self._process.stdout.readline()
        if not line:
            self._end()
            raise PeerFailed(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return f"its process ended with {self._process.poll()}: {lines[-1][:300] if lines else 'it said nothing'}"

    def _end(self) -> None:
        """It should end by itself; it is not waited for longer than this."""
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_S)

    def close(self) -> None:
        if self._process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._end()
        if self._process.stdout:
            self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Beside(Spoken):
    """`maker`, as `module:function`, is called with the options in the other process and gives what answers each question."""

    def __init__(self, maker: str, *, threads: int, **options: Any) -> None:
        super().__init__([sys.executable, "-m", "rollmill.bench.beside", maker, str(threads), json.dumps(options)])


def main() -> None:
    maker, threads, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    # Answers go out by a copy of standard output; what packages print there joins the log.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(threads)
    torch.ones(64, 64) @ torch.ones(64, 64)
    module, _, name = maker.partition(":")
    answer = getattr(importlib.import_module(module), name)(**options)
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), file=out, flush=True)
    # Background threads of a peer must not keep the process.
    out.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
