"""Qwen2.5, Qwen3 and Hermes: `<tool_call>` around `{"name": …, "arguments": …}`.

    <think>\\nwhere is it?\\n</think>\\n\\nLooking.\\n<tool_call>\\n{"name": "ls", "arguments": {}}\\n</tool_call>
     reasoning "where is it?"     content "Looking."        one call of ls

A call at the end of the text needs no closing tag.
"""

from __future__ import annotations

from functools import partial

from turnfold.gateway.parsing.broken import BrokenCall
from turnfold.gateway.parsing.calls import Calls, Grammar
from turnfold.gateway.parsing.json_calls import read_json_call
from turnfold.gateway.parsing.replies import ParsedReply, ReplyFormat
from turnfold.gateway.parsing.source import Reading, Source
from turnfold.gateway.parsing.tagged import begin
from turnfold.schemas.messages import Tool, ToolCall

CALL, END_CALL = "<tool_call>", "</tool_call>"

CHATML_CONTROLS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def read_calls(source: Source, calls: Calls) -> Reading[None]:
    """The call at `source.at`."""
    yield from calls.read(source, read_call, closers=(END_CALL,), followers=(CALL,))


def read_call(source: Source, start: int, tools: tuple[Tool, ...]) -> Reading[tuple[ToolCall, int]]:
    """One call. Raises BrokenCall."""
    call, end = yield from read_json_call(source, start + len(CALL))
    closing = yield from source.skip_space(end)
    if (yield from source.next_of((END_CALL,), closing)):
        return call, closing + len(END_CALL)
    if closing < source.length:
        raise BrokenCall("bad_json", closing)
    return call, closing


GRAMMAR = Grammar(openers=(CALL,), read_calls=read_calls, controls=CHATML_CONTROLS)

FORMAT = ReplyFormat(name="qwen", begin=partial(begin, GRAMMAR), has_tools=True)
REASONING = ReplyFormat(name="reasoning", begin=partial(begin, GRAMMAR), has_tools=False)


def parse(
    text: str, is_calling_allowed: bool, is_reasoning_open: bool, tools: tuple[Tool, ...] = ()
) -> ParsedReply:
    """The parts of a whole text."""
    return FORMAT.parse(text, is_calling_allowed, is_reasoning_open, tools)
