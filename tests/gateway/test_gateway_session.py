"""A session is token-exact: what was sampled is what is recorded, what is continued, and what is never encoded again."""

from __future__ import annotations

import asyncio
import random
import time

import numpy as np
import pytest
from gateway_fakes import TOKENIZER, FakeEngine, FakeGateway, answer
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.engine.protocol import FinishReason, GenerateReply, GenerateRequest
from rollmill.gateway import ContextFull, Session
from rollmill.records import Boundary, RunFailure

BIG = 1 << 20


def soon() -> float:
    return time.monotonic() + 60.0


def open_session(engine: FakeEngine, **options: object) -> Session:
    facts = {"seed": 3, "temperature": 1.0} | options
    return FakeGateway({"http://a": engine}).open_session("g000001.0.0", **facts)  # type: ignore[arg-type]


text = st.text(st.characters(codec="utf-8"), max_size=30) | st.sampled_from(
    ["<|im_end|>", "a<|im_end|>\n<|im_start|>assistant\n", "<tool_call>", "</tool_call>x", " ", "\n"]
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(text, min_size=1, max_size=3), min_size=1, max_size=6), st.integers(0, 2**32))
def test_random_conversations_are_recorded_token_for_token(turns: list[list[str]], seed: int) -> None:
    engine = FakeEngine(random.Random(seed))
    session = open_session(engine)

    async def talk() -> None:
        for k, said in enumerate(turns):
            new = [{"role": "user" if k == 0 else "tool", "content": s} for s in said]
            reply = await session.reply(new, max_tokens=12, max_context=BIG, deadline=soon())
            ids = engine.said[-1].token_ids
            assert reply.num_tokens == len(ids) and reply.is_complete == (ids[-1] in TOKENIZER.stop_ids)
            assert session.messages[-1] == {"role": "assistant", "content": reply.text}

    asyncio.run(talk())
    window = session.window()
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
    assert session.num_tokens == window.num_tokens == len(engine.prompts[-1]) + len(engine.said[-1].token_ids)
    assert session.oldest_version == min(int(said.versions_T.min()) for said in engine.said)


def scripted(*replies: list[int]) -> FakeEngine:
    left = list(replies)

    def speak(request: GenerateRequest) -> GenerateReply:
        ids = left.pop(0)
        finish = FinishReason.STOP if ids and ids[-1] in TOKENIZER.stop_ids else FinishReason.LENGTH
        return answer(ids, logprobs=[-0.5] * len(ids), versions=[1] * len(ids), finish=finish)

    return FakeEngine(random.Random(0), speak)


def test_turn_closed_by_the_policy_is_not_closed_twice() -> None:
    end, other_end = TOKENIZER.encode("<|im_end|><|endoftext|>")
    said = TOKENIZER.encode("hello")
    for last, rest in (
        ([*said, end], "\n<|im_start|>tool\nr<|im_end|>\n<|im_start|>assistant\n"),
        ([*said, other_end], "<|im_end|>\n<|im_start|>tool\nr<|im_end|>\n<|im_start|>assistant\n"),
        (said, "<|im_end|>\n<|im_start|>tool\nr<|im_end|>\n<|im_start|>assistant\n"),
    ):
        engine = scripted(last, [end])
        session = open_session(engine)

        async def talk(session: Session = session) -> None:
            await session.reply([{"role": "user", "content": "u"}], max_tokens=9, max_context=BIG, deadline=soon())
            await session.reply([{"role": "tool", "content": "r"}], max_tokens=9, max_context=BIG, deadline=soon())

        asyncio.run(talk())
        assert TOKENIZER.decode(engine.prompts[1][len(engine.prompts[0]) + len(last) :]) == rest


def test_full_context_is_told_before_the_replica_is_asked_and_changes_nothing() -> None:
    end = TOKENIZER.encode("<|im_end|>")
    engine = scripted(end, end)
    session = open_session(engine)
    first = len(TOKENIZER.encode(TOKENIZER.render([{"role": "user", "content": "u"}])))

    async def talk() -> None:
        with pytest.raises(ContextFull, match=f"would take {first} tokens, the context holds {first}"):
            await session.reply([{"role": "user", "content": "u"}], max_tokens=9, max_context=first, deadline=soon())
        assert session.num_tokens == 0 and session.messages == [] and engine.prompts == []
        await session.reply([{"role": "user", "content": "u"}], max_tokens=9, max_context=first + 1, deadline=soon())
        before = session.window()
        with pytest.raises(ContextFull):
            # 40 characters of three bytes each: far more tokens than characters.
            await session.reply([{"role": "tool", "content": "\ufffd" * 40}], max_tokens=9, max_context=first + 60, deadline=soon())
        assert session.window() == before and len(session.messages) == 2

    asyncio.run(talk())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(20, 120), st.lists(text, min_size=1, max_size=8))
def test_replica_never_sees_a_prompt_beyond_its_context(seed: int, max_len: int, said: list[str]) -> None:
    """The fake refuses what a real engine would refuse, so an overlong prompt would fail this test as RunFailure."""
    session = open_session(FakeEngine(random.Random(seed), max_len=max_len))

    async def talk() -> None:
        try:
            for k, s in enumerate(said):
                await session.reply([{"role": "tool" if k else "user", "content": s}], max_tokens=8, max_context=max_len, deadline=soon())
        except ContextFull:
            return

    asyncio.run(talk())


@pytest.mark.parametrize("finish", [FinishReason.CANCELLED, FinishReason.ERROR, FinishReason.DEADLINE])
def test_turn_that_our_side_broke_is_a_failure_of_the_model(finish: FinishReason) -> None:
    engine = FakeEngine(random.Random(0), lambda _: answer([7], logprobs=[-1.0], versions=[1], finish=finish))
    with pytest.raises(RunFailure, match=f"ended the turn with {finish}") as caught:
        asyncio.run(open_session(engine).reply([{"role": "user", "content": "u"}], max_tokens=9, max_context=BIG, deadline=soon()))
    assert caught.value.boundary is Boundary.MODEL


def test_same_seed_and_key_ask_with_the_same_seeds_and_turns_differ() -> None:
    def seeds(seed: int, key: str) -> list[int | None]:
        engine = FakeEngine(random.Random(1))
        session = FakeGateway({"http://a": engine}).open_session(key, seed=seed, temperature=1.0)

        async def talk() -> None:
            for _ in range(3):
                await session.reply([{"role": "user", "content": "u"}], max_tokens=4, max_context=BIG, deadline=soon())

        asyncio.run(talk())
        return [r.seed for r in engine.requests]

    assert seeds(1, "a") == seeds(1, "a")
    assert len({*seeds(1, "a"), *seeds(2, "a"), *seeds(1, "b")}) == 9


def test_branch_goes_on_from_the_same_tokens_and_trains_only_its_own() -> None:
    engine = FakeEngine(random.Random(1))
    session = open_session(engine)

    async def talk() -> Session:
        await session.reply([{"role": "user", "content": "u"}], max_tokens=4, max_context=BIG, deadline=soon())
        branch = session.branch("g000001.0.1")
        for each in (session, branch):
            await each.reply([{"role": "user", "content": "v"}], max_tokens=4, max_context=BIG, deadline=soon())
        return branch

    branch = asyncio.run(talk())
    trunk, other = session.window(), branch.window()
    _, second, third = engine.requests
    assert second.seed != third.seed
    shared = int(np.argmax(other.sampled_T))
    assert shared > 0 and other.tokens_T[:shared].tolist() == trunk.tokens_T[:shared].tolist()
    assert trunk.sampled_T[:shared].any() and other.sampled_T[shared:].all()
    assert branch.messages[:-1] == session.messages[:-1]
