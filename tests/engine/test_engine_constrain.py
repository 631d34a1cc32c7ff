"""Claims about constrained requests: the text follows, the neighbours and the logprobs do not notice, and nothing depends on luck."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import tokenizers
import torch
from engine_worlds import CONFIG, DEADLINE_S, END, VOCAB, packed_logprobs, running, served, tiny_model, write_tokenizer

from rollmill.engine.client import EngineClient, EngineRejected
from rollmill.engine.constrain import CACHE_CHARS, Constraints, Guide, Masks
from rollmill.engine.engine import Engine
from rollmill.engine.forward import Forward
from rollmill.engine.protocol import (
    MAX_CONSTRAINT_CHARS,
    Constraint,
    ConstraintKind,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    SwapMode,
)
from rollmill.engine.sampling import Lanes, sample
from rollmill.ops import CpuOps
from rollmill.weights import fingerprint

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ls", "cat"]}, "depth": {"type": "integer", "minimum": 0, "maximum": 99}, "all": {"type": "boolean"}},
    "required": ["name", "depth", "all"],
    "additionalProperties": False,
}
JSON = Constraint(kind=ConstraintKind.JSON_SCHEMA, text=json.dumps(SCHEMA))
DIGITS = Constraint(kind=ConstraintKind.REGEX, text="[0-9]{8}-(yes|no)")
LIST = Constraint(kind=ConstraintKind.LARK, text='start: "[" item ("," item)* "]"\nitem: /[a-z]{1,6}/')


class World:
    """A tokenizer's text, and constraints compiled for it."""

    def __init__(self, path: Path) -> None:
        write_tokenizer(path)
        self.file = path / "tokenizer.json"
        self.constraints = Constraints(self.file, vocab_size=VOCAB, eos_ids=frozenset(CONFIG.eos_token_ids))
        self._tokenizer = tokenizers.Tokenizer.from_file(str(self.file))

    def text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def run(self, engine: Engine, *requests: GenerateRequest) -> list[GenerateReply]:
        guides = [self.constraints.compile(r) if r.constraint else None for r in requests]
        futures = [engine.generate(r, guide=g) for r, g in zip(requests, guides, strict=True)]
        return [f.result(DEADLINE_S) for f in futures]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("tokenizer"))
    yield world
    world.constraints.close()


def ask(constraint: Constraint | None = JSON, **fields) -> GenerateRequest:
    return GenerateRequest(**{"prompt_ids": [1, 2, 3], "max_tokens": 200, "seed": 4, "stop_ids": [END], "constraint": constraint, **fields})


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 3.0])
def test_sampled_text_follows_its_constraint_and_ends_with_a_stop_token(world: World, temperature: float) -> None:
    with running() as engine:
        # Whitespace is free in JSON, so a random model needs a bound to come to an end.
        tight = msgspec.structs.replace(JSON, text=json.dumps({**SCHEMA, "x-guidance": {"whitespace_flexible": False}}))
        requests = [ask(c, seed=s, temperature=temperature) for c in (tight, DIGITS) for s in range(4)]
        requests.append(ask(Constraint(kind=ConstraintKind.LARK, text='start: "[" /[a-z]{3}/ ("," /[0-9]/)? "]"'), temperature=temperature))
        replies = world.run(engine, *requests)
    assert all(r.finish_reason is FinishReason.STOP and r.token_ids[-1] == END for r in replies)
    texts = [world.text(r.token_ids[:-1]) for r in replies]
    for text in texts[:4]:
        value = json.loads(text)
        assert value["name"] in ("ls", "cat") and 0 <= value["depth"] <= 99 and isinstance(value["all"], bool)
    assert all(re.fullmatch(DIGITS.text, text) for text in texts[4:8])
    assert re.fullmatch(r"\[[a-z]{3}(,[0-9])?\]", texts[8])


def test_forced_spans_are_where_one_token_was_allowed(world: World) -> None:
    with running() as engine:
        (reply,) = world.run(engine, ask(Constraint(kind=ConstraintKind.REGEX, text="abc[xyz]d(yes|no)")))
    text = world.text(reply.token_ids[:-1])
    end = len(reply.token_ids)
    # "abc", then a choice, "d", a choice, and what follows from its first letter up to the stop token.
    assert reply.forced == [(0, 3), (4, 5), (6, end)] and text[:3] == "abc" and text[5:] in ("yes", "no")


def test_logprobs_are_those_of_the_unconstrained_distribution(world: World) -> None:
    model = tiny_model()
    with running(model) as engine:
        (reply,) = world.run(engine, ask(temperature=0.7, num_top=2))
    assert np.array_equal(reply.logprobs_T, packed_logprobs(model, [1, 2, 3], reply.token_ids, 0.7).numpy())
    assert len(reply.tops) == len(reply.token_ids) and reply.tops[0][0][0] != reply.token_ids[0], "what it would rather have said"


def test_neighbours_of_a_constrained_row_get_the_same_bits(world: World) -> None:
    plain = [ask(None, seed=s, temperature=t, top_p=p, max_tokens=40) for s, (t, p) in enumerate([(1, 1), (0, 1), (0.7, 0.6)])]
    with running() as engine:
        alone = [world.run(engine, r)[0] for r in plain]
        together = world.run(engine, plain[0], ask(DIGITS), plain[1], ask(JSON), plain[2])
        single = world.run(engine, ask(DIGITS))[0]
    for a, b in zip(alone, together[::2], strict=True):
        assert (a.token_ids, a.logprobs) == (b.token_ids, b.logprobs)
    assert (single.token_ids, single.logprobs, single.forced) == (together[1].token_ids, together[1].logprobs, together[1].forced)


def test_fixed_steps_sample_constrained_rows_and_tops_like_steps_of_their_own_size(world: World) -> None:
    def replies(*, is_fixed: bool) -> list[tuple]:
        with running() as engine:
            engine._forward = Forward(engine.model, num_pages=engine.scheduler.book.num_pages, max_len=engine.max_len, is_fixed=is_fixed)
            asked = [
                ask(DIGITS, num_top=2),
                ask(None, num_top=3, max_tokens=20),
                ask(None, max_tokens=20),
                ask(JSON, temperature=0, top_k=3),
            ]
            return [(r.token_ids, r.logprobs, r.tops, r.forced) for r in world.run(engine, *asked)]

    assert replies(is_fixed=True) == replies(is_fixed=False)


@pytest.mark.parametrize("num_kept", [1, 5, 30])
def test_continuing_from_where_the_constraint_began_gives_the_unbroken_run(world: World, num_kept: int) -> None:
    with running() as engine:
        (whole,) = world.run(engine, ask(LIST, temperature=0.8))
    num_kept = min(num_kept, len(whole.token_ids) - 1)
    with running() as engine:
        kept = whole.token_ids[:num_kept]
        request = ask(LIST, temperature=0.8, prompt_ids=[1, 2, 3, *kept], constraint_from=3, max_tokens=200 - num_kept)
        (rest,) = world.run(engine, request)
    assert rest.token_ids == whole.token_ids[num_kept:] and rest.logprobs == whole.logprobs[4 * num_kept :]
    assert [(a + num_kept, b + num_kept) for a, b in rest.forced] == [(max(a, num_kept), b) for a, b in whole.forced if b > num_kept]


def test_tokens_that_the_constraint_does_not_allow_behind_its_beginning_are_refused(world: World) -> None:
    ids = [world._tokenizer.token_to_id(c) for c in "12x"]
    with pytest.raises(ValueError, match=r"does not allow prompt_ids\[4\]"):
        world.constraints.compile(ask(DIGITS, prompt_ids=[1, 2, *ids], constraint_from=2))


def test_a_constrained_request_that_is_put_back_goes_on_where_it_was(world: World) -> None:
    long = Constraint(kind=ConstraintKind.REGEX, text="([a-z]{1,3}[0-9]){30}x{5}")
    requests = [ask(long, prompt_ids=[i % 250 for i in range(100)], seed=s) for s in range(4)]
    with running(num_slots=4) as engine:
        calm = world.run(engine, *requests)
    with running(num_slots=4, num_pages=8) as engine:
        crowded = world.run(engine, *requests)
        assert engine.metrics.preemptions._value.get() > 0
    for a, b in zip(calm, crowded, strict=True):
        assert re.fullmatch(long.text, world.text(b.token_ids[:-1]))
        assert (a.token_ids, a.logprobs, a.forced, a.finish_reason) == (b.token_ids, b.logprobs, b.forced, b.finish_reason)


@pytest.mark.parametrize("mode", list(SwapMode))
def test_a_swap_in_the_middle_leaves_the_grammar_where_it_was(world: World, mode: SwapMode) -> None:
    model = tiny_model()
    with running(model, swap_mode=mode) as engine:
        guide, swaps = world.constraints.compile(ask(DIGITS)), []

        def hear(seq, update) -> None:
            if seq.num_sampled >= 4 and not swaps:
                swaps.append(engine.offer(2, lambda: fingerprint(model.serving_tensors())))

        seq = engine.submit(ask(DIGITS), hear, streams=True, guide=guide)
        (other,) = world.run(engine, ask(DIGITS, seed=9))
        for _ in range(1000):
            if seq.finish_reason is not None:
                break
            world.run(engine, ask(None, max_tokens=1))
    assert re.fullmatch(DIGITS.text, world.text(seq.tokens[3:-1])) and len(seq.spans) == 2 and swaps[0].result(0)
    assert re.fullmatch(DIGITS.text, world.text(other.token_ids[:-1]))


def test_several_stop_tokens_may_end_a_text_and_the_models_own_only_when_asked_for(world: World) -> None:
    other = world._tokenizer.token_to_id("<|user|>")
    with running() as engine:
        replies = world.run(engine, *(ask(Constraint(kind=ConstraintKind.REGEX, text="a*"), seed=s, stop_ids=[other]) for s in range(5)))
    assert {r.token_ids[-1] for r in replies if r.finish_reason is FinishReason.STOP} == {other}
    assert all(END not in r.token_ids and set(world.text(r.token_ids[:-1])) <= {"a"} for r in replies)


def test_a_grammar_without_a_way_on_ends_its_request_alone(world: World) -> None:
    stuck = Constraint(kind=ConstraintKind.LARK, text='start: a\na: a "x"')
    with running() as engine:
        neighbour = ask(None, seed=5, max_tokens=20)
        (alone,) = world.run(engine, neighbour)
        lost, beside = world.run(engine, ask(stuck), neighbour)
    assert lost.finish_reason is FinishReason.CONSTRAINT and lost.token_ids == []
    assert (beside.token_ids, beside.logprobs) == (alone.token_ids, alone.logprobs)


@pytest.mark.parametrize(
    ("constraint", "why"),
    [
        (Constraint(kind=ConstraintKind.REGEX, text="(?=a)b"), "look-around"),
        (Constraint(kind=ConstraintKind.REGEX, text="("), "regex"),
        (Constraint(kind=ConstraintKind.LARK, text="start: ("), "lark constraint cannot be compiled"),
        (Constraint(kind=ConstraintKind.LARK, text=""), "lark constraint cannot be compiled"),
        (Constraint(kind=ConstraintKind.JSON_SCHEMA, text="{"), "not JSON"),
        (Constraint(kind=ConstraintKind.JSON_SCHEMA, text="[1]"), "an object or a boolean"),
        (Constraint(kind=ConstraintKind.JSON_SCHEMA, text='{}}], "x": [{'), "not JSON"),
        (Constraint(kind=ConstraintKind.JSON_SCHEMA, text="[" * 100_000), "not JSON"),
        (Constraint(kind=ConstraintKind.JSON_SCHEMA, text='{"type": "wat"}'), "json_schema constraint cannot be compiled"),
        (Constraint(kind=ConstraintKind.JSON_SCHEMA, text='{"enum": []}'), "Unsatisfiable"),
        (Constraint(kind=ConstraintKind.JSON_SCHEMA, text='{"$ref": "http://127.0.0.1/x"}'), "cannot be compiled"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(world: World, constraint: Constraint, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        world.constraints.compile(ask(constraint))
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"stop_ids": []}, "stop_ids is empty"),
        ({"constraint_from": 4}, "constraint_from is 4, the prompt has 3"),
        ({"constraint_from": -1}, "constraint_from is -1"),
        ({"constraint": None, "constraint_from": 0}, "there is no constraint"),
        ({"constraint": Constraint(kind=ConstraintKind.REGEX, text="a" * (MAX_CONSTRAINT_CHARS + 1))}, "262145 characters"),
        ({"num_top": 21}, "num_top is 21"),
        ({"num_top": -1}, "num_top is -1"),
    ],
)
def test_fields_out_of_range_are_named(fields: dict, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ask(**fields).check(vocab_size=VOCAB, max_len=256)


def test_an_engine_takes_no_constraint_without_its_guide_and_no_guide_without_a_constraint(world: World) -> None:
    with running() as engine:
        with pytest.raises(ValueError, match="needs the guide"):
            engine.generate(ask(JSON))
        with pytest.raises(ValueError, match="only such a request has one"):
            engine.generate(ask(None), guide=world.constraints.compile(ask(JSON)))


def test_over_http_a_constraint_works_whole_and_streamed_and_refusals_are_400(world: World) -> None:
    async def main():
        async with served(tokenizer=world.file) as (_, url), EngineClient(url) as client:
            whole = await client.generate(ask(DIGITS))
            *pieces, last = [item async for item in client.stream(ask(DIGITS))]
            for bad in (ask(Constraint(kind=ConstraintKind.REGEX, text="(")), ask(DIGITS, stop_ids=[]), ask(DIGITS, constraint_from=9)):
                with pytest.raises(EngineRejected, match="answered 400"):
                    await client.generate(bad)
            with pytest.raises(EngineRejected, match="could not be followed after 0 tokens"):
                await client.generate(ask(Constraint(kind=ConstraintKind.LARK, text='start: a\na: a "x"')))
            return whole, pieces, last

    whole, pieces, last = asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
    assert (last.token_ids, last.logprobs, last.forced) == (whole.token_ids, whole.logprobs, whole.forced)
    assert [t for p in pieces for t in p.token_ids] == whole.token_ids and whole.forced
    assert re.fullmatch(DIGITS.text, world.text(whole.token_ids[:-1]))


def test_without_the_package_the_answer_is_the_install_command(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    fresh = Constraints(world.file, vocab_size=VOCAB, eos_ids=frozenset({END}))
    with pytest.raises(ValueError, match=r"pip install 'rollmill\[constrain\]'"):
        fresh.compile(ask(JSON))
    with pytest.raises(ValueError, match="a token that ends a text"):
        monkeypatch.undo()
        Constraints(world.file, vocab_size=VOCAB, eos_ids=frozenset()).compile(ask(JSON))


def test_compiled_grammars_are_kept_within_a_bound_and_a_guide_is_its_own(world: World) -> None:
    fresh = Constraints(world.file, vocab_size=VOCAB, eos_ids=frozenset({END}))
    first, second = fresh.compile(ask(DIGITS)), fresh.compile(ask(DIGITS))
    seven = world._tokenizer.token_to_id("7")
    assert first.take(seven) and first.matcher is not second.matcher and len(fresh._compiled) == 1
    masks = Masks(VOCAB, num_threads=1)
    assert np.array_equal(masks.fill([second])[0], masks.fill([fresh.compile(ask(DIGITS))])[0])
    long = "a" * (MAX_CONSTRAINT_CHARS - 4)
    for i in range(40):
        fresh.compile(ask(Constraint(kind=ConstraintKind.REGEX, text=f"{i:02}{long[:-2]}|b")))
    assert fresh._held_chars <= CACHE_CHARS and DIGITS not in fresh._compiled


def test_masks_made_in_turn_and_in_parallel_are_the_same(world: World) -> None:
    def guides() -> list[Guide]:
        return [world.constraints.compile(ask(c)) for c in (JSON, DIGITS, LIST, JSON)]

    assert np.array_equal(Masks(VOCAB, num_threads=1).fill(guides()), Masks(VOCAB, num_threads=3).fill(guides()))


def test_masks_shut_exactly_the_tokens_they_say(world: World) -> None:
    gen = torch.Generator().manual_seed(0)
    logits = torch.randn(3, VOCAB, generator=gen)
    allowed = [3, 31, 32, 63, 64, 299]
    mask = np.zeros((1, -(-VOCAB // 32)), np.uint32)
    for i in allowed:
        mask[0, i // 32] |= np.uint32(1 << (i % 32))
    drawn = set()
    for position in range(300):
        lanes = Lanes(temperature_N=np.full(3, 5.0), top_p_N=np.ones(3), top_k_N=np.zeros(3, np.int64), seed_N=np.arange(3), guided=[1])
        free = sample(CpuOps(), logits, lanes, np.full(3, position))
        ids, logprobs = sample(CpuOps(), logits, lanes, np.full(3, position), mask)
        drawn.add(ids[1])
        assert (ids[0], ids[2], logprobs[0], logprobs[2]) == (free[0][0], free[0][2], free[1][0], free[1][2])
        assert logprobs[1] == CpuOps().score(logits[1:2], torch.tensor(ids[1:2]))[0].item()
    assert drawn == set(allowed)
