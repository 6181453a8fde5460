"""The text of saved tokens, piece by piece, and whether a render still shows that text.

Each turn's prompt tail and output are decoded once; comparing them with a render is a memory
comparison, so checking 100k tokens costs microseconds and encodes nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from turnfold.history.render import Renderer
from turnfold.history.sequences import Ids, Span
from turnfold.history.session import Session
from turnfold.history.template_facts import common_prefix, mark_texts, template_facts

CONTEXT_TOKENS = 4
"""Tokens before a piece that are decoded with it: some tokenizers drop a space at the start."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The text of one span of the saved tokens."""

    span: Span
    ids: Ids
    text: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where a piece stands in a render: render[start:end]."""

    start: int
    end: int
    is_shown: bool
    """The whole text of the piece is there, to the character."""


def saved_pieces(session: Session, renderer: Renderer, turn_id: str, ids: Ids) -> tuple[Piece, ...]:
    """The full sequence of the turn as texts, cut where prompt and output meet.

    `ids` is `session.sequences.full(turn_id)`. Pieces are kept on the session, and so is the text of
    each, so that a turn which extends the one before takes two new ones.
    """
    known = _pieces_of_parent(session, turn_id)
    spans = session.sequences.spans(turn_id, start=known[-1].span.stop if known else 0)
    pieces = known + tuple(_piece(session, renderer, span, ids) for span in spans)
    session.pieces = (turn_id, pieces)
    return pieces


def _pieces_of_parent(session: Session, turn_id: str) -> tuple[Piece, ...]:
    last_turn_id, pieces = session.pieces
    if turn_id == last_turn_id:
        return pieces
    parent = session.sequences.parent(turn_id)
    is_extension = parent is not None and session.sequences.is_extension(turn_id)
    return pieces if is_extension and parent and parent.turn_id == last_turn_id else ()


def _piece(session: Session, renderer: Renderer, span: Span, ids: Ids) -> Piece:
    key = (span.turn_id, span.is_output)
    is_whole = span.stop == _end(session, span)
    text = session.texts.get(key) if is_whole else None
    if text is None:
        text = _decode_within(renderer, ids, span.start, span.stop)
        if is_whole:
            session.texts[key] = text
    return Piece(span, session.sequences.of_span(span), text)


def align(renderer: Renderer, pieces: Sequence[Piece], render: str) -> list[Place] | None:
    """Where each saved piece stands in a render of the same conversation.

    A reply may be shown in another form: it then has an empty place, and the next prompt piece is
    searched for. A prompt piece must appear verbatim, but for the generation opening and closing
    marks at its end; None when one does not, so that the template shows another past than the model
    saw.

        saved   <user>q1<assistant> | sampled one | <user>q2<assistant> | sampled two
        render  <user>q1<assistant>   shown one     <user>q2<assistant>   sampled two …
        shown         True               False            True               True
    """
    places: list[Place] = []
    at = 0
    for piece in pieces:
        place = _place(renderer, piece, render, at)
        if place is None:
            return None
        places.append(place)
        at = place.end
    return places


def is_end_certain(places: Sequence[Place], render: str) -> bool:
    """Whether the saved text ends where the last piece ends in the render.

    So it is when all pieces are shown. After one that is not, the last two must be found once only:
    a short piece that was searched for could stand too early.
    """
    if not places[-1].is_shown:
        return False
    if all(place.is_shown for place in places):
        return True
    start = places[-2].start if len(places) > 1 else 0
    return render.find(render[start : places[-1].end], start + 1) < 0


def is_prompt_shown_but_for_whitespace(
    renderer: Renderer, pieces: Sequence[Piece], render: str
) -> bool:
    """Whether a template rewrote no more than whitespace of what was put before the model.

    Some add a line break after a tool result once another message follows it.
    """
    bare, at = _without_whitespace(render), 0
    for piece in pieces:
        if piece.span.is_output:
            continue
        found = _find_prompt(
            piece, [_without_whitespace(t) for t in _forms(renderer, piece)], bare, at
        )
        if found is None:
            return False
        at = found[1]
    return True


def first_changed_token(renderer: Renderer, pieces: Sequence[Piece], render: str) -> int | None:
    """The first saved token whose text a render of the same conversation does not repeat.

    None where all of them are there. Nothing is encoded.
    """
    at = 0
    for piece in pieces:
        if not render.startswith(piece.text, at):
            common = len(common_prefix(piece.text, render[at : at + len(piece.text)]))
            return piece.span.start + _token_at(renderer, piece, common)
        at += len(piece.text)
    return None


def _token_at(renderer: Renderer, piece: Piece, character: int) -> int:
    """Index of the token of the piece that holds a character of its text, from the nearer end."""
    ids, rest = piece.ids, len(piece.text) - character
    if character < rest:
        return _smallest(lambda n: len(renderer.decode(ids[:n])) > character, len(ids)) - 1
    return len(ids) - _smallest(lambda n: len(renderer.decode(ids[-n:])) >= rest, len(ids))


def _smallest(holds: Callable[[int], bool], limit: int) -> int:
    """The smallest number from 1 to `limit` that holds, if all after it do; else the limit."""
    high = 1
    while high < limit and not holds(high):
        high *= 2
    return bisect_left(range(min(high, limit)), True, lo=max(1, high // 2), key=holds)


def without_closing_marks(renderer: Renderer, text: str) -> str:
    """The text up to the marks at its end, and the whitespace around those."""
    marks = mark_texts(renderer)
    text = text.rstrip()
    while text.endswith(marks):
        closing = next(mark for mark in marks if text.endswith(mark))
        text = text.removesuffix(closing).rstrip()
    return text


def _without_whitespace(text: str) -> str:
    return "".join(text.split())


def _place(renderer: Renderer, piece: Piece, render: str, at: int) -> Place | None:
    if render.startswith(piece.text, at):
        return Place(at, at + len(piece.text), True)
    if piece.span.is_output:
        return Place(at, at, False)
    found = _find_prompt(piece, _forms(renderer, piece), render, at)
    return Place(*found, False) if found else None


def _find_prompt(
    piece: Piece, forms: Iterable[str], render: str, at: int
) -> tuple[int, int] | None:
    """Where a form of the piece stands first; the beginning of a prompt stands at the start only.

    The earliest, not the fullest: an equal message may follow, shown in full as it is the last.
    """
    places = []
    for form in forms:
        is_first = piece.span.start == 0
        found = render.find(form, 0, len(form)) if is_first else render.find(form, at)
        if found >= 0:
            places.append((found, found + len(form)))
    return min(places, key=lambda place: (place[0], -place[1])) if places else None


def _forms(renderer: Renderer, piece: Piece) -> Iterator[str]:
    """A prompt piece without the generation opening, and without closing marks before that.

    Some templates close a tool result only while it is the last message, or open the reply to one
    otherwise than the reply to a user.
    """
    asked = piece.text.removesuffix(template_facts(renderer).opening)
    yield asked
    said = without_closing_marks(renderer, asked)
    if said != asked and said:
        yield said


def _end(session: Session, span: Span) -> int:
    sequences = session.sequences
    return (sequences.length if span.is_output else sequences.prompt_length)(span.turn_id)


def _decode_within(renderer: Renderer, ids: Ids, start: int, stop: int) -> str:
    before = max(0, start - CONTEXT_TOKENS)
    if before == start:
        return renderer.decode(ids[start:stop])
    context = renderer.decode(ids[before:start])
    return renderer.decode(ids[before:stop])[len(context) :]
