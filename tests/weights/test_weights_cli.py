"""`rollmill weights`: every verb does what it says, in one process, and what a person can mend is one line and exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from interop_worlds import bytes_at, bytes_in, flip, model_at, publish_steps, same_bits, write_model

from rollmill import cli
from rollmill.weights.interop.hf import read_directory
from rollmill.weights.store import open_store

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """(exit code, standard output, standard error) of `rollmill weights ...`."""

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rollmill", "weights", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


@pytest.fixture
def store(tmp_path: Path) -> Path:
    publish_steps(open_store(tmp_path / "store"), 0, 1, 2)
    return tmp_path / "store"


def test_publish_and_pull(where: str, tmp_path: Path, run: Run) -> None:
    for step in (0, 1):
        code, out, _ = run("publish", where, write_model(tmp_path / f"m{step}", step), "--run-id", "r")
        assert code == 0 and f"published version {step} (step {step})" in out and "next:  rollmill weights pull" in out
    assert "nothing to do" in run("publish", where, tmp_path / "m1" / "model.safetensors")[1]
    assert "in full" in run("pull", where, tmp_path / "p", "--version", "0")[1]
    assert "pulled version 1 from version 0" in run("pull", where, tmp_path / "p")[1]
    assert "holds version 1 already, proved again" in run("pull", where, tmp_path / "p")[1]
    assert same_bits(read_directory(tmp_path / "p"), model_at(1))


def test_publish_takes_step_and_note(tmp_path: Path, run: Run) -> None:
    run("publish", tmp_path / "s", write_model(tmp_path / "m", 0), "--step", 40, "--note", "before the summer")
    record = open_store(tmp_path / "s").version(0)
    assert (record.step, record.note, record.run_id) == (40, "before the summer", "imported")


def test_log_show_and_verify_take_a_store_or_a_run_directory(store: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "run").mkdir()
    store.rename(tmp_path / "run" / "weights")
    for where in (tmp_path / "run", tmp_path / "run" / "weights"):
        code, out, _ = run("log", where)
        assert code == 0 and "latest" in out
        assert run("verify", where)[:2] == (0, "clean: every version decodes, by every route, to the weights the trainer fingerprinted\n")
        assert run("show", where, 1)[0] == 0


def test_programs_get_json(store: Path, run: Run) -> None:
    rows = json.loads(run("log", store, "--json", "--limit", 2)[1])
    assert [row["version"] for row in rows] == [2, 1]
    shown = json.loads(run("show", store, "--json")[1])
    assert shown["version"] == 2 and shown["tensors"].keys() == model_at(0).keys() and shown["routes"][0]["base"] == 1
    assert json.loads(run("verify", store, "--json", "--version", "latest")[1]) == {"is_whole": True, "problems": []}
    assert json.loads(run("fsck", store, "--json", "--deep")[1])["is_usable"] is True
    assert json.loads(run("gc", store, "--json", "--dry-run")[1])["is_dry"] is True


def test_damage_is_named_and_mended(store: Path, run: Run) -> None:
    flip(store / "packs" / "00000001" / "delta-0000.pack", 20)
    code, out, _ = run("verify", store)
    assert code == 1 and "DAMAGED" in out and "fsck" in out
    assert run("verify", store, "--json")[0] == 1
    assert run("fsck", store, "--deep")[0] == 1
    assert json.loads(run("fsck", store, "--deep", "--json")[1])["is_usable"] is False
    code, out, _ = run("fsck", store, "--deep", "--repair")
    assert "repair:" in out


def test_tags_are_set_listed_used_and_deleted(store: Path, tmp_path: Path, run: Run) -> None:
    assert "no tags" in run("tag", store)[1]
    assert "tagged version 1 as best" in run("tag", store, "best", 1, "--note", "0.81")[1]
    assert run("tag", store)[1] == "best  version 1  0.81\n"
    run("pull", store, tmp_path / "p", "--version", "best")
    assert same_bits(read_directory(tmp_path / "p"), model_at(1))
    assert "deleted tag best" in run("tag", store, "best", "--delete")[1]
    for words in (("best", "--delete"), ("7", "1"), ("latest",), ("a b",), ("x", "99")):
        code, _, err = run("tag", store, *words)
        assert code == 2 and err.startswith("rollmill: ") and err.count("\n") == 1, words


def test_rollback_publishes_the_old_bits(store: Path, run: Run) -> None:
    assert "published version 3 with the bits of version 1" in run("rollback", store, 1)[1]
    assert bytes_in(open_store(store), 3) == bytes_at(1)
    assert run("rollback", store, 1)[0] == 2


def test_compact_and_gc_say_what_they_did(store: Path, run: Run) -> None:
    publish_steps(open_store(store), *range(3, 9))
    assert run("compact", store)[0] == 0
    code, out, _ = run("gc", store, "--dry-run", "--grace-s", 0)
    assert code == 0 and "would" in out and f"rollmill weights gc {store}" in out
    assert run("gc", store)[0] == 0 and run("verify", store)[0] == 0


def test_export_and_import_of_directories_and_deltas(store: Path, tmp_path: Path, run: Run) -> None:
    like = write_model(tmp_path / "like", 0)
    assert "wrote version 2" in run("export", store, tmp_path / "full", "--like", like)[1]
    assert same_bits(read_directory(tmp_path / "full"), model_at(2)) and (tmp_path / "full" / "config.json").exists()
    assert run("import", tmp_path / "a", tmp_path / "full")[0] == 0
    assert bytes_in(open_store(tmp_path / "a"), 0) == bytes_at(2)
    words = ("--xor", "0..latest", "--encoding", "overwrite", "--checksum", "adler32")
    assert run("export", store, tmp_path / "chain", *words)[1].count("wrote") == 2
    assert "took in 3 versions" in run("import", tmp_path / "b", tmp_path / "chain", "--base", like)[1]
    assert "nothing to do" in run("import", tmp_path / "b", tmp_path / "chain")[1]
    assert bytes_in(open_store(tmp_path / "b"), 2) == bytes_at(2)
    publish_steps(open_store(tmp_path / "c"), 0)
    assert "took in 2 versions" in run("import", tmp_path / "c", tmp_path / "chain", "--base", "latest")[1]


def test_bench_compares_files_and_versions(store: Path, tmp_path: Path, run: Run) -> None:
    code, out, err = run("bench", write_model(tmp_path / "m", 0), f"{store}@1", "--repeats", 1, "--threads", 1, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["num_changed"] > 0 and {"cgr", "xor+zstd-1"} <= {row["name"] for row in found["codecs"]}


@pytest.mark.parametrize(
    "words",
    [
        ("log", "nowhere"), ("pull", "nowhere", "p"), ("publish", "new", "nowhere"), ("import", "STORE", "nowhere"), ("log", "ftp://x"),
        ("pull", "STORE", "p", "--version", "7"), ("pull", "STORE", "p", "--version", "nix"), ("pull", "EMPTY", "p"),
        ("show", "STORE", "nix"), ("verify", "STORE", "--version", "9"), ("rollback", "STORE", "latest"), ("log", "STORE/latest.json"),
        ("export", "STORE", "STORE"), ("export", "STORE", "x", "--like", "nowhere"), ("export", "STORE", "x", "--xor", "1"),
        ("export", "STORE", "x", "--xor", "2..1"), ("export", "STORE", "x", "--xor", "0..1", "--checksum", "md5"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(
    store: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    code, out, err = run(*(word.replace("STORE", str(store)).replace("EMPTY", str(tmp_path / "empty")) for word in words))
    assert (code, out) == (2, "") and err.startswith("rollmill: ") and err.count("\n") == 1, err
    assert not (tmp_path / "nowhere").exists() and not (tmp_path / "x").exists()


def test_store_out_of_reach_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    code, _, err = run("log", "s3://bucket/prefix?endpoint=http://127.0.0.1:9&give_up_after_s=1")
    assert code == 2 and err.startswith("rollmill: s3://bucket") and err.count("\n") == 1


def test_command_line_starts_without_torch_and_without_numpy() -> None:
    code = "import sys, rollmill.cli; print(sorted({'torch', 'numpy', 'msgspec', 'starlette'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
