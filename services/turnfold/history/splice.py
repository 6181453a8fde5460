"""The tokens that follow saved tokens: what the template still adds after the model's own text.

    next prompt = saved tokens + closing tokens not sampled yet + new messages + generation opening

Nothing saved is encoded again. Where the saved text is a prefix of the template's render, the rest
of that render is the answer and proves itself. Where the template shows a reply in another form
than the model wrote it, a second render with another reply in its place tells where the reply ends:

    render      …<assistant>{"a": 1}<end><user>next<assistant>
    probe       …<assistant>{"x": 2}<end><user>next<assistant>
    common end                     }<end><user>next<assistant>

and the closing marks that the model sampled itself are taken off the front.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from turnfold.history.closing import missing_tail, text_without_closing_marks
from turnfold.history.divergence import REPLY_REFORMATTED, TEMPLATE_REWROTE_HISTORY
from turnfold.history.errors import RenderError
from turnfold.history.render import Renderer
from turnfold.history.saved_text import (
    Piece,
    Place,
    align,
    is_end_certain,
    is_prompt_shown_but_for_whitespace,
)
from turnfold.history.sequences import Ids
from turnfold.history.template_facts import common_suffix_len
from turnfold.schemas.messages import ChatMessage, Tool, ToolCall


@dataclass(frozen=True, slots=True)
class Splice:
    """What to append to the saved tokens."""

    tail: Ids
    cause: str | None
    """Why the render does not show the saved text; None when it does, to the character."""
    num_renders: int


def splice(
    renderer: Renderer,
    pieces: Sequence[Piece],
    output_ids: Ids,
    history: Sequence[ChatMessage],
    new_messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None,
) -> Splice | None:
    """The tail after the saved `pieces`; `history` is their stored messages, the reply last.

    None when what was put before the model is no longer in the render, so that a splice could show
    it a history that never was. Raises RenderError when the template refuses the messages.
    """
    render = renderer.render([*history, *new_messages], tools, True)
    places = align(renderer, pieces, render)
    if places is not None and is_end_certain(places, render):
        tail = renderer.encode(render[places[-1].end :])
        shown = render[: places[-1].end]
        return Splice(tail, _cause(renderer, pieces, places, shown, history), 1)
    if places is None and not is_prompt_shown_but_for_whitespace(renderer, pieces, render):
        return None
    return _splice_by_probe(
        renderer, pieces, places, render, output_ids, history, new_messages, tools
    )


def _splice_by_probe(
    renderer: Renderer,
    pieces: Sequence[Piece],
    places: Sequence[Place] | None,
    render: str,
    output_ids: Ids,
    history: Sequence[ChatMessage],
    new_messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None,
) -> Splice | None:
    """The splice after a reply that is shown in another form; None where its end cannot be told."""
    for num_renders, probe in enumerate(_probes(history[-1]), start=2):
        try:
            other = renderer.render([*history[:-1], probe, *new_messages], tools, True)
        except RenderError:
            continue
        ending = render[len(render) - common_suffix_len(render, other) :]
        if other == render or (places and len(ending) > len(render) - _reply_start(places, pieces)):
            continue  # the reply is not what differs
        tail = missing_tail(renderer, ending, output_ids, bool(probe.tool_calls))
        tail_text = renderer.decode(tail)
        if not _keeps(new_messages, ending, tail_text):
            continue
        shown = render[: len(render) - len(tail_text)]
        cause = _cause(renderer, pieces, places, shown, history)
        return Splice(tail, cause, num_renders)
    return None


def _probes(reply: ChatMessage) -> Iterator[ChatMessage]:
    """The same kind of reply with another end, so that only what follows the reply is equal.

    A template without tools shows no calls; there, other text tells where the reply ends.
    """
    if reply.tool_calls:
        # Each call, for some templates show the first one only.
        calls = tuple(
            ToolCall(name=call.name, arguments={"x": "y"}, id=call.id) for call in reply.tool_calls
        )
        yield msgspec.structs.replace(reply, tool_calls=calls)
    other = "y" if reply.content.rstrip().endswith("x") else "x"
    yield msgspec.structs.replace(reply, content=other, tool_calls=())


def _reply_start(places: Sequence[Place], pieces: Sequence[Piece]) -> int:
    return places[-1].start if pieces[-1].span.is_output else places[-1].end


def _keeps(new_messages: Sequence[ChatMessage], ending: str, tail: str) -> bool:
    """Whether cutting `ending` down to `tail` took nothing of the new messages with it."""
    contents = Counter(message.content.strip() for message in new_messages)
    return all(
        tail.count(content) >= min(number, ending.count(content))
        for content, number in contents.items()
    )


def _cause(
    renderer: Renderer,
    pieces: Sequence[Piece],
    places: Sequence[Place] | None,
    shown: str,
    history: Sequence[ChatMessage],
) -> str | None:
    """Why `shown`, the render up to the tail, is not the saved text; None where it is.

    written  <think></think>hi<end>   shown  hi<end>      template_rewrote_history
    written  hi<return>               shown  hi<end>      template_rewrote_history
    written  {"a":1}<end>             shown  {"a": 1}     reply_reformatted
    """
    if places is None:
        return TEMPLATE_REWROTE_HISTORY
    changed = next((index for index, place in enumerate(places) if not place.is_shown), None)
    if changed is None:
        return None
    if not pieces[changed].span.is_output or _has_lost_reasoning(history, shown):
        return TEMPLATE_REWROTE_HISTORY
    start = places[changed].start
    end = places[changed + 1].start if changed + 1 < len(places) else len(shown)
    reply = text_without_closing_marks(renderer, renderer.encode(shown[start:end]))
    written = text_without_closing_marks(renderer, pieces[changed].ids)
    is_shortened = _is_shortened(written.strip(), reply.strip())
    return TEMPLATE_REWROTE_HISTORY if reply == written or is_shortened else REPLY_REFORMATTED


def _is_shortened(written: str, shown: str) -> bool:
    return written != shown and written.endswith(shown)


def _has_lost_reasoning(history: Sequence[ChatMessage], shown: str) -> bool:
    """Whether reasoning that is stored is not shown; one pass, for the messages are in order."""
    at = 0
    for message in history:
        at = shown.find(message.reasoning.strip(), at)
        if at < 0:
            return True
    return False
