"""Chat messages in the one canonical form that all protocols are translated to."""

from __future__ import annotations

from typing import Any

from turnfold.schemas.wire import Wire


class ToolCall(Wire, frozen=True, kw_only=True):
    """One call that an assistant message makes."""

    name: str
    arguments: dict[str, Any] | str
    """Parsed arguments in the order the model wrote them; the raw text when it was not an object."""
    id: str = ""
    """The id the client saw; not part of what makes two messages equal."""


class ChatMessage(Wire, frozen=True, kw_only=True, weakref=True):
    """One message of a conversation."""

    role: str
    """system, user, assistant or tool."""
    content: str = ""
    """Text; null and absent content are the empty string."""
    reasoning: str = ""
    """Text of the thinking block, without its markers."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """On a tool message: the call that it answers."""
    name: str = ""


Tool = dict[str, Any]
"""One tool as OpenAI writes it: `{"type": "function", "function": {"name", "description", …}}`."""
