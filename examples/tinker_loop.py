"""RL in a loop of one's own: sample a group, reward it, learn from it, sample from what was learnt.

Start a server (`rollmill tinker MODEL --port 8800`), then run `python examples/tinker_loop.py http://127.0.0.1:8800 MODEL`. The reward is
the share of sampled tokens that are one chosen token, which any model can learn in seconds; put your own in `reward`.
"""

from __future__ import annotations

import argparse

import numpy as np
import tinker
from tinker import types

PROMPTS = ([1, 2, 3], [4, 5], [6], [7, 8, 9, 10])


def reward(tokens: list[int], wanted: int) -> float:
    return sum(token == wanted for token in tokens) / max(1, len(tokens))


def datum(prompt: list[int], sample: types.SampledSequence, advantage: float) -> types.Datum:
    """What the policy read, what it should have been asked for at each position, and the evidence. The prompt itself is not learnt."""
    pad = [0.0] * (len(prompt) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints([*prompt, *sample.tokens[:-1]]),
        loss_fn_inputs={
            "target_tokens": np.array([*prompt[1:], *sample.tokens]),
            "logprobs": np.array([*pad, *(sample.logprobs or [])], np.float32),
            "advantages": np.array([*pad, *[advantage] * len(sample.tokens)], np.float32),
        },
    )


def main(argv: list[str] | None = None) -> list[float]:
    """Returns the mean reward of every step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base_url")
    parser.add_argument("base_model")
    parser.add_argument("--num-steps", type=int, default=15)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--wanted", type=int, default=11, help="the token to be learnt")
    args = parser.parse_args(argv)

    service = tinker.ServiceClient(base_url=args.base_url, api_key="tml-local")
    training = service.create_lora_training_client(args.base_model, rank=8, seed=0)
    curve = []
    for step in range(args.num_steps):
        sampler = training.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=8, temperature=1.0, stop=[], seed=step)
        asked = [sampler.sample(types.ModelInput.from_ints(p), args.group_size, params) for p in PROMPTS]
        data, rewards = [], []
        for prompt, future in zip(PROMPTS, asked, strict=True):
            samples = future.result().sequences
            scores = np.array([reward(s.tokens, args.wanted) for s in samples])
            rewards += scores.tolist()
            if scores.std() > 0:
                data += [datum(prompt, s, a) for s, a in zip(samples, scores - scores.mean(), strict=True)]
        curve.append(float(np.mean(rewards)))
        print(f"step {step:3d}  reward {curve[-1]:.3f}  {len(data)} sequences to learn from")
        if data:
            learnt = training.forward_backward(data, loss_fn="importance_sampling")
            stepped = training.optim_step(types.AdamParams(learning_rate=args.lr))
            learnt.result(), stepped.result()
    service.close("success").result()
    return curve


if __name__ == "__main__":
    main()
