"""What the read-only routes say of runs, checkpoints and sessions, as JSON objects in the SDK's shapes."""

from __future__ import annotations

from typing import Any

from rollmill.tinker.checkpoints import CheckpointFacts, Kind
from rollmill.tinker.service import Service
from rollmill.tinker.tenants import TrainingRun

OWNER = "local"
_TYPES = {Kind.TRAINING: "training", Kind.SAMPLER: "sampler"}


def checkpoint(facts: CheckpointFacts, num_bytes: int) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{facts.kind}/{facts.name}",
        "checkpoint_type": _TYPES[facts.kind],
        "time": facts.created,
        "tinker_path": facts.path,
        "size_bytes": num_bytes,
        "public": facts.is_public,
        "user_metadata": facts.user_metadata,
        "expires_at": facts.expires,
    }


def weights_info(facts: CheckpointFacts) -> dict[str, Any]:
    lora = facts.lora
    return {
        "base_model": facts.base_model,
        "is_lora": lora is not None,
        "lora_rank": lora.rank if lora else 0,
        "train_unembed": lora.train_unembed if lora else None,
        "train_mlp": lora.train_mlp if lora else None,
        "train_attn": lora.train_attn if lora else None,
        "optimizer_config": {"type": "adamw"},
    }


def model_info(service: Service, home: TrainingRun) -> dict[str, Any]:
    run = home.run
    return {
        "type": "get_info",
        "model_data": {"arch": service.trainer.model.config.family, "model_name": service.names[0], "tokenizer_id": service.tokenizer_id},
        "model_id": home.id,
        "is_lora": run is not None and run.lora is not None,
        "lora_rank": run.lora.rank if run is not None and run.lora is not None else None,
        "model_name": service.names[0],
    }


def training_runs(service: Service) -> list[dict[str, Any]]:
    """Loaded ones and those that have checkpoints, newest first."""
    saved: dict[str, list[tuple[CheckpointFacts, int]]] = {}
    for facts, num_bytes in service.checkpoints.list(now=service.now()):
        saved.setdefault(facts.run, []).append((facts, num_bytes))
    found = [_training_run(service, run, saved.get(run, [])) for run in dict.fromkeys([*service.runs, *saved])]
    return sorted(found, key=lambda run: run["last_request_time"], reverse=True)


def training_run(service: Service, run: str) -> dict[str, Any] | None:
    saved = service.checkpoints.list(run, now=service.now())
    return _training_run(service, run, saved) if saved or run in service.runs else None


def _training_run(service: Service, run: str, saved: list[tuple[CheckpointFacts, int]]) -> dict[str, Any]:
    home = service.runs.get(run)
    lora = home.run.lora if home is not None and home.run is not None else saved[0][0].lora if saved else None

    def newest(kind: Kind) -> dict[str, Any] | None:
        return next((checkpoint(f, n) for f, n in saved if f.kind is kind), None)

    return {
        "training_run_id": run,
        "base_model": service.names[0] if home is not None else saved[0][0].base_model,
        "model_owner": OWNER,
        "is_lora": lora is not None,
        "lora_rank": lora.rank if lora else None,
        "last_request_time": home.last_request if home is not None else saved[0][0].created,
        "last_checkpoint": newest(Kind.TRAINING),
        "last_sampler_checkpoint": newest(Kind.SAMPLER),
        "user_metadata": home.user_metadata if home is not None else None,
    }


def page(name: str, items: list[Any], *, limit: int, offset: int) -> dict[str, Any]:
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return {name: items[offset : offset + limit] if limit else items[offset:], "cursor": cursor}
