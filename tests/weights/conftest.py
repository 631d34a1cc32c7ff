"""Places to keep objects in: every test that takes `where` runs on a directory and on a real S3 server."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from s3_server import S3Server, serve_s3


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """Its credentials are in the environment while it runs."""
    with serve_s3() as server, pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_SESSION_TOKEN", "AWS_TOKEN", "AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
            patch.delenv(name, raising=False)
        for name, value in server.credentials().items():
            patch.setenv(name, value)
        yield server


@pytest.fixture
def s3_url(s3_server: S3Server) -> str:
    """An empty prefix in a bucket, for `open_objects`."""
    return s3_server.url(f"t{secrets.token_hex(6)}")


@pytest.fixture(params=["directory", "s3"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place, for `open_objects`."""
    return str(tmp_path / "store") if request.param == "directory" else request.getfixturevalue("s3_url")
