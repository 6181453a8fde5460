"""MiniMax-M2: a block of invocations, values as bare text.

<minimax:tool_call>
<invoke name="write">
<parameter name="path">a.txt</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

from functools import partial

from turnfold.gateway.parsing.calls import Calls, Grammar
from turnfold.gateway.parsing.replies import ReplyFormat
from turnfold.gateway.parsing.source import Reading, Source
from turnfold.gateway.parsing.tagged import begin
from turnfold.gateway.parsing.tags import ValueTags, call_of_values, expect, read_name, read_values
from turnfold.schemas.messages import Tool, ToolCall

_BLOCK, _END_BLOCK = "<minimax:tool_call>", "</minimax:tool_call>"
_INVOKE, _END_INVOKE = '<invoke name="', "</invoke>"

_TAGS = ValueTags('<parameter name="', '">', "</parameter>", followers=(_END_INVOKE,))


def read_calls(source: Source, calls: Calls) -> Reading[None]:
    """The block at `source.at`."""
    yield from calls.read_block(
        source,
        _read_call,
        block=(_BLOCK, _END_BLOCK),
        opener=_INVOKE,
        closer=_END_INVOKE,
    )


def _read_call(
    source: Source, start: int, tools: tuple[Tool, ...]
) -> Reading[tuple[ToolCall, int]]:
    name, here = yield from read_name(source, start + len(_INVOKE), '">')
    values, here = yield from read_values(source, here, _TAGS)
    end = yield from expect(source, (_END_INVOKE,), here)
    return call_of_values(name, values, tools, end), end


GRAMMAR = Grammar(openers=(_BLOCK,), read_calls=read_calls, controls=("]~b]", "]~!b[", "[e~["))

FORMAT = ReplyFormat(name="minimax", begin=partial(begin, GRAMMAR), has_tools=True)
