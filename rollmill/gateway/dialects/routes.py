"""The endpoints that belong to the Messages and Responses dialects and are no model calls: counting tokens, and kept responses."""

from __future__ import annotations

import asyncio

from rollmill.chat.messages import ChatMessage, Tool
from rollmill.gateway.dialects.anthropic import Messages
from rollmill.gateway.dialects.responses import Responses
from rollmill.gateway.front.route import Incoming, Outgoing, Route
from rollmill.gateway.gateway import INLINE_CHARS, Gateway
from rollmill.web import ApiError


def dialect_routes(gateway: Gateway, messages: Messages, responses: Responses) -> list[Route]:
    """`responses` is the dialect object that answers `/v1/responses`: it is the one that keeps them."""

    async def count(incoming: Incoming) -> Outgoing:
        call = messages.parse_count(incoming.body)
        return Outgoing(body=messages.counted(await _num_tokens(gateway, call.messages, call.tools)))

    async def retrieve(incoming: Incoming) -> Outgoing:
        return Outgoing(body=responses.retrieve(incoming.params["id"]))

    async def delete(incoming: Incoming) -> Outgoing:
        return Outgoing(body=responses.delete(incoming.params["id"]))

    return [
        Route(method="POST", path="/v1/messages/count_tokens", handler=count, error=messages.error),
        Route(method="GET", path="/v1/responses/{id}", handler=retrieve, error=responses.error),
        Route(method="DELETE", path="/v1/responses/{id}", handler=delete, error=responses.error),
    ]


async def _num_tokens(gateway: Gateway, messages: tuple[ChatMessage, ...], tools: tuple[Tool, ...]) -> int:
    """Rendered afresh: counting is no request, and leaves no trace in an episode."""
    try:
        if sum(len(m.text) for m in messages) <= INLINE_CHARS:
            return len(gateway.chat.first(messages, tools))
        return len(await asyncio.to_thread(gateway.chat.first, messages, tools))
    except ValueError as error:
        raise ApiError(400, str(error)) from error
