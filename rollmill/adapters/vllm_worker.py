"""Rollmill inside a vLLM worker: follows a weight store and swaps versions on request; knows nothing of requests and scheduling.

Named by `--worker-extension-cls rollmill.adapters.vllm_worker.RollmillWorker`; called by name through vLLM's collective RPC, so
arguments are strings and answers are plain dicts. An answer with `error` changed nothing, unless it also says `is_lost`.

NEW -> stage -> STAGING -> READY -> swap -> HELD          staging runs beside serving, swapping while vLLM is paused
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from rollmill.adapters.vllm_live import Fused, VllmWeights, differing, fused_parameters, put_back
from rollmill.weights import CorruptSnapshot, Follower, Staged, WeightStore, WrongBase, WrongWeights, open_store
from rollmill.weights.errors import UnknownFormat
from rollmill.weights.live import LiveWeights
from rollmill.weights.manifest import Pointer
from rollmill.weights.proof import Fingerprint, add, base_value, combine, seeds_of, to_hex

LEASE_S = 60.0
Refusal = (CorruptSnapshot, UnknownFormat, WrongBase, WrongWeights, ValueError, OSError)


class Stage(StrEnum):
    """How far the version that was asked for has come."""

    STAGING = "staging"
    READY = "ready"
    FAILED = "failed"


class StoreAt(WeightStore):
    """A store whose latest version is the one that was asked for, so that a replica goes there and no further."""

    wanted: int = -1

    def latest(self) -> Pointer | None:
        newest = super().latest()
        return None if newest is None else Pointer(version=self.wanted, epoch=newest.epoch)


class Following:
    """One model and one store: what is staged, what is held. `stage` starts a thread; everything else is vLLM's own thread."""

    def __init__(self, model: torch.nn.Module, checkpoint: Path, store: str, replica: str, *, may_repack: bool) -> None:
        self.where, self._may_repack = store, may_repack
        self._store = StoreAt(open_store(store).objects)
        self._files = _files_of(checkpoint)
        self._checkpoint = functools.partial(_stored, self._files)
        self._model, self._replica = model, replica
        self._thread: threading.Thread | None = None
        self._staged: Staged | None = None
        self._fused: list[Fused] = []
        self.follower: Follower | None = None
        self.stage, self.problem, self.wanted = Stage.FAILED, "nothing was asked for", -1

    @property
    def version(self) -> int:
        return -1 if self.follower is None or self.follower.version is None else self.follower.version

    @property
    def fingerprint(self) -> str:
        return "" if self.follower is None or self.follower.fingerprint is None else self.follower.fingerprint.total

    def start(self, wanted: int) -> None:
        if self._thread is not None and self._thread.is_alive():
            raise ValueError(f"version {self.wanted} is being staged; wait for it before asking for {wanted}")
        self.stage, self.problem, self.wanted, self._staged = Stage.STAGING, "", wanted, None
        self._thread = threading.Thread(target=self._prepare, name="rollmill-stage", daemon=True)
        self._thread.start()

    def _prepare(self) -> None:
        try:
            self._store.wanted = self.wanted
            record = self._store.version(self.wanted)
            if self.follower is None:
                self.follower = self._attach(record.schema)
            if self.follower.version is not None and self.follower.version != self.wanted:
                self._staged = self._poll(self.follower)
            self.stage = Stage.READY
        except Refusal as error:
            self.problem, self.stage = str(error), Stage.FAILED
        finally:
            # Any other exception goes on to vLLM's log; whoever waits must not wait for ever.
            if self.stage is Stage.STAGING:
                self.problem, self.stage = "the staging thread died; see vLLM's log", Stage.FAILED

    def _poll(self, follower: Follower) -> Staged:
        staged = follower.poll()
        if staged is not None and staged.version == self.wanted:
            return staged
        reason = follower.stats().problem or f"this replica holds {follower.version}; versions only grow: publish a roll-back instead"
        raise WrongBase(f"version {self.wanted} cannot be staged: {reason}")

    def _attach(self, schema: str) -> Follower:
        """Map the parameters and prove the map, before anything is written through it.

        Packed multiplies are used here beside serving, which vLLM does not foresee; nothing that is sampled until the first version
        is held carries one, so no adapter accepts it.
        """
        published = {spec.name: spec for spec in self._store.schema(schema).tensors}
        self._fused = fused_parameters(self._model, _pack, self._files, _shuffle)
        if not self._may_repack and any(one.packed for one in self._fused):
            raise ValueError(
                "vLLM packed its matrices and compiled the old ones into its graph, where no update reaches them; start it with "
                "--enforce-eager, or with rollmill.adapters.vllm_plain.RollmillWorker, which keeps them as they are"
            )
        if wrong := differing(self._fused, self._checkpoint):
            raise ValueError(
                f"{len(wrong)} tensors that vLLM serves are not where its checkpoint has them, first {wrong[0]}; it rearranges this "
                "model in a way Rollmill does not know, or loaded it from elsewhere"
            )
        follower = Follower(self._store, self._live(published), replica=self._replica, lease_s=LEASE_S)
        if self._replica:
            threading.Thread(target=self._renew, args=(follower,), name="rollmill-lease", daemon=True).start()
        return follower

    def _live(self, published: Mapping[str, Any]) -> LiveWeights:
        if next(self._model.parameters()).is_cuda:
            from rollmill.weights.cuda import CudaWeights

            return CudaWeights({n: one.served()[a:b] for one in self._fused for n, (a, b) in one.parts.items()})
        return VllmWeights(self._fused, published)

    def _renew(self, follower: Follower) -> None:
        # A daemon: it ends with the worker, and the lease then runs out by itself.
        while True:
            follower.renew(time.time())
            time.sleep(LEASE_S / 6)

    def swap(self) -> None:
        """While vLLM is paused. Raises when the version was not reached; the weights are then what they were, unless `is_lost`."""
        if self.stage is not Stage.READY or self.follower is None:
            raise ValueError(f"version {self.wanted} is {self.stage.value}, not ready to be swapped in: {self.problem}")
        if self._staged is not None:
            self.follower.swap(self._staged)
        elif self.version != self.wanted:
            self._begin(self.follower)
        self._staged = None

    def _begin(self, follower: Follower) -> None:
        """The first version replaces the checkpoint whole; when it cannot be had or proved, the checkpoint comes back."""
        try:
            staged = follower.bootstrap()
            if staged.version != self.wanted:
                raise WrongWeights(f"version {self.wanted} cannot be read, only {staged.version}: {follower.stats().problem}")
            follower.swap(staged)
        except Refusal as error:
            put_back(self._fused, self._checkpoint)
            # Its proof may have been kept from before.
            self.follower = None
            if wrong := differing(self._fused, self._checkpoint):
                raise WrongWeights(f"{error}; and the checkpoint could not be put back", tensors=tuple(wrong), is_lost=True) from error
            raise

    def digest(self) -> Fingerprint:
        """Recomputed from what the next forward uses, nothing remembered."""
        if self.follower is None:
            raise ValueError("no store is followed yet, so nothing says which names and dtypes to show; apply a version first")
        live = self.follower.live
        if isinstance(live, VllmWeights):
            live.forget()
        lanes, specs = live.lanes(), {name: held.spec for name, held in live.held().items()}
        return combine({n: to_hex(add(base_value(seeds_of(n, s.dtype, s.shape)), lanes[n])) for n, s in specs.items()})


class RollmillWorker:
    """Mixed into vLLM's worker class by vLLM itself, which refuses names it has already: all of ours begin with `rollmill_`."""

    def rollmill_facts(self) -> dict[str, Any]:
        """What the adapter must know of this server."""
        import vllm

        config, model = self.vllm_config, self.model_runner.get_model()  # type: ignore[attr-defined]
        following: Following | None = getattr(self, "rollmill_following", None)
        return {
            "vllm": vllm.__version__,
            "max_len": config.model_config.max_model_len,
            "vocab_size": config.model_config.get_vocab_size(),
            "logprobs_mode": str(config.model_config.logprobs_mode),
            "routed_experts": config.aux_output_config.enable_return_routed_experts,
            "num_workers": config.parallel_config.world_size,
            "is_compiled": not config.model_config.enforce_eager,
            "num_packed": sum(bool(one.packed) for one in fused_parameters(model, _pack)),
            "version": -1 if following is None else following.version,
            "fingerprint": "" if following is None else following.fingerprint,
        }

    def rollmill_stage(self, store: str, version: str, replica: str) -> dict[str, Any]:
        """Begin to make a version ready beside serving; ask `rollmill_staged` how far it is."""
        config = self.vllm_config.model_config  # type: ignore[attr-defined]
        following: Following | None = getattr(self, "rollmill_following", None)
        try:
            if following is None:
                model = self.model_runner.get_model()  # type: ignore[attr-defined]
                following = Following(model, Path(config.model), store, replica, may_repack=config.enforce_eager)
                self.rollmill_following = following
            if following.where != store:
                raise ValueError(f"this worker follows {following.where}; restart vLLM to follow {store}")
            following.start(int(version))
        except Refusal as error:
            return {"error": str(error)}
        return self.rollmill_staged()

    def rollmill_staged(self) -> dict[str, Any]:
        following = self.rollmill_following
        return {
            "stage": following.stage.value,
            "problem": following.problem,
            "version": following.version,
            "fingerprint": following.fingerprint,
        }

    def rollmill_swap(self) -> dict[str, Any]:
        following, began = self.rollmill_following, time.monotonic()
        try:
            following.swap()
        except Refusal as error:
            return {"error": str(error), "is_lost": getattr(error, "is_lost", False), "version": following.version}
        return {"version": following.version, "fingerprint": following.fingerprint, "swap_s": time.monotonic() - began}

    def rollmill_digest(self) -> dict[str, Any]:
        following: Following | None = getattr(self, "rollmill_following", None)
        if following is None:
            return {"error": "no store is followed yet; apply a version first"}
        try:
            shown = following.digest()
        except Refusal as error:
            return {"error": str(error)}
        return {"version": following.version, "total": shown.total, "tensors": shown.tensors}


def _pack(module: torch.nn.Module, drop_weight: bool) -> None:
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    dispatch_cpu_unquantized_gemm(module, remove_weight=drop_weight)


def _shuffle(module: Any, matrices: torch.Tensor) -> torch.Tensor | None:
    isa = getattr(module.quant_method.moe_kernel.fused_experts, "isa", None)
    if isa is None:
        return None
    from vllm._custom_ops import cpu_prepack_moe_weight

    return cpu_prepack_moe_weight(matrices, isa)


def _files_of(checkpoint: Path) -> dict[str, Path]:
    if not checkpoint.is_dir():
        raise ValueError(f"vLLM was started with {checkpoint}, which is no directory; start it with a local checkpoint of safetensors")
    found: dict[str, Path] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def _stored(files: Mapping[str, Path], name: str) -> torch.Tensor | None:
    if name not in files:
        return None
    with safe_open(files[name], framework="pt") as file:
        return file.get_tensor(name)
