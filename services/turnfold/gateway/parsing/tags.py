"""Calls that name each argument in a tag and write its value as bare text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turnfold.gateway.parsing.broken import BrokenCall
from turnfold.gateway.parsing.json_calls import call_of
from turnfold.gateway.parsing.source import Marks, Reading, Source
from turnfold.gateway.parsing.values import typed_values
from turnfold.schemas.messages import Tool, ToolCall


@dataclass(frozen=True)
class ValueTags:
    """The tags around one argument: `<parameter=key>value</parameter>`."""

    opening: str
    end_of_key: str
    closing: str
    followers: tuple[str, ...]
    """What may stand behind the last argument."""
    value_opening: str = ""
    """A tag of its own before the value."""


def read_values(source: Source, here: int, tags: ValueTags) -> Reading[tuple[dict[str, str], int]]:
    """The arguments from the position on, and where the next thing begins. Raises BrokenCall.

    A value may hold its closing tag: one that nothing follows which may follow an argument is text.
    """
    values: dict[str, str] = {}
    while True:
        here = yield from source.skip_space(here)
        if not (yield from source.next_of((tags.opening,), here)):
            return values, here
        key, here = yield from read_name(source, here + len(tags.opening), tags.end_of_key)
        if tags.value_opening:
            here = yield from source.skip_space(here)
            here = yield from expect(source, (tags.value_opening,), here)
        end = yield from _value_end(source, here, tags)
        values[key] = source.slice(here, end)
        here = end + len(tags.closing)


def read_name(source: Source, start: int, closing: str) -> Reading[tuple[str, int]]:
    """The name up to the closing mark, and the position behind that. Raises BrokenCall."""
    found = yield from source.find(Marks((closing[0], "<", "\n")), start)
    if found is None:
        raise BrokenCall("unclosed", source.length)
    end = yield from expect(source, (closing,), found.start)
    return source.slice(start, found.start).strip(), end


def expect(source: Source, marks: Sequence[str], here: int) -> Reading[int]:
    """The position behind the mark that must stand here. Raises BrokenCall."""
    mark = yield from source.next_of(marks, here)
    if not mark:
        # At the end of the text the call was cut off, perhaps inside a tag.
        rest = source.slice(here, here + max(map(len, marks)))
        is_cut = any(expected.startswith(rest) for expected in marks)
        raise BrokenCall("unclosed" if is_cut else "bad_markup", here)
    return here + len(mark)


def call_of_values(name: str, values: dict[str, str], tools: tuple[Tool, ...], at: int) -> ToolCall:
    """The call, its values typed by the tool's schema. Raises BrokenCall."""
    return call_of(name, typed_values(values, name, tools), at)


def _value_end(source: Source, start: int, tags: ValueTags) -> Reading[int]:
    closing = Marks((tags.closing,))
    here = start
    while True:
        found = yield from source.find(closing, here)
        if found is None:
            raise BrokenCall("unclosed", source.length)
        after = yield from source.skip_space(found.end)
        is_followed = yield from source.next_of((tags.opening, *tags.followers), after)
        if is_followed or after >= source.length:
            return found.start
        here = found.end
