"""Server-sent events that carry JSON and a name."""

from __future__ import annotations

from typing import Any

import msgspec


def named_event(data: dict[str, Any]) -> bytes:
    r"""The event whose name is its data's `type`.

    >>> named_event({"type": "ping"})
    b'event: ping\ndata: {"type":"ping"}\n\n'
    """
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), msgspec.json.encode(data))
