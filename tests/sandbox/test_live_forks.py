"""Live forks: programs go on in every child from the same instant, agree with the files, and are as confined as before."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.records import RunFailure
from rollmill.sandbox import SandboxSpec, Service
from rollmill.sandbox.namespace import NamespaceBackend, criu, live
from tests.sandbox.conftest import until

LIVE = SandboxSpec(live=True)

COUNTER = """
import os, time
held, n = bytearray(24 << 20), 0
while True:
    n += 1
    with open("new", "w") as out:
        out.write(str(n))
    os.rename("new", "count")
    open("all", "a").write(f"{n}\\n")
    time.sleep(0.002)
"""

# Says `ready`, then answers every line of its input with what it still has.
KEEPER = """
import os, signal, socket, sys, threading, time
log = open("log", "w+")
log.write("first\\nsecond\\n"); log.flush()
reader = open("log"); reader.readline()
ghost = open("ghost", "w+"); ghost.write("unseen"); ghost.flush(); os.unlink("ghost")
shared = open("/dev/shm/shared", "w+"); shared.write("in memory"); shared.flush()
server = socket.create_server(("127.0.0.1", 0)); port = server.getsockname()[1]
client = socket.create_connection(("127.0.0.1", port)); accepted, _ = server.accept()
client.sendall(b"on its way")
left, right = socket.socketpair(); left.sendall(b"pair")
named = socket.socket(socket.AF_UNIX); named.bind("named"); named.listen()
ticks = 0
def tick(*_):
    global ticks
    ticks += 1
signal.signal(signal.SIGALRM, tick); signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
turns = [0]
def turn():
    while True:
        turns[0] += 1; time.sleep(0.005)
threading.Thread(target=turn, daemon=True).start()
out_r, out_w = os.pipe()
in_r, in_w = os.pipe()
child = os.fork()
if child == 0:
    signal.setitimer(signal.ITIMER_REAL, 0)
    while (line := os.read(in_r, 100)):
        os.write(out_w, line.upper())
    os._exit(0)
memory = {"secret": os.urandom(8).hex()}
print("ready", flush=True)
for line in sys.stdin:
    before = ticks, turns[0]
    deadline = time.monotonic() + 30
    while (ticks <= before[0] or turns[0] <= before[1]) and time.monotonic() < deadline:
        time.sleep(0.005)
    os.write(in_w, line.strip().encode())
    with socket.create_connection(("127.0.0.1", port)) as again:
        server.accept()[0].close()
        again.recv(1)
    with socket.socket(socket.AF_UNIX) as dialled:
        dialled.connect("named")
    print(memory["secret"], os.getpid(), os.read(out_r, 100).decode(), reader.readline().strip(), os.pread(ghost.fileno(), 9, 0).decode(),
          open("/dev/shm/shared").read(), accepted.recv(100).decode(), right.recv(100).decode(),
          ticks > before[0], turns[0] > before[1], sep="|", flush=True)
"""


@pytest.fixture(scope="session")
def criu_works(machine: None) -> None:
    async def why() -> str:
        backend = NamespaceBackend(num_prepared=1)
        try:
            found = await backend.capabilities()
            return "" if found.live_fork else found.facts["live_fork"]
        finally:
            await backend.close()

    if reason := asyncio.run(why()):
        pytest.skip(reason)


@pytest.fixture
def play(criu_works: None, play):
    return play


async def _shell(box, line: str) -> str:
    result = await box.exec(line, timeout_s=60)
    assert result.exit_code == 0, result.stdout
    return result.stdout.decode()


async def _line(process) -> str:
    found = b""
    while not found.endswith(b"\n"):
        found += (await anext(process)).data
    return found.decode().strip()


async def _beyond(box, value: int) -> int:
    """Until the counter of the box has passed the value."""
    while True:
        try:
            now = int(await box.read("count"))
        except (FileNotFoundError, ValueError):
            now = -1
        if now > value:
            return now
        await asyncio.sleep(0.01)


def test_counter_goes_on_in_the_box_and_in_three_forks_and_each_goes_its_own_way(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec(live=True, files={"counter.py": COUNTER}))
        program = await box.start(["python3", "counter.py"])
        await _beyond(box, 20)
        snapshot = await box.snapshot(live=True)
        at = len((await box.read("all")).splitlines())
        children = await snapshot.fork(3)
        for n, child in enumerate(children):
            await child.write("mine", str(n).encode())
        reached = [await _beyond(child, at + 10 * (n + 1)) for n, child in enumerate([box, *children])]
        for child, least in zip([box, *children], reached, strict=True):
            numbers = [int(line) for line in (await child.read("all")).splitlines()]
            assert numbers == list(range(1, len(numbers) + 1)), "no count was done twice or left out: files and processes agree"
            assert len(numbers) >= least - 1
        assert [await child.read("mine") for child in children] == [b"0", b"1", b"2"]
        (grandchild,) = await (await children[2].snapshot(live=True)).fork(1)
        await _beyond(grandchild, reached[3] + 5)
        await children[0].exec("pkill python3", timeout_s=10)
        await _beyond(children[1], reached[2] + 5)
        await program.kill()
        assert (await program.wait(timeout_s=10)).exit_code == -9, "the handle of a program holds through a live snapshot of its box"

    play(scene)


def test_everything_a_program_holds_is_there_in_each_fork(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec(live=True, files={"keeper.py": KEEPER}))
        keeper = Service(name="keeper", argv=("python3", "keeper.py"), ready_argv=("test", "-e", "named"))
        program = await box.start(["python3", "keeper.py"])
        assert await _line(program) == "ready"
        snapshot = await box.snapshot(live=True)
        await program.write(b"parent\n")
        secret, pid, *rest = (await _line(program)).split("|")
        assert rest == ["PARENT", "second", "unseen", "in memory", "on its way", "pair", "True", "True"]
        for child in await snapshot.fork(2):
            ((found, line),) = [(n, line) for n, line in await child.processes() if line == "python3 keeper.py" and n == int(pid)]
            await child.services.adopt(keeper, found)  # as the backend does for services
            ((_, twin),) = child.services.running()
            await twin.write(b"child\n")
            await twin.close_stdin()
            result = await twin.wait(timeout_s=60)
            assert result.stdout.decode().strip().split("|") == [secret, pid, "CHILD", *rest[1:]], (line, result)

    play(scene)


def test_services_go_on_without_a_start_and_can_be_stopped_in_a_fork(play):
    starts = Service(
        name="starts",
        argv=("sh", "-c", "echo x >> starts; trap 'echo stopped > why; exit 0' TERM; touch up; while :; do sleep 0.05; done"),
        ready_argv=("test", "-e", "up"),
    )

    async def scene(backend):
        box = await backend.create(SandboxSpec(live=True, services=(starts,)))
        snapshot = await box.snapshot(live=True)
        (child,) = await snapshot.fork(1)
        assert [service.name for service in child.services] == ["starts"]
        assert await _shell(child, "cat starts; pgrep -cf 'trap'") == "x\n1\n"
        plain = await child.snapshot()
        assert await _shell(child, "cat why starts") == "stopped\nx\nx\n", "an ordinary snapshot ends and starts it as ever"
        assert await _shell((await plain.fork(1))[0], "cat starts") == "x\nx\n"
        assert await _shell(box, "cat starts; pgrep -cf 'trap'") == "x\n1\n"

    play(scene)


def _confinement(pid: int) -> dict[str, str]:
    names = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Seccomp_filters")
    with open(f"/proc/{pid}/status") as lines:
        found = {name: value.strip() for name, _, value in (line.partition(":") for line in lines) if name in names}
    with open(f"/proc/{pid}/limits") as limits:
        found["limits"] = limits.read()
    with open(f"/proc/{pid}/oom_score_adj") as score:
        found["oom"] = score.read()
    return found


def _group(pid: int) -> set[str]:
    """Its control groups that are a box's, without the box's number."""
    with open(f"/proc/{pid}/cgroup") as lines:
        return {line.strip().partition(":")[2] for line in lines if re.search(r"/b\d+$", line.strip())}


def _below(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as children:
        found = [int(child) for child in children.read().split()]
    return found + [grandchild for child in found for grandchild in _below(child)]


def test_restored_programs_are_confined_as_before_and_belong_to_their_own_box(play):
    async def scene(backend):
        box = await backend.create(LIVE)
        await box.start(["sleep", "1000"])
        before = [_confinement(pid) for pid in _below(box.pid)]
        (child,) = await (await box.snapshot(live=True)).fork(1)
        assert [_confinement(pid) for pid in _below(child.pid)] == before
        assert all(facts["Seccomp"] == "2" and facts["NoNewPrivs"] == "1" and int(facts["CapBnd"], 16) == 0 for facts in before)
        for one in (box, child):
            assert all(_group(pid) == _group(one.pid) for pid in _below(one.pid))
            for kind in ("user", "pid", "mnt", "net", "ipc", "uts", "cgroup"):
                assert len({os.readlink(f"/proc/{pid}/ns/{kind}") for pid in (one.pid, *_below(one.pid))}) == 1, kind
        assert _group(box.pid).isdisjoint(_group(child.pid))
        assert "Operation not permitted" in await _shell(child, "unshare -U true 2>&1 || true")

    play(scene)


def test_box_built_for_live_forks_runs_commands_like_any_other(play):
    async def scene(backend):
        box = await backend.create(LIVE)
        assert await _shell(box, "id -un; stat -c %U /etc; head -c3 /dev/zero | wc -c") == "dev\nroot\n3\n"
        assert (await box.exec(["no-such-program"], timeout_s=10)).exit_code == 127
        assert (await box.exec("exit 7", timeout_s=10)).exit_code == 7
        assert (await box.exec("kill -9 $$", timeout_s=10)).exit_code == -9
        assert (await box.exec("sleep 1000", timeout_s=0.2)).timed_out
        assert (await box.exec(["cat"], stdin=b"x" * 300_000, timeout_s=30, max_output_bytes=1 << 20)).stdout == b"x" * 300_000
        assert (await box.exec(["echo", "y" * 100_000], timeout_s=30, max_output_bytes=1 << 20)).num_output_bytes == 100_001
        apart = await box.exec("echo out; echo err >&2", timeout_s=10, stderr_apart=True)
        assert (apart.stdout, apart.stderr) == (b"out\n", b"err\n")
        terminal = await box.start("tty && echo there", pty=True)
        assert b"there" in (await terminal.wait(timeout_s=10)).stdout
        await box.suspend()
        assert await _shell(box, "echo awake") == "awake\n"
        await box.resume()
        assert [line for _, line in await box.processes()] == []

    play(scene)


def test_root_of_a_box_and_a_terminal_are_forked_live(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec(live=True, root=True))
        shell = await box.start(["bash", "--norc"], pty=True)
        await shell.write(b"n=41; mkdir /opt/own; chown 7:7 /opt/own; cd /opt/own; touch here\n")
        await _shell(box, "until test -e /opt/own/here; do sleep 0.01; done")
        (child,) = await (await box.snapshot(live=True)).fork(1)
        await shell.write(b"echo $((n+1)) > answer; tty; exit 3\n")
        assert (await shell.wait(timeout_s=30)).exit_code == 3
        assert await _shell(box, "cat /opt/own/answer; stat -c %u /opt/own") == "42\n7\n"
        ((pid, _),) = await child.processes()
        await child.services.adopt(Service(name="shell", argv=("bash",)), pid)
        ((_, twin),) = child.services.running()
        await twin.write(b"echo $((n+2)) > answer; exit 4\n")
        assert (await twin.wait(timeout_s=30)).exit_code == 4
        assert await _shell(child, "cat /opt/own/answer") == "43\n"

    play(scene)


def test_program_that_cannot_be_dumped_leaves_the_box_as_it_was(play):
    traced = "import ctypes, os\nctypes.CDLL(None).ptrace(0, 0, 0, 0)\nos.kill(os.getpid(), 19)\n"

    async def scene(backend):
        box = await backend.create(SandboxSpec(live=True, files={"counter.py": COUNTER, "traced.py": traced}))
        program = await box.start(["python3", "counter.py"])
        tracer = await box.start("python3 traced.py & touch up; cat; wait")
        await box.exec("until grep -q 't (tracing' /proc/[0-9]*/status; do sleep 0.01; done", timeout_s=30)
        with pytest.raises(RunFailure, match="CRIU could not dump"):
            await box.snapshot(live=True)
        await _beyond(box, await _beyond(box, 1) + 5)
        await tracer.kill()
        assert (await tracer.wait(timeout_s=10)).exit_code == -9
        (child,) = await (await box.snapshot(live=True)).fork(1)
        await _beyond(child, await _beyond(box, 1))
        await program.kill()

    play(scene)


def test_program_that_kills_everything_it_may_cannot_end_its_box(play):
    async def scene(backend):
        box = await backend.create(LIVE)
        await box.exec("kill -9 -1", timeout_s=10)
        assert await _shell(box, "echo still here") == "still here\n"
        await box.start(["sleep", "1000"])
        (child,) = await (await box.snapshot(live=True)).fork(1)
        assert [line for _, line in await child.processes()] == ["sleep 1000"]

    play(scene)


def test_programs_left_behind_go_on_with_pipes_between_them_and_their_dead(play):
    async def scene(backend):
        box = await backend.create(LIVE)
        await _shell(box, "(while sleep 0.01; do echo tick; done | while read line; do echo x >> ticks; done) > /dev/null 2>&1 &")
        await _shell(box, "sh -c 'sleep 0 & exec sleep 1000' > /dev/null 2>&1 &")
        await _shell(box, "until grep -q 'Z (zombie' /proc/[0-9]*/status && test -s ticks; do sleep 0.01; done")
        (child,) = await (await box.snapshot(live=True)).fork(1)
        for one in (box, child):
            await _shell(one, "n=$(wc -l < ticks); until test $(wc -l < ticks) -gt $n; do sleep 0.01; done; pgrep -f 'sleep 1000'")

    play(scene)


def test_live_snapshot_of_an_idle_box_is_an_ordinary_one(play, tmp_path):
    async def scene(backend):
        box = await backend.create(SandboxSpec(live=True, files={"a": "1"}))
        snapshot = await box.snapshot(live=True)
        assert await (await snapshot.fork(1))[0].read("a") == b"1"
        assert await snapshot.save(str(tmp_path))

    play(scene)


def test_live_snapshots_are_refused_where_they_cannot_be_kept(play, tmp_path, monkeypatch):
    async def scene(backend):
        with pytest.raises(ValueError, match=r"SandboxSpec\(live=True\)"):
            await (await backend.create(SandboxSpec())).snapshot(live=True)
        box = await backend.create(LIVE)
        await box.start(["sleep", "1000"])
        under_way = asyncio.create_task(box.exec("sleep 1000", timeout_s=60))
        await until(lambda: box.link.busy)
        with pytest.raises(ValueError, match="wait for it"):
            await box.snapshot(live=True)
        under_way.cancel()
        await asyncio.gather(under_way, return_exceptions=True)
        with pytest.raises(ValueError, match="cannot be saved"):
            await (await box.snapshot(live=True)).save(str(tmp_path))

    async def without(backend):
        assert not (await backend.capabilities()).live_fork
        with pytest.raises(ValueError, match=r"need the program `criu`: install"):
            await backend.create(LIVE)

    play(scene)
    monkeypatch.setenv("PATH", "/nonexistent")
    play(without)


def test_no_image_stays_behind_a_closed_snapshot(play):
    async def scene(backend):
        box = await backend.create(LIVE)
        await box.start(["sleep", "1000"])
        snapshot = await box.snapshot(live=True)
        folder = snapshot.live.folder
        forking = asyncio.create_task(snapshot.fork(1))
        await asyncio.sleep(0)
        await snapshot.close()
        (child,) = await forking
        assert [line for _, line in await child.processes()] == ["sleep 1000"], "a fork that began before the close has what it needs"
        assert not folder.exists()
        scratch = folder.parent
        await backend.close()
        assert not scratch.exists()

    play(scene)


def test_images_of_killed_owners_are_swept_and_those_of_living_ones_kept(tmp_path):
    dead = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    for name in (f"rollmill-live-{dead}-x", f"rollmill-live-{os.getpid()}-x", "other"):
        (tmp_path / name / "images").mkdir(parents=True)
    live.sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"rollmill-live-{os.getpid()}-x", "other"}


_VALUES = st.one_of(st.integers(0, 2**64 - 1), st.binary(max_size=200))


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 1000), _VALUES), max_size=20))
def test_messages_of_an_image_come_back_as_they_were(fields):
    assert criu._fields(criu._packed(fields)) == fields


def test_only_the_user_namespace_of_the_inventory_changes():
    own, other = criu._packed([(1, 5), (10, 7), (12, 300)]), criu._packed([(1, 9), (10, 200)])
    body = criu._packed([(1, 2), (3, own), (13, b"run")])
    changed = criu.at_home(b"MMMM" + len(body).to_bytes(4, "little") + body, bytes(12) + other)
    expected = criu._packed([(1, 2), (3, criu._packed([(1, 5), (10, 200), (12, 300)])), (13, b"run")])
    assert changed == b"MMMM" + len(expected).to_bytes(4, "little") + expected
