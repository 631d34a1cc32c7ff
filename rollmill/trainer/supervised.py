"""The supervised stages, mid-training and SFT: one loop over weighted token sequences."""

from __future__ import annotations

import itertools
import multiprocessing
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as F

from rollmill.model import Model, PackedAttention, Tokenizer, load_model, read_model_config, save_model
from rollmill.trainer.examples import Example, batches, chat_example, read_rows, text_example
from rollmill.trainer.optimizer import MasterAdamW

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


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
    examples = load_examples(data, model_dir, chat_example if is_chat else text_example, report)
    model, _ = load_model(model_dir, device=config.device, numerics="fast")
    train_supervised(model, examples, config, report)
    save_model(model, out)
    for name in TOKENIZER_FILES:
        if (model_dir / name).is_file() and model_dir.resolve() != out.resolve():
            shutil.copy(model_dir / name, out / name)
    report(f"wrote {out}")


def load_examples(data: Path, model_dir: Path, make: Callable[..., Example], report: Callable[[str], None]) -> list[Example]:
    """Tokenise a data set on all cores. The workers fork before any device is touched, so they share the parent's imports."""
    limit = read_model_config(model_dir).max_position
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as pool:
        jobs = [pool.submit(_tokenise, chunk, data, model_dir, make) for chunk in _chunks(read_rows(data), 2000)]
        examples = [e for job in jobs for e in job.result()]
    kept = [e for e in examples if len(e.tokens_T) <= limit]
    if not kept:
        raise ValueError(f"{data} holds no usable row: {len(examples)} rows, all longer than the model's {limit} tokens")
    num_tokens, num_long = sum(len(e.tokens_T) for e in kept), len(examples) - len(kept)
    report(f"{len(kept):,} rows, {num_tokens:,} tokens; {num_long} rows were longer than {limit} tokens")
    return kept


def _chunks(rows: Iterator[tuple[int, dict[str, Any]]], size: int) -> Iterator[tuple[tuple[int, dict[str, Any]], ...]]:
    while chunk := tuple(itertools.islice(rows, size)):
        yield chunk


def _tokenise(rows: Sequence[tuple[int, dict[str, Any]]], data: Path, model_dir: Path, make: Callable[..., Example]) -> list[Example]:
    tokenizer = Tokenizer(model_dir)
    examples = []
    for number, row in rows:
        try:
            examples.append(make(row, tokenizer))
        except ValueError as error:
            raise ValueError(f"{data}:{number}: {error}") from error
    return examples


def train_supervised(model: Model, examples: list[Example], config: SupervisedConfig, report: Callable[[str], None]) -> float:
    """Minimise the weighted next-token loss with a linear decay to a fiftieth; returns the last batch's loss."""
    # The live weights follow the fp32 masters unrounded while learning is fast, and are rounded once when saved.
    optimizer = MasterAdamW(model, lr=config.lr, eps=1e-8, weight_decay=0.01, warmup_steps=config.warmup_steps, round_live=False)
    rng, step, started, num_tokens, loss_value = np.random.default_rng(config.seed), 0, time.monotonic(), 0, float("nan")
    while step < config.num_steps:
        for batch in batches(examples, config.tokens_per_batch, rng):
            tokens_T = torch.from_numpy(np.concatenate([e.tokens_T for e in batch])).long().to(config.device)
            # A token's loss sits on the position before it; the last position of each sequence predicts nothing.
            shifted = np.concatenate([np.append(e.weights_T[1:], 0.0) for e in batch]).astype(np.float32)
            weights_T = torch.from_numpy(shifted).to(config.device)
            attention = PackedAttention([len(e.tokens_T) for e in batch], config.device)
            hidden_TD = model(tokens_T, attention.positions_T, attention)
            rows_N = weights_T.nonzero()[:, 0]
            loss_N = F.cross_entropy(model.logits(hidden_TD[rows_N]), tokens_T[rows_N + 1], reduction="none")
            loss = (loss_N * weights_T[rows_N]).sum() / weights_T.sum()
            loss.backward()
            optimizer.step(lr_scale=1.0 - 0.98 * step / config.num_steps)
            step, num_tokens = step + 1, num_tokens + len(tokens_T)
            if step % 100 == 0 or step == config.num_steps:
                loss_value = float(loss.detach())
                rate = num_tokens / (time.monotonic() - started)
                report(f"step {step}/{config.num_steps}  loss {loss_value:.4f}  {rate:,.0f} tokens/s")
            if step >= config.num_steps:
                break
    return loss_value
