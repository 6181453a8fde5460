"""Calls that are one JSON object: `{"name": …, "arguments": {…}}`."""

from __future__ import annotations

import json
from typing import Any

from turnfold.gateway.parsing.arguments import parse_arguments
from turnfold.gateway.parsing.broken import BrokenCall
from turnfold.gateway.parsing.json_text import read_json
from turnfold.gateway.parsing.source import Reading, Source
from turnfold.schemas.messages import ToolCall


def read_json_call(source: Source, start: int) -> Reading[tuple[ToolCall, int]]:
    """The call whose object begins at the position, white space apart. Raises BrokenCall."""
    value, end = yield from read_json(source, start)
    return json_call(value, end), end


def read_json_arguments(source: Source, name: str, start: int) -> Reading[tuple[ToolCall, int]]:
    """The call of a name that was read already; its arguments begin at the position."""
    value, end = yield from read_json(source, start)
    return call_of(name, value, end), end


def json_call(value: Any, at: int) -> ToolCall:
    """The object as a call; `parameters` is Llama's word for arguments. Raises BrokenCall."""
    if not isinstance(value, dict):
        raise BrokenCall("not_an_object", at)
    if isinstance(value.get("function"), dict):
        value = value["function"]
    return call_of(value.get("name"), value.get("arguments", value.get("parameters")), at)


def call_of(name: Any, arguments: Any, at: int) -> ToolCall:
    """A call with arguments that the log can hold. Raises BrokenCall.

    Arguments in a string are looked into, as some models write them twice over.
    """
    if not isinstance(name, str) or not name.strip() or not is_text(name):
        raise BrokenCall("no_name", at)
    if arguments is None:
        return ToolCall(name=name, arguments={})
    if isinstance(arguments, str):
        return ToolCall(name=name, arguments=parse_arguments(arguments))
    if not isinstance(arguments, dict):
        raise BrokenCall("bad_arguments", at)
    # Written again and read strictly: what the log or JSON cannot hold (NaN, lone surrogates,
    # integers beyond 64 bits) comes back as text.
    parsed = parse_arguments(json.dumps(arguments, ensure_ascii=False))
    if isinstance(parsed, str):
        raise BrokenCall("bad_arguments", at)
    return ToolCall(name=name, arguments=parsed)


def is_text(text: str) -> bool:
    """Whether it can be written as UTF-8."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
