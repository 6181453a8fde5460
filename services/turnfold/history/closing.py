"""The marks that close a reply: which of them the model sampled, and which are still missing."""

from __future__ import annotations

import numpy as np

from turnfold.history.render import Renderer
from turnfold.history.sequences import Ids
from turnfold.history.template_facts import template_facts

MAX_SYNTAX = 256
"""Characters within which the syntax that ends a tool call is looked for."""


def missing_tail(renderer: Renderer, ending_text: str, output: Ids, is_call: bool) -> Ids:
    """What of the template's ending the model has not written itself.

    The ending starts where the reply's own content ends, so for a call it opens with the rest of
    the call's syntax, which the model has written in its own way:

        ending  }} </call> <end> ⏎ <user> …       output  … }} </call> <end>     →  ⏎ <user> …
        ending  }} </call> <end> ⏎ <user> …       output  … }} </call>           →  <end> ⏎ <user> …
        ending  <end> <user> …                      output  … hello <return>       →  <user> …
    """
    ending = renderer.encode(ending_text)
    marks = _closing_marks(ending, renderer)
    anchor = _last_mark(output, renderer)
    written = [index for index in marks if anchor >= 0 and ending[index] == output[anchor]]
    if written:
        return _without_head(ending[written[0] + 1 :], output[anchor + 1 :])
    if marks and anchor >= 0 and int(output[anchor]) in template_facts(renderer).closers:
        return ending[marks[0] + 1 :]
    if not is_call:
        return ending[_overlap(output, ending) :]
    syntax = _text_overlap(renderer.decode(output), ending_text)
    if syntax:
        return renderer.encode(ending_text[syntax:])
    return ending[marks[0] :] if marks else ending


def _text_overlap(output: str, ending: str) -> int:
    """How much of `ending` the output ends with, whatever the whitespace between.

    output  {"n":2}}</call>    ending  }⏎</call>⏎<end>…    →  up to and with </call>
    """
    bare = "".join(output.split())
    found, head = 0, ""
    for index, character in enumerate(ending[:MAX_SYNTAX], start=1):
        head += character.strip()
        if character.strip() and bare.endswith(head):
            found = index
    trailing = output[len(output.rstrip()) :]
    return found + len(trailing) if found and ending.startswith(trailing, found) else found


def _without_head(ids: Ids, head: Ids) -> Ids:
    """`ids` after `head`, if it begins with that."""
    return ids[len(head) :] if np.array_equal(ids[: len(head)], head) else ids


def _overlap(output: Ids, ending: Ids) -> int:
    """The longest head of `ending` that `output` ends with."""
    limit = min(len(output), len(ending))
    if not limit:
        return 0
    ends_alike = np.flatnonzero(ending[:limit] == output[-1]) + 1
    sizes = (int(size) for size in reversed(ends_alike))
    return next((n for n in sizes if np.array_equal(output[len(output) - n :], ending[:n])), 0)


def _closing_marks(ending: Ids, renderer: Renderer) -> list[int]:
    """Positions of the first run of marks in `ending`; only whitespace may stand between them."""
    marks: list[int] = []
    for index, token in enumerate(ending.tolist()):
        if token in renderer.special_ids:
            marks.append(index)
        elif marks and renderer.decode(ending[index : index + 1]).strip():
            break
    return marks


def _last_mark(output: Ids, renderer: Renderer) -> int:
    """Position of the mark that the output ends with, whitespace after it aside; -1 for none."""
    for index in range(len(output) - 1, -1, -1):
        if int(output[index]) in renderer.special_ids:
            return index
        if renderer.decode(output[index : index + 1]).strip():
            return -1
    return -1
