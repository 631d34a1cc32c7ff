"""System calls, files of the kernel, devices, sockets and borrowed rights: everything that would lead out of a box is refused in it."""

from __future__ import annotations

import os
import socket

import pytest

from tests.sandbox.hostile.conftest import attack, works

REFUSALS = {1, 13, 18, 22, 30, 38, 93, 94, 97}
"""EPERM, EACCES, EXDEV, EINVAL, EROFS, ENOSYS, EPROTONOSUPPORT, ESOCKTNOSUPPORT, EAFNOSUPPORT."""
HARMLESS = {"prlimit-1"}

WRITES = [
    "/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/kernel/hostname",
    "/proc/sys/kernel/panic",
    "/proc/sys/kernel/ns_last_pid", "/proc/sys/vm/drop_caches", "/proc/sys/vm/overcommit_memory", "/proc/sys/fs/file-max",
    "/proc/sys/fs/binfmt_misc/register", "/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/core/somaxconn",
    "/proc/sys/user/max_user_namespaces",
    "/proc/1/mem", "/proc/1/oom_score_adj", "/proc/1/attr/current", "/proc/1/uid_map", "/proc/1/clear_refs", "/proc/1/comm",
    "/proc/1/sched",
    "/proc/1/autogroup", "/proc/1/timerslack_ns", "/proc/self/uid_map", "/proc/self/setgroups", "/proc/irq/default_smp_affinity",
    "/proc/mtrr", "/proc/kcore", "/proc/timer_list", "/sys/kernel/uevent_helper", "/sys/fs/cgroup/cgroup.procs",
]  # fmt: skip
READS = [
    "/proc/1/mem",
    "/proc/1/environ",
    "/proc/1/auxv",
    "/proc/1/stack",
    "/proc/kcore",
    "/proc/kmsg",
    "/proc/1/pagemap",
    "/proc/1/syscall",
]
FOLLOWS = ["/proc/1/root/", "/proc/1/cwd/", "/proc/1/fd/", "/proc/1/exe", "/proc/1/map_files/", "/proc/1/ns/mnt", "/proc/1/task/1/fd/"]


@pytest.mark.parametrize("root", [False, True])
def test_calls_that_lead_out_are_refused(perform, root):
    async def act(stage):
        box = await stage.box(root=root)
        result = await attack(box, "escape")
        tried = dict(line.split() for line in result.stdout.decode().splitlines())
        assert result.exit_code == 0 and len(tried) > 100
        succeeded = {name for name, outcome in tried.items() if outcome == "OK"} - HARMLESS
        assert not succeeded
        odd = {name: outcome for name, outcome in tried.items() if outcome != "OK" and int(outcome) not in REFUSALS}
        assert not odd
        await works(box)

    perform(act)


@pytest.mark.parametrize("root", [False, True])
def test_files_of_the_kernel_and_of_the_first_process_are_closed(perform, root):
    tried = (
        "import os\n"
        "def attempt(what, path, flags):\n"
        "    try: fd = os.open(path, flags)\n"
        "    except OSError: return\n"
        "    try:\n"
        "        if what == 'write': os.write(fd, b'1')\n"
        "        elif what == 'read' and not os.read(fd, 1): return\n"
        "        print(what, path)\n"
        "    except OSError: pass\n"
        f"for path in {WRITES!r}: attempt('write', path, os.O_WRONLY)\n"
        f"for path in {READS!r}: attempt('read', path, os.O_RDONLY)\n"
        f"for path in {FOLLOWS!r}: attempt('follow', path, os.O_RDONLY)\n"
        "print(os.path.exists('/sys/kernel'), os.listdir('/proc/self/ns') != [])"
    )

    async def act(stage):
        box = await stage.box(root=root)
        result = await box.exec(["python3", "-c", tried], timeout_s=60)
        assert (result.exit_code, result.stdout) == (0, b"False True\n"), result.stdout.decode()
        await works(box)

    perform(act)


GIVE_RIGHTS = """
import os, shutil
shutil.copy("/usr/bin/id", "/tmp/id")
os.chown("/tmp/id", 0, 0)
os.chmod("/tmp/id", 0o6755)
os.setxattr("/tmp/id", "security.capability", bytes.fromhex("0100000200002000" + 24 * "0"))
os.setresgid(1000, 1000, 1000)
os.setresuid(1000, 1000, 1000)
os.execv("/tmp/id", ["id", "-u"])
"""
ROOT_CAPABILITIES = (0, 1, 2, 3, 4, 5, 6, 7, 31)
"""chown, dac_override, dac_read_search, fowner, fsetid, kill, setgid, setuid, setfcap."""


def test_set_user_id_bits_and_file_capabilities_give_nothing(perform):
    async def act(stage):
        box = await stage.box(root=True)
        assert (await box.exec(["python3", "-c", GIVE_RIGHTS], timeout_s=60)).stdout == b"1000\n"
        result = await box.exec(["grep", "-E", "^Cap(Eff|Bnd)", "/proc/self/status"], timeout_s=60)
        held, bound = (int(word, 16) for word in result.stdout.split()[1::2])
        assert held | bound == sum(1 << bit for bit in ROOT_CAPABILITIES)
        plain = await stage.box()
        result = await plain.exec("su -c id; passwd -l dev; grep -E '^Cap|NoNewPrivs' /proc/self/status", timeout_s=60)
        lines = result.stdout.decode().splitlines()
        assert not [line for line in lines if "uid=0" in line]
        assert {line.split()[1] for line in lines if line.startswith("Cap")} == {"0" * 16}
        assert "NoNewPrivs:\t1" in lines

    perform(act)


def test_listeners_of_the_host_cannot_be_reached(perform, tmp_path):
    async def act(stage):
        with socket.socket(socket.AF_UNIX) as abstract, socket.socket(socket.AF_UNIX) as named, socket.create_server(("", 0)) as tcp:
            abstract.bind("\0rollmill-canary")
            abstract.listen()
            named.bind(str(tmp_path / "s"))
            named.listen()
            os.chmod(tmp_path / "s", 0o777)
            box = await stage.box(root=True)
            dial = (
                "import socket\n"
                "def dial(family, where):\n"
                "    try: socket.socket(family).connect(where); print('REACHED', where)\n"
                "    except OSError: pass\n"
                "dial(1, '\\0rollmill-canary')\n"
                f"dial(1, {str(tmp_path / 's')!r})\n"
                f"dial(2, ('127.0.0.1', {tcp.getsockname()[1]}))\n"
                f"dial(2, ({_own_address()!r}, {tcp.getsockname()[1]}))\n"
                "for cid in (1, 2):\n"
                "    try: socket.socket(40, 1).connect((cid, 22)); print('REACHED', cid)\n"
                "    except OSError: pass\n"
            )
            result = await box.exec(["python3", "-c", dial], timeout_s=60)
            assert (result.exit_code, result.stdout) == (0, b"")
            for listener in (abstract, named, tcp):
                listener.setblocking(False)
                with pytest.raises(BlockingIOError):
                    listener.accept()
        (tmp_path / "s").unlink()

    perform(act)


def _own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


MEET = """
import socket
named, port = socket.socket(socket.AF_UNIX), socket.create_server(("127.0.0.1", 7000))
named.bind("\\0meet")
named.listen()
print("up", flush=True)
named.accept()
"""
DIAL = """
import socket
for family, where in ((socket.AF_UNIX, "\\0meet"), (socket.AF_INET, ("127.0.0.1", 7000))):
    try:
        socket.socket(family).connect(where)
        print(where)
    except ConnectionRefusedError:
        pass
"""


def test_two_boxes_share_no_listener(perform):
    async def act(stage):
        one, two = await stage.box(root=True), await stage.box(root=True)
        server = await one.start(["python3", "-c", MEET])
        async for chunk in server:
            assert chunk.data == b"up\n"
            break
        result = await two.exec(["python3", "-c", DIAL], timeout_s=60)
        assert (result.exit_code, result.stdout) == (0, b"")
        await server.kill()

    perform(act)


def test_root_of_a_box_owns_nothing_outside_of_it(perform):
    async def act(stage):
        box = await stage.box(root=True)
        lines = {
            "id -u": b"0\n",
            "cat /etc/shadow /proc/1/environ 2>/dev/null": b"",
            "touch /usr/x /usr/bin/x 2>/dev/null; ls /usr/x 2>/dev/null": b"",
            "chmod 777 /usr/bin/env 2>/dev/null; echo $?": b"1\n",
            "(echo 1 > /proc/sys/kernel/panic) 2>/dev/null; echo $?": b"1\n",
            "kill -9 1; kill -TERM 1; echo $?": b"0\n",
            "ip link set lo down 2>/dev/null; ls /sys/class/net 2>/dev/null": b"",
            "ls /proc | grep -c '^[0-9]*$' | awk '{print ($1 < 12)}'": b"1\n",
        }
        for line, expected in lines.items():
            assert (await box.exec(line, timeout_s=60)).stdout == expected, line
        await works(box)

    perform(act)


SPREAD = """
import os, time
try:
    for user in range(2000, 2008):
        if os.fork() == 0:
            os.setresuid(user, user, user)
            for _ in range(8):
                if os.fork() == 0: time.sleep(1000)
            time.sleep(1000)
except OSError:
    if os.getuid(): time.sleep(1000)
time.sleep(0.5)
print(sum(name.isdigit() for name in os.listdir("/proc")), flush=True)
os.killpg(0, 9)
"""


def test_root_of_a_box_cannot_leave_the_bound_on_processes_by_other_users(perform):
    async def act(stage):
        box = await stage.box(root=True, num_processes=16)
        result = await box.exec(["python3", "-c", SPREAD], timeout_s=60)
        assert int(result.stdout) <= 16 + 5

    perform(act)
