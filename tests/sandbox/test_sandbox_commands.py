"""`rollmill sandbox` and `rollmill doctor`: a command in a box behaves as if it ran here; a check that fails is a line, never an end."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill import cli
from rollmill.sandbox import checks
from rollmill.sandbox.commands import make_spec, parse_allow, parse_size, read_files
from rollmill.sandbox.doctor import Finding, Health, broken, missing, ok, report, run_checks
from rollmill.sandbox.namespace import NamespaceBackend
from rollmill.sandbox.records import Allow

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def boxes() -> None:
    if reason := NamespaceBackend.probe():
        pytest.skip(reason)


def rollmill(*words: str, stdin: bytes = b"") -> tuple[int, bytes, bytes]:
    """Status, standard output and standard error of the program itself."""
    done = subprocess.run(
        [sys.executable, "-m", "rollmill.cli", *words], input=stdin, capture_output=True, cwd=ROOT, timeout=DEADLINE_S, check=False
    )
    return done.returncode, done.stdout, done.stderr


# What is typed


@pytest.mark.parametrize(("text", "size"), [("512MiB", 512 << 20), ("1g", 1 << 30), ("1.5 GiB", 3 << 29), ("100", 100), ("64kb", 64 << 10)])
def test_sizes_are_read_the_way_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "big", "-1", "1 PiB", "1e9", "MiB"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="512MiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("example.org", Allow(host="example.org")),
        ("*.example.org:8443", Allow(host="*.example.org", port=8443)),
        ("example.org:80/get,HEAD", Allow(host="example.org", port=80, methods=("GET", "HEAD"))),
        ("example.org/POST", Allow(host="example.org", methods=("POST",))),
    ],
)
def test_an_allowance_names_host_port_and_methods(text: str, rule: Allow) -> None:
    assert parse_allow(text) == rule


@pytest.mark.parametrize("text", ["", ":80", "example.org:0", "example.org:70000", "https://example.org", "a b"])
def test_an_allowance_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="HOST"):
        parse_allow(text)


@settings(derandomize=True, max_examples=200)
@given(st.text(max_size=30))
def test_no_typed_word_raises_anything_but_a_sentence(text: str) -> None:
    for parse in (parse_size, parse_allow):
        with contextlib.suppress(ValueError):
            parse(text)


def test_a_variable_without_a_value_is_refused() -> None:
    with pytest.raises(ValueError, match="NAME=VALUE"):
        make_spec(image="host", root=False, memory="64MiB", disk="1MiB", processes=4, timeout_s=1, env=["HOME"])


def test_links_are_left_out_of_copied_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.sh").write_bytes(b"\xff")
    (tmp_path / "a" / "b.sh").chmod(0o750)
    (tmp_path / "link").symlink_to("/etc/passwd")
    assert read_files(tmp_path) == [("a/b.sh", b"\xff", 0o750)]
    assert "1 links" in capsys.readouterr().err
    with pytest.raises(ValueError, match="not a folder"):
        read_files(tmp_path / "none")


# run and fork


def test_run_passes_input_output_and_status_through(boxes: None) -> None:
    status, out, err = rollmill("sandbox", "run", "--", "sh", "-c", "cat; echo oops >&2; exit 7", stdin=b"\x00in\xff" * 50_000)
    assert (status, out, err) == (7, b"\x00in\xff" * 50_000, b"oops\n")


def test_run_tells_signals_time_outs_and_missing_programs_as_a_shell_does(boxes: None) -> None:
    assert rollmill("sandbox", "run", "sh", "-c", "kill -9 $$")[0] == 137
    status, _, err = rollmill("sandbox", "run", "--timeout", "0.2", "sleep", "600")
    assert status == 124 and b"--timeout" in err
    status, _, err = rollmill("sandbox", "run", "--", "no-such-program")
    assert status == 127 and b"no-such-program" in err


def test_run_copies_files_and_sets_variables(boxes: None, tmp_path: Path) -> None:
    (tmp_path / "say.sh").write_text("#!/bin/sh\necho $WORD\n")
    (tmp_path / "say.sh").chmod(0o755)
    status, out, _ = rollmill("sandbox", "run", "--files", str(tmp_path), "--env", "WORD=hello", "./say.sh")
    assert (status, out) == (0, b"hello\n")


def test_run_without_a_command_and_without_a_terminal_says_what_to_type() -> None:
    status, _, err = rollmill("sandbox", "run")
    assert status == 2 and b"rollmill sandbox run -- ARGV" in err


def test_an_unknown_backend_or_image_is_one_line() -> None:
    for words in (["--backend", "nowhere"], ["--image", "no-such-image"]):
        status, _, err = rollmill("sandbox", "run", *words, "true")
        assert status == 2 and len(err.splitlines()) == 1, err


def test_run_on_a_terminal_gives_a_shell_of_its_size(boxes: None) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (33, 99))
    shell = subprocess.Popen(
        [sys.executable, "-m", "rollmill.cli", "sandbox", "run"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        start_new_session=True,
    )
    os.close(theirs)
    seen = b""
    end = time.monotonic() + DEADLINE_S
    is_typed = False
    try:
        while time.monotonic() < end:
            if not select.select([ours], [], [], 1.0)[0]:
                continue
            try:
                seen += os.read(ours, 1 << 16)
            except OSError:
                break
            if not is_typed and b"$ " in seen:
                os.write(ours, b"stty size; exit 3\r")
                is_typed = True
        assert shell.wait(DEADLINE_S) == 3, seen
        assert b"33 99" in seen
    finally:
        shell.kill()
        shell.wait()
        os.close(ours)


def test_fork_sets_up_once_and_every_fork_has_its_own_copy(boxes: None) -> None:
    setup = "head -c 16 /dev/urandom | od -An -tx1 > drawn; echo before > note"
    status, out, _ = rollmill("sandbox", "fork", "--num", "3", "--setup", setup, "--", "sh", "-c", "cat drawn note; echo after > note")
    lines = out.decode().splitlines()
    assert status == 0 and [line.split(":")[0] for line in lines if line.startswith("fork")] == ["fork 0", "fork 1", "fork 2"]
    drawn = {lines[index + 1] for index, line in enumerate(lines) if line.startswith("fork")}
    assert len(drawn) == 1 and lines.count("  before") == 3
    assert "3 forks ready in" in lines[-1]


def test_fork_whose_setup_fails_makes_none(boxes: None) -> None:
    status, out, err = rollmill("sandbox", "fork", "--setup", "echo why; exit 4", "--", "true")
    assert status == 2 and b"why" in out and b"status 4; no fork was made" in err


def test_the_first_failing_fork_is_the_status(boxes: None) -> None:
    assert rollmill("sandbox", "fork", "--num", "2", "--", "false")[0] == 1


# Images


def test_without_images_the_command_that_makes_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMILL_HOME", str(tmp_path))
    assert b"rollmill sandbox build DIR" in rollmill("sandbox", "images")[1]
    status, _, err = rollmill("sandbox", "build", str(tmp_path))
    assert status == 2 and b"sandbox.toml" in err and len(err.splitlines()) == 1


# doctor


def test_findings_keep_their_order_and_a_check_that_raises_or_hangs_is_one_of_them() -> None:
    never = threading.Event()

    def raises() -> Finding:
        raise OSError("no such device")

    def hangs() -> Finding:
        never.wait(DEADLINE_S)
        return ok("hangs", "")

    found = run_checks([("well", lambda: ok("well", "fine")), ("raises", raises), ("hangs", hangs)], within_s=0.5)
    never.set()
    assert [(f.name, f.health) for f in found] == [("well", Health.OK), ("raises", Health.BROKEN), ("hangs", Health.BROKEN)]
    assert "no such device" in found[1].detail and "0.5 s" in found[2].detail


def test_the_status_says_whether_the_decisive_check_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    bad = missing("qemu", "no machines", "apt-get install qemu-system-x86")
    assert report([ok("boxes", "fine"), bad], decisive="boxes", as_json=False) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1].split() == ["missing", "qemu", "no", "machines", "->", "apt-get", "install", "qemu-system-x86"]
    assert report([broken("boxes", "no", "mend it"), ok("python", "3.12")], decisive="boxes", as_json=True) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["works"] is False and told["checks"][0] == {"name": "boxes", "health": "broken", "detail": "no", "fix": "mend it"}


def test_doctor_prints_every_check_with_a_remedy_where_one_is_needed(
    boxes: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["rollmill", "sandbox", "doctor", "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = json.loads(capsys.readouterr().out)
    assert not ended.value.code and told["works"]
    assert len(told["checks"]) == len(checks.sandbox_checks())
    assert all(check["health"] == "ok" or check["fix"] for check in told["checks"])
    assert not [check for check in told["checks"] if "the check failed" in check["detail"]]


def test_doctor_is_importable_and_runs_without_torch() -> None:
    code = (
        "import sys\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'torch': raise ImportError(f'{name} is blocked')\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        "import importlib.util\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name == 'torch' else real(name)\n"
        "from rollmill.sandbox import checks\n"
        "print(checks.torch().health)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.stdout == "missing\n", done.stderr


def fake_proc(root: Path, **values: str) -> Path:
    """A /proc of the files given as `sys_kernel_pid__max` -> sys/kernel/pid_max."""
    for name, text in values.items():
        path = root / name.replace("__", "\0").replace("_", "/").replace("\0", "_")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_limits_that_are_too_small_are_named_with_the_command_that_raises_them(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path, sys_kernel_pid__max="4096", sys_user_max__user__namespaces="100", filesystems="nodev tmpfs")
    assert "sysctl -w kernel.pid_max=" in checks.room(proc).fix
    assert checks.user_namespaces(proc).fix.startswith("sysctl -w user.max_user_namespaces=")
    assert checks.overlay(proc).fix == "modprobe overlay"
    assert checks.seccomp(proc).health is Health.BROKEN


def test_control_groups_are_found_in_both_versions_and_leave_nothing(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("4:memory:/mine\n2:cpu,cpuacct:/mine\n0::/\n")
    for folder in ("memory/mine", "cpu/mine", "unified"):
        (tmp_path / "root" / folder).mkdir(parents=True)
    (tmp_path / "root" / "unified" / "cgroup.controllers").write_text("pids\n")
    found = checks.control_groups(tmp_path / "root", own)
    assert found.health is Health.OK and found.detail == "memory (v1), pids (v2), cpu (v1)"
    assert not [path for path in (tmp_path / "root").rglob("rollmill*")]
    own.write_text("0::/nowhere\n")
    assert "not writable: memory, pids, cpu" in checks.control_groups(tmp_path / "root", own).detail


@pytest.mark.parametrize(
    ("release", "version"), [("6.18.44-fc", (6, 18)), ("5.10", (5, 10)), ("6.1-rc3", (6, 1)), ("4.19.0-26-amd64", (4, 19))]
)
def test_kernel_releases_are_compared_as_numbers(release: str, version: tuple[int, int]) -> None:
    assert checks.version_of(release) == version


@pytest.mark.parametrize("check", [checks.criu, checks.firecracker, checks.kubernetes, lambda: checks.container("docker")])
def test_a_program_that_is_not_there_is_missing_with_a_remedy(
    check: Callable[[], Finding], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = check()
    assert found.health is Health.MISSING and found.fix


def test_a_program_that_fails_says_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "docker"
    program.write_text("#!/bin/sh\necho 'Cannot connect to the daemon' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = checks.container("docker")
    assert found.health is Health.BROKEN and found.detail == "Cannot connect to the daemon"
