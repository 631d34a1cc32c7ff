"""Sessions, training runs and sampling sessions of all clients: what a request means, in which order it is done, and what is promised.

Lives on one event loop; everything that computes for training runs on one thread, in the order of arrival. A request with a number that
was seen before is not done again. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import uuid
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from rollmill.tinker import requests as ask
from rollmill.tinker.checkpoints import CheckpointFacts, Checkpoints, Kind, Saved, checked_name, expiry
from rollmill.tinker.promises import Fault, Promise, Promises
from rollmill.tinker.prompting import Model, sampled
from rollmill.tinker.sampling import SampleFailed, Samplers
from rollmill.tinker.tenants import SamplingSession, Session, TrainingRun
from rollmill.tinker.training import Snapshot, Trainer
from rollmill.tinker.wire import Pass, pass_output
from rollmill.trainer.lora import LoraConfig

log = logging.getLogger(__name__)
R = TypeVar("R")
SESSION_TTL_S = 3600.0
"""A session that was not heard of for so long is taken for ended."""
KEEP_SAMPLERS = 8
"""Unnamed samplers of a training run that are kept in memory."""
MAX_RUNS = 64


class Unknown(LookupError):
    """An id that this server does not have, or has no more."""


class Service:
    """`trainer` is used on a thread of its own only; `names` are what the base model may be called, the first is what it is called."""

    def __init__(
        self,
        trainer: Trainer,
        samplers: Samplers,
        checkpoints: Checkpoints,
        model: Model,
        *,
        names: tuple[str, ...],
        tokenizer_id: str,
        thread: ThreadPoolExecutor,
        alpha: float = 32.0,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.trainer, self.samplers, self.checkpoints, self.model = trainer, samplers, checkpoints, model
        self.names, self.tokenizer_id, self._thread, self._alpha, self._clock = names, tokenizer_id, thread, alpha, clock
        self.promises = Promises()
        self.sessions: dict[str, Session] = {}
        self.runs: dict[str, TrainingRun] = {}
        self.sampling: dict[str, SamplingSession] = {}
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self.num_faults = 0
        """Requests that failed for reasons of the server's own."""

    def now(self) -> datetime:
        return self._clock()

    # Sessions.

    def create_session(self, body: ask.CreateSession) -> str:
        self._reap()
        session_id = str(uuid.uuid4())
        self.sessions[session_id] = Session(session_id, body, self._clock())
        return session_id

    def session(self, session_id: str) -> Session:
        if session_id not in self.sessions:
            raise Unknown(f"there is no session {session_id}; it has ended, or the server was started again")
        self.sessions[session_id].last_seen = self._clock()
        return self.sessions[session_id]

    def finish_session(self, session_id: str) -> None:
        """Let go of everything of a session that is not saved."""
        session = self.sessions.pop(session_id, None)
        if session is None:
            return
        for model_id in session.runs:
            self.unload(model_id)
        for sampler_id in session.samplers:
            self.sampling.pop(sampler_id, None)

    def _reap(self) -> None:
        now = self._clock()
        for session in [s for s in self.sessions.values() if (now - s.last_seen).total_seconds() > SESSION_TTL_S]:
            log.info("session %s was not heard of for %.0f s and is ended", session.id, SESSION_TTL_S)
            self.finish_session(session.id)

    # Training runs.

    def training_run(self, model_id: str) -> TrainingRun:
        if model_id not in self.runs:
            raise Unknown(f"there is no model {model_id}; it was unloaded, or its session ended, or the server was started again")
        return self.runs[model_id]

    def create_model(self, body: ask.CreateModel) -> str:
        spec = body.lora_config
        full = spec is None or spec.rank == 0
        config = None if spec is None or full else self._lora(spec)

        def make(home: TrainingRun) -> dict[str, Any]:
            self._check_base(body.base_model)
            self._check_optimizer(body.optimizer_config)
            home.run = self.trainer.new_run(config)
            return {"model_id": home.id, "type": "create_model"}

        home = self._new_run(body.session_id, body.model_seq_id, body.user_metadata)
        return self._train(home, 0, make)

    def _lora(self, spec: ask.LoraSpec) -> LoraConfig:
        return LoraConfig(
            rank=spec.rank,
            alpha=self._alpha,
            seed=secrets.randbits(63) if spec.seed is None else spec.seed,
            train_attn=spec.train_attn,
            train_mlp=spec.train_mlp,
            train_unembed=spec.train_unembed,
        )

    def _new_run(self, session_id: str, seq: int, user_metadata: dict[str, Any] | None) -> TrainingRun:
        session, model_id = self.session(session_id), f"{session_id}:train:{seq}"
        if model_id not in self.runs:
            if len(self.runs) >= MAX_RUNS:
                raise ValueError(f"{MAX_RUNS} models are loaded, which is the most; close a session or unload a model")
            metadata = {key: str(value) for key, value in (user_metadata or {}).items()}
            self.runs[model_id] = TrainingRun(model_id, user_metadata=metadata, now=self._clock())
            session.runs.append(model_id)
        return self.runs[model_id]

    def run_pass(self, body: Pass) -> str:
        def work(home: TrainingRun) -> bytes:
            found = self.trainer.run_pass(home.made(), body.data, body.loss_fn, body.config, is_forward_only=body.is_forward_only)
            return pass_output({"logprobs": found.logprobs}, len(body.data), found.metrics)

        return self._train(self.training_run(body.model_id), body.seq_id, work)

    def optim_step(self, body: ask.OptimStep) -> str:
        def work(home: TrainingRun) -> dict[str, Any]:
            if body.adam_params is None:
                raise ValueError("optim_step needs adam_params; this server has AdamW only")
            return {"metrics": self.trainer.optim_step(home.made(), body.adam_params)}

        return self._train(self.training_run(body.model_id), body.seq_id, work)

    def save_weights(self, body: ask.SaveWeights) -> str:
        home = self.training_run(body.model_id)

        def work(home: TrainingRun) -> dict[str, Any]:
            return {"path": self._save(home, Kind.TRAINING, body), "type": "save_weights"}

        return self._train(home, body.seq_id, work)

    def save_weights_for_sampler(self, body: ask.SaveWeights) -> str:
        home = self.training_run(body.model_id)

        def named(home: TrainingRun) -> dict[str, Any]:
            return {"path": self._save(home, Kind.SAMPLER, body), "type": "save_weights_for_sampler"}

        if body.path is not None or body.sampling_session_seq_id is None:
            return self._train(home, body.seq_id, named)
        session = self.session(body.model_id.partition(":")[0])
        sampler_id = f"{session.id}:sample:{body.sampling_session_seq_id}"

        def unnamed(home: TrainingRun) -> Snapshot:
            return self.trainer.snapshot(home.made())

        def opened(snapshot: Snapshot) -> dict[str, Any]:
            self.sampling[sampler_id] = SamplingSession(model_path=None, snapshot=snapshot)
            session.samplers.append(sampler_id)
            home.unnamed.append(sampler_id)
            while len(home.unnamed) > KEEP_SAMPLERS:
                self.sampling.pop(home.unnamed.popleft(), None)
            return {"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"}

        return self._train(home, body.seq_id, unnamed, opened)

    def load_weights(self, body: ask.LoadWeights) -> str:
        def work(home: TrainingRun) -> dict[str, Any]:
            if body.base_model is not None:
                self._check_base(body.base_model)
            if body.optimizer_config is not None:
                self._check_optimizer(body.optimizer_config)
            saved = self._read(body.path, with_optimizer=body.optimizer)
            run = home.run or self.trainer.new_run(saved.facts.lora)
            _check_fits(run.lora, saved.facts)
            run.overlay.load(saved.lora.parameters() if saved.lora is not None else saved.tensors or {})
            run.adam.drop()
            run.adam.load(saved.moments or {}, saved.facts.num_steps if body.optimizer else 0)
            self.trainer.drop_run(run)
            home.run = run
            return {"path": body.path, "model_id": home.id, "type": "load_weights"}

        if body.model_id is not None:
            return self._train(self.training_run(body.model_id), body.seq_id, work)
        if body.session_id is None or body.model_seq_id is None:
            raise ValueError("load_weights needs a model_id, or a session_id and a model_seq_id")
        return self._train(self._new_run(body.session_id, body.model_seq_id, body.user_metadata), 0, work)

    def unload_model(self, model_id: str) -> str:
        self.training_run(model_id)
        self.unload(model_id)
        promise = self.promises.make(f"{model_id}:unload:{uuid.uuid4()}")
        promise.keep({"model_id": model_id, "type": "unload_model"})
        self.promises.retire(promise)
        return promise.request_id

    def unload(self, model_id: str) -> None:
        """Let go of a run; what it still has to do fails."""
        home = self.runs.pop(model_id, None)
        if home is None:
            return
        for sampler_id in home.unnamed:
            self.sampling.pop(sampler_id, None)

        def drop() -> None:
            if home.run is not None:
                self.trainer.drop_run(home.run)
            home.run = None

        self._thread.submit(drop)

    def _save(self, home: TrainingRun, kind: Kind, body: ask.SaveWeights) -> str:
        """On the trainer's thread."""
        run, now = home.made(), self._clock()
        snapshot = self.trainer.snapshot(run)
        facts = CheckpointFacts(
            run=home.id,
            kind=kind,
            name=checked_name(body.path if body.path is not None else f"step-{run.adam.num_steps:06d}-{uuid.uuid4().hex[:8]}"),
            base_model=self.names[0],
            base_fingerprint=self.trainer.base_snapshot.fingerprint,
            fingerprint=snapshot.fingerprint,
            lora=run.lora,
            num_steps=run.adam.num_steps,
            created=now,
            expires=expiry(body.ttl_seconds, now),
            user_metadata=body.user_metadata,
        )
        tensors = None if run.lora else (run.overlay.parameters() if kind is Kind.TRAINING else snapshot.tensors)
        moments = run.adam.moments() if kind is Kind.TRAINING else None
        self.checkpoints.save(facts, lora=snapshot.lora, tensors=tensors, moments=moments, overwrite=body.overwrite)
        return facts.path

    def _read(self, path: str, *, with_optimizer: bool) -> Saved:
        device = self.trainer.model.embed.device
        saved = self.checkpoints.load(path, device=device, with_optimizer=with_optimizer, now=self._clock())
        if saved.facts.base_fingerprint != self.trainer.base_snapshot.fingerprint:
            raise ValueError(f"{path} was trained on other weights than those of {self.names[0]!r}, which this server has")
        return saved

    def _check_base(self, name: str) -> None:
        if name not in self.names:
            raise ValueError(f"base_model is {name!r}; this server has {' or '.join(map(repr, self.names))}")

    @staticmethod
    def _check_optimizer(spec: ask.OptimizerSpec) -> None:
        if spec.type != "adamw":
            raise ValueError(f"optimizer is {spec.type!r}; this server has 'adamw' only")

    # Sampling.

    def create_sampling_session(self, body: ask.CreateSamplingSession) -> str:
        session = self.session(body.session_id)
        sampler_id = f"{session.id}:sample:{body.sampling_session_seq_id}"
        if sampler_id not in self.sampling:
            self.sampling[sampler_id] = self._sampling_session(body.model_path, body.base_model)
            session.samplers.append(sampler_id)
        return sampler_id

    def _sampling_session(self, model_path: str | None, base_model: str | None) -> SamplingSession:
        if model_path is None:
            self._check_base(base_model or "")
            return SamplingSession(model_path=None, snapshot=self.trainer.base_snapshot)
        self.checkpoints.facts(model_path, now=self._clock())
        return SamplingSession(model_path=model_path, snapshot=None)

    def sampling_session(self, sampler_id: str) -> SamplingSession:
        if sampler_id not in self.sampling:
            raise Unknown(
                f"there is no sampler {sampler_id}; of a model's unnamed samplers the newest {KEEP_SAMPLERS} are kept, "
                "save_weights_for_sampler(name) makes one that stays"
            )
        return self.sampling[sampler_id]

    def sample(self, body: ask.Sample) -> tuple[str, list[str]]:
        """(request id, an id for every sample)."""
        if body.sampling_session_id is not None:
            seat = self.sampling_session(body.sampling_session_id)
        else:
            seat = self._sampling_session(body.model_path, body.base_model)
        home = body.sampling_session_id or "one"
        request_id = f"{home}:{body.seq_id if body.seq_id is not None and body.sampling_session_id else uuid.uuid4()}"
        if self.promises.get(request_id) is None:
            self._spawn(self.promises.make(request_id), self._sampled(seat, body))
        return request_id, [f"{request_id}:{i}" for i in range(min(max(body.num_samples, 0), 1 << 16))]

    async def _sampled(self, seat: SamplingSession, body: ask.Sample) -> bytes:
        if seat.snapshot is None:
            assert seat.model_path is not None
            seat.snapshot = await self._on_thread(partial(self._snapshot_at, seat.model_path))
        return await sampled(self.samplers, seat.snapshot, body, self.model)

    def _snapshot_at(self, path: str) -> Snapshot:
        """On the trainer's thread."""
        saved = self._read(path, with_optimizer=False)
        dtype = self.trainer.model.serving_dtype
        tensors = None if saved.tensors is None else {name: t.to(dtype) for name, t in saved.tensors.items()}
        return Snapshot(lora=saved.lora, tensors=tensors, fingerprint=saved.facts.fingerprint)

    # Promises.

    def _train(
        self,
        home: TrainingRun,
        seq_id: int | None,
        work: Callable[[TrainingRun], R],
        finish: Callable[[R], Any] = lambda result: result,
    ) -> str:
        """Queue work on a run, unless a request of this number was queued before."""
        request_id = f"{home.id}:{seq_id if seq_id is not None else uuid.uuid4()}"
        if seq_id is not None and not home.seen.add(seq_id):
            return request_id
        home.last_request = self._clock()
        promise = self.promises.make(request_id)
        # Submitted here, not in the task: the thread's queue is in the order of arrival.
        queued = asyncio.wrap_future(self._thread.submit(work, home))

        async def done() -> Any:
            return finish(await queued)

        self._spawn(promise, done())
        return request_id

    async def _on_thread(self, work: Callable[[], R]) -> R:
        return await asyncio.wrap_future(self._thread.submit(work))

    def _spawn(self, promise: Promise, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._tasks[promise.request_id] = task
        task.add_done_callback(partial(self._settle, promise))

    def _settle(self, promise: Promise, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(promise.request_id, None)
        if task.cancelled():
            promise.break_off("the request was cancelled", Fault.USER)
        elif (error := task.exception()) is None:
            promise.keep(task.result())
        elif isinstance(error, ValueError):
            promise.break_off(str(error), Fault.USER)
        else:
            self.num_faults += 1
            log.error("request %s failed", promise.request_id, exc_info=None if isinstance(error, SampleFailed) else error)
            promise.break_off(f"{type(error).__name__}: {error}", Fault.SERVER)
        self.promises.retire(promise)

    def cancel(self, request_id: str) -> None:
        """End a sample that nobody waits for. Training is done in order or not at all, so it goes on."""
        if ":sample:" in request_id and (task := self._tasks.get(request_id)):
            task.cancel()


def _check_fits(mine: LoraConfig | None, facts: CheckpointFacts) -> None:
    def said(config: LoraConfig | None) -> str:
        return "all weights" if config is None else f"adapters of rank {config.rank} and alpha {config.alpha:g}"

    if said(mine) != said(facts.lora):
        raise ValueError(f"{facts.path} holds {said(facts.lora)}, this model has {said(mine)}; make a training client of the checkpoint")
