"""Mistral: `[TOOL_CALLS]`, then the calls as its tokenizer of that year writes them.

    Nemo                   [TOOL_CALLS][{"name": "ls", "arguments": {}, "id": "a1b2c3d4e"}]
    Small 3.2              [TOOL_CALLS]ls[CALL_ID]a1b2c3d4e[ARGS]{}
    Devstral, Ministral 3  [TOOL_CALLS]ls[ARGS]{}

Call ids that the model writes are not used: the client gets the gateway's.
"""

from __future__ import annotations

from functools import partial

from turnfold.gateway.parsing.broken import BrokenCall
from turnfold.gateway.parsing.calls import Calls, Grammar
from turnfold.gateway.parsing.json_calls import read_json_arguments, read_json_call
from turnfold.gateway.parsing.replies import ReplyFormat
from turnfold.gateway.parsing.source import Marks, Reading, Source
from turnfold.gateway.parsing.tagged import begin
from turnfold.schemas.messages import Tool, ToolCall

_CALLS, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

_END_OF_NAME = Marks((_ARGS, _CALL_ID, "{", _CALLS))
_END_OF_ID = Marks((_ARGS, "{", _CALLS))


def read_calls(source: Source, calls: Calls) -> Reading[None]:
    """The call, or the list of calls, at `source.at`."""
    here = yield from source.skip_space(source.at + len(_CALLS))
    if (yield from source.next_of(("[",), here)) and not (
        yield from source.next_of((_ARGS, _CALL_ID, _CALLS), here)
    ):
        yield from _read_list(source, here + 1, calls)
    else:
        yield from calls.read(source, _read_call, followers=(_CALLS,))


def _read_list(source: Source, here: int, calls: Calls) -> Reading[None]:
    """Each call of the list by itself: a broken one does not touch the others."""
    here = yield from source.skip_space(here)
    if (yield from source.next_of(("]",), here)):
        source.at = here + 1
        return
    while True:
        source.at = here
        if not calls.is_read(source):
            return
        yield from calls.read(source, _read_element)
        here = yield from source.skip_space(source.at)
        mark = yield from source.next_of((",", "]"), here)
        if mark == "]":
            source.at = here + 1
        if mark != ",":
            return
        here = yield from source.skip_space(here + 1)


def _read_element(
    source: Source, start: int, tools: tuple[Tool, ...]
) -> Reading[tuple[ToolCall, int]]:
    return (yield from read_json_call(source, start))


def _read_call(
    source: Source, start: int, tools: tuple[Tool, ...]
) -> Reading[tuple[ToolCall, int]]:
    here = yield from source.skip_space(start + len(_CALLS))
    if (yield from source.next_of(("{",), here)):
        return (yield from read_json_call(source, here))
    found = yield from source.find(_END_OF_NAME, here)
    if found is None:
        raise BrokenCall("unclosed", source.length)
    name = source.slice(here, found.start).strip()
    if found.mark == _CALL_ID:
        found = yield from source.find(_END_OF_ID, found.end)
        if found is None:
            raise BrokenCall("unclosed", source.length)
    if found.mark == _CALLS:
        raise BrokenCall("bad_markup", found.start)
    arguments = found.end if found.mark == _ARGS else found.start
    return (yield from read_json_arguments(source, name, arguments))


GRAMMAR = Grammar(
    openers=(_CALLS,),
    read_calls=read_calls,
    thinking=("[THINK]", "[/THINK]"),
    controls=(
        _CALLS,
        _CALL_ID,
        _ARGS,
        "</s>",
        "[INST]",
        "[/INST]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "[TOOL_CONTENT]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[SYSTEM_PROMPT]",
        "[/SYSTEM_PROMPT]",
    ),
    newlines_before_call=0,
    is_content_flush=False,
)

FORMAT = ReplyFormat(
    name="mistral", begin=partial(begin, GRAMMAR), has_tools=True, opens_reasoning="[THINK]"
)
