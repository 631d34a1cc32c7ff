"""TLS through the guard: tunnelled by its server name, or opened by the run's own authority where methods matter."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from egress_fakes import Outside, in_time, pass_time, raw_outside, stage

from rollmill.sandbox.egress import Authority, EgressGuard, Kind, Limits, Verdict
from rollmill.sandbox.records import Allow, Egress

OK, TWO = "ok.example", "two.example"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Key and certificate of the outside in one file, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make the outside's certificate")
    folder = tmp_path_factory.mktemp("outside")
    ask = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=outside -keyout key -out crt"
    subprocess.run([*ask.split(), "-addext", f"subjectAltName=DNS:{OK},DNS:{TWO}"], cwd=folder, check=True, capture_output=True, timeout=30)
    (folder / "pem").write_bytes((folder / "key").read_bytes() + (folder / "crt").read_bytes())
    return folder / "pem"


def serving(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def trusting(path: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(path))


@pytest.fixture(scope="module")
def authority() -> Authority:
    pytest.importorskip("cryptography", reason="intercept needs the cryptography package")
    return Authority()


@pytest.fixture(scope="module")
def authority_file(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("box") / "ca.pem"
    path.write_bytes(authority.pem)
    return path


def test_a_tunnel_shows_the_box_the_certificate_of_the_outside(certificate: Path) -> None:
    async def scene() -> None:
        outside = Outside()
        async with outside.serve(serving(certificate)) as port, stage(port, OK) as s:
            assert await s.curl(OK, "/t", "--cacert", str(certificate), scheme="https") == (0, b"hello from /t")
            assert await s.curl(OK, "/big", "--cacert", str(certificate), scheme="https") == (0, bytes(range(256)) * 8192)
            first, second = sorted(await s.recorded(2), key=lambda record: record.num_received_bytes)
            assert (first.kind, first.host, first.verdict, first.reason) == (Kind.TLS, OK, Verdict.ALLOWED, "")
            assert second.num_received_bytes > 256 * 8192 > second.num_sent_bytes > 0
        assert len(outside.requests) == 2

    in_time(scene())


@pytest.mark.parametrize(("dialled", "name", "reason"), [
    (OK, "evil.example", "host is not allowed"),
    (OK, TWO, "host is not the one that was dialled"),
    ("evil.example", OK, "host is not the one that was dialled"),
    (OK, None, "hello has no server name"),
])  # fmt: skip
def test_a_tunnel_to_another_name_is_refused(certificate: Path, dialled: str, name: str | None, reason: str) -> None:
    async def scene() -> None:
        outside = Outside()
        async with outside.serve(serving(certificate)) as port, stage(port, OK, TWO) as s:
            context = trusting(certificate)
            context.check_hostname = False
            with pytest.raises(ssl.SSLError, match=r"(?i)access.denied"):
                await asyncio.open_connection(s.book.address_of(dialled), s.port, ssl=context, server_hostname=name or "127.0.0.1")
            (record,) = s.records
            assert (record.kind, record.verdict, record.reason) == (Kind.TLS, Verdict.DENIED, reason)
        assert not outside.peers

    in_time(scene())


def test_a_rule_with_methods_refuses_tls_that_it_cannot_see_into(certificate: Path) -> None:
    async def scene() -> None:
        async with Outside().serve(serving(certificate)) as port, stage(port, OK, methods=("GET",)) as s:
            assert (await s.curl(OK, "/", "--cacert", str(certificate), scheme="https"))[0] != 0
            assert (await s.recorded(1))[0].reason == "rule has methods, which TLS hides without intercept"

    in_time(scene())


def test_bytes_that_only_begin_like_tls_are_refused() -> None:
    async def scene() -> None:
        async with Outside().serve() as port, stage(port, OK, limits=Limits(head_s=1)) as s:
            assert (await s.say(OK, b"\x16GET / HTTP/1.1\r\n\r\n"))[:1] == b"\x15"
            assert (await s.say(OK, b"\x16\x03\x01\x00\xff\x01\x00\x40\x00")) == b""
            assert [r.reason for r in await s.recorded(2)] == ["not a TLS record", "nothing was said for too long"]

    in_time(scene())


def test_a_silent_tunnel_is_ended_and_a_busy_one_is_not(certificate: Path) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(data)
            await writer.drain()

    async def scene() -> None:
        server = await asyncio.start_server(echo, "127.0.0.1", 0, ssl=serving(certificate))
        async with server, stage(server.sockets[0].getsockname()[1], OK, limits=Limits(idle_s=8)) as s:
            reader, writer = await asyncio.open_connection(s.book.address_of(OK), s.port, ssl=trusting(certificate), server_hostname=OK)
            for _ in range(3):
                pass_time(6)
                writer.write(b"x")
                assert await reader.readexactly(1) == b"x"
            assert s.records == []
            pass_time(9)
            assert await reader.read() == b""
            (record,) = await s.recorded(1)
            assert (record.verdict, record.reason) == (Verdict.ALLOWED, "nothing was said for too long")
            writer.close()

    in_time(scene())


def test_an_outside_that_cannot_be_reached_fails_the_tunnel() -> None:
    async def scene() -> None:
        async with raw_outside(lambda r, w: asyncio.sleep(0)) as port:
            pass
        async with stage(port, OK) as s:
            assert (await s.curl(OK, "/", scheme="https"))[0] == 35
            assert (await s.recorded(1))[0].verdict is Verdict.FAILED

    in_time(scene())


def test_intercept_sees_methods_and_paths_inside_tls(certificate: Path, authority: Authority, authority_file: Path) -> None:
    async def scene() -> None:
        outside = Outside()
        tls = trusting(certificate)
        async with (
            outside.serve(serving(certificate)) as port,
            stage(port, OK, methods=("GET",), intercept=True, authority=authority, upstream_tls=tls) as s,
        ):
            assert s.guard.authority_pem == authority.pem
            trust = ["--cacert", str(authority_file)]
            assert await s.curl(OK, "/i", *trust, scheme="https") == (0, b"hello from /i")
            assert await s.curl(OK, "/big", *trust, scheme="https") == (0, bytes(range(256)) * 8192)
            assert await s.curl(OK, "/i", *trust, "-d", "secret", scheme="https") == (0, b"Forbidden\n")
            assert [(r.kind, r.method, r.path, r.status, r.verdict) for r in await s.recorded(3)] == [
                (Kind.HTTP, "GET", "/i", 200, Verdict.ALLOWED),
                (Kind.HTTP, "GET", "/big", 200, Verdict.ALLOWED),
                (Kind.HTTP, "POST", "/i", 403, Verdict.DENIED),
            ]
        assert [m for m, *_ in outside.requests] == ["GET", "GET"]

    in_time(scene())


def test_python_accepts_the_authority_under_its_strictest_rules(certificate: Path, authority: Authority, authority_file: Path) -> None:
    async def scene() -> None:
        async with (
            Outside().serve(serving(certificate)) as port,
            stage(port, OK, intercept=True, authority=authority, upstream_tls=trusting(certificate)) as s,
        ):
            context = trusting(authority_file)
            context.verify_flags |= ssl.VERIFY_X509_STRICT
            reader, writer = await asyncio.open_connection(s.book.address_of(OK), s.port, ssl=context, server_hostname=OK)
            for i in range(3):
                writer.write(f"GET /{i} HTTP/1.1\r\nHost: {OK}\r\n\r\n".encode())
                await reader.readuntil(b"\r\n\r\n")
                assert await reader.readexactly(13) == f"hello from /{i}".encode()
            writer.close()

    in_time(scene())


def test_intercept_refuses_another_host_inside_and_an_outside_it_cannot_trust(
    certificate: Path, authority: Authority, authority_file: Path
) -> None:
    async def scene() -> None:
        outside = Outside()
        async with outside.serve(serving(certificate)) as port, stage(port, OK, TWO, intercept=True, authority=authority) as s:
            trust = ["--cacert", str(authority_file)]
            assert await s.curl(OK, "/", *trust, "-H", f"Host: {TWO}", scheme="https") == (0, b"Forbidden\n")
            assert await s.curl(OK, "/", *trust, scheme="https") == (0, b"Bad Gateway\n")  # signed by nobody that this machine knows
            assert (await s.curl(OK, "/", scheme="https"))[0] == 60  # nor does the box know us
            records = await s.recorded(3)
            assert [r.verdict for r in records] == [Verdict.DENIED, Verdict.FAILED, Verdict.DENIED]
            assert "certificate verify failed" in records[1].reason
        assert outside.requests == []

    in_time(scene())


def test_intercept_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.setitem(sys.modules, "cryptography.x509", None)

    async def scene() -> None:
        with pytest.raises(ValueError, match=r"pip install 'rollmill\[egress\]'"):
            await EgressGuard.start("box", Egress(allow=(Allow(host=OK),), intercept=True), [])

    in_time(scene())
