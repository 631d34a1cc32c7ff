"""Where a JSON object or list ends in a text that still grows; every character is looked at once, and nothing is validated."""

from __future__ import annotations

import re

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')


class JsonExtent:
    """
    >>> extent = JsonExtent(1)
    >>> extent.end('x{"a": "}'), extent.end('x{"a": "}"} y')
    (None, 11)
    """

    def __init__(self, start: int) -> None:
        self._at = start
        self._depth = 0
        self._in_string = False

    def end(self, text: str) -> int | None:
        """One past the closing bracket; None while it is not there. `text` begins with what the call before was given."""
        while (found := (_INSIDE if self._in_string else _OUTSIDE).search(text, self._at)) is not None:
            sign, self._at = found[0], found.end()
            if sign == "\\":
                if self._at == len(text):
                    self._at -= 1
                    return None
                self._at += 1
            elif sign == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if sign in "{[" else -1
                if self._depth <= 0:
                    return self._at
        self._at = len(text)
        return None
