"""Llama 3: a reply that is a JSON object, or JSON or Python behind `<|python_tag|>`.

    {"name": "ls", "parameters": {"path": "."}}
    <|python_tag|>{"name": "ls", "parameters": {}}; {"name": "pwd", "parameters": {}}
    <|python_tag|>brave_search.call(query="weather")

JSON without the tag is a call when it stands at the beginning, has the keys of a call, and names a
tool that was offered: an answer may be JSON too.
"""

from __future__ import annotations

import re

from turnfold.gateway.parsing.broken import BrokenCall
from turnfold.gateway.parsing.calls import Calls, Grammar, ReadCall
from turnfold.gateway.parsing.json_calls import json_call, read_json_call
from turnfold.gateway.parsing.json_text import read_json
from turnfold.gateway.parsing.parser import Parser
from turnfold.gateway.parsing.replies import ReplyFormat, ReplyParser, Situation
from turnfold.gateway.parsing.source import Marks, Reading, Source
from turnfold.gateway.parsing.tagged import read_text
from turnfold.gateway.parsing.values import tool_names
from turnfold.gateway.parsing.writer import ReplyWriter
from turnfold.schemas.messages import Tool, ToolCall

_TAG = "<|python_tag|>"
_ENDS = ("<|eom_id|>", "<|eot_id|>", "<|end_of_text|>")

_FIRST_KEYS = ('"name"', '"type"', '"function"', '"parameters"', '"arguments"', '"id"')

_BUILTIN = re.compile(r"\s*([A-Za-z_]\w*)\.call\((.*)\)\s*", re.DOTALL)
_BUILTIN_ARGUMENT = re.compile(
    r'\s*([A-Za-z_]\w*)="(.*?)"(?:,(?=\s*[A-Za-z_]\w{0,99}=")|\s*$)', re.DOTALL
)


def begin(situation: Situation) -> ReplyParser:
    """A parser of one reply."""
    return Parser(_read_reply, GRAMMAR, situation)


def _read_reply(
    grammar: Grammar, situation: Situation, source: Source, writer: ReplyWriter
) -> Reading[None]:
    calls = Calls(grammar, situation, writer)
    here = yield from source.skip_space(0)
    if situation.is_calling_allowed and (yield from _begins_call(source, here)):
        source.at = here
        yield from _read_objects(source, calls, _read_bare_call)
    yield from read_text(grammar, source, calls)
    calls.end(source)


def _begins_call(source: Source, here: int) -> Reading[bool]:
    if not (yield from source.next_of(("{",), here)):
        return False
    key = yield from source.skip_space(here + 1)
    return bool((yield from source.next_of(_FIRST_KEYS, key)))


def _read_objects(source: Source, calls: Calls, read_call: ReadCall) -> Reading[None]:
    """Objects one after another, with or without semicolons between them."""
    while (yield from calls.read(source, read_call)):
        here = yield from source.skip_space(source.at)
        if (yield from source.next_of((";",), here)):
            here = yield from source.skip_space(here + 1)
        if not (yield from source.next_of(("{",), here)):
            return
        source.at = here


def _read_bare_call(
    source: Source, start: int, tools: tuple[Tool, ...]
) -> Reading[tuple[ToolCall, int]]:
    value, end = yield from read_json(source, start)
    if isinstance(value, dict) and not {"parameters", "arguments", "function"} & value.keys():
        raise BrokenCall(None, end)  # an answer in JSON
    call = json_call(value, end)
    names = tool_names(tools)
    if names and call.name not in names:
        raise BrokenCall("unknown_tool", end)
    return call, end


def _read_tagged(source: Source, calls: Calls) -> Reading[None]:
    """What stands behind the tag at `source.at`."""
    here = yield from source.skip_space(source.at + len(_TAG))
    if (yield from source.next_of(("{",), here)):
        source.at = here
        yield from _read_objects(source, calls, _read_object)
    else:
        yield from calls.read(source, _read_builtin, followers=(_TAG, *_ENDS))


def _read_object(
    source: Source, start: int, tools: tuple[Tool, ...]
) -> Reading[tuple[ToolCall, int]]:
    return (yield from read_json_call(source, start))


def _read_builtin(
    source: Source, start: int, tools: tuple[Tool, ...]
) -> Reading[tuple[ToolCall, int]]:
    """A built-in tool called in Python's form; other Python is malformed."""
    code = start + len(_TAG)
    found = yield from source.find(Marks((_TAG, *_ENDS)), code)
    end = source.length if found is None else found.start
    text = source.slice(code, end)
    source.work += len(text)
    call = _BUILTIN.fullmatch(text)
    arguments = _builtin_arguments(call.group(2)) if call else None
    if call is None or arguments is None:
        raise BrokenCall("bad_markup", end)
    return ToolCall(name=call.group(1), arguments=arguments), end


def _builtin_arguments(text: str) -> dict[str, str] | None:
    """`a="1", b="2"` as a mapping; quotes inside a value are written as they are."""
    arguments: dict[str, str] = {}
    here = 0
    while here < len(text):
        match = _BUILTIN_ARGUMENT.match(text, here)
        if match is None:
            return None
        arguments[match.group(1)] = match.group(2)
        here = match.end()
    return arguments


GRAMMAR = Grammar(
    openers=(_TAG,),
    read_calls=_read_tagged,
    thinking=None,
    controls=(_TAG, *_ENDS, "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>"),
    newlines_before_call=0,
)

FORMAT = ReplyFormat(name="llama", begin=begin, has_tools=True, opens_reasoning="")
