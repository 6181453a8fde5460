"""A sampled reply as its parts, and the seam that a family of models implements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from turnfold.schemas.messages import ToolCall
from turnfold.schemas.wire import Wire

MalformedReason = Literal["bad_json", "not_an_object", "no_name", "bad_arguments", "too_many"]


class MalformedCall(Wire, frozen=True, kw_only=True):
    """A call that could not be read; its text stays in the content."""

    reason: MalformedReason
    start: int
    """First character in the sampled text."""
    end: int


class ParsedReply(Wire, frozen=True, kw_only=True):
    """What the client sees of a sampled text."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[MalformedCall, ...] = ()


ParseReply = Callable[[str, bool, bool], ParsedReply]
"""(text, is_calling_allowed, is_reasoning_open) -> parts; in time linear in the text.

`text` has no stop token; `is_reasoning_open` says that the prompt ended inside a thinking block.
Never fails: what cannot be read stays in the content.
"""


class ReplyFormat(Wire, frozen=True, kw_only=True):
    """How a family of models writes its replies."""

    name: str
    parse: ParseReply
    has_tools: bool
    """Whether calls can be read at all."""
