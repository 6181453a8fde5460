"""An answer as server-sent events, written while it comes; a recorded one comes at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from turnfold.gateway.calls import Answer, AnswerPiece, pieces_of
from turnfold.gateway.refusals import Refusal


class AnswerStream(Protocol):
    """Writes one answer in one protocol.

        begin()  add(piece)*  end(answer)      or, at any time after begin, error(refusal, …)

    However the answer is cut into pieces, the texts of the events put together are the same.
    """

    def begin(self) -> Iterator[bytes]:
        """The events before the first piece."""
        ...

    def add(self, piece: AnswerPiece) -> Iterator[bytes]:
        """The events of a piece; perhaps none yet."""
        ...

    def end(self, answer: Answer) -> Iterator[bytes]:
        """The events after the last piece, of an answer that is recorded."""
        ...

    def error(self, refusal: Refusal, request_id: str) -> bytes:
        """The last event of an answer that cannot be finished."""
        ...


def whole(stream: AnswerStream, answer: Answer) -> Iterator[bytes]:
    """All events of an answer that is there already."""
    yield from stream.begin()
    for piece in pieces_of(answer):
        yield from stream.add(piece)
    yield from stream.end(answer)
