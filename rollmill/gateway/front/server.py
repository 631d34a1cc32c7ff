"""The gateway's HTTP face: finds whose request it is, for which episode and in which dialect, and passes the answer on as it comes.

Every event leaves when it is there; a client that leaves frees its replica's row at once; nothing a client sends is answered with a 500.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
from starlette.types import Receive, Scope, Send

from rollmill.gateway.dialects.dialect import Dialect, openai_error
from rollmill.gateway.front.crowd import Crowd
from rollmill.gateway.front.exchange import Exchange, Header
from rollmill.gateway.front.keys import Grant, KeyRing
from rollmill.gateway.front.metrics import Metrics
from rollmill.gateway.front.model_call import Limits, ModelCall
from rollmill.gateway.front.replays import Replays
from rollmill.gateway.front.route import Incoming, Outgoing, Route
from rollmill.gateway.gateway import Gateway, closed_error
from rollmill.gateway.recording.call_rows import new_call_id
from rollmill.gateway.sessions.episode import Episode
from rollmill.web import STATUS_CLIENT_GONE, ApiError, ClientGone

log = logging.getLogger(__name__)
STATUS_FLOODED = 429
ErrorBody = Callable[[int, str, Mapping[str, object]], bytes]


class GatewayApp:
    """The ASGI application."""

    def __init__(
        self,
        gateway: Gateway,
        keys: KeyRing,
        *,
        dialects: Mapping[str, Dialect],
        limits: Limits = Limits(),
        opens_unknown: bool = True,
    ) -> None:
        """`dialects`: by path, all POST. `opens_unknown`: an episode that nobody opened is opened by its first call."""
        self.gateway, self.keys, self.limits = gateway, keys, limits
        self.metrics = Metrics(gateway)
        self._dialects, self._opens_unknown = dict(dialects), opens_unknown
        self._routes: list[Route] = []
        self.replays = Replays()
        self.crowd = Crowd(max_running=limits.max_running, max_per_episode=limits.max_running_per_episode)

    @property
    def num_running(self) -> int:
        """Model calls."""
        return self.crowd.num_running

    def mount(self, routes: Sequence[Route]) -> None:
        """Serve these as well."""
        self._routes += routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        x = Exchange(scope, receive, send, new_call_id())
        dialect = self._dialects.get(x.path)
        label, error_body = "other", openai_error
        try:
            if dialect is not None:
                label, error_body = x.path, dialect.error
                if x.method != "POST":
                    raise ApiError(405, f"{x.path} takes POST", headers={"allow": "POST"})
                await self._model_call(x, dialect)
            else:
                route, params = self._find(x)
                label, error_body = route.path, route.error
                await self._other_call(x, route, params)
        except ApiError as error:
            await _refuse(x, error, error_body)
        except ClientGone:
            x.status = STATUS_CLIENT_GONE
        except Exception:
            log.exception("request %s to %s failed", x.id, x.path)
            await _refuse(x, ApiError(500, f"request {x.id} failed on our side; its log says why"), error_body)
        self.metrics.count(label, x.status)

    def _find(self, x: Exchange) -> tuple[Route, dict[str, str]]:
        methods = []
        for route in self._routes:
            params = route.matches(route.method, x.path)
            if params is not None and route.method == x.method:
                return route, params
            if params is not None:
                methods.append(route.method)
        if methods:
            raise ApiError(405, f"{x.path} takes {' or '.join(methods)}", headers={"allow": ", ".join(methods)})
        raise ApiError(404, f"there is nothing at {x.path}; see /openapi.json")

    async def _other_call(self, x: Exchange, route: Route, params: dict[str, str]) -> None:
        grant = self.keys.grant(x.key, x.url_episode) if route.needs_key else Grant()
        if route.needs_admin and not grant.is_admin:
            raise ApiError(403, "this needs a key with may_admin")
        incoming = Incoming(
            method=x.method,
            path=x.path,
            episode=self._episode_name(x, grant),
            params=params,
            headers={name.decode("latin-1"): value.decode("latin-1") for name, value in x.headers.items()},
            key_name=grant.name,
            is_admin=grant.is_admin,
        )
        if route.check is not None:
            route.check(incoming)
        body = await x.read(max_bytes=self.limits.max_body_bytes, within_s=self.limits.body_s)
        out: Outgoing = await route.handler(msgspec.structs.replace(incoming, body=body))
        await x.reply(out.status, out.body, media_type=out.media_type.encode(), headers=_encoded(out.headers))

    async def _model_call(self, x: Exchange, dialect: Dialect) -> None:
        grant = self.keys.grant(x.key, x.url_episode)
        name = self._episode_name(x, grant)
        call = ModelCall(self, x, dialect, grant, name)
        with self._counted(name, call):
            if grant.holder is not None:
                grant.holder.admit()
            try:
                await call.run()
            finally:
                if grant.holder is not None:
                    grant.holder.release(call.num_tokens)

    @contextlib.contextmanager
    def _counted(self, name: str, call: ModelCall) -> Iterator[None]:
        """One of the calls that run. Whoever owns the episode learns of refusals, and whether they are our fault."""
        try:
            self.crowd.enter(name)
        except ApiError as error:
            self.tell(name, "flooded" if error.status_code == STATUS_FLOODED else "failed")
            raise
        self.metrics.in_flight.inc()
        try:
            yield
        except (ApiError, ClientGone):
            raise
        except Exception:
            self.tell(name, "failed")
            raise
        finally:
            self.crowd.leave(name, call.num_choices)
            self.metrics.in_flight.dec()

    def tell(self, episode: str, kind: str) -> None:
        """Count in the episode's tally, where there is one."""
        if episode and (found := self.gateway.episodes.get(episode)) is not None:
            found.tally[kind] += 1

    @staticmethod
    def _episode_name(x: Exchange, grant: Grant) -> str:
        """The URL names it, else the key that opens only one, else the headers. Header names are each client's own."""
        if name := x.url_episode or grant.episode:
            return name
        name = x.header_episode
        return f"{grant.name}/{name}"[:256] if name and grant.name else name[:256]

    def episode(self, name: str, grant: Grant) -> Episode | None:
        """The open episode of this name; None when there is no name. ApiError 410 or 404."""
        if not name:
            return None
        episode = self.gateway.episodes.get(name)
        if episode is not None:
            return episode
        if self.gateway.episodes.is_closed(name):
            raise closed_error(name)
        if not self._opens_unknown or grant.episode:
            raise ApiError(404, f"there is no episode {name!r}; its owner opens it first")
        try:
            return self.gateway.open_episode(name)
        except ValueError as error:
            raise ApiError(400, str(error)) from error

    def deadline(self, x: Exchange) -> float:
        asked = x.headers.get(b"x-request-timeout-s")
        if asked is None:
            return x.at + self.limits.call_s
        try:
            seconds = float(asked)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds <= self.limits.max_call_s:
            text = f"x-request-timeout-s is {asked.decode('latin-1')!r}, it must be above 0 and at most {self.limits.max_call_s:g}"
            raise ApiError(400, text)
        return x.at + seconds


async def _refuse(x: Exchange, error: ApiError, error_body: ErrorBody) -> None:
    if x.status or x.is_gone:
        x.abort()
        return
    body = error_body(error.status_code, str(error.detail), error.extra)
    await x.reply(error.status_code, body, headers=_encoded(error.headers or {}))


def _encoded(headers: Mapping[str, str]) -> list[Header]:
    return [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]
