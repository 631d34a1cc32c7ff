"""A tiny model and a server on a thread of its own, for the real SDK to talk to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker.types import AdamParams, Datum, ModelInput, SamplingParams

from rollmill.tinker.run import run_tinker

DEADLINE_S = 60.0
KEY = "tml-local"


@contextmanager
def served(model: Path, state: Path, **options: Any) -> Iterator[str]:
    """The address of a server that runs until the block ends."""
    ready, found, failed = threading.Event(), dict[str, Any](), list[BaseException]()

    async def life() -> None:
        found["loop"], found["task"] = asyncio.get_running_loop(), asyncio.current_task()

        def on_ready(port: int) -> None:
            found["port"] = port
            ready.set()

        await run_tinker(model, state_dir=state, on_ready=on_ready, **{"num_slots": 16, **options})

    def work() -> None:
        try:
            asyncio.run(life())
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            failed.append(error)
            ready.set()
            raise

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert ready.wait(DEADLINE_S), "the server did not start"
    if failed:
        raise failed[0]
    try:
        yield f"http://127.0.0.1:{found['port']}"
    finally:
        found["loop"].call_soon_threadsafe(found["task"].cancel)
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "the server did not stop"


def client_of(url: str, key: str = KEY) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=url, api_key=key)


def lesson(tokens: list[int], num_prompt: int = 1) -> Datum:
    """Learn what follows the prompt."""
    weights = np.array([float(i + 1 >= num_prompt) for i in range(len(tokens) - 1)], np.float32)
    inputs: Any = {"target_tokens": np.array(tokens[1:]), "weights": weights}
    return Datum(model_input=ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def sampled_lesson(prompt: list[int], tokens: list[int], logprobs: list[float], advantage: float) -> Datum:
    """A sampled sequence with the evidence, in the cookbook's layout: zeros where the prompt is."""
    pad = len(prompt) - 1
    inputs: Any = {
        "target_tokens": np.array([*prompt[1:], *tokens]),
        "logprobs": np.array([0.0] * pad + logprobs, np.float32),
        "advantages": np.array([0.0] * pad + [advantage] * len(tokens), np.float32),
    }
    return Datum(model_input=ModelInput.from_ints([*prompt, *tokens[:-1]]), loss_fn_inputs=inputs)


def logprobs_of(output: Any) -> list[np.ndarray]:
    return [np.asarray(o["logprobs"].data, np.float32) for o in output.loss_fn_outputs]


def adam(lr: float = 1e-2, **more: Any) -> AdamParams:
    return AdamParams(learning_rate=lr, **more)


def greedy(num: int) -> SamplingParams:
    return SamplingParams(max_tokens=num, temperature=0.0, stop=[])
