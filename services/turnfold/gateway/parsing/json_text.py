"""Where a JSON value ends that is still being written, and what it holds."""

from __future__ import annotations

import json
import re
from typing import Any

from turnfold.gateway.parsing.broken import BrokenCall
from turnfold.gateway.parsing.source import Reading, Source

_BETWEEN = re.compile(r"[\s,:0-9A-Za-z+.-]*")
"""Numbers, literals and separators; whether they stand right is checked when the value is whole."""
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')


def read_json(source: Source, start: int) -> Reading[tuple[Any, int]]:
    """The object or array at the position, and its end. Raises BrokenCall.

    The value decides where it ends, not the next marker: a string in it may hold that marker.
    """
    end = yield from json_end(source, start)
    text = source.slice(start, end)
    source.work += len(text)
    try:
        return json.loads(text), end
    except (ValueError, RecursionError) as error:
        raise BrokenCall("bad_json", end) from error


def json_end(source: Source, start: int) -> Reading[int]:
    """The end of the object or array at the position. Raises BrokenCall.

    A character that no JSON has there ends the search at once.
    """
    depth = 0
    here = yield from source.skip_space(start)
    while True:
        character = source.slice(here, here + 1)
        if not character:
            raise BrokenCall("unclosed", here)
        if character in "{[":
            depth += 1
        elif depth == 0 or character not in '}]"':
            raise BrokenCall("bad_json", here)
        here += 1
        if character == '"':
            here = yield from _string_end(source, here)
        elif character in "}]":
            depth -= 1
            if depth == 0:
                return here
        here = yield from source.skip(_BETWEEN, here)


def _string_end(source: Source, here: int) -> Reading[int]:
    while True:
        here = yield from source.skip(_IN_STRING, here)
        if here >= source.length:
            raise BrokenCall("unclosed", source.length)
        character = source.slice(here, here + 1)
        if character == '"':
            return here + 1
        if character != "\\":
            raise BrokenCall("bad_json", here)
        here += 2
