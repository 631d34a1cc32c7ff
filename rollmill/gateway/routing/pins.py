"""What a model name asks for: `name`, `name:VERSION` or `name@TAG`, as the exact weight version; knows no store and no replica."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable

from rollmill.gateway.routing.replicas import NoAnswer

KEPT_S = 1.0
MAX_KEPT = 256
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_VERSION = re.compile(r"[0-9]{1,9}")


class Pins:
    """
    >>> import asyncio
    >>> asyncio.run(Pins("policy").resolve("policy:12"))
    12
    """

    def __init__(
        self, name: str, tag_version: Callable[[str], int | None] | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`tag_version` looks a tag up in the weight store, None when there is no such tag; it may block and is called in a thread."""
        self.name, self._tag_version, self._clock = name, tag_version, clock
        self._kept: dict[str, tuple[float, asyncio.Future[int | None]]] = {}

    async def resolve(self, model: str) -> int | None:
        """The version that must answer; None: whichever is served. ValueError for a name that means nothing here.

        NoAnswer when the store cannot be asked.
        """
        if model == self.name:
            return None
        sign, rest = model[len(self.name) : len(self.name) + 1], model[len(self.name) + 1 :]
        if model.startswith(self.name) and sign == ":" and _VERSION.fullmatch(rest):
            return int(rest)
        if self._tag_version is not None and model.startswith(self.name) and sign == "@" and _TAG.fullmatch(rest):
            version = await self._look_up(rest)
            if version is None:
                raise ValueError(f"model is {model!r}, and the weight store has no tag {rest!r}; `rollmill weights tag STORE` lists them")
            return version
        known = [self.name, f"{self.name}:VERSION", *([f"{self.name}@TAG"] if self._tag_version is not None else [])]
        raise ValueError(f"there is no model {model!r} here; known are {', '.join(known)}")

    async def _look_up(self, tag: str) -> int | None:
        """At most one question per tag and second, however many ask."""
        assert self._tag_version is not None
        now = self._clock()
        at, found = self._kept.get(tag, (0.0, None))
        if found is None or now - at >= KEPT_S or (found.done() and (found.cancelled() or found.exception() is not None)):
            self._kept.pop(tag, None)
            if len(self._kept) >= MAX_KEPT:
                self._kept.pop(next(iter(self._kept)))
            found = asyncio.get_running_loop().run_in_executor(None, self._tag_version, tag)
            self._kept[tag] = (now, found)
        try:
            return await asyncio.shield(found)
        except OSError as error:
            raise NoAnswer(f"the weight store cannot be asked for tag {tag!r}: {error}", is_late=False) from error
