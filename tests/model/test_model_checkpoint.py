"""Model directories: what is saved loads bit for bit; a directory that is incomplete, foreign or damaged says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from model_worlds import fresh, tiny
from safetensors.torch import load_file, save_file

from rollmill.model import CheckpointError, Model, Tokenizer, load_model, save_model
from rollmill.tasks.repo.words import NAMES

DEMO = Path(__file__).parents[2] / "models" / "demo"


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: t.contiguous().view(torch.uint8).numpy().tobytes() for name, t in tensors.items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("tied", [True, False])
def test_saved_model_loads_bit_for_bit(tmp_path: Path, dtype: str, tied: bool) -> None:
    model = fresh(tiny(dtype=dtype, tied=tied, num_kv_heads=2))
    save_model(model, tmp_path)
    back, config = load_model(tmp_path)
    assert config == model.config
    assert bits(back.serving_tensors()) == bits(model.serving_tensors())
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), model.parameters(), strict=True))
    assert [p.name for p in tmp_path.glob("*.tmp")] == []


def test_serving_tensors_are_lossless_both_ways() -> None:
    """Every bfloat16 number, infinities, subnormals and -0.0 included, survives the fp32 live weights; a NaN stays one."""
    model = Model(tiny(vocab_size=2048, dtype="bfloat16"))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(2048, 32)
    model.load_serving({"model.embed_tokens.weight": patterns})
    out = model.serving_tensors()["model.embed_tokens.weight"]
    same = out.view(torch.int16) == patterns.view(torch.int16)
    assert bool((same | patterns.isnan()).all()) and bool(out.isnan().eq(patterns.isnan()).all())


def test_serving_tensors_are_copies() -> None:
    model = fresh(tiny())
    taken = model.serving_tensors()
    before = bits(taken)
    with torch.no_grad():
        model.embed.add_(1.0)
        model.layers[0].attn.qkv.add_(1.0)  # type: ignore[union-attr, operator]
    assert bits(taken) == before


def test_load_serving_refuses_foreign_names_and_shapes_and_changes_nothing() -> None:
    model = fresh(tiny())
    before = bits(model.serving_tensors())
    with pytest.raises(ValueError, match=r"'lm_head\.weight' is not part of this model"):
        model.load_serving({"model.norm.weight": torch.zeros(32), "lm_head.weight": torch.zeros(64, 32)})
    with pytest.raises(ValueError, match=r"'model.norm.weight' has shape \(31,\), this model needs \(32,\)"):
        model.load_serving({"model.norm.weight": torch.zeros(31)})
    assert bits(model.serving_tensors()) == before


def test_sharded_directory_loads_like_a_whole_one(tmp_path: Path) -> None:
    model = fresh(tiny(tied=False, dtype="bfloat16"))
    save_model(model, tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(whole)
    for i, part in enumerate((names[::2], names[1::2])):
        save_file({n: whole[n] for n in part}, tmp_path / f"model-{i + 1:05d}-of-00002.safetensors")
    assert bits(load_model(tmp_path)[0].serving_tensors()) == bits(model.serving_tensors())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks \d+ of 21 tensors, first"):
        load_model(tmp_path)


def test_tied_model_ignores_a_stored_copy_of_its_head(tmp_path: Path) -> None:
    model = fresh(tiny())
    save_model(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors")
    assert bits(load_model(tmp_path)[0].serving_tensors()) == bits(model.serving_tensors())


def test_missing_foreign_and_damaged_directories_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing; point `model\.path`"):
        load_model(tmp_path / "nowhere")
    save_model(fresh(tiny()), tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    good, body = json.loads(config.read_text()), weights.read_bytes()

    def complains(text: str, about: str) -> None:
        config.write_text(text)
        with pytest.raises(CheckpointError, match=about):
            load_model(tmp_path)
        config.write_text(json.dumps(good))

    complains(json.dumps(good | {"model_type": "gpt2"}), "model_type 'gpt2'; this version loads llama")
    complains(json.dumps(good | {"rope_scaling": {"type": "longrope", "factor": 2.0}}), "rope_scaling 'longrope'")
    complains(json.dumps({k: v for k, v in good.items() if k != "hidden_size"}), "hidden_size")
    complains("{", "does not describe a model")
    complains(json.dumps(good | {"vocab_size": 80}), r"does not fit .*shape \(64, 32\), this model needs \(80, 32\)")
    complains(json.dumps(good | {"num_hidden_layers": 1}), "'model.layers.1")
    complains(json.dumps(good | {"num_hidden_layers": 3}), "lacks 9 of 29 tensors")
    for damaged in (body[:100], body[:-10], b"", b"\xff" * 64):
        weights.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="is damaged"):
            load_model(tmp_path)
    weights.unlink()
    with pytest.raises(CheckpointError, match="no weights at"):
        load_model(tmp_path)


CRASH = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from model_worlds import fresh, tiny
from rollmill.model import save_model
old, new = fresh(tiny(), 1), fresh(tiny(rope_theta=500.0 if sys.argv[3] == "config" else 10000.0), 2)
before, after = (int(size) for size in sys.argv[4:6])
real = {name: getattr(Path, name) for name in ("unlink", "replace", "write_text")}
for num_steps in range(40):
    path = Path(sys.argv[2]) / str(num_steps)
    save_model(old, path, shard_bytes=before)
    if child := os.fork():
        if os.waitpid(child, 0)[1] == 0:
            break
        continue
    left = [num_steps]
    def counted(name):
        def step(*args, **options):
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return real[name](*args, **options)
        return step
    for name in real:
        setattr(Path, name, counted(name))
    save_model(new, path, shard_bytes=after)
    os._exit(0)
"""


@pytest.mark.parametrize(
    ("change", "before", "after"),
    [
        ("weights", 1 << 30, 1 << 30),
        ("config", 1 << 30, 1 << 30),
        ("weights", 1 << 30, 30_000),
        ("weights", 30_000, 1 << 30),
        ("config", 30_000, 30_000),
    ],
)
def test_save_that_is_killed_leaves_the_old_model_the_new_one_or_none(tmp_path: Path, change: str, before: int, after: int) -> None:
    command = [sys.executable, "-c", CRASH, str(Path(__file__).parent), str(tmp_path), change, str(before), str(after)]
    subprocess.run(command, check=True, timeout=60, env=os.environ | {"OMP_NUM_THREADS": "1"})
    old, new = fresh(tiny(), 1), fresh(tiny(rope_theta=500.0 if change == "config" else 10000.0), 2)
    seen = []
    for path in sorted(tmp_path.iterdir(), key=lambda p: int(p.name)):
        try:
            model, config = load_model(path)
        except CheckpointError:
            seen.append("none")
            continue
        held = (config, bits(model.serving_tensors()))
        seen.append("old" if held == (old.config, bits(old.serving_tensors())) else "new")
        assert held in [(m.config, bits(m.serving_tensors())) for m in (old, new)]
    assert seen[0] == "old" and seen[-1] == "new"
    if (change, before, after) == ("weights", 1 << 30, 1 << 30):
        assert "none" not in seen


def test_shipped_model_is_small_loads_and_knows_the_names() -> None:
    assert sum(f.stat().st_size for f in DEMO.iterdir()) <= 6 << 20
    _, config = load_model(DEMO)
    tokenizer = Tokenizer(DEMO)
    assert tokenizer.vocab_size <= config.vocab_size and tokenizer.stop_ids == set(config.eos_token_ids)
    assert [n for n in NAMES if len(tokenizer.encode(n)) != 1] == []
    for around in ("fix {} in", '{{"path": "{}.py"}}', "mkdir -p {} &&"):
        assert [n for n in NAMES if tokenizer.encode(n)[0] not in tokenizer.encode(around.format(n))] == []
