"""`rollmill sandbox bench`: our boxes beside other sandboxes in one run, in turns, so that a busy minute is everybody's.

A row's ratio is how many times ours is ahead: theirs over ours for times and memory, ours over theirs for rates. A start of ours is the
call `create` until it returns a box; of a program that only runs commands, until `cat` inside it has answered.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rollmill.bench.beside import PeerFailed
from rollmill.bench.report import Row, result, rounded, say
from rollmill.bench.sandbox_ours import Ours
from rollmill.bench.sandbox_peers import EXECUTE, PEERS, open_peer, version

OURS = "rollmill"
NUM_FILES, FILE_BYTES = 2000, 4096
GROUPS = (16, 64, 128)
HOLD_S = 20.0
"""A peer that needs longer for a burst has no figure for it, and is asked for no larger one."""
SLOW_S = 5.0
"""A burst that took longer is told once: some peers keep every core busy while their boxes idle."""
SETTLE_S = 1.0
"""What is prepared ahead is made again, and what ended is freed, before memory is read."""
NOTES = {"subprocess": "no isolation", "swe-rex": "no isolation", EXECUTE: "no isolation", "cp": "files alone, no box"}


class Contender(Protocol):
    def ask(self, what: str, **options: Any) -> dict[str, Any]: ...
    def close(self) -> None: ...


Ask = Callable[[Contender, str], dict[str, Any]]
Answers = dict[str, list[dict[str, Any]]]


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much of everything."""

    rounds: int = 3
    num: int = 250
    """Starts, commands or forks of a contender in one round."""
    num_cycles: int = 400
    limit_s: float = 2.0
    """No start is begun later in a round: slow ones have fewer samples, and the row says how many."""
    num_burst: int = 1000
    num_idle: int = 500
    """Boxes that the memory of one is taken from."""
    num_big: int = 0
    """5,000 with `--big`."""


QUICK = Sizes(rounds=1, num=20, num_cycles=40, limit_s=1.0, num_burst=100, num_idle=50)


class Bench:
    """Asks everybody, keeps what they said and why they could not."""

    def __init__(self, contenders: dict[str, Contender], missing: dict[str, str], sizes: Sizes) -> None:
        assert OURS in contenders
        self._contenders, self._missing, self._sizes = contenders, missing, sizes
        self._start_s: dict[str, float] = {}
        self._no_forks: dict[str, str] = {}
        self._too_many: dict[str, int] = {}
        self.rows: list[Row] = []

    def run(self, state: str) -> None:
        size = self._sizes
        each = {"num": size.num, "limit_s": size.limit_s}
        self._latency("create to ready", "ready", each, is_start=True)
        for at_once in (1, 2, 64):
            name = f"create + true + destroy, {at_once} at once"
            self._rate(name, {"num": size.num_cycles, "limit_s": size.limit_s, "at_once": at_once})
        self._latency("exec true in a live box", "execs", each, also=(EXECUTE,))
        self._find_forks(state)
        self._latency(f"fork of {NUM_FILES:,} files ready", "ready", {**each, "state": state}, also=("cp",), refused=self._no_forks)
        self._latency(f"snapshot of {NUM_FILES:,} files", "freeze", {**each, "state": state}, only=(OURS,))
        for num in GROUPS:
            self._burst(f"{num} forks of {NUM_FILES:,} files ready", num, unit="ms", state=state, also=("cp",))
        self._burst(f"{size.num_burst:,} boxes ready", size.num_burst, unit="s")
        self._memory("memory of an idle box")
        if size.num_big:
            self._big(size.num_big)
        self._live()

    def _turns(
        self, name: str, ask: Ask, *, also: Sequence[str] = (), only: Sequence[str] = (), refused: Mapping[str, str] = {}
    ) -> tuple[Answers, dict[str, str]]:  # fmt: skip
        """Everybody's answers, one for each round, and the reasons of those who have none."""
        special = {"cp", EXECUTE} - set(also)
        taking = [peer for peer in self._contenders if (peer in only if only else peer not in special)]
        why = {peer: reason for peer, reason in {**self._missing, **refused}.items() if not only and peer not in special}
        found: Answers = {peer: [] for peer in taking}
        for index in range(self._sizes.rounds):
            say(f"{name}: round {index + 1} of {self._sizes.rounds}")
            for peer in taking:
                if peer in why:
                    continue
                try:
                    found[peer].append(ask(self._contenders[peer], peer))
                except PeerFailed as failure:
                    why[peer] = str(failure)
        return {peer: answers for peer, answers in found.items() if peer not in why}, why

    def _tell(
        self, name: str, unit: str, values: dict[str, float], why: dict[str, str], *, more_is_better: bool = False,
        notes: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        ours = values.get(OURS)
        for peer in (OURS, *PEERS):
            if peer in values:
                value = values[peer]
                ratio = None
                if peer != OURS and ours and value > 0:
                    ratio = rounded(ours / value if more_is_better else value / ours, 3)
                self.rows.append(Row(name=name, peer=peer, value=rounded(value), unit=unit, ratio=ratio, note=_note(peer, notes or {})))
            elif peer in why:
                self.rows.append(Row(name=name, peer=peer, value=None, unit=unit, note=why[peer]))

    def _latency(
        self, name: str, what: str, options: dict[str, Any], *, also: Sequence[str] = (), only: Sequence[str] = (),
        refused: Mapping[str, str] = {}, is_start: bool = False,
    ) -> None:  # fmt: skip
        found, why = self._turns(name, lambda contender, _: contender.ask(what, **options), also=also, only=only, refused=refused)
        samples = {peer: sorted(s * 1e3 for answer in answers for s in answer["seconds"]) for peer, answers in found.items()}
        notes = {peer: f"{len(s)} samples" for peer, s in samples.items() if len(s) < 100}
        for q in (50, 99):
            self._tell(f"{name}, p{q}", "ms", {peer: percentile(s, q) for peer, s in samples.items()}, why, notes=notes)
        if is_start:
            self._start_s = {peer: percentile(s, 50) / 1e3 for peer, s in samples.items()}

    def _rate(self, name: str, options: dict[str, Any]) -> None:
        found, why = self._turns(name, lambda contender, _: contender.ask("cycles", **options))
        rates = {peer: statistics.median(a["num"] / a["seconds"] for a in answers) for peer, answers in found.items()}
        self._tell(name, "/s", rates, why, more_is_better=True)

    def _burst(self, name: str, num: int, *, unit: str, state: str = "", also: Sequence[str] = ()) -> None:
        slow: dict[str, dict[str, Any]] = {}

        def ask(contender: Contender, peer: str) -> dict[str, Any]:
            if peer not in slow:
                found = self._hold(contender, peer, num, state=state)
                if peer == OURS or found["seconds"] <= SLOW_S:
                    return found
                slow[peer] = found
            return slow[peer]

        found, why = self._turns(name, ask, also=also, refused=self._no_forks if state else {})
        factor = 1e3 if unit == "ms" else 1.0
        values = {peer: factor * statistics.median(a["seconds"] for a in answers) for peer, answers in found.items()}
        self._tell(name, unit, values, why, notes=dict.fromkeys(slow, "one round"))

    def _hold(self, contender: Contender, peer: str, num: int, *, settle_s: float = 0.0, state: str = "") -> dict[str, Any]:
        """So many boxes alive at once, and what they use; they are gone afterwards."""
        if peer != OURS and num >= self._too_many.get(peer, num + 1):
            raise PeerFailed(f"not tried: {self._too_many[peer]} were too many already")
        time.sleep(settle_s)
        before = available_bytes()
        try:
            found = contender.ask("hold", num=num, limit_s=HOLD_S, state=state)
            time.sleep(settle_s)
            return {**found, "used": before - available_bytes()}
        except PeerFailed:
            self._too_many[peer] = num
            raise
        finally:
            contender.ask("drop")

    def _memory(self, name: str) -> None:
        def ask(contender: Contender, peer: str) -> dict[str, Any]:
            num = self._num_idle(peer)
            return {"kib": self._hold(contender, peer, num, settle_s=SETTLE_S)["used"] / num / 1024}

        found, why = self._turns(name, ask)
        values = {peer: statistics.median(a["kib"] for a in answers) for peer, answers in found.items()}
        for peer in [peer for peer, value in values.items() if value <= 0]:
            why[peer] = f"lost in the noise of the machine ({values.pop(peer):.0f} KiB)"
        self._tell(name, "KiB", values, why, notes={peer: f"of {self._num_idle(peer)} boxes" for peer in values})

    def _big(self, num: int) -> None:
        ours = self._contenders[OURS]
        say(f"{num:,} boxes alive")
        time.sleep(SETTLE_S)
        before = available_bytes()
        values: dict[str, float] = {}
        reason = ""
        try:
            values["s"] = ours.ask("hold", num=num, limit_s=10 * HOLD_S)["seconds"]
            time.sleep(SETTLE_S)
            values["GiB"] = (before - available_bytes()) / 2**30
            values["boxes"] = ours.ask("alive")["num"]
        except PeerFailed as failure:
            reason = str(failure)
        finally:
            ours.ask("drop")
        for what, unit in (("made in", "s"), ("hold", "GiB"), ("that ran true", "boxes")):
            value = values.get(unit)
            self.rows.append(
                Row(name=f"{num:,} boxes {what}", peer=OURS, value=None if value is None else rounded(value), unit=unit, note=reason)
            )

    def _live(self) -> None:
        rows = ("snapshot of a running 24 MiB process", "fork of a running 24 MiB process, p50")
        say("live forks")
        try:
            if not self._contenders[OURS].ask("capabilities")["live_fork"]:
                raise PeerFailed("this backend gives no live forks here: `rollmill sandbox doctor` says what is missing")
            answer = self._contenders[OURS].ask("live", num=10, limit_s=HOLD_S)
            values: list[float | None] = [rounded(1e3 * answer["froze"]), rounded(1e3 * statistics.median(answer["seconds"]))]
            reason = ""
        except PeerFailed as failure:
            values, reason = [None, None], str(failure)
        self.rows += [Row(name=name, peer=OURS, value=value, unit="ms", note=reason) for name, value in zip(rows, values, strict=True)]

    def _find_forks(self, state: str) -> None:
        """Who claims to fork the state must show its files; the figures of others would mean nothing."""
        for peer, contender in self._contenders.items():
            try:
                if (num := contender.ask("files", state=state)["num"]) != NUM_FILES:
                    self._no_forks[peer] = f"its fork shows {num} files of {NUM_FILES}"
            except PeerFailed as failure:
                self._no_forks[peer] = str(failure)

    def _num_idle(self, peer: str) -> int:
        """As many as start within about two seconds, when all of them would take longer."""
        start_s = self._start_s.get(peer, 0.0)
        return self._sizes.num_idle if peer == OURS or start_s == 0 else max(10, min(self._sizes.num_idle, int(2.0 / start_s)))


def bench_sandbox(*, command: str, backend: str = "namespace", peers: Path | None = None, sizes: Sizes = Sizes()) -> dict[str, Any]:
    """One JSON object; a peer that does not run here has rows without a value that say why."""
    if peers is not None:
        if not (peers / "bin").is_dir():
            raise ValueError(f"{peers} holds no peers; fill it with `scripts/setup_peers.sh {peers}`")
        peers = peers.resolve()
        # Our own backend finds criu the way a person would have installed it.
        os.environ["PATH"] = f"{peers / 'bin'}:{os.environ.get('PATH', os.defpath)}"
    idle_before = idle_share(1.0)
    with contextlib.ExitStack() as stack:
        ours = Ours(backend)
        stack.callback(ours.close)
        # The first box starts what makes boxes; that is not part of a box's start.
        try:
            ours.ask("ready", num=20, limit_s=10.0)
        except PeerFailed as failure:
            raise ValueError(f"our own boxes do not work here: {failure}; `rollmill sandbox doctor` says more") from failure
        contenders: dict[str, Contender] = {OURS: ours}
        missing: dict[str, str] = {}
        for name in PEERS:
            try:
                peer = open_peer(name, peers)
                stack.callback(peer.close)
                if name != "cp":
                    peer.ask("ready", num=2, limit_s=5.0)
                contenders[name] = peer
            except PeerFailed as failure:
                missing[name] = str(failure)
                say(f"{name}: {failure}")
        bench = Bench(contenders, missing, sizes)
        bench.run(stack.enter_context(_state()))
        facts = ours.ask("capabilities")["facts"]
    return result(
        command, bench.rows, backend=backend, facts=facts, kernel=platform.release(), sizes=msgspec.to_builtins(sizes),
        idle_before=rounded(idle_before, 3), peer_versions={name: found for name in PEERS if (found := version(name, peers))},
    )  # fmt: skip


def _note(peer: str, notes: Mapping[str, str]) -> str:
    return ", ".join(filter(None, (NOTES.get(peer), notes.get(peer))))


def percentile(values: Sequence[float], q: float) -> float:
    """Of sorted values, the nearest that `q` percent do not exceed."""
    return values[max(0, math.ceil(q / 100 * len(values)) - 1)]


def available_bytes() -> int:
    """What the kernel could give to a new program now: it sees page tables, namespaces and mounts, which no process is charged for."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/meminfo has no MemAvailable")


def idle_share(over_s: float) -> float:
    """Share of all cores' time that nobody used."""

    def read() -> tuple[int, int]:
        ticks = [int(t) for t in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
        return ticks[3] + ticks[4], sum(ticks[:8])

    idle, total = read()
    time.sleep(over_s)
    later_idle, later_total = read()
    return (later_idle - idle) / max(1, later_total - total)


@contextlib.contextmanager
def _state() -> Iterator[str]:
    """A folder of files like a small repository's, in memory so that nobody waits for a disk."""
    folder = tempfile.mkdtemp(prefix="state-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    try:
        for index in range(NUM_FILES):
            path = Path(folder, f"part{index // 100:02}", f"file{index:04}.txt")
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"{index:015}\n" * (FILE_BYTES // 16))
        # Other sandboxes map their user to another one of the host.
        os.chmod(folder, 0o755)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
