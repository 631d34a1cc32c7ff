"""What the quantised profiles cost in accuracy and time on the CPU, beside the exact profile and bfloat16 linear layers in the same run.

Prints one JSON object. Logprobs are those of the pages in docs/, the first `--tokens` of them, in one packed forward.
    python bench/precision.py [--tokens 512] [--threads 1] [--output FILE] [MODEL_DIR ...]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rollmill.model import Model, PackedAttention, Tokenizer, load_model
from rollmill.ops import CpuOps, Ops, ops_for

ROOT = Path(__file__).parents[1]
ROUNDS = 3


class Bfloat16Linears(CpuOps):
    """Operands and results of linear layers rounded to bfloat16, sums in float32: what a bfloat16 model loses, for comparison."""

    profile = "bf16"

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return super().linear(x.bfloat16().float(), weight.bfloat16().float(), bias).bfloat16().float()

    def linear_fp32(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return CpuOps.linear(self, x.float(), weight.float())


def profiles() -> dict[str, Ops]:
    return {"bf16": Bfloat16Linears(), "fp8": ops_for("fp8", "cpu"), "nvfp4": ops_for("nvfp4", "cpu")}


def row(name: str, peer: str, value: float, unit: str) -> dict[str, Any]:
    return {"name": name, "peer": peer, "value": float(f"{value:.4g}"), "unit": unit}


def seconds(work: Callable[[], object]) -> float:
    work()
    taken = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


@torch.no_grad()
def random_rows() -> list[dict[str, Any]]:
    """One product of normal numbers, and of numbers with the heavy tails that activations have (a normal number cubed)."""
    gen = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter((torch.randn(1024, 1024, generator=gen) * 0.02).bfloat16().float())
    normal = torch.randn(512, 1024, generator=gen)
    found = []
    for kind, x in (("normal", normal), ("heavy-tailed", normal**3)):
        wanted = x.double() @ weight.detach().double().T
        for profile, ops in profiles().items():
            error = (ops.linear(x, weight).double() - wanted).norm() / wanted.norm()
            found.append(row(f"relative error of a 1024 x 1024 product, {kind} rows, {profile}", "float64", 100 * float(error), "%"))
    return found


@torch.inference_mode()
def logits(model: Model, ids: list[int]) -> torch.Tensor:
    attention = PackedAttention([len(ids)])
    return model.logits(model(torch.tensor(ids), attention.positions_T, attention))


def model_rows(path: Path, num_tokens: int) -> list[dict[str, Any]]:
    model, _ = load_model(path, numerics="exact")
    text = "\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
    ids = Tokenizer(path).encode(text)[: min(num_tokens, model.config.max_position)]
    after = torch.tensor(ids[1:])[:, None]
    exact = model.ops
    wanted = logits(model, ids).log_softmax(-1)
    base_s = seconds(lambda: logits(model, ids))
    found = [row(f"{path.name}: perplexity, exact", "", float((-wanted[:-1].gather(1, after)).mean().exp()), "")]
    for profile, ops in profiles().items():
        model._ops = ops
        began = time.perf_counter()
        got = logits(model, ids).log_softmax(-1)
        first_s = time.perf_counter() - began
        gap = (got - wanted)[:-1].gather(1, after).abs()
        kl = (wanted.exp() * (wanted - got)).sum(-1).mean()
        agree = (got.argmax(-1) == wanted.argmax(-1)).float().mean()
        found += [
            row(f"{path.name}: mean |logprob difference|, {profile}", "exact", float(gap.mean()), "nat"),
            row(f"{path.name}: mean KL divergence, {profile}", "exact", float(kl), "nat"),
            row(f"{path.name}: same most likely token, {profile}", "exact", 100 * float(agree), "%"),
            row(f"{path.name}: perplexity, {profile}", "exact", float((-got[:-1].gather(1, after)).mean().exp()), ""),
        ]
        if profile != "bf16":
            took_s = seconds(lambda: logits(model, ids))
            found += [
                row(f"{path.name}: time of a forward of {len(ids)} tokens, {profile}", "exact", took_s / base_s, "times"),
                row(
                    f"{path.name}: quantising all weights, {profile}",
                    "a forward of the exact profile",
                    (first_s - took_s) / base_s,
                    "times",
                ),
            ]
    model._ops = exact
    few = ids[:32]
    base_s = seconds(lambda: logits(model, few))
    for profile, ops in profiles().items():
        if profile != "bf16":
            model._ops = ops
            taken = seconds(lambda: logits(model, few))
            found.append(row(f"{path.name}: time of a forward of 32 tokens, {profile}", "exact", taken / base_s, "times"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", type=Path, nargs="*", default=[ROOT / "models" / "demo"])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = random_rows()
    for path in options.models:
        rows += model_rows(path, options.tokens)
    found = {
        "command": f"python bench/precision.py --tokens {options.tokens} --threads {options.threads} "
        + " ".join(path.name for path in options.models),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, shared",
        "rows": rows,
    }
    text = json.dumps(found, indent=2)
    if options.output:
        options.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
