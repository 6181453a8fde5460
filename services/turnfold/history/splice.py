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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import msgspec

from turnfold.history.closing import missing_tail
from turnfold.history.divergence import REPLY_REFORMATTED, TEMPLATE_REWROTE_HISTORY
from turnfold.history.errors import RenderError
from turnfold.history.render import Renderer
from turnfold.history.saved_text import (
    Piece,
    Place,
    align,
    first_changed_token,
    is_end_certain,
    is_prompt_shown_but_for_whitespace,
    without_closing_marks,
)
from turnfold.history.sequences import Ids
from turnfold.history.template_facts import common_suffix_len
from turnfold.schemas.messages import ChatMessage, ToolCall

RenderOf = Callable[[Sequence[ChatMessage]], str]
"""Raises RenderError when the template refuses the messages."""


@dataclass(frozen=True, slots=True)
class Splice:
    """What to append to the saved tokens."""

    tail: Ids
    cause: str | None
    """Why the render does not show the saved text; None when it does, to the character."""
    num_renders: int
    is_taken_back: bool = False
    """The template shows no more some text that the model was shown or wrote; whitespace and the
    marks around a message do not count."""
    changed_token: int | None = None
    """The first saved token that the render does not show; None where it shows the saved text."""


def splice(
    renderer: Renderer,
    render_of: RenderOf,
    pieces: Sequence[Piece],
    output_ids: Ids,
    history: Sequence[ChatMessage],
    new_messages: Sequence[ChatMessage],
) -> Splice | None:
    """The tail after the saved `pieces`; `history` is their stored messages, the reply last.

    `render_of` renders messages with the tools of the turn and a generation opening. None when the end of the reply cannot be told in the render. Raises RenderError when the template
    refuses the messages.
    """
    render = render_of([*history, *new_messages])
    places = align(renderer, pieces, render)
    if places is not None and is_end_certain(places, render):
        tail_start = places[-1].end
        tail = renderer.encode(render[tail_start:])
        return _splice(renderer, pieces, places, render, tail_start, history, tail, 1)
    return _splice_by_probe(
        renderer, render_of, pieces, places, render, output_ids, history, new_messages
    )


def _splice_by_probe(
    renderer: Renderer,
    render_of: RenderOf,
    pieces: Sequence[Piece],
    places: Sequence[Place] | None,
    render: str,
    output_ids: Ids,
    history: Sequence[ChatMessage],
    new_messages: Sequence[ChatMessage],
) -> Splice | None:
    """The splice after a reply that is shown in another form; None where its end cannot be told."""
    num_renders = 1
    for probe in _probes(history[-1]):
        ending = _ending(render_of, render, history[:-1], probe, new_messages)
        num_renders += 1
        if ending is None or (places and len(ending) > len(render) - _reply_start(places, pieces)):
            continue  # the reply is not what differs
        if _repeats_reply(history[-1], probe, ending, new_messages):
            ending = _ending_of_bare_call(render_of, history, probe, new_messages) or ending
            num_renders += 2
        tail = missing_tail(renderer, ending, output_ids, bool(probe.tool_calls))
        tail_text = renderer.decode(tail)
        if not _keeps(new_messages, ending, tail_text):
            continue
        tail_start = len(render) - len(tail_text)
        if _shows_before(new_messages, pieces, render[:tail_start], tail_text):
            continue
        return _splice(renderer, pieces, places, render, tail_start, history, tail, num_renders)
    return None


def _ending(
    render_of: RenderOf,
    render: str,
    before: Sequence[ChatMessage],
    probe: ChatMessage,
    new_messages: Sequence[ChatMessage],
) -> str | None:
    """What `render` and a render with the probe as the reply end with alike; None if they are equal."""
    try:
        other = render_of([*before, probe, *new_messages])
    except RenderError:
        return None
    return None if other == render else render[len(render) - common_suffix_len(render, other) :]


def _repeats_reply(
    reply: ChatMessage, probe: ChatMessage, ending: str, new_messages: Sequence[ChatMessage]
) -> bool:
    """Whether the text of the reply seems to stand behind its calls, in what would be appended.

    Gemma shows it after the results of the calls, though the model has written it before them.
    """
    text = reply.content.strip()
    if not (text and probe.tool_calls):
        return False
    return ending.count(text) > sum(message.content.count(text) for message in new_messages)


def _ending_of_bare_call(
    render_of: RenderOf,
    history: Sequence[ChatMessage],
    probe: ChatMessage,
    new_messages: Sequence[ChatMessage],
) -> str | None:
    """The ending where the reply is its calls alone: the saved tokens hold its text already."""
    bare, other = (msgspec.structs.replace(message, content="") for message in (history[-1], probe))
    try:
        render = render_of([*history[:-1], bare, *new_messages])
    except RenderError:
        return None
    return _ending(render_of, render, history[:-1], other, new_messages)


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


def _shows_before(
    new_messages: Sequence[ChatMessage], pieces: Sequence[Piece], head: str, tail: str
) -> bool:
    """Whether a new message is shown before the reply only, where the model would not see it."""
    contents = (message.content.strip() for message in new_messages)
    return any(
        content not in tail
        and head.count(content) > sum(piece.text.count(content) for piece in pieces)
        for content in contents
    )


def _splice(
    renderer: Renderer,
    pieces: Sequence[Piece],
    places: Sequence[Place] | None,
    render: str,
    tail_start: int,
    history: Sequence[ChatMessage],
    tail: Ids,
    num_renders: int,
) -> Splice:
    """The splice, and how render[:tail_start] differs from the saved text.

    written  <think>so</think>hi<end>   shown  hi<end>      template_rewrote_history, taken back
    written  hi<return>                 shown  hi<end>      template_rewrote_history
    written  {"a":1}<end>               shown  {"a": 1}     reply_reformatted
    """
    shown = render[:tail_start]
    if places is None:
        is_whole = is_prompt_shown_but_for_whitespace(renderer, pieces, shown)
        cause, is_taken_back = TEMPLATE_REWROTE_HISTORY, not is_whole
    else:
        forms = list(_changed_forms(renderer, pieces, places, shown))
        if not forms:
            return Splice(tail, None, num_renders)
        cause = REPLY_REFORMATTED if forms[0] is _Form.OTHER else TEMPLATE_REWROTE_HISTORY
        is_taken_back = _Form.SHORTER in forms
    if _has_lost_reasoning(history, pieces, shown):
        cause, is_taken_back = TEMPLATE_REWROTE_HISTORY, True
    token = first_changed_token(renderer, pieces, render)
    return Splice(tail, cause, num_renders, is_taken_back, token)


class _Form(Enum):
    """How the template shows a piece of the saved text that it does not show as it was."""

    MARKS = auto()
    """With other closing marks, or another generation opening."""
    SHORTER = auto()
    """Without its beginning, as a thinking block that is left out."""
    OTHER = auto()
    """With other spacing or markup."""


def _changed_forms(
    renderer: Renderer, pieces: Sequence[Piece], places: Sequence[Place], shown: str
) -> Iterator[_Form]:
    ends = [place.start for place in places[1:]] + [len(shown)]
    for piece, place, end in zip(pieces, places, ends, strict=True):
        if place.is_shown:
            continue
        if not piece.span.is_output:
            yield _Form.MARKS
            continue
        written = without_closing_marks(renderer, piece.text)
        reply = without_closing_marks(renderer, shown[place.start : end])
        if written == reply:
            yield _Form.MARKS
        else:
            yield _Form.SHORTER if written.endswith(reply.strip()) else _Form.OTHER


def _has_lost_reasoning(
    history: Sequence[ChatMessage], pieces: Sequence[Piece], shown: str
) -> bool:
    """Whether reasoning that the saved tokens hold is not shown; the messages are in order."""
    at = 0
    for message in history:
        reasoning = message.reasoning.strip()
        found = shown.find(reasoning, at)
        if found < 0 and any(reasoning in piece.text for piece in pieces):
            return True
        at = max(at, found)
    return False
