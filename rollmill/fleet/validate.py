"""Checks of a run's inputs before anything starts, so that a mistake costs a second and not a night."""

from __future__ import annotations

from rollmill.config import ConfigError, RunConfig
from rollmill.model import Tokenizer, check_model
from rollmill.sandbox import backend_class
from rollmill.tasks import TaskSource, open_family


def check_inputs(config: RunConfig) -> None:
    """Raise ValueError, saying what to change, when this run could not work."""
    model = check_model(config.model.path)
    tokenizer = Tokenizer(config.model.path)
    if tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(f"{config.model.path}: the tokenizer knows {tokenizer.vocab_size} tokens, the model only {model.vocab_size}")
    if config.engine.max_len > model.max_position:
        raise ConfigError(f"engine.max_len is {config.engine.max_len}, the model reaches {model.max_position} tokens; lower it")
    if config.rollout.max_tokens_per_turn >= config.engine.max_len:
        raise ConfigError(
            f"rollout.max_tokens_per_turn {config.rollout.max_tokens_per_turn} does not fit into engine.max_len {config.engine.max_len}"
        )
    if config.trainer.router_replay != "off" and model.moe is None:
        raise ConfigError(
            f'trainer.router_replay is {config.trainer.router_replay!r}, but {config.model.path} has no experts; set it to "off"'
        )
    source = TaskSource(open_family(config.tasks.family), split="train", seed=0, kinds=config.tasks.kinds, levels=config.tasks.levels)
    for level in config.tasks.levels:
        source.family.make(kind=source.kinds[0], level=level, seed=0, split="train")
    if why := backend_class(config.rollout.sandbox).probe():
        raise ConfigError(f"rollout.sandbox = {config.rollout.sandbox!r} does not work on this machine: {why}")
