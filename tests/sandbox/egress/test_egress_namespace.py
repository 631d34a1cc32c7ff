"""Unmodified programs in a real network namespace: allowed hosts work under their own names, all else is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from egress_fakes import Outside, in_time

from rollmill.sandbox.egress import Authority, EgressGuard, Kind, Policy, Verdict
from rollmill.sandbox.egress.route import local_route
from rollmill.sandbox.records import Allow, Egress

ROOT = Path(__file__).resolve().parents[3]
CURL = ["curl", "-q", "-sS", "-m", "20"]
EGRESS = Egress(allow=(Allow(host="allowed.example", port=80), Allow(host="*.wild.example", port=8080, methods=("GET",))))


class Inside:
    """Commands inside the namespace, and the guard outside it."""

    def __init__(self, guard: EgressGuard, end: socket.socket) -> None:
        self.guard, self.end = guard, end

    async def run(self, *argv: str) -> tuple[int, str]:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self.end, json.dumps(argv).encode())
        code, output = json.loads(await loop.sock_recv(self.end, 1 << 20))
        return code, output


@contextlib.asynccontextmanager
async def namespace(folder: Path, egress: Egress, outside_port: int, authority: Authority | None = None) -> AsyncIterator[Inside]:
    async def resolve(host: str, port: int) -> list[tuple[str, int]]:
        return [("127.0.0.1", outside_port)]

    (folder / "resolv.conf").write_text("nameserver 9.9.9.9\noptions timeout:5 attempts:1\n")
    end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    argv = [sys.executable, str(Path(__file__).with_name("egress_inside.py")), str(theirs.fileno()), str(folder / "resolv.conf")]
    clean = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()} | {"PYTHONPATH": str(ROOT)}
    ports = map(str, Policy(egress).ports)
    process = await asyncio.create_subprocess_exec(*argv, *ports, pass_fds=[theirs.fileno()], env=clean)
    theirs.close()
    try:
        end.settimeout(30)
        said, fds, _, _ = await asyncio.to_thread(socket.recv_fds, end, 1000, 16)
        if said.startswith(b"no"):
            pytest.skip(f"no network namespaces here: {said.decode()}")
        assert said == b"ready", "the program inside died"
        guard = await EgressGuard.start("box", egress, fds, resolve=resolve, authority=authority)
        end.setblocking(False)
        yield Inside(guard, end)
        assert guard.num_faults == 0
        await guard.close()
    finally:
        end.close()
        process.kill()
        await process.wait()


def test_curl_inside_reaches_what_is_allowed_and_nothing_else(tmp_path: Path) -> None:
    async def scene() -> None:
        outside = Outside()
        async with outside.serve() as port, namespace(tmp_path, EGRESS, port) as inside:
            assert await inside.run(*CURL, "http://allowed.example/a?b") == (0, "hello from /a")
            assert await inside.run(*CURL, "http://x.y.wild.example:8080/w") == (0, "hello from /w")
            assert await inside.run(*CURL, "-d", "secret", "http://x.y.wild.example:8080/w") == (0, "Forbidden\n")
            assert (await inside.run(*CURL, "http://evil.example/"))[0] == 6, "no such name"
            assert (await inside.run(*CURL, "http://allowed.example.evil.com/"))[0] == 6
            assert await inside.run(*CURL, "http://93.184.216.34/") == (0, "Forbidden\n")
            assert await inside.run(*CURL, "http://169.254.169.254/latest/meta-data/") == (0, "Forbidden\n")
            assert await inside.run(*CURL, "-H", "Host: allowed.example", "http://93.184.216.34/") == (0, "Forbidden\n")
            assert (await inside.run(*CURL, "https://allowed.example/"))[0] == 35, "its rule is for port 80"
            assert (await inside.run(*CURL, "http://allowed.example:81/"))[0] == 7, "nobody listens there"
            assert (await inside.run(*CURL, "-g", "http://[2606:4700::1111]/"))[0] == 7, "no route"
            code, own = await inside.run(*CURL, "-o", "/dev/null", "-w", "%{local_ip} %{remote_ip}", "http://allowed.example/")
            assert code == 0 and own.startswith("10.0.2.15 198.1")
            records = inside.guard.records
        assert [(method, path) for method, path, *_ in outside.requests] == [("GET", "/a?b"), ("GET", "/w"), ("GET", "/")]
        denied = {(r.kind, r.host or r.dialled) for r in records if r.verdict is Verdict.DENIED}
        assert {(Kind.NAME, "evil.example"), (Kind.NAME, "allowed.example.evil.com"), (Kind.HTTP, "93.184.216.34:80"),
                (Kind.HTTP, "169.254.169.254:80"), (Kind.HTTP, "x.y.wild.example"), (Kind.TLS, "allowed.example")} <= denied  # fmt: skip

    in_time(scene())


def test_python_inside_needs_no_proxy_settings(tmp_path: Path) -> None:
    code = """
import os, socket, urllib.request
print(sorted(k for k in os.environ if "proxy" in k.lower()))
print(urllib.request.urlopen("http://allowed.example/py", timeout=20).read().decode())
print(socket.getaddrinfo("allowed.example", 80, type=socket.SOCK_STREAM)[0][4] == socket.getaddrinfo("ALLOWED.example.", 80)[0][4])
for target in (("203.0.113.9", 22), ("8.8.8.8", 853)):
    try: socket.create_connection(target, timeout=20)
    except OSError as e: print(type(e).__name__)
"""

    async def scene() -> None:
        async with Outside().serve() as port, namespace(tmp_path, EGRESS, port) as inside:
            found = await inside.run(sys.executable, "-I", "-c", code)
            assert found == (0, "[]\nhello from /py\nTrue\nConnectionRefusedError\nConnectionRefusedError\n")

    in_time(scene())


def test_intercepted_tls_works_inside_with_the_authority_in_the_trust_store(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="intercept needs the cryptography package")
    authority, trust = Authority(), tmp_path / "ca.pem"
    trust.write_bytes(authority.pem)

    async def scene() -> None:
        egress = Egress(allow=(Allow(host="allowed.example", methods=("GET",)),), intercept=True)
        async with Outside().serve() as port, namespace(tmp_path, egress, port, authority) as inside:
            assert (await inside.run(*CURL, "https://allowed.example/"))[0] == 60, "not in the trust store"
            refused = await inside.run(*CURL, "--cacert", str(trust), "-X", "PUT", "https://allowed.example/")
            assert refused == (0, "Forbidden\n")
            assert [r.method for r in inside.guard.records if r.kind is Kind.HTTP] == ["PUT"]

    in_time(scene())


def test_the_route_message_has_these_bytes() -> None:
    assert local_route().hex(" ", 4) == "24000000 18000505 01000000 00000000 02000000 ff04fe02 00000000 08000400 01000000"
    assert local_route("10.0.2.15/32")[0] == 44 and local_route(source="10.0.2.15")[-8:] == b"\x08\x00\x07\x00\x0a\x00\x02\x0f"
