"""Runs a command-line tool under a deadline and attributes what goes wrong to it; knows no tool in particular."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence

from rollmill.records import Boundary, RunFailure

MAX_WORDS = 2000
"""How much of a tool's complaint an error repeats."""
CHUNK_BYTES = 1 << 20


class Tool:
    """A program and the options that come before every verb, e.g. `("podman", "--runtime", "runc")`."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(words)

    async def spawn(self, *args: str, is_piped: bool = True) -> asyncio.subprocess.Process:
        """Start it with its output at our end; a session of its own, so that a Ctrl-C at our terminal is ours to answer."""
        pipe = asyncio.subprocess.PIPE
        try:
            return await asyncio.create_subprocess_exec(
                *self.words, *args,
                stdin=pipe if is_piped else asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise RunFailure(Boundary.SANDBOX, f"`{self.words[0]}` could not be started: {error}") from None

    async def hold(self, *args: str) -> tuple[asyncio.subprocess.Process, socket.socket]:
        """Start it with one socket for its input and output, and the other end of that; only its complaints come by a pipe."""
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *self.words, *args, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=asyncio.subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            ours.close()
            raise RunFailure(Boundary.SANDBOX, f"`{self.words[0]}` could not be started: {error}") from None
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return process, ours

    async def run(self, *args: str, deadline_s: float, stdin: bytes | None = None) -> bytes:
        """Its standard output; a status other than 0 is a failure that carries its standard error."""
        process = await self.spawn(*args, is_piped=stdin is not None)
        try:
            async with asyncio.timeout(deadline_s):
                out, err = await process.communicate(stdin)
        except TimeoutError:
            raise RunFailure(Boundary.SANDBOX, f"{self._named(args)} took longer than {deadline_s:g} s") from None
        finally:
            await _end(process)
        if process.returncode:
            raise self.complaint(args, process.returncode, err)
        return out

    async def read(self, *args: str, deadline_s: float) -> AsyncIterator[bytes]:
        """Its standard output in pieces, for what may be larger than memory."""
        process = await self.spawn(*args, is_piped=False)
        assert process.stdout is not None and process.stderr is not None
        words = asyncio.ensure_future(process.stderr.read())
        end_s = asyncio.get_running_loop().time() + deadline_s
        try:
            while True:
                # Around each read and not around the yield: a deadline must not strike while the consumer is at work.
                async with asyncio.timeout_at(end_s):
                    chunk = await process.stdout.read(CHUNK_BYTES)
                if not chunk:
                    break
                yield chunk
            async with asyncio.timeout_at(end_s):
                status = await process.wait()
            if status:
                raise self.complaint(args, status, await words)
        except TimeoutError:
            raise RunFailure(Boundary.SANDBOX, f"{self._named(args)} took longer than {deadline_s:g} s") from None
        finally:
            await _end(process)
            words.cancel()

    async def feed(self, chunks: AsyncIterator[bytes], *args: str, deadline_s: float) -> bytes:
        """Its standard output, with its input taken from an iterator."""
        process = await self.spawn(*args)
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        out, words = asyncio.ensure_future(process.stdout.read()), asyncio.ensure_future(process.stderr.read())
        try:
            async with asyncio.timeout(deadline_s):
                with contextlib.suppress(ConnectionError):  # it gave up early: its status and words say why
                    async for chunk in chunks:
                        process.stdin.write(chunk)
                        await process.stdin.drain()
                process.stdin.close()
                status = await process.wait()
                if status:
                    raise self.complaint(args, status, await words)
                return await out
        except TimeoutError:
            raise RunFailure(Boundary.SANDBOX, f"{self._named(args)} took longer than {deadline_s:g} s") from None
        finally:
            await _end(process)
            out.cancel()
            words.cancel()

    def complaint(self, args: Sequence[str], status: int, words: bytes) -> RunFailure:
        said = words.decode(errors="replace").strip()[-MAX_WORDS:] or "it said nothing"
        return RunFailure(Boundary.SANDBOX, f"{self._named(args)} failed with status {status}: {said}")

    def _named(self, args: Sequence[str]) -> str:
        return f"`{' '.join([self.words[0], *args[:1]])}`"


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
