"""Follows the weight store in the background and offers the engine what it has prepared; decides nothing about serving."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rollmill.engine.engine import Engine
from rollmill.model import Model
from rollmill.weights import Follower, LiveWeights, WeightStore
from rollmill.weights.bits import dtype_name, host_bytes, tensor_of
from rollmill.weights.live import TensorPatch
from rollmill.weights.proof import Lanes
from rollmill.weights.schema import TensorSpec
from rollmill.weights.shard import Held, whole

log = logging.getLogger(__name__)
POLL_S = 0.1
# An engine that takes longer than this to reach a step boundary has stopped stepping.
SWAP_DEADLINE_S = 600.0
LEASE_S = 60.0


class ModelWeights:
    """The live weights of a model that computes in another dtype than it is served in; every read and proof goes through the cast back."""

    def __init__(self, model: Model) -> None:
        self._model = model
        dtype = dtype_name(model.serving_dtype)
        self._held = {n: whole(TensorSpec(name=n, dtype=dtype, shape=tuple(t.shape))) for n, t in model.named_slices()}

    def held(self) -> Mapping[str, Held]:
        return self._held

    @torch.no_grad()
    def read(self, name: str) -> np.ndarray:
        return host_bytes(self._model.slices()[name].to(self._model.serving_dtype))

    def load(self, name: str, data: np.ndarray) -> None:
        spec = self._held[name].spec
        self._model.load_serving({name: tensor_of(data, spec.dtype, spec.shape)})

    def stage(self, patches: Sequence[TensorPatch]) -> list[_Change]:
        return [_Change(patch, device=self._model.embed.device) for patch in patches]

    def apply(self, staged: Sequence[_Change]) -> None:
        for change in staged:
            self._model.patch_serving(change.name, change.positions, change.after)

    def revert(self, staged: Sequence[_Change]) -> None:
        for change in staged:
            self._model.patch_serving(change.name, change.positions, change.before)

    @torch.no_grad()
    def lanes(self) -> dict[str, Lanes]:
        dtype, live = self._model.serving_dtype, self._model.slices()
        return {name: held.lanes(host_bytes(live[name].to(dtype))) for name, held in self._held.items()}


class _Change:
    """One tensor's patch as torch tensors where the model is, made before the pause."""

    def __init__(self, patch: TensorPatch, device: torch.device) -> None:
        spec = patch.held.spec
        self.name = spec.name
        self.positions = torch.from_numpy(patch.positions).to(device)
        self.after, self.before = (
            tensor_of(np.ascontiguousarray(codes).view(np.uint8), spec.dtype, (len(codes),)).to(device)
            for codes in (patch.codes, patch.before)
        )


def live_of(model: Model) -> LiveWeights:
    """The model's weights as a follower sees them; on a GPU that computes in the serving dtype they are patched where they lie."""
    if model.embed.is_cuda and model.embed.dtype == model.serving_dtype:
        from rollmill.weights.cuda import CudaWeights

        return CudaWeights({name: live.detach() for name, live in model.named_slices()})
    return ModelWeights(model)


def follower_of(store: WeightStore, model: Model, *, replica: str = "", url: str = "") -> Follower:
    """A follower whose live weights are this model's."""
    return Follower(store, live_of(model), replica=replica, url=url, lease_s=LEASE_S)


class WeightWatch:
    """One thread: poll, stage on the side, offer, wait for the swap, poll again. Another says in the store what is served."""

    def __init__(self, engine: Engine, follower: Follower, *, poll_s: float = POLL_S) -> None:
        self._engine, self._follower, self._poll_s = engine, follower, poll_s
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name="weight-watch", daemon=True),
            # On its own, since staging can take minutes and a lease that ends meanwhile protects nothing from collection.
            threading.Thread(target=self._renew, name="weight-lease", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self, timeout_s: float = 10.0) -> None:
        self._stop.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._follow_once()
                self._stop.wait(self._poll_s)
        finally:
            # An exception goes on to threading.excepthook; health must not look as if nothing had happened.
            if not self._stop.is_set():
                self._engine.follow_problem = "the thread that follows the weight store died; see its log and restart the engine"

    def _renew(self) -> None:
        while not self._stop.is_set():
            self._follower.renew(time.time())
            self._stop.wait(self._poll_s)

    def _follow_once(self) -> None:
        failed_before = self._follower.stats().num_read_errors
        staged = self._follower.poll()
        if staged is not None:
            log.info("version %d staged: %d bytes read, %.0f ms", staged.version, staged.bytes_read, 1e3 * staged.prepare_s)
            self._engine.offer(staged.version, functools.partial(self._follower.swap, staged)).result(SWAP_DEADLINE_S)
        stats = self._follower.stats()
        self._engine.follow_problem = stats.problem
        self._engine.metrics.follow_errors.inc(stats.num_read_errors - failed_before)
