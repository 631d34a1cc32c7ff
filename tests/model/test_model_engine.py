"""What the engine generates with its cache, in chunks and in company, the packed forward of the trainer scores the same."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parents[1] / "engine"))
from engine_worlds import DEADLINE_S, packed_logprobs, running
from peer_worlds import FAMILIES, saved_peer

from rollmill.engine.protocol import GenerateRequest
from rollmill.model import load_model

PROMPTS = [[5, 9, 2, 40, 33, 1, 0, 63, 17, 4, 4, 18], [7], [60, 3, 3, 21, 8]]


@pytest.mark.parametrize("name", [*FAMILIES, "llama_yarn", "llama_biased"])
def test_engine_generates_what_the_packed_forward_scores(name: str, tmp_path: Path) -> None:
    saved_peer(name, tmp_path)
    model, _ = load_model(tmp_path)
    with running(model, step_tokens=7) as engine:
        requests = [GenerateRequest(prompt_ids=p, max_tokens=16, seed=i) for i, p in enumerate(PROMPTS)]
        results = [future.result(DEADLINE_S) for future in [engine.generate(r) for r in requests]]
    for prompt, result in zip(PROMPTS, results, strict=True):
        scored = packed_logprobs(model, prompt, list(result.token_ids))
        assert len(result.token_ids) >= 1
        np.testing.assert_allclose(result.logprobs_T, scored.numpy(), atol=2e-5)
