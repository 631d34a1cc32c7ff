"""The rules of an episode, one by one: what goes on from what, what is trained, and what is not."""

from __future__ import annotations

import json
import random
import shutil
import unicodedata
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
from gateway_fakes import CHAT, DEMO, TOKENIZER, answer, tool, user

from rollmill.chat.format import ChatFormat
from rollmill.chat.messages import ChatMessage, ChatRole, Tool
from rollmill.engine.protocol import FinishReason
from rollmill.gateway.sessions.episode import Episode
from rollmill.gateway.sessions.placement import EpisodeClosed, EpisodeFull, PlaceKind, Placement
from rollmill.model.tokenizer import Tokenizer
from rollmill.records import Window

END = TOKENIZER.encode("<|im_end|>")[0]
READ = Tool(name="read", description="Read a file.", parameters={"type": "object"})
CALL = '<tool_call>{"name": "read", "arguments": {"path": "a", "n": 1}}</tool_call>'
replace = msgspec.structs.replace


class Talk:
    """An episode whose answers the test writes."""

    def __init__(self, chat: ChatFormat = CHAT, **options: int) -> None:
        self.chat = chat
        self.episode = Episode("e", chat, **options)  # type: ignore[arg-type]

    def place(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> Placement:
        return self.episode.place(messages, tools)

    def answer(self, placement: Placement, text: str, *, num_used: int | None = None, **facts: object) -> ChatMessage:
        """The policy says this and ends its turn."""
        ids = [*TOKENIZER.encode(text), END]
        reader = self.chat.reader(has_tools=True)
        reader.feed(ids[:num_used], last=True)
        reply = answer(ids, logprobs=[-0.5] * len(ids), versions=[1] * len(ids), finish=FinishReason.STOP, **facts)  # type: ignore[arg-type]
        self.episode.add(placement, reply, reader.message(), num_used=num_used)
        return reader.message()

    def say(self, messages: Sequence[ChatMessage], text: str, tools: Sequence[Tool] = ()) -> ChatMessage:
        return self.answer(self.place(messages, tools), text)

    def trained(self) -> list[str]:
        """The trained text of every window."""
        return [trained(w) for w in self.episode.windows()]


def trained(window: Window) -> str:
    window.check()
    return TOKENIZER.decode(window.tokens_T[window.sampled_T != 0].tolist())


def text(window: Window) -> str:
    return TOKENIZER.decode(window.tokens_T.tolist())


def assistant(text: str) -> ChatMessage:
    return ChatMessage(role=ChatRole.ASSISTANT, text=text)


SAME = {
    "as it was": lambda m: m,
    "stripped": lambda m: replace(m, text=m.text.strip()),
    "without its reasoning": lambda m: replace(m, reasoning=""),
    "arguments written anew": lambda m: replace(m, calls=tuple(replace(c, arguments='{"n":1,\n"path":"a"}') for c in m.calls)),
    "ids of its own": lambda m: replace(m, calls=tuple(replace(c, id=f"mine-{i}") for i, c in enumerate(m.calls))),
    "no ids": lambda m: replace(m, calls=tuple(replace(c, id="") for c in m.calls)),
}


@pytest.mark.parametrize("retell", SAME.values(), ids=SAME.keys())
def test_answer_told_in_other_words_is_still_the_sampled_one(retell) -> None:  # type: ignore[no-untyped-def]
    talk = Talk()
    first = talk.place([user("u")], [READ])
    message = replace(talk.answer(first, f" hm \n{CALL}"), reasoning="thought")
    told = retell(message)
    second = talk.place([user("u"), told, tool("r", told.calls[0].id)], [READ])
    assert second.kind is PlaceKind.APPEND
    sampled = [*TOKENIZER.encode(f" hm \n{CALL}"), END]
    assert second.prompt_ids[: len(first.prompt_ids) + len(sampled)] == first.prompt_ids + sampled
    talk.answer(second, "done")
    assert talk.trained() == [f" hm \n{CALL}<|im_end|>done<|im_end|>"]


def test_reasoning_that_the_client_drops_stays_in_the_context(tmp_path: Path) -> None:
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    shutil.copy(DEMO / "tokenizer_config.json", tmp_path)
    template = json.loads((DEMO / "tokenizer_config.json").read_text())["chat_template"]
    (tmp_path / "chat_template.jinja").write_text("{# thinks in <think> ... </think> #}" + template)
    talk = Talk(chat=ChatFormat(Tokenizer(tmp_path)))
    message = talk.say([user("u")], "<think>hm, hm</think>\n\nFine.")
    assert (message.reasoning.strip(), message.text.strip()) == ("hm, hm", "Fine.")
    placement = talk.place([user("u"), assistant("Fine."), user("v")])
    assert placement.kind is PlaceKind.APPEND and "<think>hm, hm</think>\n\nFine.<|im_end|>" in TOKENIZER.decode(placement.prompt_ids)
    talk.answer(placement, "<think></think>Yes.")
    assert talk.trained() == ["<think>hm, hm</think>\n\nFine.<|im_end|><think></think>Yes.<|im_end|>"]


def test_conversation_holds_every_token_once_and_renders_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    talk, messages, rendered = Talk(), [user("start")], list[int]()
    after = CHAT.after

    def counting(history: Sequence[ChatMessage], last_id: int | None, new: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> list[int]:
        rendered.append(len(new))
        return after(history, last_id, new, tools)

    monkeypatch.setattr(CHAT, "after", counting)
    for k in range(40):
        messages += [talk.say(messages, f"answer {k}"), tool(f"result {k}")]
    (window,) = talk.episode.windows()
    assert talk.episode.graph.num_tokens == window.num_tokens and rendered == [1] * 39
    assert +talk.episode.tally == {"first": 1, "appended": 39}


def test_call_ids_tell_answers_apart_that_say_the_same() -> None:
    talk, ask = Talk(), [user("u")]
    first, second = talk.say(ask, CALL), talk.say(ask, CALL)
    a = talk.place([*ask, first, tool("r", first.calls[0].id)])
    talk.answer(a, "one")
    b = talk.place([*ask, second, tool("r", second.calls[0].id)])
    assert (a.kind, b.kind) == (PlaceKind.APPEND, PlaceKind.APPEND), "the second is no retry of the first, nor a branch of it"
    talk.answer(b, "two")
    assert talk.trained() == [f"{CALL}<|im_end|>one<|im_end|>", f"{CALL}<|im_end|>two<|im_end|>"]
    mine = replace(first, calls=(replace(first.calls[0], id="mine"),))
    third = talk.place([*ask, mine, tool("r", "mine"), assistant("two"), user("v")])
    assert third.kind is PlaceKind.APPEND, "rewritten ids name nobody: the deepest, newest answer that says this is meant"


def test_of_identical_answers_the_newest_is_gone_on_from_and_the_other_is_an_orphan() -> None:
    talk, ask = Talk(), [user("u")]
    talk.say(ask, "same")
    talk.say(ask, "same")
    talk.say([*ask, assistant("same"), user("v")], "more")
    assert talk.trained() == ["same<|im_end|>more<|im_end|>"] and talk.episode.tally["orphaned"] == 1
    old, new = talk.episode.graph.samples[:2]
    assert (old.is_followed, new.is_followed) == (False, True)
    talk.say(ask, "same")
    assert talk.place([*ask, assistant("same"), user("v")]).kind is PlaceKind.RETRY, "a deeper place is not left for a newer answer"


def test_ids_rewritten_after_an_answer_that_was_given_twice_are_no_trouble() -> None:
    talk, ask = Talk(), [user("u")]
    past = [*ask, talk.say(ask, "same"), user("v")]
    message = talk.say(past, CALL)
    talk.say(ask, "same")
    told = replace(message, calls=(replace(message.calls[0], id="mine"),))
    assert talk.place([*past, told, tool("r", "mine")]).kind is PlaceKind.APPEND


def test_last_of_retries_counts_until_somebody_goes_on_from_another() -> None:
    talk, ask = Talk(), [user("u")]
    kinds = [talk.place(ask) for _ in range(3)]
    for placement, said in zip(kinds, ("one", "two", "three"), strict=True):
        talk.answer(placement, said)
    assert talk.place(ask).kind is PlaceKind.RETRY and talk.trained() == ["three<|im_end|>"]
    assert talk.episode.tally["orphaned"] == 2
    talk.say([*ask, assistant("one"), user("v")], "on")
    assert talk.trained() == ["one<|im_end|>on<|im_end|>"] and talk.episode.tally["orphaned"] == 2
    talk.say([*ask, assistant("two"), user("v")], "too")
    assert talk.trained() == ["one<|im_end|>on<|im_end|>", "two<|im_end|>too<|im_end|>"] and talk.episode.tally["orphaned"] == 1


def test_choices_of_one_call_all_count_unless_one_is_taken() -> None:
    talk, ask = Talk(), [user("u")]
    placement = talk.place(ask)
    for said in ("one", "two", "three"):
        talk.answer(placement, said)
    windows = talk.episode.windows()
    assert [trained(w) for w in windows] == ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]
    assert [w.parent for w in windows] == [None, 0, 0] and +talk.episode.tally == {"first": 1}
    talk.place([*ask, assistant("two"), user("v")])
    assert talk.trained() == ["two<|im_end|>"], "it was gone on from, even if nothing came of that"


def test_cut_answer_is_realigned_and_its_tail_is_not_trained() -> None:
    talk, ask = Talk(), [user("u")]
    first = talk.place(ask)
    talk.answer(first, "one two three four")
    second = talk.place([*ask, assistant("one two"), user("v")])
    assert second.kind is PlaceKind.REALIGN
    talk.answer(second, "on")
    (window,) = talk.episode.windows()
    assert text(window).endswith("assistant\none two<|im_end|>\n<|im_start|>user\nv<|im_end|>\n<|im_start|>assistant\non<|im_end|>")
    assert trained(window) == "one twoon<|im_end|>"
    assert talk.episode.messages()[1] == {"role": "assistant", "content": "one two"}
    talk.say([*ask, assistant("one two"), user("v"), assistant("on"), user("w")], "and on")
    assert +talk.episode.tally == {"first": 1, "realigned": 1, "appended": 1}, "what the client says is what it is recognised by"


def test_realigned_answer_stays_a_window_when_much_of_it_would_be_lost() -> None:
    talk, ask = Talk(realign_tokens=3), [user("u")]
    talk.say(ask, "one two three four five six seven eight")
    talk.say([*ask, assistant("one two"), user("v")], "on")
    whole, other = talk.episode.windows()
    assert trained(whole) == "one two three four five six seven eight<|im_end|>"
    assert trained(other) == "on<|im_end|>" and other.parent == 0


def test_call_that_the_client_edits_is_realigned() -> None:
    talk, ask = Talk(), [user("u")]
    message = talk.say(ask, f"I look.{CALL}")
    call = message.calls[0]
    told = replace(message, calls=(replace(call, arguments='{"path": "b"}'),))
    placement = talk.place([*ask, told, tool("r", call.id)])
    assert placement.kind is PlaceKind.REALIGN
    talk.answer(placement, "on")
    (window,) = talk.episode.windows()
    assert '"path": "b"' in text(window) and '"path": "b"' not in trained(window) and trained(window).startswith("I look.")


def test_answer_of_the_clients_own_is_context_and_the_sampled_one_stays() -> None:
    talk, ask = Talk(), [user("u")]
    talk.say(ask, "sampled")
    placement = talk.place([*ask, assistant("Mine, not yours."), user("v")])
    assert placement.kind is PlaceKind.FORK
    talk.answer(placement, "on")
    assert talk.trained() == ["sampled<|im_end|>", "on<|im_end|>"]


def test_few_shot_answers_are_context() -> None:
    talk = Talk()
    talk.say([user("1+1"), assistant("2"), user("2+2"), assistant("4"), user("3+3")], "6")
    assert talk.trained() == ["6<|im_end|>"] and "assistant\n4<|im_end|>" in text(talk.episode.windows()[0])


def test_compaction_and_helpers_are_windows_of_their_own_and_every_token_is_trained_once() -> None:
    talk = Talk()
    system = ChatMessage(role=ChatRole.SYSTEM, text="You code.")
    main = [system, user("task")]
    main += [talk.say(main, "step one"), user("go on")]
    helper = [ChatMessage(role=ChatRole.SYSTEM, text="You search."), user("find it")]
    helper += [talk.say(helper, "found"), user("sure?")]
    main += [talk.say(main, "step two"), user("go on")]
    talk.say(helper, "yes")
    summary = talk.say([*main[:-1], user("Summarise.")], "did one and two")
    short = [system, user(f"task. So far: {summary.text}")]
    talk.say(short, "step three")
    windows = talk.episode.windows()
    assert [trained(w) for w in windows] == [
        "found<|im_end|>yes<|im_end|>",
        "step one<|im_end|>step two<|im_end|>did one and two<|im_end|>",
        "step three<|im_end|>",
    ]
    assert [w.parent for w in windows] == [None, None, None]
    assert +talk.episode.tally == {"first": 1, "appended": 3, "forked": 2}


def test_branch_trains_the_shared_past_once_and_names_its_parent() -> None:
    talk, ask = Talk(), [user("u")]
    past = [*ask, talk.say(ask, "past")]
    talk.say([*past, user("left")], "l")
    fork = talk.place([*past, user("right")])
    assert fork.kind is PlaceKind.FORK
    talk.answer(fork, "r")
    left, right = talk.episode.windows()
    assert (trained(left), trained(right)) == ("past<|im_end|>l<|im_end|>", "r<|im_end|>")
    assert (left.parent, right.parent) == (None, 0) and "past<|im_end|>" in text(right)
    shared = int(np.argmax(right.sampled_T))
    assert (right.versions_T[:shared] == -1).all() and (right.logprobs_T[:shared] == 0).all()


def test_edit_of_an_earlier_message_is_another_conversation_from_there() -> None:
    talk, ask = Talk(), [user("u")]
    one = [*ask, talk.say(ask, "one"), tool("result")]
    two = [*one, talk.say(one, "two"), user("v")]
    assert talk.place([*two[:2], tool("result (cleared)"), *two[3:]]).kind is PlaceKind.FORK
    assert talk.place([user("other"), *two[1:]]).prompt.parent is None  # type: ignore[union-attr]


def test_other_tools_are_another_conversation() -> None:
    talk, ask = Talk(), [user("u")]
    message = talk.say(ask, "one", [READ])
    again = [*ask, message, user("v")]
    assert talk.place(again, [READ]).kind is PlaceKind.APPEND
    assert talk.place(again, [replace(READ, description="Reads.")]).kind is PlaceKind.FORK
    assert (
        talk.place(again, [Tool(name=READ.name, description=READ.description, parameters=dict(READ.parameters))]).kind is PlaceKind.APPEND
    )


def test_tokens_after_a_stop_string_are_kept_nowhere() -> None:
    talk, ask = Talk(), [user("u")]
    ids = TOKENIZER.encode("one two three")
    placement = talk.place(ask)
    talk.answer(placement, "one two three", num_used=len(ids) - 1)
    after = talk.place([*ask, assistant(TOKENIZER.decode(ids[:-1])), user("v")])
    talk.answer(after, "on")
    assert after.kind is PlaceKind.APPEND and talk.trained() == [TOKENIZER.decode(ids[:-1]) + "on<|im_end|>"]


def test_forced_tokens_are_context() -> None:
    talk = Talk()
    ids = TOKENIZER.encode("one two three")
    talk.answer(talk.place([user("u")]), "one two three", forced=[(1, len(ids))])
    assert talk.trained() == [TOKENIZER.decode(ids[:1]) + "<|im_end|>"]
    talk.answer(talk.place([user("v")]), "x", forced=[(0, 9)])
    assert len(talk.episode.windows()) == 1, "a path that would train nothing is no window"


def test_abandoned_answers_are_counted_and_not_trained() -> None:
    talk, ask = Talk(), [user("u")]
    talk.episode.abandon(talk.place(ask), 5)
    talk.say(ask, "one")
    assert talk.trained() == ["one<|im_end|>"]
    assert +talk.episode.tally == {"abandoned": 1, "abandoned_tokens": 5, "first": 1}


def test_answer_that_the_client_has_begun_goes_on_where_it_was_begun() -> None:
    talk, ask = Talk(), [user("u")]
    placement = talk.place([*ask, assistant("The answer")])
    assert TOKENIZER.decode(placement.prompt_ids).endswith("assistant\nThe answer")
    talk.answer(placement, " is 4")
    after = talk.place([*ask, assistant("The answer is 4"), user("v")])
    assert after.kind is PlaceKind.APPEND


def test_answer_that_was_cut_short_goes_on_from_its_own_tokens() -> None:
    talk, ask = Talk(), [user("u")]
    first = talk.place(ask)
    ids = TOKENIZER.encode("one two three four")
    talk.answer(first, "one two three four", num_used=len(ids))
    second = talk.place([*ask, assistant("one two three four")])
    assert second.kind is PlaceKind.APPEND and second.prompt_ids == first.prompt_ids + ids
    talk.answer(second, " five")
    third = talk.place([*ask, assistant("one two three four five"), user("v")])
    assert third.kind is PlaceKind.APPEND
    talk.answer(third, "on")
    assert talk.trained() == ["one two three four five<|im_end|>on<|im_end|>"]


def test_equal_requests_on_their_way_at_once_are_one_request() -> None:
    talk, ask = Talk(), [user("u")]
    one, two = talk.place(ask), talk.place(ask)
    talk.answer(two, "second")
    talk.answer(one, "first")
    assert len(talk.episode.graph.prompts) == 1 and talk.trained() == ["second<|im_end|>"]


def test_messages_are_those_of_the_longest_window() -> None:
    talk, ask = Talk(), [user("u")]
    message = talk.say(ask, f"I look.{CALL}")
    talk.say([*ask, message, tool("r", message.calls[0].id)], "done")
    talk.say([user("short")], "s")
    assert [(m["role"], m["content"]) for m in talk.episode.messages()] == [
        ("user", "u"),
        ("assistant", "I look."),
        ("tool", "r"),
        ("assistant", "done"),
    ]
    assert talk.episode.messages()[1]["tool_calls"][0]["function"] == {"name": "read", "arguments": {"path": "a", "n": 1}}
    assert Talk().episode.messages() == ()


def test_answer_that_was_gone_on_with_is_one_message() -> None:
    talk, ask = Talk(), [user("u")]
    talk.say([*ask, assistant("The answer")], " is")
    talk.say([*ask, assistant("The answer is")], " 42")
    assert [(m["role"], m["content"]) for m in talk.episode.messages()] == [("user", "u"), ("assistant", "The answer is 42")]
    assert talk.episode.answer() == "The answer is 42"


def test_answer_is_what_was_said_last_and_not_in_the_longest_window() -> None:
    talk, ask = Talk(), [user("a long story, " * 20)]
    first = talk.say(ask, "I think about it")
    talk.say([*ask, first, user("sum up")], "a story")
    talk.say([user("summary: a story")], "42")
    assert talk.episode.messages()[-1]["content"] == "a story" and talk.episode.answer() == "42"
    assert Talk().episode.answer() == ""


@pytest.mark.parametrize("retell", [lambda t: t.replace("\r\n", "\n"), lambda t: unicodedata.normalize("NFC", t)])
def test_line_ends_and_composed_accents_are_no_difference(retell) -> None:  # type: ignore[no-untyped-def]
    talk, ask = Talk(), [user("u")]
    message = talk.say(ask, "one\r\ne\u0301te\u0301\r\ntwo")
    after = talk.place([*ask, assistant(retell(message.text)), user("v")])
    assert after.kind is PlaceKind.APPEND
    talk.answer(after, "on")
    assert talk.trained() == ["one\r\ne\u0301te\u0301\r\ntwo<|im_end|>on<|im_end|>"] and not talk.episode.untrained()
    # What the user says is context: there a different character is a different token.
    assert talk.place([user("u\r\n")]).kind is PlaceKind.FORK


@pytest.mark.parametrize("value", ['"\\ud800"', "9" * 30, "[" * 800 + "]" * 800])
def test_whatever_a_model_writes_into_a_call_can_be_kept(value: str) -> None:
    talk, ask = Talk(), [user("u")]
    message = talk.say(ask, f'<tool_call>{{"name": "read", "arguments": {{"path": {value}}}}}</tool_call>')
    talk.say([*ask, message, tool("r", message.calls[0].id)], "on")
    told = talk.episode.messages()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told)) == list(told)
    assert json.loads(told[1]["tool_calls"][0]["function"]["arguments"]) == {"path": json.loads(value)}, "as text"


def test_every_sampled_token_is_trained_or_counted() -> None:
    talk, ask = Talk(realign_tokens=64), [user("u")]
    talk.say(ask, "orphan")
    first = talk.say(ask, "one two three")
    talk.answer(talk.place([*ask, replace(first, text="one"), user("v")]), "x y z", num_used=2, forced=[(0, 1)])
    late = talk.place([user("w")])
    talk.episode.abandon(talk.place([user("w")]), 5)
    talk.episode.close()
    talk.answer(late, "late")
    num_of = {t: len(TOKENIZER.encode(t)) + 1 for t in ("orphan", "one two three", "x y z", "late")}
    kept = len(TOKENIZER.encode("one"))
    untrained = talk.episode.untrained()
    assert untrained == {
        "orphaned": num_of["orphan"],
        "cut": num_of["one two three"] - kept,
        "unused": num_of["x y z"] - 2,
        "forced": 1,
        "late": num_of["late"],
        "abandoned": 5,
    }
    assert sum(int(w.sampled_T.sum()) for w in talk.episode.windows()) + untrained.total() == sum(num_of.values()) + 5


def test_skew_counts_answers_that_an_encoder_would_have_written_otherwise() -> None:
    episode = Episode("e", CHAT)
    plain = [*TOKENIZER.encode("the file is fine"), END]
    odd = [i for c in "the file" for i in TOKENIZER.encode(c)]
    assert TOKENIZER.encode("the file") != odd
    for ids in (plain, odd):
        reply = answer(ids, logprobs=[-1.0] * len(ids), versions=[1] * len(ids), finish=FinishReason.STOP)
        episode.add(episode.place([user("u")]), reply, assistant(TOKENIZER.decode(ids)))
    skew = episode.skew()
    assert (skew.num_answers, skew.num_skewed, skew.num_tokens) == (2, 1, len(plain) + len(odd))
    assert 0 < skew.num_skewed_tokens <= len(odd) and skew.answer_frac == 0.5
    assert skew == episode.skew() and (skew + skew).num_answers == 4


def test_episode_that_is_full_or_closed_says_so() -> None:
    talk = Talk(max_answers=2)
    talk.say([user("u")], "one")
    talk.say([user("v")], "two")
    with pytest.raises(EpisodeFull, match="has 2 answers, at most 2 are kept"):
        talk.place([user("w")])
    talk = Talk(max_tokens=40)
    talk.say([user("u")], "one")
    with pytest.raises(EpisodeFull, match="at most 40 are kept"):
        talk.place([user("word " * 50)])
    placement = talk.place([user("v")])
    talk.episode.close()
    with pytest.raises(EpisodeClosed, match="episode e has ended"):
        talk.place([user("w")])
    talk.answer(placement, "late")
    assert talk.trained() == ["one<|im_end|>"] and talk.episode.tally["late"] == 1


@pytest.mark.parametrize(
    "bad", [lambda e: e.place([]), lambda e: e.place_text(""), lambda e: e.place_ids([]), lambda e: e.place_ids([2**40])]
)
def test_request_that_says_nothing_is_refused(bad) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=r"the (prompt|conversation)"):
        bad(Episode("e", CHAT))


def test_seeds_are_a_function_of_seed_key_and_number() -> None:
    def seeds(key: str, seed: int) -> list[int]:
        episode = Episode(key, CHAT, seed=seed)
        return [episode.next_seed() for _ in range(3)]

    assert seeds("a", 1) == seeds("a", 1)
    assert len({*seeds("a", 1), *seeds("a", 2), *seeds("b", 1)}) == 9


def test_requests_may_be_placed_in_other_threads_while_answers_arrive() -> None:
    talk, rng = Talk(), random.Random(0)

    def converse(k: int) -> None:
        messages = [user(f"conversation {k}")]
        for n in range(12):
            messages += [talk.say(messages, f"answer {k} {n}"), user(f"more {n} " * rng.randint(1, 3))]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(converse, range(8)))
    assert sorted(len(t.split("<|im_end|>")) - 1 for t in talk.trained()) == [12] * 8
    assert talk.episode.tally["appended"] == 88 and talk.episode.graph.num_orphans == 0
