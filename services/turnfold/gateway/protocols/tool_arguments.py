"""Tool arguments on the wire: in the model's order, with its types."""

from __future__ import annotations

from typing import Any

import msgspec

from turnfold.schemas.messages import ToolCall


def arguments_text(call: ToolCall) -> str:
    """Arguments as the model meant them: its order and its types, without spacing.

    >>> arguments_text(ToolCall(name="write", arguments={"text": "a", "path": "b"}))
    '{"text":"a","path":"b"}'
    """
    if isinstance(call.arguments, str):
        return call.arguments
    return msgspec.json.encode(call.arguments).decode()


def arguments_object(call: ToolCall) -> dict[str, Any]:
    """Arguments for a protocol that knows only objects; text that is none goes under `_raw`."""
    if isinstance(call.arguments, str):
        return {"_raw": call.arguments}
    return call.arguments
