"""The end of a box's lifetime, kept by a timer of its first process: it says why, then ends and takes the box with it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import time
from types import FrameType

from .. import wire
from .serve import Agent

_LATE_S = 0.01
_AGAIN_S = 0.05
_GRACE_S = 5.0
"""How long an answer that is being sent may hold up the end."""
_WORDS = wire.frame(0, wire.Say.LAST_WORDS, struct.pack("<i", 0) + wire.text(b"its lifetime ended"))


def end_after(lifetime_s: float, fd: int) -> None:
    end = time.monotonic() + lifetime_s

    def ring(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now < end:
            return  # a program of the box may send this signal, too
        is_sending = _is_sending(frame)
        if is_sending and now < end + _GRACE_S:
            # Words in the middle of an answer would become a part of it.
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
            return
        if not is_sending:
            with contextlib.suppress(OSError):  # an owner that does not listen hears of the end from the zygote
                socket.socket(fileno=fd).send(_WORDS, socket.MSG_DONTWAIT)
        os._exit(1)

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, lifetime_s + _LATE_S)


def _is_sending(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is Agent._send.__code__:
            return True
        frame = frame.f_back
    return False
