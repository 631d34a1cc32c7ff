"""Claims about decode steps over fixed, padded buffers: the same bits as steps of their own size. On a GPU they are replayed graphs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_worlds import DEADLINE_S, VOCAB, tiny_model
from test_engine_routes import SPARSE

from rollmill.engine.engine import Engine
from rollmill.engine.fixed import FixedStep
from rollmill.engine.forward import Forward
from rollmill.engine.protocol import GenerateReply, GenerateRequest
from rollmill.model import Model

REQUESTS = [
    GenerateRequest(
        prompt_ids=[(7 * i + j) % VOCAB for j in range(5 + 23 * i)],
        max_tokens=20 + 5 * i,
        seed=i,
        temperature=[1.0, 0.0, 0.7][i % 3],
        top_k=9 if is_cut and i == 2 else 0,
    )
    for is_cut in (False, True)
    for i in range(7)
]


def replies(model: Model, *, is_fixed: bool, routes: bool = False) -> list[GenerateReply]:
    engine = Engine(model, model.config, version=1, num_slots=16, num_threads=1)
    engine._forward = Forward(model, num_pages=engine.scheduler.book.num_pages, max_len=engine.max_len, is_fixed=is_fixed)
    engine.start()
    try:
        asked = [GenerateRequest(**{f: getattr(r, f) for f in r.__struct_fields__} | {"routes_from": 0}) if routes else r for r in REQUESTS]
        return [f.result(DEADLINE_S) for f in [engine.generate(r) for r in asked]]
    finally:
        engine.close()


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "experts"])
def test_padded_fixed_steps_give_the_bits_of_steps_of_their_own_size(sparse: bool) -> None:
    model = tiny_model(0, SPARSE) if sparse else tiny_model()
    plain, fixed = (replies(model, is_fixed=f, routes=sparse) for f in (False, True))
    assert [(r.token_ids, r.logprobs, r.routes) for r in fixed] == [(r.token_ids, r.logprobs, r.routes) for r in plain]


def test_padding_writes_into_nobodys_page() -> None:
    model = tiny_model()
    forward = Forward(model, num_pages=4, max_len=256, is_fixed=True)
    assert forward.pages.num_pages == 5
    step = FixedStep(model, forward.pages, num_rows=8, max_len=256, spare_page=4)
    for array in forward.pages._k:
        array[:] = 7
    with torch.inference_mode():
        step.fill([1, 2, 3], [70, 0, 5], [[0, 1], [2], [3]], temperature_N=np.ones(3), uniform_N=np.zeros(3))
        step.run()
    for array in forward.pages._k:
        assert {(p, s) for p, s in zip(*np.nonzero((array != 7).any(axis=(1, 2))), strict=True)} == {(1, 6), (2, 0), (3, 5), (4, 0)}
