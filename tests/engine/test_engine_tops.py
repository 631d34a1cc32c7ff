"""Claims about the most likely tokens that are told beside the sampled one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_worlds import CONFIG, DEADLINE_S, running, tiny_model

from rollmill.engine.protocol import GenerateRequest
from rollmill.engine.sampling import most_likely
from rollmill.model import PackedAttention
from rollmill.ops import CpuOps, tempered

PROMPT = [1, 2, 3]


def ask(**fields) -> GenerateRequest:
    return GenerateRequest(**{"prompt_ids": PROMPT, "max_tokens": 30, "seed": 4, **fields})


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.6}, {"temperature": 0}, {"top_p": 0.5, "top_k": 9}])
def test_tops_are_the_likeliest_tokens_of_the_distribution_that_the_logprob_speaks_of(fields: dict) -> None:
    model = tiny_model()
    with running(model) as engine:
        reply = engine.generate(ask(num_top=5, **fields)).result(DEADLINE_S)
        plain = engine.generate(ask(**fields)).result(DEADLINE_S)
    assert (reply.token_ids, reply.logprobs) == (plain.token_ids, plain.logprobs) and plain.tops == []
    tokens = [*PROMPT, *reply.token_ids]
    attention = PackedAttention([len(tokens)])
    with torch.inference_mode():
        hidden = model(torch.tensor(tokens), attention.positions_T, attention)
        logits = tempered(model.logits(hidden[len(PROMPT) - 1 : -1]), fields.get("temperature", 1.0))
    for row, (top, token, logprob) in enumerate(zip(reply.tops, reply.token_ids, reply.logprobs_T.tolist(), strict=True)):
        ids = [i for i, _ in top]
        assert ids == logits[row].topk(5).indices.tolist()
        exact = model.ops.score(logits[row].expand(5, -1), torch.tensor(ids))[0].tolist()
        assert [lp for _, lp in top] == exact, "the bits that a score of these tokens gives"
        assert dict(top).get(token, logprob) == logprob


def test_rows_that_ask_for_different_numbers_get_them_and_the_others_none() -> None:
    with running() as engine:
        futures = [engine.generate(ask(seed=s, num_top=n)) for s, n in enumerate((0, 1, 20, 3))]
        replies = [f.result(DEADLINE_S) for f in futures]
        alone = [engine.generate(ask(seed=s)).result(DEADLINE_S) for s in range(4)]
    assert [sorted({len(t) for t in r.tops}) for r in replies] == [[], [1], [20], [3]]
    assert [(r.token_ids, r.logprobs) for r in replies] == [(r.token_ids, r.logprobs) for r in alone]


def test_a_vocabulary_smaller_than_the_number_is_told_whole() -> None:
    tops = most_likely(CpuOps(), torch.tensor([[0.0, 2.0, 1.0]]), 20)
    assert [i for i, _ in tops[0]] == [1, 2, 0] and np.isclose(sum(np.exp(lp) for _, lp in tops[0]), 1)


def test_tops_survive_being_put_back() -> None:
    requests = [ask(prompt_ids=[i % 250 for i in range(100)], seed=s, max_tokens=120, num_top=2) for s in range(4)]
    with running(num_slots=4) as engine:
        calm = [f.result(DEADLINE_S) for f in [engine.generate(r) for r in requests]]
    with running(num_slots=4, num_pages=8) as engine:
        crowded = [f.result(DEADLINE_S) for f in [engine.generate(r) for r in requests]]
        assert engine.metrics.preemptions._value.get() > 0
    assert [r.tops for r in calm] == [r.tops for r in crowded] and len(calm[0].tops) == 120
    assert CONFIG.max_position >= 220
