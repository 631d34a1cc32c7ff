"""Places to keep blobs in: every test that takes `where` runs on a folder, in memory and on a real S3 server."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "weights"))
from s3_server import S3Server, serve_s3


@pytest.fixture(scope="session")
def snapshot_s3() -> Iterator[S3Server]:
    """Its credentials are in the environment while it runs."""
    with serve_s3() as server, pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_SESSION_TOKEN", "AWS_TOKEN", "AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
            patch.delenv(name, raising=False)
        for name, value in server.credentials().items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(params=["folder", "memory", "s3"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place, for `open_store`."""
    if request.param == "folder":
        return str(tmp_path / "store")
    if request.param == "memory":
        return f"memory://{secrets.token_hex(6)}"
    return request.getfixturevalue("snapshot_s3").url(f"t{secrets.token_hex(6)}")
