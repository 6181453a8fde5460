"""Models without tools and thinking: the text is the content."""

from __future__ import annotations

from turnfold.gateway.parsing.replies import (
    ContentText,
    ReplyFormat,
    ReplyParser,
    ReplyPart,
    Situation,
)


def begin(situation: Situation) -> ReplyParser:
    """A parser of one reply."""
    return _Parser()


class _Parser:
    def feed(self, text: str) -> list[ReplyPart]:
        return [ContentText(text=text)] if text else []

    def end(self) -> list[ReplyPart]:
        return []


FORMAT = ReplyFormat(name="plain", begin=begin, has_tools=False, opens_reasoning="")
