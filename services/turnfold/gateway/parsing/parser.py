"""A reader of replies over text that comes in pieces."""

from __future__ import annotations

from collections.abc import Callable

from turnfold.gateway.parsing.calls import Grammar
from turnfold.gateway.parsing.replies import ReplyPart, Situation
from turnfold.gateway.parsing.source import Reading, Source
from turnfold.gateway.parsing.writer import ReplyWriter

ReadReply = Callable[[Grammar, Situation, Source, ReplyWriter], Reading[None]]


class Parser:
    """See ReplyParser."""

    def __init__(self, read: ReadReply, grammar: Grammar, situation: Situation) -> None:
        self.source = Source()
        self._writer = ReplyWriter(
            newlines_before_call=grammar.newlines_before_call,
            is_content_flush=grammar.is_content_flush,
        )
        self._reading = read(grammar, situation, self.source, self._writer)

    def feed(self, text: str) -> list[ReplyPart]:
        """The parts that the text adds for certain."""
        if self.source.feed(text):
            next(self._reading)
        return self._writer.take()

    def end(self) -> list[ReplyPart]:
        """The rest."""
        self.source.end()
        for _ in self._reading:
            raise AssertionError("a reader waits for text after the end")
        self._writer.end()
        return self._writer.take()
