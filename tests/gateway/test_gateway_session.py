"""A session is token-exact: what was sampled is what is recorded, what is continued, and what is never encoded again."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from gateway_fakes import CHAT, TOKENIZER, FakeEngine, answer, open_session, soon, tool, user, with_replicas, with_session
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.engine.client import EngineRejected
from rollmill.engine.protocol import FinishReason, GenerateReply, GenerateRequest
from rollmill.gateway.routing.replicas import Replicas
from rollmill.gateway.sessions.session import ContextFull, Session
from rollmill.records import Boundary, RunFailure, Window

BIG = 1 << 20
END, OTHER_END = TOKENIZER.encode("<|im_end|><|endoftext|>")


text = st.text(st.characters(codec="utf-8"), max_size=30) | st.sampled_from(
    ["<|im_end|>", "a<|im_end|>\n<|im_start|>assistant\n", "<tool_call>", "</tool_call>x", " ", "\n"]
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.lists(text, min_size=1, max_size=3), min_size=1, max_size=6), st.integers(0, 2**32))
def test_random_conversations_are_recorded_token_for_token(turns: list[list[str]], seed: int) -> None:
    engine = FakeEngine(random.Random(seed))

    async def talk(session: Session) -> Window:
        for k, said in enumerate(turns):
            new = [tool(s) if k else user(s) for s in said]
            reply = await session.reply(new, max_tokens=12, max_context=BIG, deadline=soon())
            ids = engine.said[-1].token_ids
            assert reply.num_tokens == len(ids) and reply.is_complete == (ids[-1] in TOKENIZER.stop_ids)
            assert reply.text == TOKENIZER.decode(ids[: len(ids) - reply.is_complete])
            assert session.messages[-1] == reply.message.as_template()
        assert session.num_tokens == len(engine.prompts[-1]) + len(engine.said[-1].token_ids) == session.window().num_tokens
        assert session.oldest_version == min(int(said.versions_T.min()) for said in engine.said)
        assert session.windows() == (session.window(),)
        return session.window()

    window = with_session(engine, talk)
    window.check()
    mask = window.sampled_T != 0
    assert window.tokens_T[mask].tolist() == [t for said in engine.said for t in said.token_ids]
    assert window.logprobs_T[mask].tobytes() == b"".join(said.logprobs for said in engine.said)
    assert window.versions_T[mask].tolist() == np.concatenate([said.versions_T for said in engine.said]).tolist()
    assert (window.versions_T[~mask] == -1).all()
    for k, prompt in enumerate(engine.prompts):
        # Every prompt is a prefix of the record, and of the next prompt together with what was sampled in between.
        grown = prompt + engine.said[k].token_ids
        assert window.tokens_T[: len(grown)].tolist() == grown
        assert k + 1 == len(engine.prompts) or engine.prompts[k + 1][: len(grown)] == grown


def scripted(*replies: list[int]) -> FakeEngine:
    left = list(replies)

    def speak(request: GenerateRequest) -> GenerateReply:
        ids = left.pop(0)
        finish = FinishReason.STOP if ids and ids[-1] in TOKENIZER.stop_ids else FinishReason.LENGTH
        return answer(ids, logprobs=[-0.5] * len(ids), versions=[1] * len(ids), finish=finish)

    return FakeEngine(random.Random(0), speak)


@pytest.mark.parametrize(
    ("last", "rest"),
    [
        ([END], "\n<|im_start|>tool\nr<|im_end|>\n<|im_start|>assistant\n"),
        ([OTHER_END], "<|im_end|>\n<|im_start|>tool\nr<|im_end|>\n<|im_start|>assistant\n"),
        ([], "<|im_end|>\n<|im_start|>tool\nr<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_turn_closed_by_the_policy_is_not_closed_twice(last: list[int], rest: str) -> None:
    said = [*TOKENIZER.encode("hello"), *last]
    engine = scripted(said, [END])

    async def talk(session: Session) -> None:
        await session.reply([user("u")], max_tokens=9, max_context=BIG, deadline=soon())
        await session.reply([tool("r")], max_tokens=9, max_context=BIG, deadline=soon())

    with_session(engine, talk)
    assert TOKENIZER.decode(engine.prompts[1][len(engine.prompts[0]) + len(said) :]) == rest


def test_full_context_is_told_before_the_replica_is_asked_and_changes_nothing() -> None:
    engine = scripted([END], [END])
    first = len(CHAT.first([user("u")]))

    async def talk(session: Session) -> None:
        with pytest.raises(ContextFull, match=f"would take {first} tokens, the context holds {first}"):
            await session.reply([user("u")], max_tokens=9, max_context=first, deadline=soon())
        assert session.num_tokens == 0 and session.messages == [] and engine.prompts == [] and session.windows() == ()
        await session.reply([user("u")], max_tokens=9, max_context=first + 1, deadline=soon())
        before = session.window()
        with pytest.raises(ContextFull):
            # 40 characters of three bytes each: far more tokens than characters.
            await session.reply([tool("\ufffd" * 40)], max_tokens=9, max_context=first + 60, deadline=soon())
        assert session.window() == before and len(session.messages) == 2 and session.windows() == (before,)

    with_session(engine, talk)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.integers(20, 120), st.lists(text, min_size=1, max_size=8))
def test_replica_never_sees_a_prompt_beyond_its_context(seed: int, max_len: int, said: list[str]) -> None:
    """The fake refuses what a real engine would refuse, so an overlong prompt would fail this test."""

    async def talk(session: Session) -> None:
        try:
            for k, s in enumerate(said):
                await session.reply([tool(s) if k else user(s)], max_tokens=8, max_context=max_len, deadline=soon())
        except ContextFull:
            return

    with_session(FakeEngine(random.Random(seed), max_len=max_len), talk)


def test_calls_are_read_from_the_answer_and_bad_ones_are_named() -> None:
    good = TOKENIZER.encode('ok <tool_call>{"name": "read", "arguments": {"path": "a"}}</tool_call>')
    bad = TOKENIZER.encode('<tool_call>{"name": "read"</tool_call>')

    async def talk(session: Session) -> None:
        reply = await session.reply([user("u")], max_tokens=99, max_context=BIG, deadline=soon())
        assert [(c.name, c.arguments) for c in reply.message.calls] == [("read", '{"path": "a"}')]
        assert reply.message.text.strip() == "ok" and reply.problems == ()
        assert session.messages[-1]["tool_calls"][0]["id"] == reply.message.calls[0].id
        reply = await session.reply([tool("r", reply.message.calls[0].id)], max_tokens=99, max_context=BIG, deadline=soon())
        assert reply.message.calls == () and len(reply.problems) == 1 and reply.text == TOKENIZER.decode(bad)
        reply = await session.reply([user("v")], max_tokens=99, max_context=BIG, deadline=soon(), reads_calls=False)
        assert reply.message.calls == () and reply.message.text == reply.text == TOKENIZER.decode(good)
        assert session.episode.tally == {"first": 1, "appended": 2, "orphaned": 0}

    with_session(scripted([*good, END], [*bad, END], [*good, END]), talk)


@pytest.mark.parametrize("finish", [FinishReason.CANCELLED, FinishReason.ERROR, FinishReason.DEADLINE])
def test_turn_that_our_side_broke_is_a_failure_of_the_model(finish: FinishReason) -> None:
    engine = FakeEngine(random.Random(0), lambda _: answer([7], logprobs=[-1.0], versions=[1], finish=finish))

    async def talk(session: Session) -> None:
        with pytest.raises(RunFailure, match=f"ended the turn with {finish}") as caught:
            await session.reply([user("u")], max_tokens=9, max_context=BIG, deadline=soon())
        assert caught.value.boundary is Boundary.MODEL
        assert session.windows() == () and session.messages == [], "the turn can be asked for again"

    with_session(engine, talk)


def test_request_that_the_replica_refuses_is_a_failure_of_the_model() -> None:
    def refuse(request: GenerateRequest) -> GenerateReply:
        raise EngineRejected("max_tokens is 0")

    async def talk(session: Session) -> None:
        with pytest.raises(RunFailure, match="max_tokens is 0") as caught:
            await session.reply([user("u")], max_tokens=9, max_context=BIG, deadline=soon())
        assert caught.value.boundary is Boundary.MODEL

    with_session(FakeEngine(random.Random(0), refuse), talk)


def test_words_that_cannot_be_rendered_end_the_attempt_and_not_the_run() -> None:
    engine = FakeEngine(random.Random(0))

    async def talk(session: Session) -> None:
        await session.reply([user("u")], max_tokens=4, max_context=BIG, deadline=soon())
        with pytest.raises(RunFailure, match="cannot be rendered") as caught:
            await session.reply([tool("half \ud800")], max_tokens=4, max_context=BIG, deadline=soon())
        assert caught.value.boundary is Boundary.HARNESS and len(engine.prompts) == 1

    with_session(engine, talk)


def test_episode_closed_in_mid_turn_keeps_nothing_of_it() -> None:
    async def talk(session: Session) -> None:
        asked, may_answer = asyncio.Event(), asyncio.Event()
        generate = engine.generate

        async def slow(request: GenerateRequest) -> GenerateReply:
            asked.set()
            await may_answer.wait()
            return await generate(request)

        engine.generate = slow  # type: ignore[method-assign]
        turn = asyncio.create_task(session.reply([user("u")], max_tokens=9, max_context=BIG, deadline=soon()))
        await asyncio.wait_for(asked.wait(), 20)
        session.episode.close()
        may_answer.set()
        with pytest.raises(RunFailure, match="was closed while it was being played"):
            await turn
        assert session.windows() == () and session.episode.tally["late"] == 1

    engine = scripted([END])
    with_session(engine, talk)


def test_same_seed_and_key_ask_with_the_same_seeds_and_turns_differ() -> None:
    def seeds(seed: int, key: str) -> list[int | None]:
        engine = FakeEngine(random.Random(1))

        async def talk(session: Session) -> None:
            for _ in range(3):
                await session.reply([user("u")], max_tokens=4, max_context=BIG, deadline=soon())

        with_session(engine, talk, seed=seed, key=key)
        return [r.seed for r in engine.requests]

    assert seeds(1, "a") == seeds(1, "a")
    assert len({*seeds(1, "a"), *seeds(2, "a"), *seeds(1, "b")}) == 9


def test_branch_goes_on_from_the_same_tokens_and_trains_only_its_own() -> None:
    engine = FakeEngine(random.Random(1))

    async def talk(replicas: Replicas) -> None:
        session = open_session(replicas)
        await session.reply([user("u")], max_tokens=4, max_context=BIG, deadline=soon())
        branch = session.branch("g000001.0.1")
        assert branch.windows() == () and branch.num_tokens == session.num_tokens and branch.oldest_version is None
        for each in (session, branch):
            await each.reply([user("v")], max_tokens=4, max_context=BIG, deadline=soon())
        trunk, other = session.window(), branch.window()
        assert (session.windows(), branch.windows()) == ((trunk,), (other,))
        _, second, third = engine.requests
        assert second.seed != third.seed and second.prompt_ids == third.prompt_ids
        shared = int(np.argmax(other.sampled_T))
        assert shared > 0 and other.tokens_T[:shared].tolist() == trunk.tokens_T[:shared].tolist()
        assert trunk.sampled_T[:shared].any() and other.sampled_T[shared:].all()
        assert branch.messages[:-1] == session.messages[:-1]
        assert [s.start for s in other.sources] == [shared], "what was sampled elsewhere has its source there"

    with_replicas({"http://a": engine}, talk)


def test_ids_of_calls_are_the_same_in_the_same_session_and_nowhere_else() -> None:
    said = TOKENIZER.encode('<tool_call>{"name": "ls", "arguments": {}}</tool_call>')

    def speak(request: GenerateRequest) -> GenerateReply:
        ids = [*said, END]
        return answer(ids, logprobs=[-1.0] * len(ids), versions=[0] * len(ids), finish=FinishReason.STOP)

    async def talk(session: Session) -> list[str]:
        replies = [await session.reply([user(text)], max_tokens=99, max_context=BIG, deadline=soon()) for text in ("a", "b")]
        return [call.id for reply in replies for call in reply.message.calls]

    def ids(**options: object) -> list[str]:
        return with_session(FakeEngine(random.Random(0), speak), talk, **options)

    assert ids() == ids() and len(set(ids())) == 2
    assert not set(ids()) & {*ids(key="other"), *ids(seed=4)}
