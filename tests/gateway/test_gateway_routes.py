"""A session carries routes and the names of replicas: asked for once per token, kept in order, missing where nothing was computed."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from gateway_fakes import CHAT, TOKENIZER, FakeEngine, answer, soon, tool, user, with_session
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.chat.messages import ChatMessage, ChatRole
from rollmill.engine.protocol import FinishReason, GenerateReply, GenerateRequest
from rollmill.gateway.sessions.episode import Episode
from rollmill.gateway.sessions.placement import Placement
from rollmill.gateway.sessions.session import Session
from rollmill.model.route_record import RouteRecord, RouteShape
from rollmill.records import Boundary, RunFailure, SourceSpan, Window

BIG = 1 << 20
SHAPE = RouteShape(num_layers=3, layers=(1, 2), num_experts=16, top_k=2)
END = TOKENIZER.encode("<|im_end|>")[0]


def experts_of(tokens: list[int], start: int) -> np.ndarray:
    """A model whose experts are a function of token and position, so that a row in the wrong place shows."""
    ids = np.full((len(tokens) - start, 3, 2), -1, np.int16)
    for row, position in enumerate(range(start, len(tokens))):
        for layer in SHAPE.layers:
            first = (7 * tokens[position] + 3 * position + layer) % 15
            ids[row, layer] = (first, 15)
    return ids


class RoutingEngine(FakeEngine):
    """Records experts as a replica does; `quiet` turns have none, and `spoil` may break what it sends."""

    def __init__(self, seed: int = 0, *, quiet: tuple[int, ...] = (), spoil: Callable[[bytes], bytes] = lambda routes: routes) -> None:
        super().__init__(random.Random(seed), self._speak)
        self._quiet, self._spoil = quiet, spoil

    def _speak(self, request: GenerateRequest) -> GenerateReply:
        ids = [*self._rng.choices(range(40, 400), k=self._rng.randint(0, 4)), END]
        routes = b""
        if request.routes_from is not None and len(self.requests) - 1 not in self._quiet:
            grown = [*request.prompt_ids, *ids]
            record = RouteRecord.of(experts_of(grown, request.routes_from)[:-1], SHAPE)
            routes = self._spoil(record.to_bytes())
        return answer(ids, logprobs=[-0.5] * len(ids), versions=[1] * len(ids), finish=FinishReason.STOP, routes=routes)


async def talk(session: Session, num_turns: int, first: int = 0) -> None:
    for k in range(first, first + num_turns):
        said = f"message {k} " * (k + 1)
        await session.reply([tool(said) if k else user(said)], max_tokens=9, max_context=BIG, deadline=soon())


def window_after(engine: FakeEngine, num_turns: int, **options: bool) -> Window:
    async def work(session: Session) -> Window:
        await talk(session, num_turns)
        return session.window()

    return with_session(engine, work, **{"wants_routes": True} | options)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.integers(1, 5))
def test_every_computed_token_has_its_row_and_is_asked_for_once(seed: int, num_turns: int) -> None:
    engine = RoutingEngine(seed)
    window = window_after(engine, num_turns)
    window.check()
    record = RouteRecord.from_bytes(window.routes)
    assert (record.shape, record.num_tokens) == (SHAPE, window.num_tokens)
    wanted = experts_of(window.tokens_T.tolist(), 0)
    wanted[-1] = -1
    assert (record.ids_TLK() == wanted).all()
    # Each call starts where the record ended: at the last token of the turn before, which was sampled and not computed.
    ends = [len(p) + len(s.token_ids) - 1 for p, s in zip(engine.prompts, engine.said, strict=True)]
    assert [r.routes_from for r in engine.requests] == [0, *ends[:-1]]


def test_run_without_replay_neither_asks_for_routes_nor_keeps_them() -> None:
    engine = RoutingEngine()
    assert window_after(engine, 2, wants_routes=False).routes == b""
    assert [r.routes_from for r in engine.requests] == [None, None]


def test_turn_without_routes_is_asked_for_again_and_else_missing() -> None:
    engine = RoutingEngine(quiet=(0,))
    window = window_after(engine, 2)
    assert [r.routes_from for r in engine.requests] == [0, 0]
    assert (RouteRecord.from_bytes(window.routes).ids_TLK()[:-1] == experts_of(window.tokens_T.tolist(), 0)[:-1]).all()

    async def two_turns(session: Session) -> None:
        await talk(session, 1)
        known = session.num_tokens - 1
        await talk(session, 1, first=1)
        ids = RouteRecord.from_bytes(session.window().routes).ids_TLK()
        assert len(ids) == session.num_tokens and (ids[known:] == -1).all() and (ids[:known, 1:] >= 0).all()

    with_session(RoutingEngine(quiet=(1, 2)), two_turns, wants_routes=True)
    assert window_after(RoutingEngine(quiet=(0, 1)), 2).routes == b""


def test_branch_keeps_the_routes_of_its_past_and_asks_only_for_what_is_new() -> None:
    engine = RoutingEngine(5)

    async def work(session: Session) -> Window:
        await talk(session, 2)
        branch = session.branch("other")
        await talk(branch, 1, first=2)
        return branch.window()

    window = with_session(engine, work, wants_routes=True)
    window.check()
    assert engine.requests[2].routes_from == len(engine.prompts[1]) + len(engine.said[1].token_ids) - 1
    assert window.sampled_T.sum() == len(engine.said[2].token_ids)
    assert (RouteRecord.from_bytes(window.routes).ids_TLK()[:-1] == experts_of(window.tokens_T.tolist(), 0)[:-1]).all()


@pytest.mark.parametrize("told", ["as it was", "differently"])
def test_fork_and_realignment_keep_the_routes_of_what_they_share(told: str) -> None:
    episode = Episode("e", CHAT, wants_routes=True)
    said = [*TOKENIZER.encode("one two three"), END]

    def ask(messages: list[ChatMessage]) -> Placement:
        placement = episode.place(messages)
        routes = RouteRecord.of(experts_of([*placement.prompt_ids, *said], placement.routes_from or 0)[:-1], SHAPE).to_bytes()
        reply = answer(said, logprobs=[-0.5] * len(said), versions=[1] * len(said), finish=FinishReason.STOP, routes=routes)
        episode.add(placement, reply, ChatMessage(role=ChatRole.ASSISTANT, text="one two three"))
        return placement

    first = ask([user("u")])
    whole = ChatMessage(role=ChatRole.ASSISTANT, text="one two three")
    ask([user("u"), whole, user("v")])
    again = whole if told == "as it was" else ChatMessage(role=ChatRole.ASSISTANT, text="one two")
    third = ask([user("u"), again, user("w")])
    num_shared = len(said) - 1 if told == "as it was" else len(TOKENIZER.encode("one two"))
    assert third.routes_from == len(first.prompt_ids) + num_shared
    for window in episode.windows():
        window.check()
        ids = RouteRecord.from_bytes(window.routes).ids_TLK()
        assert (ids[:-1] == experts_of(window.tokens_T.tolist(), 0)[:-1]).all() and (ids[-1] == -1).all()
    assert len(episode.windows()) == 2


def another_model(routes: bytes) -> bytes:
    other = RouteShape(num_layers=3, layers=(1, 2), num_experts=32, top_k=2)
    return RouteRecord.missing(other, RouteRecord.from_bytes(routes).num_tokens).to_bytes()


def doubled(routes: bytes) -> bytes:
    record = RouteRecord.from_bytes(routes)
    return RouteRecord.join([record, record]).to_bytes()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda routes: routes[:-1], "cannot be used"),
        (lambda routes: b"not a record at all", "cannot be used"),
        (doubled, r"routes of \d+ tokens, asked for the \d+ tokens from 0 on"),
    ],
)
def test_routes_that_do_not_fit_are_a_failure_of_the_model(spoil: Callable[[bytes], bytes], why: str) -> None:
    with pytest.raises(RunFailure, match=why) as caught:
        window_after(RoutingEngine(spoil=spoil), 1)
    assert caught.value.boundary is Boundary.MODEL


def test_routes_of_another_model_in_a_later_turn_are_a_failure_of_the_model() -> None:
    turns = iter([lambda routes: routes, another_model])
    with pytest.raises(RunFailure, match="routes of another model"):
        window_after(RoutingEngine(spoil=lambda routes: next(turns)(routes)), 2)


def test_window_says_which_tokens_were_sampled_on_an_older_context() -> None:
    stale = iter([None, 1, None, 0])

    def speak(request: GenerateRequest) -> GenerateReply:
        return answer([50, END], logprobs=[-0.1] * 2, versions=[1] * 2, finish=FinishReason.STOP, stale_from=next(stale))

    engine = FakeEngine(random.Random(0), speak)
    window = window_after(engine, 4, wants_routes=False)
    window.check()
    starts = [len(p) for p in engine.prompts]
    assert window.stale == ((starts[1] + 1, starts[1] + 2), (starts[3], starts[3] + 2))


def test_window_names_the_replicas_that_sampled() -> None:
    names = iter(["", "east", "east", "west", "east"])

    def speak(request: GenerateRequest) -> GenerateReply:
        return answer([50, END], logprobs=[-0.1] * 2, versions=[1] * 2, finish=FinishReason.STOP, replica=next(names))

    engine = FakeEngine(random.Random(0), speak)
    window = window_after(engine, 5, wants_routes=False)
    window.check()
    ends = [len(p) + 2 for p in engine.prompts]
    # A nameless replica goes by its address.
    assert window.sources == (
        SourceSpan(ends[0] - 2, ends[0], "10.0.0.7:8000"),
        SourceSpan(ends[1] - 2, ends[2], "east"),
        SourceSpan(ends[3] - 2, ends[3], "west"),
        SourceSpan(ends[4] - 2, ends[4], "east"),
    )
