"""The sandbox benchmark measures what it says: everybody in turns, ratios that point one way, a reason wherever a figure is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from folder_backend import FolderBackend
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.bench import sandbox as sandbox_bench
from rollmill.bench.beside import PeerFailed, Spoken
from rollmill.bench.report import Row
from rollmill.bench.sandbox import Bench, Sizes, bench_sandbox, percentile
from rollmill.bench.sandbox_ours import Ours
from rollmill.bench.sandbox_peers import PEERS, open_peer

SIZES = Sizes(rounds=2, num=3, num_cycles=4, limit_s=5.0, num_burst=6, num_idle=4)


@pytest.fixture(autouse=True)
def no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_bench, "SETTLE_S", 0.0)


class Stopwatch:
    """A sandbox whose every act takes `seconds`; it cannot do what `cannot` names, and its forks show `num_files`."""

    def __init__(self, seconds: float, *, cannot: tuple[str, ...] = (), num_files: int = 2000) -> None:
        self.seconds, self.cannot, self.num_files = seconds, cannot, num_files
        self.heard: list[str] = []
        self.held = 0

    def ask(self, what: str, **options: Any) -> dict[str, Any]:
        self.heard.append(what)
        if what in self.cannot:
            raise PeerFailed(f"cannot {what}")
        if what == "hold":
            self.held = options["num"]
        elif what == "drop":
            self.held = 0
        match what:
            case "cycles":
                return {"num": options["num"], "seconds": options["num"] * self.seconds}
            case "hold" | "drop":
                return {"seconds": self.seconds * options.get("num", 0)}
            case "files":
                return {"num": self.num_files}
            case "capabilities":
                return {"live_fork": False, "facts": {}}
        return {"seconds": [self.seconds] * options["num"]}

    def close(self) -> None:
        self.heard.append("close")


def rows_by_name(rows: list[Row]) -> dict[tuple[str, str], Row]:
    return {(row.name, row.peer): row for row in rows}


def measured(contenders: dict[str, Any], missing: dict[str, str] | None = None, sizes: Sizes = SIZES) -> dict[tuple[str, str], Row]:
    bench = Bench(contenders, missing or {}, sizes)
    bench.run("state")
    return rows_by_name(bench.rows)


def test_a_ratio_above_one_means_that_we_are_ahead_for_times_and_for_rates() -> None:
    rows = measured({"rollmill": Stopwatch(0.001), "bwrap": Stopwatch(0.004)})
    for name in ("create to ready, p50", "create + true + destroy, 64 at once", "6 boxes ready", "fork of 2,000 files ready, p99"):
        assert rows[name, "bwrap"].ratio == 4.0, name
        assert rows[name, "rollmill"].ratio is None
    assert rows["create to ready, p50", "bwrap"].value == 4.0
    assert rows["create + true + destroy, 1 at once", "rollmill"].value == 1000.0
    assert rows["16 forks of 2,000 files ready", "rollmill"].value == 16.0


def test_contenders_take_turns_within_every_round() -> None:
    order: list[str] = []

    class Signs(Stopwatch):
        def ask(self, what: str, **options: Any) -> dict[str, Any]:
            if what == "ready" and "state" not in options:
                order.append(self.name)
            return super().ask(what, **options)

    ours, theirs = Signs(0.001), Signs(0.002)
    ours.name, theirs.name = "ours", "theirs"  # type: ignore[attr-defined]
    measured({"rollmill": ours, "crun": theirs})
    assert order == ["ours", "theirs"] * SIZES.rounds


def test_a_missing_peer_has_a_reason_in_every_row_it_belongs_to_and_in_no_other() -> None:
    rows = measured({"rollmill": Stopwatch(0.001)}, {"runsc": "runsc is not installed", "cp": "there is no cp"})
    names = {name for name, peer in rows if peer == "runsc"}
    assert len(names) >= 12 and all(rows[name, "runsc"].note == "runsc is not installed" for name in names)
    assert {name for name, peer in rows if peer == "cp"} == {name for name in names if "files" in name}


def test_what_a_peer_cannot_do_is_told_and_its_other_figures_stay() -> None:
    rows = measured({"rollmill": Stopwatch(0.001), "bwrap": Stopwatch(0.002, cannot=("execs",))})
    assert rows["exec true in a live box, p50", "bwrap"].value is None
    assert rows["exec true in a live box, p50", "bwrap"].note == "cannot execs"
    assert rows["create to ready, p50", "bwrap"].value == 2.0


def test_a_fork_that_does_not_show_the_files_has_no_figures() -> None:
    rows = measured({"rollmill": Stopwatch(0.001), "crun": Stopwatch(0.002, num_files=7)})
    for name in ("fork of 2,000 files ready, p50", "128 forks of 2,000 files ready"):
        assert rows[name, "crun"].value is None and rows[name, "crun"].note == "its fork shows 7 files of 2000"


def test_a_burst_that_is_too_much_is_told_once_and_no_larger_one_is_asked_for() -> None:
    class Crowded(Stopwatch):
        """Holds at most 20 boxes."""

        def ask(self, what: str, **options: Any) -> dict[str, Any]:
            if what == "hold" and options["num"] > 20:
                self.heard.append(what)
                raise PeerFailed("only 20 were ready")
            return super().ask(what, **options)

    peer = Crowded(0.002)
    rows = measured({"rollmill": Stopwatch(0.001), "runsc": peer})
    assert rows["16 forks of 2,000 files ready", "runsc"].value == 32.0
    assert rows["64 forks of 2,000 files ready", "runsc"].note == "only 20 were ready"
    assert rows["128 forks of 2,000 files ready", "runsc"].note == "not tried: 64 were too many already"
    assert rows["6 boxes ready", "runsc"].value is not None
    assert peer.heard.count("hold") == 2 * 3 + 1


def test_a_slow_burst_of_a_peer_is_measured_once() -> None:
    slow = Stopwatch(5.0)
    rows = measured({"rollmill": Stopwatch(0.001), "runsc": slow})
    assert rows["6 boxes ready", "runsc"].value == 30.0 and rows["6 boxes ready", "runsc"].note == "one round"


def test_a_peer_without_isolation_is_marked() -> None:
    rows = measured({"rollmill": Stopwatch(0.001), "subprocess": Stopwatch(0.001)})
    assert rows["create to ready, p50", "subprocess"].note == "no isolation, 6 samples"


def test_everything_held_is_dropped_also_after_a_failure() -> None:
    ours, theirs = Stopwatch(0.001), Stopwatch(0.001, cannot=("hold",))
    measured({"rollmill": ours, "bwrap": theirs})
    assert ours.heard.count("hold") == ours.heard.count("drop") and theirs.heard.count("hold") == theirs.heard.count("drop")


def test_few_samples_are_said_to_be_few() -> None:
    rows = measured({"rollmill": Stopwatch(0.001)})
    assert rows["create to ready, p99", "rollmill"].note == "6 samples"


def test_big_counts_boxes_that_answer() -> None:
    class Big(Stopwatch):
        def ask(self, what: str, **options: Any) -> dict[str, Any]:
            return {"num": self.held} if what == "alive" else super().ask(what, **options)

    rows = measured({"rollmill": Big(0.001)}, sizes=Sizes(rounds=1, num=1, num_cycles=1, num_burst=1, num_idle=1, num_big=40))
    assert rows["40 boxes that ran true", "rollmill"].value == 40
    assert rows["40 boxes made in", "rollmill"].value == pytest.approx(0.04)


@settings(derandomize=True, max_examples=100)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300).map(sorted), st.sampled_from([1, 50, 90, 99, 100]))
def test_a_percentile_is_the_least_value_that_enough_do_not_exceed(values: list[float], q: int) -> None:
    found = percentile(values, q)
    assert found in values and sum(v <= found for v in values) * 100 >= q * len(values)
    assert sum(v < found for v in values) * 100 < q * len(values)


# Our own side, over folders


def test_ours_answers_every_question_through_the_public_interface(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    for index in range(5):
        (state / f"{index}.txt").write_text("x")
    backend = FolderBackend(tmp_path)
    ours = Ours(backend)  # type: ignore[arg-type]
    assert len(ours.ask("ready", num=3, limit_s=60.0)["seconds"]) == 3
    assert ours.ask("cycles", num=5, limit_s=60.0, at_once=3)["num"] == 5
    assert len(ours.ask("execs", num=2, limit_s=60.0)["seconds"]) == 2
    assert backend.num_alive == 0, "what was timed is closed"
    assert ours.ask("files", state=str(state))["num"] == 5
    assert len(ours.ask("ready", num=2, limit_s=60.0, state=str(state))["seconds"]) == 2
    assert len(ours.ask("freeze", num=2, limit_s=60.0, state=str(state))["seconds"]) == 2
    ours.ask("hold", num=4, limit_s=60.0, state=str(state))
    assert backend.num_alive == 4 and ours.ask("alive")["num"] == 4
    ours.ask("drop")
    assert backend.num_alive == 0
    ours.close()
    assert backend.is_closed


def test_a_failure_of_ours_is_a_reason_too(tmp_path: Path) -> None:
    ours = Ours(FolderBackend(tmp_path, most=2))  # type: ignore[arg-type]
    with pytest.raises(PeerFailed, match="2 folders already"):
        ours.ask("hold", num=3, limit_s=60.0)
    ours.close()


def test_turns_end_with_their_time(tmp_path: Path) -> None:
    ours = Ours(FolderBackend(tmp_path))  # type: ignore[arg-type]
    assert ours.ask("ready", num=100, limit_s=-1.0)["seconds"] == []
    ours.close()


# The other side, in its own process


def test_the_plain_subprocess_and_cp_are_driven_in_their_own_process(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    plain = open_peer("subprocess", None)
    try:
        assert len(plain.ask("ready", num=2, limit_s=60.0)["seconds"]) == 2
        assert plain.ask("cycles", num=4, limit_s=60.0, at_once=2)["num"] == 4
        assert len(plain.ask("execs", num=2, limit_s=60.0)["seconds"]) == 2
        plain.ask("hold", num=3, limit_s=60.0)
        plain.ask("drop")
        with pytest.raises(PeerFailed, match="no state to fork"):
            plain.ask("files", state=str(tmp_path))
    finally:
        plain.close()
    copies = open_peer("cp", None)
    try:
        assert copies.ask("files", state=str(tmp_path))["num"] == 1
        assert len(copies.ask("ready", num=2, limit_s=60.0, state=str(tmp_path))["seconds"]) == 2
    finally:
        copies.close()


def test_a_peer_that_is_not_installed_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("bwrap", "crun", "runsc", "sandlock", "swe-rex"):
        with pytest.raises(PeerFailed, match=r"setup_peers\.sh"):
            open_peer(name, tmp_path)


def test_a_program_that_cannot_start_tells_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: no namespaces for you' >&2\nexit 1\n")
    program.chmod(0o755)
    peer = open_peer("bwrap", tmp_path)
    try:
        with pytest.raises(PeerFailed, match="no namespaces for you"):
            peer.ask("ready", num=1, limit_s=60.0)
    finally:
        peer.close()


def test_whatever_a_peer_raises_is_a_reason_and_it_can_be_asked_again(tmp_path: Path) -> None:
    copies = open_peer("cp", None)
    try:
        with pytest.raises(PeerFailed, match="TypeError"):
            copies.ask("files", state=7)
        assert copies.ask("files", state=str(tmp_path))["num"] == 0
    finally:
        copies.close()


def test_a_process_that_does_not_answer_is_ended() -> None:
    silent = Spoken(["/bin/sh", "-c", 'echo "{}"; exec sleep 600'])
    with pytest.raises(PeerFailed, match="did not answer within"):
        silent.ask(answer_s=0.05)
    silent.close()


def test_a_folder_without_peers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"setup_peers\.sh"):
        bench_sandbox(command="x", peers=tmp_path)


def test_the_whole_run_is_one_object_with_a_row_or_reason_for_everybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FolderBackend(tmp_path)
    monkeypatch.setattr(sandbox_bench, "Ours", lambda name: Ours(backend))  # type: ignore[arg-type]
    monkeypatch.setattr(sandbox_bench, "GROUPS", (2,))
    monkeypatch.setattr(sandbox_bench, "NUM_FILES", 20)
    sizes = Sizes(rounds=1, num=2, num_cycles=2, limit_s=1.0, num_burst=2, num_idle=2)
    found = json.loads(json.dumps(bench_sandbox(command="rollmill sandbox bench", sizes=sizes)))
    told = {(row["name"], row["peer"]) for row in found["rows"]}
    for peer in ("rollmill", *PEERS):
        assert any(p == peer for _, p in told), peer
    for row in found["rows"]:
        assert set(row) >= {"name", "peer", "value", "unit"} and (row["value"] is not None or row["note"])
    assert found["versions"]["rollmill"] and found["hardware"]["num_cores"] and found["kernel"] and found["facts"] == {"privilege": "none"}
    assert backend.is_closed and backend.num_alive == 0
