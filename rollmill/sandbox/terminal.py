"""Joins a command in a box to the standard streams of this process: bytes as they come, and a terminal for a terminal.

What the person types goes in, what the command prints comes out, its status is returned the way a shell tells it. Knows no backend.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from rollmill.sandbox.interface import Process
from rollmill.sandbox.records import ExecResult

TIMED_OUT = 124
"""The status by which `timeout(1)` tells it."""
END_S = 10.0
_PIECE_BYTES = 1 << 16


@runtime_checkable
class Resizable(Protocol):
    async def resize(self, rows: int, columns: int) -> None: ...


def status_of(result: ExecResult) -> int:
    if result.timed_out:
        return TIMED_OUT
    return 128 - result.exit_code if result.exit_code < 0 else result.exit_code


async def attach(process: Process, *, timeout_s: float, is_terminal: bool = False) -> int:
    """Until the command ends or its time is over; the status to exit with."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        if is_terminal:
            stack.enter_context(_raw())
            if isinstance(process, Resizable):
                await _fit(process)
                resizing: set[asyncio.Task[None]] = set()
                loop.add_signal_handler(signal.SIGWINCH, lambda: resizing.add(loop.create_task(_fit(process))))
                stack.callback(loop.remove_signal_handler, signal.SIGWINCH)
        else:
            interrupts: set[asyncio.Task[None]] = set()
            loop.add_signal_handler(signal.SIGINT, lambda: interrupts.add(loop.create_task(process.kill(signal.SIGINT))))
            stack.callback(loop.remove_signal_handler, signal.SIGINT)
        # A thread that nobody waits for: a read of a terminal or pipe cannot be called off.
        threading.Thread(target=_feed, args=(process, loop), daemon=True).start()
        try:
            async with asyncio.timeout(timeout_s):
                async for chunk in process:
                    stream = sys.stderr if chunk.is_stderr else sys.stdout
                    stream.buffer.write(chunk.data)
                    stream.flush()
        except TimeoutError:
            await process.kill()
            await process.wait(timeout_s=END_S)
            return TIMED_OUT
        except BrokenPipeError:
            # Whoever read our output is gone, as in `... | head`.
            await process.kill()
            # Nothing is flushed into the closed pipe at exit.
            sys.stdout = None
            return 128 + signal.SIGPIPE
        return status_of(await process.wait(timeout_s=END_S))


def _feed(process: Process, loop: asyncio.AbstractEventLoop) -> None:
    """Standard input, piece by piece, each taken before the next is read."""
    try:
        while data := os.read(0, _PIECE_BYTES):
            asyncio.run_coroutine_threadsafe(process.write(data), loop).result()
        asyncio.run_coroutine_threadsafe(process.close_stdin(), loop).result()
    except (OSError, RuntimeError, asyncio.CancelledError):
        # The command or the loop ended first: there is nobody to feed.
        return


async def _fit(process: Resizable) -> None:
    size = os.get_terminal_size(0)
    await process.resize(size.lines, size.columns)


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """Keys go to the box as they are, also the one that would interrupt us."""
    before = termios.tcgetattr(0)
    # Keys typed ahead are kept.
    tty.setraw(0, termios.TCSADRAIN)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
