"""Token shards: what was tokenised reads back, damage is named, a stopped preparation goes on, all kinds of files give the same rows."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_worlds import CHATS, DEMO, DOCUMENTS, quiet, write_rows

from rollmill.model import Tokenizer
from rollmill.trainer.datasets import prepare as preparing
from rollmill.trainer.datasets import sources
from rollmill.trainer.datasets.prepare import Prepared, Recipe, prepare
from rollmill.trainer.datasets.rows import Layout
from rollmill.trainer.datasets.shards import INDEX, Index, ShardDamaged, TokenSequence, TokenShards, replace_file, token_dtype, write_shard
from rollmill.trainer.datasets.sources import Piece, files_of, named, open_source, read_rows, write_dataset

TEXT = Recipe(layout=Layout.TEXT, max_length=0, vocab_size=1024)
CHAT = Recipe(layout=Layout.CHAT, max_length=64, vocab_size=1024)


def made(folder: Path, shards: list[list[TokenSequence]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    written = [
        write_shard(folder, n, {"train": found}, dtype=token_dtype(1024), num_rows=len(found), num_skipped=0, num_long=0)
        for n, found in enumerate(shards)
    ]
    replace_file(folder / INDEX, msgspec.json.encode(Index(key="k", dtype="uint16", shards=tuple(written))))
    return folder


@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4), st.data())
def test_sequences_and_stretches_read_back_as_written(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[list[int]], data: st.DataObject
) -> None:
    count = iter(range(10_000))
    shards = [[TokenSequence(tokens_T=np.array([next(count) for _ in range(n)])) for n in lens] for lens in sizes]
    read = TokenShards(made(tmp_path_factory.mktemp("shards"), shards))
    flat = [s for shard in shards for s in shard]
    assert [read.sequence(n).tokens_T.tolist() for n in range(read.num_sequences)] == [s.tokens_T.tolist() for s in flat]
    assert read.lengths_S().tolist() == [len(s.tokens_T) for s in flat]
    begin = data.draw(st.integers(0, read.num_tokens - 1))
    end = data.draw(st.integers(begin + 1, read.num_tokens))
    found = read.stretch(begin, end)
    assert np.concatenate(found).tolist() == list(range(begin, end))
    starts = {int(s.tokens_T[0]) for s in flat}
    assert [int(f[0]) for f in found] == sorted({begin} | {s for s in starts if begin < s < end})


def test_masks_read_back_bit_for_bit(tmp_path: Path) -> None:
    weights = np.array([0.0, 0.1, 1.0, 3.5], np.float32)
    folder = made(tmp_path / "s", [[TokenSequence(tokens_T=np.arange(4), weights_T=weights), TokenSequence(tokens_T=np.arange(2))]])
    read = TokenShards(folder)
    first, second = (read.sequence(n).weights_T for n in (0, 1))
    assert first is not None and second is not None
    assert first.tobytes() == weights.tobytes() and second.tolist() == [1.0, 1.0]


def test_token_width_follows_the_vocabulary() -> None:
    assert token_dtype(65536) == np.dtype("<u2") and token_dtype(65537) == np.dtype("<u4")


@pytest.mark.parametrize("name", ["00000.train.tokens", "00000.train.starts"])
def test_an_altered_shard_is_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = made(tmp_path / "s", [[TokenSequence(tokens_T=np.arange(40))]])
    body = bytearray((folder / name).read_bytes())
    body[3] ^= 1
    (folder / name).write_bytes(body)
    with pytest.raises(ShardDamaged, match=f"{name} is altered or torn"):
        TokenShards(folder).check()
    (folder / name).unlink()
    with pytest.raises(ShardDamaged, match="cannot be read"):
        TokenShards(folder).check()
    (folder / INDEX).write_text("{")
    with pytest.raises(ShardDamaged, match="no finished set"):
        TokenShards(folder)


def run(tmp_path: Path, *data: Path | str, recipe: Recipe = TEXT, num_workers: int = 1) -> Prepared:
    return prepare(data, DEMO, recipe, cache=tmp_path / "cache", num_workers=num_workers, report=quiet)


def test_documents_are_tokenised_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_rows(tmp_path / "d.jsonl", DOCUMENTS)
    first = run(tmp_path, data)
    tokenizer = Tokenizer(DEMO)
    read = TokenShards(first.folder)
    assert [tokenizer.decode(read.sequence(n).tokens_T.tolist()) for n in range(3)] == [d["text"] + "<|endoftext|>" for d in DOCUMENTS[:3]]
    monkeypatch.setattr(preparing, "_tokenise", None)
    assert run(tmp_path, data) == first
    moved = write_rows(tmp_path / "elsewhere.jsonl", DOCUMENTS)
    assert run(tmp_path, moved).key == first.key, "the same bytes under another name are the same data"


def test_other_data_or_another_recipe_is_another_folder(tmp_path: Path) -> None:
    keys = {run(tmp_path, write_rows(tmp_path / "d.jsonl", DOCUMENTS)).key}
    keys.add(run(tmp_path, write_rows(tmp_path / "e.jsonl", DOCUMENTS[1:])).key)
    keys.add(run(tmp_path, tmp_path / "d.jsonl", recipe=Recipe(layout=Layout.TEXT, max_length=9, vocab_size=1024)).key)
    keys.add(run(tmp_path, tmp_path / "d.jsonl", recipe=Recipe(layout=Layout.CHAT, max_length=0, vocab_size=1024)).key)
    assert len(keys) == 4


def test_a_preparation_goes_on_with_the_shards_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 600)
    data = write_rows(tmp_path / "d.jsonl", DOCUMENTS)
    real, made_now = preparing._tokenise, []

    def dies_at_the_third(folder: Path, number: int, *rest: object) -> object:
        if number == 2:
            raise KeyboardInterrupt
        made_now.append(number)
        return real(folder, number, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(preparing, "_tokenise", dies_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, data)
    monkeypatch.setattr(preparing, "_tokenise", lambda f, n, *r: made_now.append(n) or real(f, n, *r))
    done = run(tmp_path, data)
    assert made_now == list(range(len(made_now))) and len(made_now) > 4, "every shard was made exactly once"
    monkeypatch.setattr(preparing, "_tokenise", real)
    again = prepare([data], DEMO, TEXT, cache=tmp_path / "other", num_workers=1, report=quiet)
    read = [TokenShards(p.folder) for p in (done, again)]
    assert done == Prepared(**{f: getattr(again, f) for f in again.__struct_fields__} | {"folder": done.folder})
    assert read[0].stretch(0, read[0].num_tokens)[-1].tolist() == read[1].stretch(0, read[1].num_tokens)[-1].tolist()


def test_many_processes_make_the_same_shards_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 1500)
    data = write_rows(tmp_path / "d.jsonl", DOCUMENTS)
    one = run(tmp_path, data)
    two = prepare([data], DEMO, TEXT, cache=tmp_path / "other", num_workers=2, report=quiet)
    names = sorted(p.name for p in one.folder.iterdir())
    assert names == sorted(p.name for p in two.folder.iterdir()) and len(names) > 8
    assert all((one.folder / n).read_bytes() == (two.folder / n).read_bytes() for n in names)


def test_rows_put_aside_are_a_share_of_the_rows_and_equal_rows_stay_together(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "d.jsonl", [{"text": f"owl {n % 100}"} for n in range(400)])
    done = run(tmp_path, data, recipe=Recipe(layout=Layout.TEXT, max_length=0, eval_frac=0.3, vocab_size=1024))
    train, aside = (TokenShards(done.folder, split) for split in ("train", "eval"))
    sides = [{tuple(s.sequence(n).tokens_T) for n in range(s.num_sequences)} for s in (train, aside)]
    assert not sides[0] & sides[1] and len(sides[0]) + len(sides[1]) == 100
    assert 15 <= len(sides[1]) <= 45 and train.num_sequences == 4 * len(sides[0])


def test_long_and_empty_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    long = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "owl " * 200}]}
    mute = {"messages": [{"role": "assistant", "content": "x", "train": False}]}
    done = run(tmp_path, write_rows(tmp_path / "c.jsonl", [*CHATS[:5], long, mute]), recipe=CHAT)
    assert (done.num_rows, done.num_long, done.num_skipped) == (7, 1, 1)


def test_a_tokenizer_larger_than_the_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"d.jsonl:1: token .* is beyond the model's 10"):
        run(tmp_path, write_rows(tmp_path / "d.jsonl", DOCUMENTS), recipe=Recipe(layout=Layout.TEXT, max_length=0, vocab_size=10))


@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["x", "é" * 9, "", "long " * 30]), min_size=1, max_size=20), st.integers(1, 200))
def test_pieces_of_a_file_hold_every_line_once(tmp_path_factory: pytest.TempPathFactory, texts: list[str], piece_bytes: int) -> None:
    path = tmp_path_factory.mktemp("p") / "d.jsonl"
    body = "\n".join(json.dumps({"text": t, "n": n}, ensure_ascii=False) for n, t in enumerate(texts))
    path.write_text(body)
    size = path.stat().st_size
    pieces = [Piece(path=str(path), kind="jsonl", begin=b, end=min(size, b + piece_bytes)) for b in range(0, size, piece_bytes)]
    found = [(named(p, where), row["n"]) for p in pieces for where, row in read_rows(p)]
    assert found == [(f"{path}:{n + 1}", n) for n in range(len(texts))]


def test_jsonl_parquet_and_arrow_give_the_same_rows(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    calls = [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    rows = [*CHATS[:6], {"messages": [*CHATS[0]["messages"], {"role": "assistant", "content": "", "tool_calls": calls}]}]
    data = datasets.Dataset.from_list([{"messages": r["messages"], "id": n} for n, r in enumerate(rows)])
    data.to_parquet(tmp_path / "rows.parquet")
    data.save_to_disk(tmp_path / "saved")
    write_dataset(data, tmp_path / "rows.jsonl")
    write_dataset(data.to_iterable_dataset(), tmp_path / "streamed.jsonl")
    files = [tmp_path / name for name in ("rows.jsonl", "rows.parquet", "saved", "streamed.jsonl")]
    read = [[row for piece in open_source([f]).pieces for _, row in read_rows(piece)] for f in files]
    assert read[0] == read[1] == read[2] == read[3] and len(read[0]) == 7
    assert "tool_calls" not in read[1][0]["messages"][0], "what only other messages have is absent"
    shards = [TokenShards(run(tmp_path / str(n), f, recipe=CHAT).folder) for n, f in enumerate(files)]
    assert len({shard.stretch(0, shard.num_tokens)[-1].tobytes() for shard in shards}) == 1


def test_folders_and_globs_stand_for_their_files_in_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_rows(tmp_path / name, DOCUMENTS[:1])
    assert [f.name for f in files_of(str(tmp_path))] == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert [f.name for f in files_of(str(tmp_path / "*.jsonl"))] == ["a.jsonl", "b.jsonl"]
    with pytest.raises(ValueError, match="named twice"):
        open_source([tmp_path, tmp_path / "a.jsonl"])
    with pytest.raises(ValueError, match="unknown ending"):
        open_source([tmp_path / "notes.txt"])
    with pytest.raises(ValueError, match="no data at"):
        open_source([tmp_path / "none.jsonl"])


def test_a_data_set_that_was_fetched_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fake_fetch(name: str, path: Path) -> Path:
        asked.append(name)
        path.parent.mkdir(parents=True)
        return write_rows(path, DOCUMENTS)

    monkeypatch.setattr(preparing, "fetch_dataset", fake_fetch)
    assert run(tmp_path, "hf:org/name:train") == run(tmp_path, "hf:org/name:train")
    assert asked == ["org/name:train"]
