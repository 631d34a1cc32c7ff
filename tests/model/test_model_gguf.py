"""A model read from GGUF computes what the model that was written computes, and what the reference loader makes of the same file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gguf")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")
import gguf
import transformers
from gguf_worlds import KIND, KINDS, arch_of, reference, write_gguf
from peer_worlds import RAGGED, packed_logits, peer_logits
from typer.testing import CliRunner

from rollmill.cli import app
from rollmill.model import Tokenizer, load_model, read_model_config
from rollmill.model.gguf import import_gguf
from rollmill.model.gguf_file import GGUFFile

CLOSE = dict(rtol=1e-5, atol=1e-5)
"""Two float32 forwards of the same weights, logits of order one: the house bound for agreement with the reference."""


def reference_load(file: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def agree(out: Path, peer: Any) -> None:
    model, _ = load_model(out)
    for ours, theirs in zip(packed_logits(model, RAGGED), peer_logits(peer, RAGGED), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("name", KINDS)
def test_imported_model_computes_what_the_written_one_did(name: str, tmp_path: Path) -> None:
    peer = reference(name)
    file = write_gguf(tmp_path / "x.gguf", peer, arch_of(name))
    config = import_gguf(file, tmp_path / "out", dtype="float32")
    assert config == read_model_config(tmp_path / "out")
    assert config.tied == peer.config.tie_word_embeddings
    assert config.norm_eps == peer.config.rms_norm_eps
    agree(tmp_path / "out", peer)


MIXED = {"attn_q": KIND.Q4_0, "attn_k": KIND.Q4_1, "attn_v": KIND.Q5_0, "ffn_gate": KIND.Q5_1, "ffn_up": KIND.F16, "token_embd": KIND.BF16}


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen2", "qwen3", "qwen3moe"])
def test_quantised_file_computes_what_the_reference_loader_makes_of_it(name: str, tmp_path: Path) -> None:
    # The reference loader does not read the head size of qwen3 files and takes the family's.
    wide = {"head_dim": 128} if name == "qwen3" else {}
    file = write_gguf(tmp_path / "x.gguf", reference(name, intermediate_size=64, **wide), arch_of(name), kinds=MIXED, default=KIND.Q8_0)
    assert {place.kind for place in GGUFFile(file).tensors.values()} == {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
    import_gguf(file, tmp_path / "out", dtype="float32")
    agree(tmp_path / "out", reference_load(file))


# Kind -> where in a block its float16 scales lie.
SUPER = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,), "IQ4_NL": (0,)}


def random_blocks(shape: tuple[int, int], kind: str, rng: np.random.Generator) -> np.ndarray:
    """Any bytes are a valid block once its scales are small numbers; the library writes none of these kinds."""
    block, size = gguf.GGML_QUANT_SIZES[KIND[kind]]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // block, size), dtype=np.uint8)
    for at in SUPER[kind]:
        blocks[:, at : at + 2] = rng.uniform(1e-5, 4e-5, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)


def test_super_blocks_compute_what_the_reference_loader_makes_of_them(tmp_path: Path) -> None:
    peer = reference("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=2)
    rng = np.random.default_rng(3)
    where = {
        "blk.0.attn_q.weight": ("Q4_K", (256, 256)),
        "blk.0.attn_k.weight": ("Q6_K", (128, 256)),
        "blk.0.ffn_down.weight": ("Q2_K", (256, 256)),
        "blk.0.ffn_up.weight": ("Q3_K", (256, 256)),
        "blk.1.ffn_gate.weight": ("Q5_K", (256, 256)),
        "blk.1.attn_q.weight": ("IQ4_XS", (256, 256)),
        "blk.1.attn_v.weight": ("IQ4_NL", (128, 256)),
    }
    raw = {name: (random_blocks(shape, kind, rng), KIND[kind]) for name, (kind, shape) in where.items()}
    file = write_gguf(tmp_path / "x.gguf", peer, "llama", raw=raw)
    import_gguf(file, tmp_path / "out", dtype="float32")
    loaded = reference_load(file)
    agree(tmp_path / "out", loaded)
    held = loaded.state_dict()
    assert all(torch.equal(value, held[name]) for name, value in load_model(tmp_path / "out")[0].serving_tensors().items())


def unpackable() -> list[str]:
    found = []
    for kind, (_, size) in gguf.GGML_QUANT_SIZES.items():
        try:
            gguf.dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            continue
        found.append(kind.name)
    return found


@pytest.mark.parametrize("kind", unpackable())
def test_stack_is_read_whole_and_in_parts_in_every_kind_the_library_unpacks(kind: str, tmp_path: Path) -> None:
    block, size = gguf.GGML_QUANT_SIZES[KIND[kind]]
    raw = np.random.default_rng(5).integers(0, 100, (3, 4, 2 * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("t", raw, raw_dtype=KIND[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "x.gguf")
    expected = gguf.dequantize(raw, KIND[kind]).reshape(3, 4, 2 * block)
    assert file.tensors["t"].shape == (3, 4, 2 * block)
    np.testing.assert_array_equal(file.read("t"), expected)
    for x in range(3):
        np.testing.assert_array_equal(file.read("t", x), expected[x])


def llama3_divisors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """As Meta's formula has it, one frequency after the other."""
    found = []
    for i in range(head_dim // 2):
        wave = 2 * np.pi * theta ** (2 * i / head_dim)
        if wave < 8192 / 4:
            found.append(1.0)
        elif wave > 8192:
            found.append(factor)
        else:
            smooth = (8192 / wave - 1) / 3
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, dtype=np.float32)


def test_llama3_scaling_is_recognised_by_its_divisors(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500000.0}
    rope["original_max_position_embeddings"] = 8192
    peer = reference("llama", rope_parameters=rope, head_dim=64)
    file = write_gguf(tmp_path / "x.gguf", peer, "llama", extra={"rope_freqs.weight": llama3_divisors(64, 500000.0, 8.0)})
    config = import_gguf(file, tmp_path / "out", dtype="float32")
    assert config.rope_scaling is not None
    assert config.rope_scaling.to_hf() == {k: v for k, v in rope.items() if k != "rope_theta"}
    agree(tmp_path / "out", peer)


def test_weights_are_rounded_once_to_the_dtype_asked_for(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "x.gguf", reference("llama"), "llama")
    import_gguf(file, tmp_path / "exact", dtype="float32")
    import_gguf(file, tmp_path / "out")
    exact, (model, config) = load_model(tmp_path / "exact")[0].serving_tensors(), load_model(tmp_path / "out")
    assert config.dtype == "bfloat16"
    assert all(torch.equal(value, exact[name].bfloat16()) for name, value in model.serving_tensors().items())


def test_big_model_is_written_in_shards(tmp_path: Path) -> None:
    peer = reference("qwen3moe")
    file = write_gguf(tmp_path / "x.gguf", peer, "qwen3moe")
    import_gguf(file, tmp_path / "out", dtype="float32", shard_bytes=20_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    assert index["metadata"]["total_size"] == sum(p.numel() for p in peer.parameters()) * 4
    agree(tmp_path / "out", peer)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    agree(tmp_path / "out", again)


def test_verb_imports_and_says_what_it_made(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "x.gguf", reference("qwen2"), "qwen2")
    done = CliRunner().invoke(app, ["model", "import", str(file), str(tmp_path / "out"), "--dtype", "float16"])
    assert done.exit_code == 0, done.output
    assert "qwen2, 2 layers, 64 tokens of context" in done.output and "float16" in done.output
    assert load_model(tmp_path / "out")[1].eos_token_ids == (2, 0)


@pytest.mark.slow
@pytest.mark.skipif("ROLLMILL_GGUF" not in os.environ, reason="set ROLLMILL_GGUF to a GGUF file of a real model")
def test_real_model_agrees_with_the_reference_loader(tmp_path: Path) -> None:
    file = Path(os.environ["ROLLMILL_GGUF"])
    import_gguf(file, tmp_path / "out", dtype="float32")
    tok = Tokenizer(tmp_path / "out")
    prompt = tok.chat_template.render([{"role": "user", "content": "What is the capital of France?"}])
    ids = tok.encode(prompt)
    peer = reference_load(file)
    model, _ = load_model(tmp_path / "out")
    held = peer.state_dict()
    assert all(torch.equal(value, held[name]) for name, value in model.serving_tensors().items())
    ours, theirs = packed_logits(model, [ids])[0], peer_logits(peer, [ids])[0]
    # Tens of layers and logits of some tens: 1e-5 of the largest one.
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-5 * float(theirs.abs().max()))
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
    their_tok = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for text in ("naïve café, 東京 🙂\n\n  x\t y", "I'm sure you'll   see ", prompt):
        assert tok.encode(text) == their_tok(text, add_special_tokens=False)["input_ids"]
        assert tok.decode(tok.encode(text)) == text
