"""What most families share: thinking between two tags, then content, with calls behind markers.

    <think>where is it?</think>Looking.<tool_call>…</tool_call>
           reasoning           content  read by the family

A call inside the thinking is not lost: it is made when nothing else comes of the reply, and
reported when the model went on without it.
"""

from __future__ import annotations

from turnfold.gateway.parsing.calls import Calls, Grammar
from turnfold.gateway.parsing.parser import Parser
from turnfold.gateway.parsing.replies import ReplyParser, Situation
from turnfold.gateway.parsing.source import Reading, Source
from turnfold.gateway.parsing.writer import ReplyWriter


def begin(grammar: Grammar, situation: Situation) -> ReplyParser:
    """A parser of one reply."""
    return Parser(read_reply, grammar, situation)


def read_reply(
    grammar: Grammar, situation: Situation, source: Source, writer: ReplyWriter
) -> Reading[None]:
    """Thinking, then content."""
    calls = Calls(grammar, situation, writer)
    if grammar.thinking:
        opening, closing = grammar.thinking
        here = yield from source.skip_space(0)
        is_opened = yield from source.next_of((opening,), here)
        if is_opened:
            source.at = here + len(opening)
        if is_opened or situation.is_reasoning_open:
            calls.place = "reasoning"
            start = source.at
            end = yield from read_text(grammar, source, calls, until=closing)
            writer.reasoned(start, end)
            writer.end_reasoning()
            calls.place = "content"
    yield from read_text(grammar, source, calls)
    calls.end(source)


def read_text(
    grammar: Grammar, source: Source, calls: Calls, *, until: str | None = None
) -> Reading[int]:
    """Text and calls, to the end of the reply or behind the mark `until`; where they end."""
    ends = (until,) if until else ()
    marks = calls.marks(*ends)
    while True:
        mark = yield from source.text_until(marks, calls.write)
        end = source.at
        if mark is None:
            return end
        if mark == until:
            source.at += len(mark)
            return end
        if mark in grammar.openers and calls.is_read(source):
            yield from grammar.read_calls(source, calls)
        else:
            calls.pass_over(source, mark)
