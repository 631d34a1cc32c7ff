"""A GGUF file that is damaged, hostile or of a kind we do not compute is refused by name, and nothing is left on the disk."""

from __future__ import annotations

import builtins
import struct
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")
pytest.importorskip("transformers")
import numpy as np
from gguf_worlds import KIND, MERGES, TOKENS, TYPES, arch_of, reference, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.model.gguf import import_gguf
from rollmill.model.gguf_file import GGUFFile


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "x.gguf"
    return write_gguf(path, reference("llama", num_hidden_layers=1), "llama").read_bytes()


def refused(data: bytes, tmp_path: Path, why: str) -> None:
    (tmp_path / "x.gguf").write_bytes(data)
    refused_file(tmp_path / "x.gguf", why)


def refused_file(file: Path, why: str, **options: Any) -> None:
    with pytest.raises(ValueError, match=why):
        import_gguf(file, file.parent / "out", **options)
    assert [p.name for p in file.parent.iterdir()] == [file.name]


def header(num_tensors: int, num_pairs: int, rest: bytes = b"", *, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, num_tensors, num_pairs) + rest


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


HUGE = 1 << 60
DAMAGED = {
    "empty": (b"", "0 bytes are less than a header"),
    "foreign": (header(0, 0, magic=b"PK\x03\x04"), "does not start with 'GGUF'"),
    "first_version": (header(0, 0, version=1), "format version 1"),
    "big_endian": (header(0, 0, version=3 << 24), "big-endian"),
    "many_tensors": (header(HUGE, 0), "claims 1,152,921,504,606,846,976 tensors"),
    "many_keys": (header(0, HUGE), "claims 1,152,921,504,606,846,976 metadata keys"),
    "long_key": (header(0, 1, struct.pack("<Q", HUGE) + bytes(30)), "asks for 1,152,921,504,606,846,976 more"),
    "nameless": (header(0, 1, text("") + struct.pack("<IQ", 4, 1) + bytes(9)), "name of 0 characters"),
    "long_list": (header(0, 1, text("k") + struct.pack("<IIQ", 9, 4, HUGE) + bytes(99)), "entries of 'k', more than"),
    "long_texts": (header(0, 1, text("k") + struct.pack("<IIQ", 9, 8, HUGE) + bytes(99)), "entries of 'k', more than"),
    "nested_list": (header(0, 1, text("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(99)), "'k' is a list of type 9"),
    "unknown_type": (header(0, 1, text("k") + struct.pack("<I", 77) + bytes(99)), "'k' has the unknown type 77"),
    "not_utf8": (header(0, 1, struct.pack("<Q", 2) + b"\xff\xfe" + bytes(99)), "not UTF-8"),
    "twice": (header(0, 2, (text("kkkkk") + struct.pack("<IB", 0, 1)) * 2), "states 'kkkkk' twice"),
    "many_dims": (header(1, 0, text("t") + struct.pack("<I", 99) + bytes(99)), "claims 99 dimensions"),
    "no_elements": (header(1, 0, text("t") + struct.pack("<IQIQ", 1, 0, 0, 0) + bytes(99)), r"shape \(0,\)"),
    "many_elements": (header(1, 0, text("t") + struct.pack("<IQQIQ", 2, HUGE, HUGE, 0, 0) + bytes(99)), "'t' ends at byte"),
    "far_away": (header(1, 0, text("t") + struct.pack("<IQIQ", 1, 4, 0, HUGE) + bytes(99)), "'t' ends at byte"),
    "unknown_kind": (header(1, 0, text("t") + struct.pack("<IQIQ", 1, 4, 999, 0) + bytes(99)), "quantisation number 999"),
    "broken_block": (header(1, 0, text("t") + struct.pack("<IQIQ", 1, 33, 2, 0) + bytes(99)), "rows come in blocks of 32"),
    "overlap": (header(2, 0, b"".join(text(n) + struct.pack("<IQIQ", 1, 4, 0, 8 * i) for i, n in enumerate("tu")) + bytes(99)), "overlap"),
    "same_tensor": (header(2, 0, (text("t") + struct.pack("<IQIQ", 1, 4, 0, 0)) * 2 + bytes(99)), "tensor 't' twice"),
    "no_architecture": (header(0, 0, bytes(64)), "architecture None; this version imports llama, qwen2, qwen3, qwen3moe"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_header_is_refused(name: str, tmp_path: Path) -> None:
    refused(DAMAGED[name][0], tmp_path, DAMAGED[name][1])


def test_truncated_file_is_refused_wherever_it_is_cut(whole: bytes, tmp_path: Path) -> None:
    for end in (*range(0, len(whole) - 1, len(whole) // 40), len(whole) - 1):
        refused(whole[:end], tmp_path, "cut short|less than a header")


@settings(max_examples=150, derandomize=True, deadline=None)
@given(where=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes_in_the_header_are_refused_or_harmless(
    where: list[tuple[float, int]], whole: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("fuzz")
    data = bytearray(whole)
    (path / "x.gguf").write_bytes(whole)
    header_bytes = min(place.offset for place in GGUFFile(path / "x.gguf").tensors.values())
    for at, value in where:
        data[int(at * (header_bytes - 1))] = value
    (path / "x.gguf").write_bytes(data)
    try:
        import_gguf(path / "x.gguf", path / "out")
    except ValueError:
        assert [p.name for p in path.iterdir()] == ["x.gguf"]
    else:
        assert {p.name for p in (path / "out").iterdir()} == {
            "config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        }


def vocabulary(**changes: Any) -> dict[str, Any]:
    return {"vocabulary": changes}


FOREIGN: dict[str, tuple[str, dict[str, Any], str]] = {
    "missing_tensor": ("llama", {"drop": ("blk.1.ffn_up.weight",)}, r"lacks the tensor 'blk\.1\.ffn_up\.weight'; it is not a whole llama"),
    "no_embeddings": ("llama", {"drop": ("token_embd.weight",)}, r"lacks the tensor 'token_embd\.weight'"),
    "unknown_tensor": (
        "llama",
        {"extra": {"blk.0.ffn_gate_shexp.weight": np.ones((4, 4), np.float32)}},
        "'blk.0.ffn_gate_shexp.weight', which",
    ),
    "half_biased": ("llama", {"extra": {"blk.0.attn_q.bias": np.ones(32, np.float32)}}, r"'blk\.0\.attn_q\.bias', which"),
    "other_shape": ("llama", {"extra": {"output_norm.weight": np.ones(31, np.float32)}}, r"'output_norm\.weight' has shape \(31,\)"),
    "not_finite": ("llama", {"extra": {"output_norm.weight": np.full(32, np.nan, np.float32)}}, "values that are not finite"),
    "unreadable_kind": ("llama", {"raw": {"output_norm.weight": (np.ones(32), KIND.F64)}}, "quantised as F64, which the installed gguf"),
    "strange_divisors": ("llama", {"extra": {"rope_freqs.weight": np.array([1, 1, 1, 3], np.float32)}}, "in a way that is not Llama 3's"),
    "window": ("llama", {"more": {"llama.attention.sliding_window": 8}}, "sliding_window"),
    "partial_rotation": ("qwen2", {"more": {"qwen2.rope.dimension_count": 4}}, r"rope\.dimension_count is 4, heads have size 8"),
    "unknown_key": ("llama", {"more": {"llama.logit_scale": 0.5}}, r"llama\.logit_scale = 0\.5, which this version does not know"),
    "pinned_key": ("qwen3moe", {"more": {"qwen3moe.expert_shared_count": 1}}, r"expert_shared_count = 1; this version computes 0"),
    "dense_experts": (
        "llama",
        {"more": {"llama.expert_count": 8}},
        r"llama\.expert_count = 8; this version imports experts of qwen3moe only",
    ),
    "longrope": ("llama", {"more": {"llama.rope.scaling.type": "longrope"}}, "'longrope'; this version computes none, linear and yarn"),
    "one_of_many": ("llama", {"more": {"split.count": 3}}, "one of 3 parts.*llama-gguf-split --merge"),
    "sentencepiece": ("llama", vocabulary(model="llama", pre="default"), "model 'llama' with the splitting rule 'default'"),
    "unknown_split": ("llama", vocabulary(pre="tekken"), "splitting rule 'tekken'; this version makes 'gpt2' with llama-bpe"),
    "same_token": ("llama", vocabulary(tokens=[*TOKENS[:-1], "a"]), "token 'a' twice"),
    "strange_merge": ("llama", vocabulary(merges=[*MERGES, "x y"]), "merge 'x y' does not join"),
    "types_missing": ("llama", vocabulary(types=TYPES[:-1]), "token_type does not have an entry for each"),
    "end_outside": ("llama", vocabulary(eos=999), "eos_token_id is 999, its vocabulary has 33 tokens"),
    "bad_template": ("llama", vocabulary(chat="{% for %}"), "chat template is not valid"),
    "too_many_tokens": (
        "llama",
        vocabulary(tokens=[*TOKENS, *(f"x{i}" for i in range(40))], types=[*TYPES, *[1] * 40]),
        "the tokenizer has 73 tokens, .* embeddings for 64",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_not_computed_is_refused_by_name(name: str, tmp_path: Path) -> None:
    kind, changes, why = FOREIGN[name]
    refused_file(write_gguf(tmp_path / "x.gguf", reference(kind), arch_of(kind), **changes), why)


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "attention.head_count", "context_length", "feed_forward_length"])
@pytest.mark.parametrize("value", [0, (1 << 32) - 1])
def test_absurd_size_is_refused(key: str, value: int, whole: bytes, tmp_path: Path) -> None:
    at = whole.index(text(f"llama.{key}")) + len(text(f"llama.{key}")) + 4
    refused(whole[:at] + struct.pack("<I", value) + whole[at + 4 :], tmp_path, rf"llama\.{key} = {value}; expected one whole number")


def test_other_architecture_is_refused_by_name(tmp_path: Path) -> None:
    refused_file(write_gguf(tmp_path / "x.gguf", reference("llama"), "gemma3"), "architecture 'gemma3'; this version imports llama")


def test_values_beyond_float16_are_refused_where_float16_is_asked_for(tmp_path: Path) -> None:
    big = {"output_norm.weight": np.full(32, 1e6, np.float32)}
    file = write_gguf(tmp_path / "x.gguf", reference("llama"), "llama", extra=big)
    refused_file(file, r"'output_norm\.weight' has values that are not finite in torch\.float16; try --dtype float32", dtype="float16")


def test_directory_in_use_is_left_alone(whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(whole)
    (tmp_path / "out").mkdir()
    import_gguf(tmp_path / "x.gguf", tmp_path / "out")
    with pytest.raises(ValueError, match="exists already"):
        import_gguf(tmp_path / "x.gguf", tmp_path / "out")


def test_unknown_dtype_and_absent_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot store a model in 'int8'; choose one of bfloat16"):
        import_gguf(tmp_path / "x.gguf", tmp_path / "out", dtype="int8")
    with pytest.raises(FileNotFoundError, match="no GGUF file"):
        import_gguf(tmp_path / "x.gguf", tmp_path / "out")


def test_missing_library_is_told_with_the_command_that_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_gguf(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "gguf":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_gguf)
    with pytest.raises(ValueError, match=r"pip install 'rollmill\[gguf\]'"):
        import_gguf(tmp_path / "x.gguf", tmp_path / "out")
