"""How request records tell the OpenAPI description what their decoder does not check."""

from __future__ import annotations

from msgspec import Meta


def one_of(*values: str) -> Meta:
    """The strings that are understood. Others decode as well, so that their refusal can say where they stand and what to send."""
    return Meta(extra_json_schema={"enum": list(values)})
