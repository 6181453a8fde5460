"""Models without tools: the text is the content."""

from __future__ import annotations

from turnfold.gateway.parsing.replies import ParsedReply


def parse(text: str, is_calling_allowed: bool, is_reasoning_open: bool) -> ParsedReply:
    """The whole text as content."""
    return ParsedReply(content=text)
