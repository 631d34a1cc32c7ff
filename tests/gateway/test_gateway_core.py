"""Calls without HTTP: however a replica cuts its answer the client gets the same, and whatever breaks the episode knows."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest
from call_worlds import END, HELLO, TOKENIZER, FakeReplicas, gateway_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.chat.messages import ChatMessage, ChatRole, Tool
from rollmill.engine.client import EngineRejected
from rollmill.engine.protocol import FinishReason, GenerateReply, GenerateRequest
from rollmill.gateway.call import Answer, ChatCall, Event, EventKind, Finish, TextCall
from rollmill.gateway.gateway import Gateway
from rollmill.gateway.recording.call_rows import CallRecord, EpisodeRecord
from rollmill.gateway.routing.replicas import NoAnswer
from rollmill.web import ApiError

CALL = '<tool_call>{"name": "ls", "arguments": {"path": "."}}</tool_call>'
LS = Tool(name="ls", parameters={"type": "object"})


def heard(replicas: FakeReplicas, call: ChatCall | TextCall, *, streams: bool) -> tuple[list[Event], list[Answer], Gateway]:
    async def main() -> tuple[list[Event], list[Answer], Gateway]:
        gateway = gateway_of(replicas)
        episode = gateway.open_episode("e")
        answering = gateway.answer(call, episode, deadline=time.monotonic() + 60)
        events = [event async for event in answering] if streams else []
        return events, answering.answers if streams else await answering.whole(), gateway

    return asyncio.run(main())


def without_ids(answer: Answer) -> Any:
    """An answer but for the ids of its calls, which are drawn, and for what only a whole reply tells."""
    return (
        (answer.text, answer.reasoning, [(c.name, c.arguments) for c in answer.calls], answer.finish, answer.stop_string),
        (answer.token_ids, answer.logprobs.tolist(), [(s.start, s.end, s.version) for s in answer.spans]),
    )


TEXTS = st.lists(st.sampled_from(["a ", "STOP", "ST", "é", "🙂", "\n", CALL, "<tool", "x" * 9, "<|im", "{}"]), max_size=8).map("".join)


@given(
    text=TEXTS, sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4), one_call=st.booleans(), stops=st.sampled_from([(), ("STOP",)])
)
@settings(max_examples=150, derandomize=True, deadline=None)
def test_answer_does_not_depend_on_how_it_was_cut(text: str, sizes: list[int], one_call: bool, stops: tuple[str, ...]) -> None:
    ids = [*TOKENIZER.encode(TOKENIZER.neutral(text).replace("< ", "<")), END]
    call = ChatCall(messages=HELLO, tools=(LS,), stops=stops, parallel_calls=not one_call)
    events, streamed, gateway = heard(FakeReplicas(lambda r: ids, tuple(sizes)), msgspec.structs.replace(call, stream=True), streams=True)
    _, whole, _ = heard(FakeReplicas(lambda r: ids, (1,)), call, streams=False)
    assert [without_ids(a) for a in streamed] == [without_ids(a) for a in whole]
    (answer,) = streamed
    assert "".join(e.text for e in events if e.kind is EventKind.TEXT).startswith(answer.text.rstrip())
    begun = [(e.call_id, e.name) for e in events if e.kind is EventKind.CALL]
    assert begun == [(c.id, c.name) for c in answer.calls] and (not one_call or len(begun) <= 1)
    assert answer.token_ids == ids[: len(answer.token_ids)]
    assert [t for e in events for t in e.token_ids] == answer.token_ids, "nothing is told that is no part of the answer"
    assert events[-1].kind is EventKind.END and events[-1].answer == answer
    windows = gateway.episodes.get("e").windows()  # type: ignore[union-attr]
    if answer.token_ids:
        assert windows[0].tokens_T.tolist()[-len(answer.token_ids) :] == answer.token_ids


def test_episode_has_the_answer_before_the_last_event_leaves() -> None:
    async def main() -> None:
        gateway = gateway_of(FakeReplicas(lambda r: [*TOKENIZER.encode("hi"), END]))
        episode = gateway.open_episode("e")
        async for event in gateway.answer(ChatCall(messages=HELLO), episode, deadline=time.monotonic() + 60):
            if event.kind is EventKind.END:
                assert len(episode.windows()) == 1

    asyncio.run(main())


def test_arguments_of_a_call_are_told_while_they_are_written() -> None:
    call = '<tool_call>{"name": "ls", "arguments": {"path": "a/rather/long/path/to/a/file"}}</tool_call>'
    replicas = FakeReplicas(lambda r: [*TOKENIZER.encode(call), END])
    events, (answer,), _ = heard(replicas, ChatCall(messages=HELLO, tools=(LS,), stream=True), streams=True)
    first = next(i for i, e in enumerate(events) if e.kind is EventKind.CALL)
    parts = [e.text for e in events[first + 1 :] if e.kind is EventKind.ARGUMENTS]
    assert len(parts) > 5 and events[first].text + "".join(parts) == answer.calls[0].arguments


@pytest.mark.parametrize("asked", [None, 3, 100])
def test_an_episode_may_cap_every_answer(asked: int | None) -> None:
    async def main() -> Answer:
        replicas = FakeReplicas(lambda r: TOKENIZER.encode("many words " * 50))
        replicas.reason = FinishReason.LENGTH
        gateway = gateway_of(replicas)
        episode = gateway.open_episode("e", max_answer_tokens=5)
        (answer,) = await gateway.answer(ChatCall(messages=HELLO, max_tokens=asked), episode, deadline=time.monotonic() + 60).whole()
        return answer

    answer = asyncio.run(main())
    assert len(answer.token_ids) == (3 if asked == 3 else 5) and answer.finish is Finish.LENGTH


def test_whole_call_of_which_one_choice_failed_leaves_nothing() -> None:
    class LastFails(FakeReplicas):
        async def generate(self, request: GenerateRequest, *, deadline: float) -> GenerateReply:
            if len(self.requests) == 2:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                raise NoAnswer("nobody is there")
            return await super().generate(request, deadline=deadline)

    async def main() -> None:
        gateway = gateway_of(LastFails(lambda r: [*TOKENIZER.encode("hi"), END]))
        episode = gateway.open_episode("e")
        answering = gateway.answer(TextCall(prompts=("a", "b", "c")), episode, deadline=time.monotonic() + 60)
        with pytest.raises(ApiError):
            await answering.whole()
        assert answering.recorded == [] and answering.num_abandoned == 2 * (len(TOKENIZER.encode("hi")) + 1)
        assert episode.windows() == () and episode.tally["abandoned"] == 3

    asyncio.run(main())


def test_skew_of_every_ended_episode_is_counted() -> None:
    async def main() -> None:
        gateway = gateway_of(FakeReplicas(lambda r: [*TOKENIZER.encode("hi"), END]))
        for key in ("a", "b"):
            episode = gateway.open_episode(key)
            await gateway.answer(ChatCall(messages=HELLO), episode, deadline=time.monotonic() + 60).whole()
        gateway.end_episode("a")
        gateway.sweep(time.monotonic() + 1e6)
        await asyncio.gather(*gateway._counting)
        assert gateway.ended_skew.num_answers == 2

    asyncio.run(main())


class ListRecorder:
    """A recorder that keeps what it gets."""

    def __init__(self) -> None:
        self.records: list[CallRecord | EpisodeRecord] = []

    def put(self, record: CallRecord | EpisodeRecord) -> None:
        self.records.append(record)

    async def close(self) -> None:
        pass


def test_a_gateway_that_closes_leaves_its_episodes_open_in_the_record() -> None:
    class Endless(FakeReplicas):
        is_asked = asyncio.Event()

        async def generate(self, request: GenerateRequest, *, deadline: float) -> GenerateReply:
            self.is_asked.set()
            return await asyncio.get_running_loop().create_future()

        async def close(self) -> None:
            pass

    async def main() -> None:
        replicas, recorder = Endless(lambda r: []), ListRecorder()
        gateway = gateway_of(replicas, recorder=recorder)
        answering = gateway.answer(ChatCall(messages=HELLO), gateway.open_episode("e"), deadline=time.monotonic() + 60)
        task = asyncio.create_task(answering.whole())
        await asyncio.wait_for(replicas.is_asked.wait(), 10)
        await gateway.close()
        with pytest.raises(ApiError) as caught:
            await task
        assert caught.value.status_code == 503
        assert [(r.key, r.is_open) for r in recorder.records if isinstance(r, EpisodeRecord)] == [("e", True)]

    asyncio.run(main())


def test_choices_share_a_prompt_and_not_a_seed() -> None:
    replicas = FakeReplicas(lambda r: [*TOKENIZER.encode("hi"), END])
    events, answers, gateway = heard(replicas, ChatCall(messages=HELLO, num_choices=3), streams=True)
    assert len(answers) == 3 and {e.index for e in events} == {0, 1, 2}
    assert len({r.seed for r in replicas.requests}) == 3
    assert len({tuple(r.prompt_ids) for r in replicas.requests}) == 1
    assert len(gateway.episodes.get("e").windows()) == 3  # type: ignore[union-attr]


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize(
    ("error", "reason", "status", "is_ours"),
    [
        (NoAnswer("nobody is there"), FinishReason.STOP, 503, True),
        (NoAnswer("the replica did not answer in time", is_slow=True), FinishReason.STOP, 504, True),
        (NoAnswer("version 3 is past", is_version=True), FinishReason.STOP, 409, True),
        (EngineRejected("http://10.0.0.1:1 answered 400: the prompt has 9 tokens, the context 8"), FinishReason.STOP, 400, False),
        (None, FinishReason.DEADLINE, 504, True),
        (None, FinishReason.VERSION, 409, True),
        (None, FinishReason.ERROR, 503, True),
        (None, FinishReason.CANCELLED, 503, True),
    ],
)
def test_failures_have_their_status_and_the_episode_keeps_nothing(
    error: Exception | None, reason: FinishReason, status: int, is_ours: bool, num_choices: int, streams: bool
) -> None:
    async def main() -> None:
        replicas = FakeReplicas(lambda r: TOKENIZER.encode("some words"), (1,))
        replicas.error, replicas.reason = error, reason
        gateway = gateway_of(replicas)
        episode = gateway.open_episode("e")
        answering = gateway.answer(ChatCall(messages=HELLO, num_choices=num_choices), episode, deadline=time.monotonic() + 60)
        with pytest.raises(ApiError) as caught:
            if streams:
                async for _ in answering:
                    pass
            else:
                await answering.whole()
        assert caught.value.status_code == status and "10.0.0.1" not in str(caught.value.detail)
        assert episode.windows() == () and episode.tally["abandoned"] == num_choices
        assert bool(episode.tally["failed"]) == is_ours
        assert replicas.num_open == 0 and len(asyncio.all_tasks()) == 1

    asyncio.run(main())


@pytest.mark.parametrize("num_choices", [1, 3])
def test_leaving_early_closes_every_stream(num_choices: int) -> None:
    async def main() -> None:
        replicas = FakeReplicas(lambda r: TOKENIZER.encode("many words " * 50))
        gateway = gateway_of(replicas)
        episode = gateway.open_episode("e")
        steps = gateway.answer(ChatCall(messages=HELLO, num_choices=num_choices), episode, deadline=time.monotonic() + 60).steps()
        await anext(steps)
        await steps.aclose()
        assert replicas.num_open == 0 and len(asyncio.all_tasks()) == 1
        assert episode.tally["abandoned"] == num_choices and episode.tally["abandoned_tokens"] >= 1

    asyncio.run(main())


def test_ending_the_episode_ends_its_calls_and_the_caller_hears_why() -> None:
    async def main() -> None:
        started = asyncio.Event()

        def say(request: GenerateRequest) -> list[int]:
            started.set()
            return TOKENIZER.encode("many words " * 1000)

        replicas = FakeReplicas(say)
        gateway = gateway_of(replicas)
        answering = gateway.answer(ChatCall(messages=HELLO, stops=("never",)), gateway.open_episode("e"), deadline=time.monotonic() + 60)
        task = asyncio.create_task(answering.whole())
        await started.wait()
        assert gateway.end_episode("e") is not None and gateway.end_episode("e") is None
        with pytest.raises(ApiError, match="has ended") as caught:
            await task
        assert caught.value.status_code == 410 and replicas.num_open == 0
        again = gateway.answer(ChatCall(messages=HELLO), answering.episode, deadline=time.monotonic() + 60)
        with pytest.raises(ApiError, match="has ended"):
            await again.whole()

    asyncio.run(main())


def test_text_calls_give_choices_prompt_by_prompt() -> None:
    replicas = FakeReplicas(lambda r: [r.prompt_ids[-1], END])
    ids = [TOKENIZER.encode("a"), TOKENIZER.encode("b")]
    _, answers, _ = heard(replicas, TextCall(prompts=("a", ids[1]), num_choices=2, max_tokens=5), streams=False)
    assert [a.token_ids[0] for a in answers] == [ids[0][-1]] * 2 + [ids[1][-1]] * 2
    assert all(a.finish is Finish.STOP for a in answers)


def test_calls_outside_an_episode_find_their_replica_by_how_they_begin() -> None:
    async def main() -> None:
        replicas = FakeReplicas(lambda r: [END])
        gateway = gateway_of(replicas)
        turns = [HELLO, (*HELLO, ChatMessage(role=ChatRole.ASSISTANT, text="x"), *HELLO), (ChatMessage(role=ChatRole.USER, text="Other"),)]
        for messages in turns:
            await gateway.answer(ChatCall(messages=messages), None, deadline=time.monotonic() + 60).whole()
        first, second, other = (r.session for r in replicas.requests)
        assert first == second != other

    asyncio.run(main())
