r"""Halves of surrogate pairs in JSON text (`\ud83d` alone): no text can hold one, and models and clients write them nevertheless; pure."""

from __future__ import annotations

import re

# Every escape is looked at, so that the second character of `\\` begins none.
_ESCAPE = re.compile(rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL)
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")


def without_halves(text: bytes) -> bytes:
    r"""The same JSON with U+FFFD in their place, as a decoder of UTF-16 would have it.

    >>> without_halves(rb'["\ud83d!", "\ud83d\ude42", "\\ud83d"]') == rb'["\ufffd!", "\ud83d\ude42", "\\ud83d"]'
    True
    """
    if _HALF.search(text) is None:
        return text
    return _ESCAPE.sub(lambda found: rb"\ufffd" if found[1] else found[0], text)
