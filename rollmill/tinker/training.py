"""Training runs on one shared model: each owns its overlay and moments, and one of them at a time is folded into the live weights.

Everything here runs on one thread, in the order it is asked for. Knows no HTTP and no files. Shapes: N positions of a datum, M of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
import torch

from rollmill.model import Model, PackedAttention
from rollmill.tinker.adam import Adam, AdamParams
from rollmill.tinker.full import FullWeights
from rollmill.tinker.losses import LOSSES, LossFn, loss_named, settings_of, summed
from rollmill.tinker.wire import Datum
from rollmill.trainer.attach import Attached
from rollmill.trainer.lora import Lora, LoraConfig
from rollmill.weights import Fingerprint, fingerprint


class Run:
    """What one training run owns: `config` None means all weights are trained."""

    def __init__(self, overlay: Lora | FullWeights) -> None:
        self.overlay, self.adam = overlay, Adam(overlay.parameters())

    @property
    def lora(self) -> LoraConfig | None:
        return self.overlay.config if isinstance(self.overlay, Lora) else None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Weights to sample from, fixed for good. Neither field: the base model."""

    lora: Lora | None = None
    tensors: Mapping[str, torch.Tensor] | None = None
    """Stored tensors in the serving dtype."""
    fingerprint: str
    """Of all the weights that the model has with these; proved again wherever they are served."""


class PassResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a pass found: arrays per datum, and sums."""

    logprobs: list[np.ndarray]
    """float32 [N] or [N, K] per datum: of each target."""
    metrics: dict[str, float]


class Trainer:
    """A live model, the tensors it started from, and the run that is folded into it now."""

    def __init__(self, model: Model, *, tokens_per_pass: int = 8192) -> None:
        self.model, self._tokens_per_pass = model, tokens_per_pass
        self.base = model.serving_tensors()
        self.base_snapshot = Snapshot(fingerprint=live_fingerprint(model).total)
        self._held: tuple[Run, Attached] | None = None

    def new_run(self, config: LoraConfig | None) -> Run:
        return Run(FullWeights(self.base) if config is None else Lora.of(self.model, config))

    def drop_run(self, run: Run) -> None:
        if self._held is not None and self._held[0] is run:
            self._held[1].detach()
            self._held = None

    def run_pass(
        self, run: Run, data: Sequence[Datum], loss_fn: str, config: Mapping[str, float | str], *, is_forward_only: bool
    ) -> PassResult:
        """Logprobs and loss of the data; unless `is_forward_only`, gradients are added to those the run holds.

        Everything is checked before anything is computed. A pass that fails on the way leaves the run without gradients.
        """
        loss = loss_named(loss_fn)
        settings = settings_of(loss, config)
        for index, datum in enumerate(data):
            check_datum(datum, index, loss, vocab_size=self.model.config.vocab_size, max_len=self.model.config.max_position)
        self._fold(run)
        logprobs: list[np.ndarray] = [np.empty(0, np.float32)] * len(data)
        losses, left_out, is_done = [], [], False
        try:
            for indices in _chunks(data, self._tokens_per_pass):
                chunk = [data[i] for i in indices]
                with torch.set_grad_enabled(not is_forward_only):
                    logprobs_M = self._score(chunk)
                    total, num_left_out = summed(loss, logprobs_M, self._inputs(chunk, loss), settings)
                if not is_forward_only:
                    torch.autograd.backward(total)
                losses.append(total.detach())
                left_out.append(num_left_out)
                shapes = [d.inputs["target_tokens"].shape for d in chunk]
                parts = np.split(logprobs_M.detach().float().cpu().numpy(), np.cumsum([int(np.prod(s)) for s in shapes])[:-1])
                for i, part, shape in zip(indices, parts, shapes, strict=True):
                    logprobs[i] = part.reshape(shape)
            is_done = True
        finally:
            if not is_done:
                run.adam.drop()
        sums = torch.stack([torch.stack(losses).double().sum(), torch.stack(left_out).double().sum()]).tolist()
        return PassResult(logprobs=logprobs, metrics={"loss:sum": sums[0], "tokens_left_out:sum": sums[1]})

    def optim_step(self, run: Run, params: AdamParams) -> dict[str, float]:
        metrics = run.adam.step(params)
        if metrics["is_applied"] and self._held is not None and self._held[0] is run:
            self._held[1].fold()
        return metrics

    def snapshot(self, run: Run) -> Snapshot:
        """The run's weights as they are now."""
        self._fold(run)
        total = live_fingerprint(self.model).total
        if isinstance(run.overlay, Lora):
            return Snapshot(lora=run.overlay.copy(), fingerprint=total)
        return Snapshot(tensors=self.model.serving_tensors(), fingerprint=total)

    @torch.no_grad()
    def serving_tensors(self, snapshot: Snapshot) -> Mapping[str, torch.Tensor]:
        """The stored tensors that differ from the base model's. Merged on the trainer's own thread, which gives the bits of `fold`."""
        if snapshot.lora is None:
            return snapshot.tensors or {}
        lora, dtype = snapshot.lora, self.model.serving_dtype
        return {name: lora.value(name, self.base[name]).to(dtype) for name in lora.names}

    def _fold(self, run: Run) -> None:
        """Make the live weights this run's."""
        if self._held is not None and self._held[0] is run:
            return
        if self._held is not None:
            self._held[1].detach()
            self._held = None
        self._held = (run, Attached(self.model, run.overlay, self.base))

    def _score(self, chunk: Sequence[Datum]) -> torch.Tensor:
        device = self.model.embed.device
        tokens_T = torch.from_numpy(np.concatenate([d.tokens_N for d in chunk]).astype(np.int64)).to(device)
        attention = PackedAttention([len(d.tokens_N) for d in chunk], device)
        hidden_TD = self.model(tokens_T, attention.positions_T, attention)
        targets = [d.inputs["target_tokens"] for d in chunk]
        targets_M = torch.from_numpy(np.concatenate([t.reshape(-1) for t in targets]).astype(np.int64)).to(device)
        if any(t.ndim == 2 for t in targets):
            widths = np.concatenate([np.full(len(t), 1 if t.ndim == 1 else t.shape[1]) for t in targets])
            hidden_TD = hidden_TD.repeat_interleave(torch.from_numpy(widths).to(device), 0)
        return self.model.score(hidden_TD, targets_M)[0]

    def _inputs(self, chunk: Sequence[Datum], loss: LossFn) -> dict[str, torch.Tensor]:
        """By name one value per position, with the default where a datum has none."""
        names = {name for d in chunk for name in d.inputs if name != "target_tokens"} | ({"weights"} & loss.takes)
        defaults = {"weights": 1.0, **loss.defaults}
        found = {}
        for name in names:
            parts = [d.inputs.get(name, np.full(d.inputs["target_tokens"].shape, defaults.get(name, 0.0))).reshape(-1) for d in chunk]
            found[name] = torch.from_numpy(np.concatenate(parts).astype(np.float32)).to(self.model.embed.device)
        return found


def live_fingerprint(model: Model) -> Fingerprint:
    """Of the stored tensors as the live weights hold them; without a copy where they are kept in the serving dtype."""
    return fingerprint(model.slices() if model.embed.dtype == model.serving_dtype else model.serving_tensors())


def check_datum(datum: Datum, index: int, loss: LossFn, *, vocab_size: int, max_len: int) -> None:
    """Raise ValueError for a datum that this loss cannot be computed of."""
    where, length = f"data[{index}]", len(datum.tokens_N)
    if not 1 <= length <= max_len:
        raise ValueError(f"{where} has {length} tokens; this model takes 1 to {max_len}")
    if "target_tokens" not in datum.inputs:
        raise ValueError(f"{where} has no loss_fn_inputs['target_tokens']")
    targets = datum.inputs["target_tokens"]
    if targets.ndim not in ((1, 2) if loss is LOSSES["cross_entropy"] else (1,)) or len(targets) != length or targets.size == 0:
        raise ValueError(f"{where} has target_tokens of shape {list(targets.shape)} for {length} tokens; there must be one for every token")
    for name, ids in (("model_input", datum.tokens_N), ("target_tokens", targets)):
        if ids.dtype.kind != "i" or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            raise ValueError(f"{where} has a token in {name} that is no id of this model; they go from 0 to {vocab_size - 1}")
    known = loss.needs | loss.takes
    for name, values in datum.inputs.items():
        if name != "target_tokens" and name not in known:
            raise ValueError(f"{where} has loss_fn_inputs[{name!r}]; this loss takes {', '.join(['target_tokens', *sorted(known)])}")
        if values.shape != targets.shape:
            raise ValueError(f"{where} has {name} of shape {list(values.shape)}, target_tokens have {list(targets.shape)}")
    if missing := loss.needs - datum.inputs.keys():
        raise ValueError(f"{where} lacks loss_fn_inputs[{min(missing)!r}], which this loss needs")


def _chunks(data: Sequence[Datum], max_tokens: int) -> Iterator[list[int]]:
    """Indices of data of similar length, at most `max_tokens` padded tokens together; one datum may exceed it alone."""
    chunk: list[int] = []
    for i in sorted(range(len(data)), key=lambda i: -len(data[i].tokens_N)):
        if chunk and len(data[chunk[0]].tokens_N) * (len(chunk) + 1) > max_tokens:
            yield chunk
            chunk = []
        chunk.append(i)
    if chunk:
        yield chunk
