"""What an episode used up, read from its trace, and what that costs: pure, without a tokenizer."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from rollmill.algorithms import Effort
from rollmill.records import Trace


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one episode. A trace tells which tokens were sampled, not which of them were reasoning: the sampled tokens are divided
    among reasoning, calls and answers in proportion to the characters of each in the messages."""

    thinking_tokens: float = 0.0
    answer_tokens: float = 0.0
    call_tokens: float = 0.0
    output_tokens: float = 0.0
    """Context after the first sampled token of a window that no earlier window holds: what tools returned, and the template around it."""
    calls: float = 0.0
    turns: float = 0.0
    """Runs of sampled tokens."""


def usage_of(trace: Trace) -> Usage:
    num_sampled = num_output = num_turns = 0
    for window in trace.windows:
        is_sampled = window.sampled_T != 0
        num_sampled += int(is_sampled.sum())
        if is_sampled.any():
            first = int(is_sampled.argmax())
            last = len(is_sampled) - int(is_sampled[::-1].argmax())
            num_output += int((~is_sampled[first:last]).sum())
            num_turns += int(np.count_nonzero(np.diff(is_sampled.astype(np.int8), prepend=0) == 1))
    thinking = answer = call = num_calls = 0
    for message in trace.messages:
        if message.get("role") == "assistant":
            thinking += len(str(message.get("reasoning_content") or message.get("reasoning") or ""))
            answer += len(str(message.get("content") or ""))
            for made in message.get("tool_calls") or ():
                function = made.get("function") or {}
                call += len(str(function.get("name") or "")) + len(str(function.get("arguments") or ""))
                num_calls += 1
    per_char = num_sampled / max(1, thinking + answer + call)
    return Usage(
        thinking_tokens=thinking * per_char,
        # A trace without messages is all answer.
        answer_tokens=answer * per_char if thinking + answer + call else float(num_sampled),
        call_tokens=call * per_char,
        output_tokens=float(num_output),
        calls=float(num_calls),
        turns=float(num_turns),
    )


def cost(usage: Usage, effort: Effort) -> float:
    """`scale` * C(x), C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)): concave and increasing, C(0) = 0, C'(0) = 1.

    >>> cost(Usage(turns=3.0), Effort(scale=0.5, k=1.0, q=0.0, turns=1.0))
    1.5
    """
    x = sum(getattr(effort, name) * getattr(usage, name) for name in Usage.__struct_fields__)
    return effort.scale * concave(x, effort.k, effort.q)


def concave(x: float, k: float, q: float) -> float:
    """expm1 and log1p, so that nothing is lost where k x is small or q is near 1."""
    bent = (1 - q) * math.log1p(k * x)
    # Near 0, expm1(b) / b is 1 + b / 2: below 1e-12 that is 1 to the last bit.
    return math.log1p(k * x) / k * (math.expm1(bent) / bent if abs(bent) > 1e-12 else 1.0)
