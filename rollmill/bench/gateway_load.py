"""The client side of the gateway's benchmark, in a process of its own: asks a base URL in one of three ways and tells what it saw.

One JSON question per line of standard input, one JSON answer per line of standard output (`rollmill.bench.beside.Spoken`).
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

READ_S = 120.0
NUM_WARM = 5


def _headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", "content-type": "application/json"}


class Load:
    """Connections are kept over the questions that go to the same place."""

    def __init__(self) -> None:
        self._http: aiohttp.ClientSession | None = None

    async def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        if self._http is None:
            timeout = aiohttp.ClientTimeout(total=READ_S)
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout, read_bufsize=1 << 18)
        ways: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {
            "one_by_one": self._one_by_one,
            "at_once": self._at_once,
            "streams": self._streams,
        }
        what = ways[question.pop("what")]
        used = resource.getrusage(resource.RUSAGE_SELF)
        answer = await what(**question)
        after = resource.getrusage(resource.RUSAGE_SELF)
        return {**answer, "client_cpu_s": after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime}

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def _call(self, url: str, key: str, body: bytes) -> bytes:
        assert self._http is not None
        async with self._http.post(url, data=body, headers=_headers(key)) as reply:
            data = await reply.read()
            if reply.status != 200:
                raise RuntimeError(f"status {reply.status}: {data[:200]!r}")
            return data

    async def _one_by_one(self, url: str, key: str, body: str, num: int, limit_s: float) -> dict[str, Any]:
        """Whole calls, one after the other."""
        seconds: list[float] = []
        raw = body.encode()
        # The first ones open the connection and fill caches.
        for _ in range(NUM_WARM):
            await self._call(url, key, raw)
        end = time.monotonic() + limit_s
        while len(seconds) < num and time.monotonic() < end:
            started = time.perf_counter()
            await self._call(url, key, raw)
            seconds.append(time.perf_counter() - started)
        return {"seconds": seconds}

    async def _at_once(self, url: str, key: str, body: str, num: int, limit_s: float, at_once: int) -> dict[str, Any]:
        """Whole calls, always so many under way."""
        raw, done = body.encode(), 0
        await asyncio.gather(*(self._call(url, key, raw) for _ in range(at_once)))
        end = time.monotonic() + limit_s

        async def worker() -> None:
            nonlocal done
            while done < num and time.monotonic() < end:
                done += 1
                await self._call(url, key, raw)

        started = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(at_once)))
        return {"per_s": done / (time.perf_counter() - started), "num": done}

    async def _streams(self, url: str, key: str, body: str, num: int, spread_s: float) -> dict[str, Any]:
        """So many streams at once; when each first text came, how long the longest silence was, and how many reads it took."""
        assert self._http is not None
        first_s: list[float] = []
        gap_s: list[float] = []
        reads: list[int] = []
        errors: list[str] = []
        raw, http = body.encode(), self._http

        async def one(index: int) -> None:
            await asyncio.sleep(spread_s * index / num)
            started = last = time.perf_counter()
            first: float | None = None
            longest, count, tail = 0.0, 0, b""
            try:
                async with http.post(url, data=raw, headers=_headers(key)) as reply:
                    if reply.status != 200:
                        raise RuntimeError(f"status {reply.status}: {(await reply.read())[:200]!r}")
                    async for data in reply.content.iter_any():
                        now = time.perf_counter()
                        if first is None and b'"content":"' in data.replace(b'"content": "', b'"content":"').replace(b'"content":""', b""):
                            first = now - started
                        elif first is not None:
                            longest = max(longest, now - last)
                        last, count, tail = now, count + 1, (tail + data)[-64:]
                if b"[DONE]" not in tail:
                    raise RuntimeError(f"the stream ended with {tail!r}")
            except (aiohttp.ClientError, TimeoutError, OSError, RuntimeError) as error:
                errors.append(f"{type(error).__name__}: {error}"[:200])
                return
            first_s.append(first if first is not None else last - started)
            gap_s.append(longest)
            reads.append(count)

        started = time.perf_counter()
        await asyncio.gather(*(one(i) for i in range(num)))
        return {
            "first_s": first_s,
            "gap_s": gap_s,
            "reads": reads,
            "errors": errors[:3],
            "num_errors": len(errors),
            "total_s": time.perf_counter() - started,
        }


async def main() -> None:
    load, loop = Load(), asyncio.get_running_loop()
    print(json.dumps({"ready": True}), flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        try:
            answer = await load.ask(json.loads(line))
        except (aiohttp.ClientError, TimeoutError, OSError, RuntimeError) as error:
            answer = {"failed": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), flush=True)
    await load.close()


if __name__ == "__main__":
    try:
        import uvloop
    except ImportError:
        asyncio.run(main())
    else:
        uvloop.run(main())
