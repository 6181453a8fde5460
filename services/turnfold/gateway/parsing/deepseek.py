"""DeepSeek-V3.1, and V3 and R1 before it: a block of calls between special tokens.

V3.1  <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>ls<｜tool▁sep｜>{"path": "."}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
V3    …<｜tool▁call▁begin｜>function<｜tool▁sep｜>ls\\n```json\\n{"path": "."}\\n```<｜tool▁call▁end｜>…
"""

from __future__ import annotations

from functools import partial

from turnfold.gateway.parsing.broken import BrokenCall
from turnfold.gateway.parsing.calls import Calls, Grammar
from turnfold.gateway.parsing.json_calls import read_json_arguments
from turnfold.gateway.parsing.replies import ReplyFormat
from turnfold.gateway.parsing.source import Marks, Reading, Source
from turnfold.gateway.parsing.tagged import begin
from turnfold.gateway.parsing.tags import expect
from turnfold.schemas.messages import Tool, ToolCall

_BLOCK, _END_BLOCK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_FENCE, _END_FENCE = "```json", "```"

_END_OF_NAME = Marks((_SEPARATOR, _END_CALL, _CALL))
_END_OF_FENCED_NAME = Marks((_FENCE, _END_CALL, _CALL))


def read_calls(source: Source, calls: Calls) -> Reading[None]:
    """The block at `source.at`."""
    yield from calls.read_block(
        source, _read_call, block=(_BLOCK, _END_BLOCK), opener=_CALL, closer=_END_CALL
    )


def _read_call(
    source: Source, start: int, tools: tuple[Tool, ...]
) -> Reading[tuple[ToolCall, int]]:
    name, here = yield from _name(source, start + len(_CALL), _END_OF_NAME)
    here = yield from source.skip_space(here)
    is_fenced = name == "function" and not (yield from source.next_of(("{",), here))
    if is_fenced:
        name, here = yield from _name(source, here, _END_OF_FENCED_NAME)
        here = yield from source.skip_space(here)
    call, here = yield from read_json_arguments(source, name, here)
    if is_fenced:
        here = yield from source.skip_space(here)
        here = yield from expect(source, (_END_FENCE,), here)
    here = yield from source.skip_space(here)
    return call, (yield from expect(source, (_END_CALL,), here))


def _name(source: Source, start: int, ends: Marks) -> Reading[tuple[str, int]]:
    found = yield from source.find(ends, start)
    if found is None:
        raise BrokenCall("unclosed", source.length)
    if found.mark != ends.marks[0]:
        raise BrokenCall("bad_markup", found.start)
    return source.slice(start, found.start).strip(), found.end


GRAMMAR = Grammar(
    openers=(_BLOCK,),
    read_calls=read_calls,
    controls=(
        _BLOCK,
        _END_BLOCK,
        _CALL,
        _END_CALL,
        _SEPARATOR,
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜tool▁outputs▁begin｜>",
        "<｜tool▁outputs▁end｜>",
        "<｜tool▁output▁begin｜>",
        "<｜tool▁output▁end｜>",
    ),
    newlines_before_call=0,
    is_content_flush=False,
)

FORMAT = ReplyFormat(name="deepseek", begin=partial(begin, GRAMMAR), has_tools=True)
