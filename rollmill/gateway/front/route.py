"""Endpoints that are not model calls: what a handler is given and what it returns, so that other parts can add their own to the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from rollmill.gateway.dialects.dialect import openai_error


class Incoming(msgspec.Struct, frozen=True, kw_only=True):
    """One request; its key has been checked."""

    method: str
    path: str
    """Without `/e/{episode}`."""
    episode: str = ""
    """From the URL or the session headers; empty: none."""
    params: Mapping[str, str] = {}
    """The `{names}` of the route's path."""
    headers: Mapping[str, str] = {}
    """Names in lower case."""
    body: bytes = b""
    """Whole; empty when `Route.check` sees it."""
    key_name: str = ""
    """Whose key it came with; empty where no keys are asked for."""
    is_admin: bool = False


class Outgoing(msgspec.Struct, frozen=True, kw_only=True):
    status: int = 200
    body: bytes = b""
    media_type: str = "application/json"
    headers: Mapping[str, str] = {}


Handler = Callable[[Incoming], Awaitable[Outgoing]]


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """
    >>> Route(method="GET", path="/v1/responses/{id}", handler=None).matches("GET", "/v1/responses/7")
    {'id': '7'}
    """

    method: str
    path: str
    """`/v1/responses/{id}`: a name in braces stands for one part. The server serves it below `/e/{episode}` as well."""
    handler: Handler | Any
    needs_key: bool = True
    needs_admin: bool = False
    check: Callable[[Incoming], None] | None = None
    """Called before the body is read; ApiError for whoever may not send it. For routes with keys of their own."""
    error: Callable[..., bytes] = openai_error
    """Body of a refusal: `Dialect.error` of the dialect it belongs to."""

    def matches(self, method: str, path: str) -> dict[str, str] | None:
        """The named parts, or None when this route is another's."""
        mine, its = self.path.split("/"), path.split("/")
        if method != self.method or len(mine) != len(its):
            return None
        found = {}
        for a, b in zip(mine, its, strict=True):
            if a.startswith("{") and b:
                found[a[1:-1]] = b
            elif a != b:
                return None
        return found


def json_out(body: Any, status: int = 200, headers: Mapping[str, str] = {}) -> Outgoing:
    return Outgoing(status=status, body=msgspec.json.encode(body), headers=headers)
