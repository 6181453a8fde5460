"""Which message a token belongs to, and where the tokens of a message begin.

    t0: asks m0, samples m1        tokens  m0 [0, 5)   m1 [5, 7)
    t1: asks m2, samples m3                m2 [7, 12)  m3 [12, 15)

A turn that asks several messages has them in one span, so these are told apart no further.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from turnfold.history.sequences import Span
from turnfold.history.session import Session


def message_of_token(session: Session, spans: Iterable[Span], token: int) -> int:
    """Index, in the history of a turn, of the first message of the span that holds the token."""
    return next((first for first, _, span in _messages(session, spans) if token < span.stop), -1)


def token_of_message(session: Session, spans: Iterable[Span], message: int) -> int:
    """The first token of the span that holds the message; -1 when no span does."""
    found = (span.start for _, end, span in _messages(session, spans) if message < end)
    return next(found, -1)


def _messages(session: Session, spans: Iterable[Span]) -> Iterator[tuple[int, int, Span]]:
    """(first message, message after the last, span) of the spans of a turn's sequence, in order."""
    for span in spans:
        shared, asked = session.new_messages(span.turn_id)
        num_asked = shared + len(asked)
        if span.is_output:
            yield num_asked, num_asked + 1, span
        else:
            yield shared, num_asked, span
