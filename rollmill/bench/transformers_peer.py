"""What runs in the process beside us: `transformers` over the same weights, as one padded batch or by its continuous batching.

Imports nothing of ours. Neither side may stop early, and both draw from the whole distribution.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

import torch

Answer = Callable[..., dict[str, Any]]


def _model(path: str, device: str, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    return model.to(device).eval()


def generate(*, path: str, device: str, dtype: str) -> Answer:
    """`generate` over all prompts at once; they have one length, so nothing is padded."""
    model = _model(path, device, dtype)

    @torch.inference_mode()
    def answer(prompts: list[list[int]], num_new: int) -> dict[str, Any]:
        ids = torch.tensor(prompts, device=device)
        options = {"do_sample": True, "top_k": 0, "max_new_tokens": num_new, "min_new_tokens": num_new, "pad_token_id": 0}
        began = time.perf_counter()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **options).cpu()
        return {"seconds": time.perf_counter() - began, "num_tokens": out.numel() - ids.numel()}

    return answer


def batching(*, path: str, device: str, dtype: str, num_tokens: int) -> Answer:
    """Continuous batching with room for `num_tokens` tokens: left to itself it takes most of the memory."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model = _model(path, device, dtype)
    page = 256
    # The two names under which releases of `transformers` know it.
    key = "page_size" if "page_size" in inspect.signature(ContinuousBatchingConfig).parameters else "block_size"
    room: dict[str, Any] = {"num_blocks": 2 * -(-num_tokens // page), "max_batch_tokens": 1024, key: page}
    settings = ContinuousBatchingConfig(**room)

    # An id that no token has never ends a sequence.
    how = GenerationConfig(do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)
    # Kept between questions: `generate_batch` would start and stop its thread each time.
    manager = model.init_continuous_batching(generation_config=how, continuous_batching_config=settings)
    manager.start()

    def answer(prompts: list[list[int]], num_new: int) -> dict[str, Any]:
        began = time.perf_counter()
        manager.add_requests(inputs=prompts, max_new_tokens=num_new)
        ended: list[int] = []
        while len(ended) < len(prompts):
            reply = manager.get_result(timeout=1)
            if reply is not None and reply.error is not None:
                raise RuntimeError(reply.error)
            if reply is not None and reply.is_finished():
                ended.append(len(reply.generated_tokens))
            elif reply is None and not manager.is_running():
                raise RuntimeError("the thread that generates has ended")
        return {"seconds": time.perf_counter() - began, "num_tokens": sum(ended)}

    return answer
