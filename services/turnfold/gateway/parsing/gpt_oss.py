"""gpt-oss: messages in channels, as the prompt's `<|start|>assistant` begins the first of them.

    <|channel|>analysis<|message|>where is it?<|end|>                    reasoning
    <|start|>assistant<|channel|>commentary<|message|>Looking.<|end|>    content
    <|start|>assistant to=functions.ls<|channel|>commentary json<|message|>{}<|call|>
                                                                         a call of ls
    <|start|>assistant<|channel|>final<|message|>Found it.<|return|>     content

The recipient makes a message a call, whatever its channel is; it may stand before or behind the
channel. A recipient outside `functions` is a built-in tool, called by its whole name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

from turnfold.gateway.parsing.broken import BrokenCall
from turnfold.gateway.parsing.calls import Calls, Grammar
from turnfold.gateway.parsing.json_calls import read_json_arguments
from turnfold.gateway.parsing.parser import Parser
from turnfold.gateway.parsing.replies import ReplyFormat, ReplyParser, Situation
from turnfold.gateway.parsing.source import Marks, Reading, Source
from turnfold.gateway.parsing.writer import ReplyWriter
from turnfold.schemas.messages import Tool, ToolCall

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_CONSTRAIN = "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_CONTROLS = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS, "<|startoftext|>", "<|endoftext|>")

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")

_BEGINNINGS = (_START, _CHANNEL, _MESSAGE, "to=")
_END_OF_HEADER = Marks((_MESSAGE, *_ENDS))
_END_OF_HEADER_OR_LINE = Marks((*_END_OF_HEADER.marks, "\n"))
_LONGEST_HEADER = 200
"""Characters that a header may have; what goes on without its end is text."""
_END_OF_BODY = (_START, _CHANNEL, *_ENDS)
"""A message that forgets its end is ended by the header of the next."""
_CONTROL_MARKS = Marks(_CONTROLS)

_THINKING = "analysis"
_PEOPLE = ("assistant", "user", "all")
"""Recipients that are no tools."""


def begin(situation: Situation) -> ReplyParser:
    """A parser of one reply."""
    return Parser(_read_reply, GRAMMAR, situation)


@dataclass(frozen=True)
class _Header:
    channel: str
    recipient: str


_ANSWER = _Header(channel="final", recipient="")


def _read_reply(
    grammar: Grammar, situation: Situation, source: Source, writer: ReplyWriter
) -> Reading[None]:
    calls = Calls(grammar, situation, writer)
    while source.at < source.length or not source.is_ended:
        writer.new_message()
        here = yield from source.skip_space(source.at)
        beginning = yield from source.next_of(_BEGINNINGS, here)
        if beginning and (yield from _is_header(source, here)):
            yield from _read_message(source, calls, writer)
        else:
            if beginning in (_START, _CHANNEL):
                source.at = here + len(beginning)
            yield from _read_body(source, calls, _ANSWER)
    calls.end(source)


def _is_header(source: Source, here: int) -> Reading[bool]:
    """Whether a header begins here, and not text after a marker that stands for itself."""
    found = yield from source.find(_END_OF_HEADER_OR_LINE, here, _LONGEST_HEADER)
    if found is None:
        return source.length - here < _LONGEST_HEADER
    return found.mark != "\n"


def _read_message(source: Source, calls: Calls, writer: ReplyWriter) -> Reading[None]:
    found = yield from source.find(_END_OF_HEADER, source.at)
    end = source.length if found is None else found.start
    header = _read_header(source.slice(source.at, end))
    is_call = bool(header.recipient) and calls.is_read(source)
    if found is None or found.mark != _MESSAGE or (yield from _is_cut(source, found.end)):
        # A message that was cut off before its text; one that names a tool is worth a report.
        if is_call:
            writer.malformed("unclosed", source.at, end)
        source.at = source.length if found is None else found.end
        return
    source.at = found.end
    if is_call:
        calls.place = "content"
        read_call = partial(_read_call, header.recipient)
        yield from calls.read(source, read_call, followers=_END_OF_BODY)
    else:
        start = source.at
        end = yield from _read_body(source, calls, header)
        if header.channel == _THINKING:
            writer.reasoned(start, end)


def _is_cut(source: Source, here: int) -> Reading[bool]:
    return (yield from source.skip_space(here)) >= source.length


def _read_header(text: str) -> _Header:
    channel = _CHANNEL_NAME.search(text)
    recipient = _RECIPIENT.search(text)
    name = recipient.group(1) if recipient else ""
    name = "" if name in _PEOPLE else name.removeprefix("functions.")
    return _Header(channel.group(1) if channel else "final", name)


def _read_call(
    name: str, source: Source, start: int, tools: tuple[Tool, ...]
) -> Reading[tuple[ToolCall, int]]:
    here = yield from source.skip_space(start)
    if (yield from source.next_of(_ENDS, here)):
        return ToolCall(name=name, arguments={}), here
    call, end = yield from read_json_arguments(source, name, here)
    end = yield from source.skip_space(end)
    is_whole = end >= source.length or (yield from source.next_of(_END_OF_BODY, end))
    if not is_whole:
        raise BrokenCall("bad_json", end)
    return call, end


def _read_body(source: Source, calls: Calls, header: _Header) -> Reading[int]:
    """Text up to the end of the message, to where its channel says; the position where it ends."""
    calls.place = "reasoning" if header.channel == _THINKING else "content"
    while True:
        mark = yield from source.text_until(_CONTROL_MARKS, calls.write)
        end = source.at
        if mark is None or mark in (_START, _CHANNEL):
            return end
        source.at += len(mark)
        if mark in _ENDS:
            return end


GRAMMAR = Grammar(thinking=None, controls=_CONTROLS, newlines_before_call=0)

FORMAT = ReplyFormat(name="gpt_oss", begin=begin, has_tools=True, opens_reasoning="")
