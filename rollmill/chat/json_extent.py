"""Where a JSON object or list ends in a text that arrives in pieces; every character is looked at once, and nothing is validated."""

from __future__ import annotations

import re

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')


class JsonExtent:
    """
    >>> extent = JsonExtent()
    >>> extent.feed('{"a": "}'), extent.feed('"} y')
    (None, 2)
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def feed(self, piece: str) -> int | None:
        """One past the closing bracket in this piece; None while it is not there. The first piece begins with the opening one."""
        at = int(self._is_escaped and bool(piece))
        self._is_escaped = self._is_escaped and not piece
        while (found := (_INSIDE if self._in_string else _OUTSIDE).search(piece, at)) is not None:
            sign, at = found[0], found.end()
            if sign == "\\":
                self._is_escaped = at == len(piece)
                at += 1
            elif sign == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if sign in "{[" else -1
                if self._depth <= 0:
                    return at
        return None
