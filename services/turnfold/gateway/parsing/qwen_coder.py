"""Qwen3-Coder, Qwen3.5 and Nemotron 3: a function tag with parameter tags, values as bare text.

    <tool_call>
    <function=write>
    <parameter=path>
    a.txt
    </parameter>
    </function>
    </tool_call>

The line break on each side of a value is the format's. The outer tags are often forgotten and not
needed.
"""

from __future__ import annotations

from functools import partial

from turnfold.gateway.parsing import qwen
from turnfold.gateway.parsing.calls import Calls, Grammar
from turnfold.gateway.parsing.qwen import CALL, CHATML_CONTROLS, END_CALL
from turnfold.gateway.parsing.replies import ReplyFormat
from turnfold.gateway.parsing.source import Reading, Source
from turnfold.gateway.parsing.tagged import begin
from turnfold.gateway.parsing.tags import ValueTags, call_of_values, expect, read_name, read_values
from turnfold.schemas.messages import Tool, ToolCall

_FUNCTION, _END_FUNCTION = "<function=", "</function>"

_TAGS = ValueTags("<parameter=", ">", "</parameter>", followers=(_END_FUNCTION, END_CALL))


def read_calls(source: Source, calls: Calls) -> Reading[None]:
    """The call at `source.at`, with or without its outer tags."""
    if (yield from source.next_of((CALL,), source.at)):
        yield from calls.read(source, _read_call, closers=(END_CALL,), followers=(CALL,))
    else:
        followers = (_FUNCTION, CALL)
        yield from calls.read(source, _read_call, closers=(_END_FUNCTION,), followers=followers)


def _read_call(
    source: Source, start: int, tools: tuple[Tool, ...]
) -> Reading[tuple[ToolCall, int]]:
    here = start
    if (yield from source.next_of((CALL,), start)):
        here = yield from source.skip_space(start + len(CALL))
        if (yield from source.next_of(("{",), here)):
            return (yield from qwen.read_call(source, start, tools))
    here = yield from expect(source, (_FUNCTION,), here)
    name, here = yield from read_name(source, here, ">")
    values, here = yield from read_values(source, here, _TAGS)
    end = yield from expect(source, (_END_FUNCTION, END_CALL), here)
    values = {key: value.removeprefix("\n").removesuffix("\n") for key, value in values.items()}
    call = call_of_values(name, values, tools, end)
    return call, (yield from _behind_outer_tag(source, end))


def _behind_outer_tag(source: Source, end: int) -> Reading[int]:
    here = yield from source.skip_space(end)
    is_closed = yield from source.next_of((END_CALL,), here)
    return here + len(END_CALL) if is_closed else end


GRAMMAR = Grammar(
    openers=(CALL, _FUNCTION),
    read_calls=read_calls,
    controls=CHATML_CONTROLS,
    newlines_before_call=2,
)

FORMAT = ReplyFormat(name="qwen_coder", begin=partial(begin, GRAMMAR), has_tools=True)
