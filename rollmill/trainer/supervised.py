"""The supervised stages, mid-training and SFT: one loop over weighted token sequences."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.nn.functional as F

from rollmill.model import Model, PackedAttention, Tokenizer, load_model, save_model
from rollmill.trainer.examples import Example, batches, chat_example, read_rows, text_example
from rollmill.trainer.optimizer import MasterAdamW

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class SupervisedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One supervised stage."""

    lr: float = 2e-3
    num_steps: int = 1000
    tokens_per_batch: int = 32768
    warmup_steps: int = 50
    seed: int = 0
    device: str = "cpu"


def stage_midtrain(model_dir: Path, data: Path, out: Path, config: SupervisedConfig, report: Callable[[str], None] = print) -> None:
    """Continue pre-training on documents."""
    _stage(model_dir, data, out, config, report, is_chat=False)


def stage_sft(model_dir: Path, data: Path, out: Path, config: SupervisedConfig, report: Callable[[str], None] = print) -> None:
    """Supervised fine-tuning on conversations: only the assistant's tokens are learnt."""
    _stage(model_dir, data, out, config, report, is_chat=True)


def _stage(model_dir: Path, data: Path, out: Path, config: SupervisedConfig, report: Callable[[str], None], *, is_chat: bool) -> None:
    if not data.is_file():
        raise ValueError(f"no data at {data}; `rollmill tasks export` writes some")
    model, model_config = load_model(model_dir, device=config.device)
    tokenizer = Tokenizer(model_dir)
    make = chat_example if is_chat else text_example
    examples: list[Example] = []
    num_long = 0
    for number, row in read_rows(data):
        try:
            example = make(row, tokenizer)
        except ValueError as error:
            raise ValueError(f"{data}:{number}: {error}") from error
        if len(example.tokens_T) > model_config.max_position:
            num_long += 1
        else:
            examples.append(example)
    if not examples:
        raise ValueError(f"{data} holds no usable row ({num_long} were longer than the model's {model_config.max_position} tokens)")
    report(f"{len(examples):,} rows, {sum(len(e.tokens_T) for e in examples):,} tokens ({num_long} rows too long)")
    train_supervised(model, examples, config, report)
    save_model(model, out)
    for name in TOKENIZER_FILES:
        if (model_dir / name).is_file() and model_dir.resolve() != out.resolve():
            shutil.copy(model_dir / name, out / name)
    report(f"wrote {out}")


def train_supervised(model: Model, examples: list[Example], config: SupervisedConfig, report: Callable[[str], None]) -> float:
    """Minimise the weighted next-token loss with a linear decay to a tenth; returns the last batch's loss."""
    # The live weights follow the fp32 masters unrounded while learning is fast, and are rounded once when saved.
    optimizer = MasterAdamW(model, lr=config.lr, eps=1e-8, weight_decay=0.01, warmup_steps=config.warmup_steps, round_live=False)
    rng, step, started, num_tokens, loss_value = np.random.default_rng(config.seed), 0, time.monotonic(), 0, float("nan")
    while step < config.num_steps:
        for batch in batches(examples, config.tokens_per_batch, rng):
            tokens_T = torch.from_numpy(np.concatenate([e.tokens_T for e in batch])).long().to(config.device)
            # A token's loss sits on the position before it; the last position of each sequence predicts nothing.
            weights_T = torch.from_numpy(np.concatenate([np.append(e.weights_T[1:], 0.0) for e in batch]).astype(np.float32)).to(config.device)
            attention = PackedAttention([len(e.tokens_T) for e in batch], config.device)
            hidden_TD = model(tokens_T, attention.positions_T, attention)
            rows_N = weights_T.nonzero()[:, 0]
            loss_N = F.cross_entropy(model.logits(hidden_TD[rows_N]), tokens_T[rows_N + 1], reduction="none")
            loss = (loss_N * weights_T[rows_N]).sum() / weights_T.sum()
            loss.backward()
            optimizer.step(lr_scale=1.0 - 0.9 * step / config.num_steps)
            step, num_tokens = step + 1, num_tokens + len(tokens_T)
            if step % 100 == 0 or step == config.num_steps:
                loss_value = float(loss.detach())
                rate = num_tokens / (time.monotonic() - started)
                report(f"step {step}/{config.num_steps}  loss {loss_value:.4f}  {rate:,.0f} tokens/s")
            if step >= config.num_steps:
                break
    return loss_value
