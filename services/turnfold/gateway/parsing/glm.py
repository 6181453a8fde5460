"""GLM-4.5, 4.6 and 4.7: the name, then a pair of tags for each argument, values as bare text.

    <tool_call>write
    <arg_key>path</arg_key>
    <arg_value>a.txt</arg_value>
    </tool_call>

4.7 writes the same without line breaks.
"""

from __future__ import annotations

from functools import partial

from turnfold.gateway.parsing.broken import BrokenCall
from turnfold.gateway.parsing.calls import Calls, Grammar
from turnfold.gateway.parsing.qwen import CALL, END_CALL
from turnfold.gateway.parsing.replies import ReplyFormat
from turnfold.gateway.parsing.source import Marks, Reading, Source
from turnfold.gateway.parsing.tagged import begin
from turnfold.gateway.parsing.tags import ValueTags, call_of_values, expect, read_values
from turnfold.schemas.messages import Tool, ToolCall

_TAGS = ValueTags(
    "<arg_key>", "</arg_key>", "</arg_value>", followers=(END_CALL,), value_opening="<arg_value>"
)
_END_OF_NAME = Marks(("<", "\n"))


def read_calls(source: Source, calls: Calls) -> Reading[None]:
    """The call at `source.at`."""
    yield from calls.read(source, _read_call, closers=(END_CALL,), followers=(CALL,))


def _read_call(
    source: Source, start: int, tools: tuple[Tool, ...]
) -> Reading[tuple[ToolCall, int]]:
    here = yield from source.skip_space(start + len(CALL))
    found = yield from source.find(_END_OF_NAME, here)
    if found is None:
        raise BrokenCall("unclosed", source.length)
    name = source.slice(here, found.start).strip()
    values, here = yield from read_values(source, found.start, _TAGS)
    end = yield from expect(source, (END_CALL,), here)
    return call_of_values(name, values, tools, end), end


GRAMMAR = Grammar(
    openers=(CALL,),
    read_calls=read_calls,
    controls=("<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "<|endoftext|>"),
)

FORMAT = ReplyFormat(name="glm", begin=partial(begin, GRAMMAR), has_tools=True)
