"""What a person decides about a stage: frozen records with defaults that work, and the rules they must keep; nothing is computed here."""

from __future__ import annotations

import difflib
from enum import StrEnum
from typing import Any, TypeVar

import msgspec


class Schedule(StrEnum):
    LINEAR = "linear"
    COSINE = "cosine"
    CONSTANT = "constant"


class StageSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all stages share."""

    lr: float = 2e-3
    """Peak learning rate."""
    steps: int = 1000
    """Optimiser steps."""
    epochs: float = 0.0
    """Passes over the data instead of `steps`; 0: `steps` counts."""
    warmup_steps: int = 50
    """The learning rate rises evenly over these."""
    schedule: Schedule = Schedule.LINEAR
    """How it goes on: linear, cosine or constant."""
    lr_final_frac: float = 0.02
    """Share of the peak that linear and cosine end at."""
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    """The gradient's global L2 norm is cut here."""
    adam_eps: float = 1e-8
    tokens_per_batch: int = 32768
    """Tokens of one optimiser step, about."""
    tokens_per_microbatch: int = 32768
    """Most tokens computed at once, padding counted; a step adds up the gradients of as many micro-batches as it needs."""
    length: int = 0
    """Longest sequence in tokens; 0: the model's context. Longer conversations are left out and counted; documents are cut into windows."""
    seed: int = 0
    """Decides the order of the data."""
    eval_frac: float = 0.0
    """Share of the rows put aside for `loss/eval`."""
    eval_every: int = 100
    """Steps between two evaluations; one more follows the last step."""
    eval_tokens: int = 262144
    """Most tokens of one evaluation."""
    checkpoint_every: int = 200
    """Steps between checkpoints: what a crash costs."""
    device: str = "cpu"
    precision: str = "float32"
    """What the forward computes in: float32, or bfloat16 on a GPU. Masters and moments are float32 always."""
    numerics: str = "fast"
    """Profile of the operations: fast or exact."""
    recompute_layers: bool = False
    """Less memory for a third more work."""
    num_threads: int = 0
    """Of torch on a CPU; 0: as torch chooses. Another number may round otherwise."""
    num_workers: int = 0
    """Processes that tokenise; 0: one per core."""

    def __post_init__(self) -> None:
        positive = ("lr", "clip_norm", "adam_eps", "steps", "tokens_per_batch", "tokens_per_microbatch", "eval_every", "checkpoint_every")
        for name in (*positive, "eval_tokens"):
            _need(self, name, getattr(self, name) > 0, "more than 0")
        for name in ("epochs", "warmup_steps", "weight_decay", "length", "seed", "num_threads", "num_workers"):
            _need(self, name, getattr(self, name) >= 0, "0 or more")
        _need(self, "lr_final_frac", 0 <= self.lr_final_frac <= 1, "between 0 and 1")
        _need(self, "eval_frac", 0 <= self.eval_frac < 1, "from 0 to less than 1")
        _need(self, "precision", self.precision in ("float32", "bfloat16"), "float32 or bfloat16")
        _need(self, "numerics", self.numerics in ("fast", "exact"), "fast or exact")


class Phase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A further phase of mid-training, usually with longer windows.

    >>> parse_phase("steps=200,length=4096,rope=yarn").length
    4096
    """

    steps: int
    length: int
    """Window in tokens."""
    rope: str = ""
    """How the model's positions reach `length`: yarn, linear, or keep (the same angles go on); needed when the context must grow."""
    theta: float = 0.0
    """A new base of the rotary angles; 0: the model's own."""
    lr: float = 0.0
    """Peak learning rate of this phase; 0: the stage's."""

    def __post_init__(self) -> None:
        for name in ("steps", "length"):
            _need(self, name, getattr(self, name) > 0, "more than 0")
        for name in ("theta", "lr"):
            _need(self, name, getattr(self, name) >= 0, "0 or more")
        _need(self, "rope", self.rope in ("", "yarn", "linear", "keep"), "yarn, linear or keep")


class MidtrainSettings(StageSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Continued pre-training on documents."""

    phases: tuple[Phase, ...] = ()
    """What follows the first phase of `steps` steps with windows of `length`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.phases and self.epochs:
            raise ValueError("epochs and phases do not go together: a phase has its own steps; give steps instead of epochs")


class SftSettings(StageSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Supervised fine-tuning on conversations."""


class DpoLoss(StrEnum):
    SIGMOID = "sigmoid"
    IPO = "ipo"
    SIMPO = "simpo"


class DpoSettings(StageSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Learning from preferences."""

    lr: float = 1e-6
    loss: DpoLoss = DpoLoss.SIGMOID
    beta: float = 0.1
    """sigmoid and ipo: how strongly the policy is held to the reference; simpo: scale of the mean logprobs (2 to 10 there)."""
    label_smoothing: float = 0.0
    """sigmoid and simpo: share of pairs taken to be labelled the wrong way round."""
    gamma: float = 0.5
    """simpo: the margin by which the chosen answer shall lead, in units of the scaled mean logprob."""
    nll_weight: float = 0.0
    """How much the mean negative logprob of the chosen answer is added."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _need(self, "beta", self.beta > 0, "more than 0")
        _need(self, "label_smoothing", 0 <= self.label_smoothing < 0.5, "from 0 to less than 0.5")
        for name in ("gamma", "nll_weight"):
            _need(self, name, getattr(self, name) >= 0, "0 or more")
        if self.loss is DpoLoss.IPO and self.label_smoothing:
            raise ValueError("label_smoothing means nothing with loss = 'ipo'; leave it out")


WITHOUT_EFFECT = ("device", "num_workers", "checkpoint_every", "num_threads")
"""May change between a stage and its resumption: they decide where and how safely it is computed; rounding aside, not what."""

S = TypeVar("S", bound=msgspec.Struct)


def parse_settings(kind: type[S], raw: dict[str, Any], where: str) -> S:
    """Options by name; an unknown one is an error that names the nearest."""
    if unknown := sorted(set(raw) - set(kind.__struct_fields__)):
        near = difflib.get_close_matches(unknown[0], kind.__struct_fields__, 1, 0.0)
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; the nearest known key is {near[0]!r}")
    try:
        return msgspec.convert(raw, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}") from error


def parse_phase(text: str) -> Phase:
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if bad := [key for key, sign, _ in pairs if not sign]:
        raise ValueError(f"phase {text!r}: {bad[0]!r} has no '='; write steps=200,length=4096,rope=yarn")
    return parse_settings(Phase, {key.strip(): value.strip() for key, _, value in pairs}, f"phase {text!r}")


def _need(record: msgspec.Struct, name: str, is_fine: bool, wanted: str) -> None:
    if not is_fine:
        raise ValueError(f"{name} = {getattr(record, name)!r} is not usable: give {wanted}")
