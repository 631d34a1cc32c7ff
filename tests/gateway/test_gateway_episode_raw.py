"""Raw completions are recognised by their tokens or their text: what was sampled is gone on from, as far as the client repeats it."""

from __future__ import annotations

import random

import pytest
from episode_world import FakePolicy, World, check_windows
from gateway_fakes import CHAT, TOKENIZER, answer, user
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.chat.messages import ChatMessage, ChatRole
from rollmill.engine.protocol import FinishReason
from rollmill.gateway.sessions.episode import Episode
from rollmill.gateway.sessions.placement import PlaceKind, Placement
from rollmill.gateway.sessions.prefixes import Prefixes, num_shared

END = TOKENIZER.encode("<|im_end|>")[0]


def say(episode: Episode, placement: Placement, ids: list[int], num_used: int | None = None) -> None:
    reply = answer(ids, logprobs=[-1.0] * len(ids), versions=[1] * len(ids), finish=FinishReason.STOP)
    message = ChatMessage(role=ChatRole.ASSISTANT, text=TOKENIZER.decode(ids[:num_used]))
    episode.add(placement, reply, message, num_used=num_used)


def odd(text: str) -> list[int]:
    """Ids of this text that the encoder would not choose."""
    return [i for c in text for i in TOKENIZER.encode(c)]


def trained(episode: Episode) -> list[list[int]]:
    return [w.tokens_T[w.sampled_T != 0].tolist() for w in episode.windows()]


def test_ids_that_repeat_an_answer_go_on_from_it() -> None:
    episode = Episode("e", CHAT)
    prompt, said = TOKENIZER.encode("Q: a\nA:"), [*odd(" four"), END]
    first = episode.place_ids(prompt)
    say(episode, first, said)
    assert (first.kind, first.prompt_ids) == (PlaceKind.FIRST, prompt)
    second = episode.place_ids([*prompt, *said, 7, 8])
    assert second.kind is PlaceKind.APPEND and second.prompt_ids == [*prompt, *said, 7, 8]
    say(episode, second, [9, END])
    assert episode.place_ids(prompt).kind is PlaceKind.RETRY
    assert episode.place_ids([5, 6]).kind is PlaceKind.FORK
    cut = episode.place_ids([*prompt, *said[:-1], 30, 31])
    assert cut.kind is PlaceKind.REALIGN and cut.prompt_ids == [*prompt, *said[:-1], 30, 31]
    say(episode, cut, [11, END])
    assert trained(episode) == [[*said, 9, END], [11, END]]


def test_equal_raw_requests_on_their_way_at_once_are_one_request() -> None:
    for place in (lambda e: e.place_ids(TOKENIZER.encode("Q: a")), lambda e: e.place_text("Q: a")):
        episode = Episode("e", CHAT)
        one, two = place(episode), place(episode)
        say(episode, two, [7, END])
        say(episode, one, [8, END])
        assert len(episode.graph.prompts) == 1 and trained(episode) == [[7, END]] and episode.untrained() == {"orphaned": 2}


@pytest.mark.parametrize(("after", "kind"), [("<|im_end|>\nQ: b\nA:", PlaceKind.APPEND), ("\nQ: b\nA:", PlaceKind.REALIGN)])
def test_text_that_repeats_an_answer_goes_on_from_its_sampled_tokens(after: str, kind: PlaceKind) -> None:
    """The stop token stays where the client's text has it, and goes where it does not."""
    episode = Episode("e", CHAT)
    said = odd(" four")
    first = episode.place_text("Q: a\nA:")
    say(episode, first, [*said, END])
    second = episode.place_text(f"Q: a\nA: four{after}")
    assert second.kind is kind
    assert second.prompt_ids[: len(first.prompt_ids) + len(said)] == first.prompt_ids + said
    assert TOKENIZER.decode(second.prompt_ids) == f"Q: a\nA: four{after}"
    say(episode, second, [9, END])
    third = episode.place_text(f"Q: a\nA: four{after}{TOKENIZER.decode([9])}<|im_end|>\n")
    assert third.kind is PlaceKind.APPEND and episode.place_text("Q: a\nA:").kind is PlaceKind.RETRY


def test_stop_string_that_the_client_writes_itself_is_not_doubled() -> None:
    episode = Episode("e", CHAT)
    said = TOKENIZER.encode(" I look.\nObservation:")
    first = episode.place_text("Task\nThought:")
    say(episode, first, said)
    same = episode.place_text("Task\nThought: I look.\nObservation: fine\nThought:")
    assert TOKENIZER.decode(same.prompt_ids) == "Task\nThought: I look.\nObservation: fine\nThought:"
    assert same.kind is PlaceKind.APPEND and same.prompt_ids[len(first.prompt_ids) :][: len(said)] == said
    other = episode.place_text("Task\nThought: I look.\nResult: fine")
    assert TOKENIZER.decode(other.prompt_ids) == "Task\nThought: I look.\nResult: fine" and other.kind is PlaceKind.REALIGN


def test_ids_of_a_conversation_are_recognised_too() -> None:
    episode = Episode("e", CHAT)
    first = episode.place([user("u")])
    say(episode, first, [40, 41, END])
    assert episode.place_ids([*first.prompt_ids, 40, 41, END, 5]).kind is PlaceKind.APPEND
    assert episode.place_text(TOKENIZER.decode([*first.prompt_ids, 40, 41, END]) + "\n").kind is PlaceKind.APPEND


def test_half_a_character_waits_for_its_other_half() -> None:
    episode = Episode("e", CHAT)
    ids = TOKENIZER.encode("\u4f60\u597d")
    say(episode, episode.place_text("say:"), [*ids, END])
    placement = episode.place_text("say:\u4f60\u597d!")
    assert TOKENIZER.decode(placement.prompt_ids) == "say:\u4f60\u597d!" and placement.kind is PlaceKind.REALIGN
    assert placement.prompt_ids[: -len(TOKENIZER.encode("!"))][-len(ids) :] == ids


class RawWorld(World):
    """A client of plain text or plain ids, with retries, cuts and prompts of its own."""

    def run(self, num_steps: int) -> None:
        rng, policy = self.rng, self.policy
        is_text = rng.random() < 0.5
        prompts = ["Q:", "Q: a\nA:"]
        for _ in range(num_steps):
            text = rng.choice(prompts)
            placement = self.episode.place_text(text) if is_text else self.episode.place_ids(TOKENIZER.encode(text))
            assert TOKENIZER.decode(placement.prompt_ids) == text
            for _ in range(rng.choice((1, 1, 2))):
                said = policy.sample(placement)
                ids = said.reply.token_ids[: said.num_used]
                shown = TOKENIZER.decode([i for i in ids if i not in TOKENIZER.stop_ids])
                message = ChatMessage(role=ChatRole.ASSISTANT, text=shown)
                self.episode.add(placement, said.reply, message, num_used=said.num_used)
                whole = TOKENIZER.decode(ids)
                if "\ufffd" not in whole:
                    prompts.append(text + rng.choice((whole, shown, shown[:-1])) + rng.choice(("", "\nQ:", "<|im_end|>\n")))


@pytest.mark.parametrize("seed", range(200))
def test_raw_clients_train_what_was_sampled_whatever_they_do(seed: int) -> None:
    world = RawWorld(seed)
    world.run(10)
    check_windows(world.episode.windows(), world.policy.said, has_routes=True)
    held = sum(s.num_used for s in world.policy.said)
    assert sum(len(s.ids) for s in world.episode.graph.samples) == held


def test_policy_of_the_world_cuts_texts_anyhow() -> None:
    policy = FakePolicy(random.Random(0))
    ids = [policy.ids() for _ in range(200)]
    skewed = [i for i in ids if TOKENIZER.encode(TOKENIZER.decode(i)) != i]
    assert len(skewed) > 20, "a world in which encoding again is harmless would prove nothing"


data = st.binary(max_size=12)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(data, max_size=12), data)
def test_known_beginnings_are_found_longest_first(known: list[bytes], asked: bytes) -> None:
    prefixes = Prefixes[bytes]()
    for item in known:
        prefixes.put(item, item)
    wanted = sorted({k for k in known if asked.startswith(k)}, key=len, reverse=True)
    assert prefixes.beginnings(asked) == [(len(k), k) for k in wanted]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text("ab", max_size=6), st.text("ab", max_size=6))
def test_shared_beginning_is_as_long_as_can_be(a: str, b: str) -> None:
    num = num_shared(a, b)
    assert a[:num] == b[:num] and (num in (len(a), len(b)) or a[num] != b[num])
