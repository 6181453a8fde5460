"""Qwen and Hermes: `<think>…</think>`, content, `<tool_call>{"name": …, "arguments": …}</tool_call>`.

    <think>\\nwhere is it?\\n</think>\\n\\nLooking.\\n<tool_call>\\n{"name": "ls", "arguments": {}}\\n</tool_call>
     reasoning "where is it?"     content "Looking."        one call of ls

The newlines taken off are those that the template writes by itself when it renders the message
again, so that an unhealed history drifts as little as it can.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from turnfold.gateway.parsing.arguments import parse_arguments
from turnfold.gateway.parsing.replies import MalformedCall, MalformedReason, ParsedReply
from turnfold.schemas.messages import ToolCall

_THINK, _END_THINK = "<think>", "</think>"
_CALL, _END_CALL = "<tool_call>", "</tool_call>"

_MAX_MALFORMED = 32
"""A broken call may cost a scan to the end of the text; a bounded number keeps the whole linear."""

_json = json.JSONDecoder()


def parse(text: str, is_calling_allowed: bool, is_reasoning_open: bool) -> ParsedReply:
    """The parts of a sampled text; a call that cannot be read stays in the content."""
    reasoning, start = _reasoning(text, is_reasoning_open)
    if not is_calling_allowed:
        return ParsedReply(reasoning=reasoning, content=text[start:])
    return _with_calls(text, start, reasoning)


def _reasoning(text: str, is_open: bool) -> tuple[str, int]:
    """The thinking text, and where the rest begins."""
    start = 0
    opening = len(text) - len(text.lstrip())
    if text.startswith(_THINK, opening):
        start = opening + len(_THINK)
    elif not is_open:
        return "", 0
    end = text.find(_END_THINK, start)
    if end >= 0:
        rest = end + len(_END_THINK)
    else:
        # A model that forgets to close its thinking still means its call.
        end = rest = _first_call(text, start)
    while rest < len(text) and text[rest] == "\n":
        rest += 1
    return text[start:end].strip("\n"), rest


def _first_call(text: str, start: int) -> int:
    call = text.find(_CALL, start)
    return call if call >= 0 else len(text)


def _with_calls(text: str, start: int, reasoning: str) -> ParsedReply:
    calls: list[ToolCall] = []
    malformed: list[MalformedCall] = []
    pieces: list[str] = []
    written = start
    at = text.find(_CALL, start)
    while at >= 0:
        found = _read_call(text, at) if len(malformed) < _MAX_MALFORMED else _Broken("too_many")
        if isinstance(found, _Broken):
            end = _end_of_broken(text, at) if found.reason != "too_many" else len(text)
            malformed.append(MalformedCall(reason=found.reason, start=at, end=end))
        else:
            end = found.end
            pieces.append(text[written:at].removesuffix("\n"))
            calls.append(found.call)
            written = end
        at = text.find(_CALL, end)
    pieces.append(text[written:])
    return ParsedReply(
        reasoning=reasoning,
        content=_joined(pieces, has_calls=bool(calls)),
        tool_calls=tuple(calls),
        malformed=tuple(malformed),
    )


def _joined(pieces: list[str], has_calls: bool) -> str:
    if not has_calls:
        return "".join(pieces)
    # Newlines between calls are the template's; text that came between or after is kept.
    first, *rest = pieces
    texts = [first, *(piece.strip("\n") for piece in rest)]
    return "\n".join(text for text in texts if text.strip())


class _Found(NamedTuple):
    call: ToolCall
    end: int


class _Broken(NamedTuple):
    reason: MalformedReason


def _read_call(text: str, at: int) -> _Found | _Broken:
    """The call whose marker stands at `at`.

    The JSON decides where the call ends, not the first closing marker: a string argument may hold
    that marker. A call at the end of the text needs no closing marker.
    """
    start = _skip_space(text, at + len(_CALL))
    try:
        value, end = _json.raw_decode(text, start)
    except (ValueError, RecursionError):
        return _Broken("bad_json")
    closing = _skip_space(text, end)
    if text.startswith(_END_CALL, closing):
        closing += len(_END_CALL)
    elif closing < len(text):
        return _Broken("bad_json")
    call = _tool_call(value)
    return _Found(call, closing) if isinstance(call, ToolCall) else call


def _tool_call(value: Any) -> ToolCall | _Broken:
    if not isinstance(value, dict):
        return _Broken("not_an_object")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return _Broken("no_name")
    arguments = value.get("arguments", value.get("parameters"))
    if arguments is None:
        return ToolCall(name=name, arguments={})
    if isinstance(arguments, str):
        return ToolCall(name=name, arguments=parse_arguments(arguments))
    if not isinstance(arguments, dict):
        return _Broken("bad_arguments")
    # Written again and read strictly: what the log or JSON cannot hold (NaN, lone surrogates,
    # integers beyond 64 bits) comes back as text.
    parsed = parse_arguments(json.dumps(arguments, ensure_ascii=False))
    if isinstance(parsed, str) or not _is_text(name):
        return _Broken("bad_arguments")
    return ToolCall(name=name, arguments=parsed)


def _is_text(name: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _end_of_broken(text: str, at: int) -> int:
    end = text.find(_END_CALL, at)
    following = text.find(_CALL, at + len(_CALL))
    if end < 0 or 0 <= following < end:
        return following if following >= 0 else len(text)
    return end + len(_END_CALL)


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at
