"""Arguments of a tool call, from JSON text to values."""

from __future__ import annotations

from typing import Any

import msgspec


def parse_arguments(text: str) -> dict[str, Any] | str:
    """The object that the text holds, in its order; else the text as it came.

    >>> parse_arguments('{"path": "b", "n": 1}')
    {'path': 'b', 'n': 1}
    >>> parse_arguments('[1, 2')
    '[1, 2'

    No text means no arguments. An object that the log cannot hold (an integer beyond 64 bits) stays
    text.
    """
    if not text.strip():
        return {}
    try:
        value = msgspec.json.decode(text)
        msgspec.msgpack.encode(value)
    except (msgspec.MsgspecError, UnicodeEncodeError, OverflowError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
