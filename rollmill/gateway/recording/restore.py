"""A gateway that starts again goes on where its record ends: open episodes as they stood, and the keys they were given still open them."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec

from rollmill.gateway.gateway import Gateway
from rollmill.gateway.recording.record import CALLS_NAME
from rollmill.gateway.recording.recorded import open_episodes, read_calls, rebuild
from rollmill.gateway.sessions.placement import Sampling

SECRET_NAME = "episode_secret"
SECRET_BYTES = 32


def kept_secret(folder: Path) -> bytes:
    """The secret that episode keys are made with, kept beside the record and readable by its owner alone."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SECRET_NAME
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
    except FileExistsError:
        pass
    secret = path.read_bytes()
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"{path} has {len(secret)} bytes, {SECRET_BYTES} are expected; delete it, and open episodes get new keys")
    return secret


def restore(gateway: Gateway, folder: Path) -> int:
    """Bring back the episodes that were open when the record ends; how many there were. Called before the first request."""
    path = folder / CALLS_NAME
    if not path.is_file():
        return 0
    found = open_episodes(path)
    for record in found:
        options = dict(record.options)
        if options.get("sampling") is not None:
            options["sampling"] = msgspec.convert(options["sampling"], Sampling)
        episode = gateway.episodes.open(record.key, **options)
        rebuild(episode, read_calls(path, record.key))
    return len(found)
