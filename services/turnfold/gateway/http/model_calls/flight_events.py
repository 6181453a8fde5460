"""What one client is told of a turn, however much of it was made when the client came."""

from __future__ import annotations

from turnfold.gateway.calls import Answer, ModelCall
from turnfold.gateway.protocols.answer_stream import AnswerStream
from turnfold.gateway.protocols.protocol import ModelProtocol
from turnfold.gateway.refusals import Refusal
from turnfold.gateway.rollouts.app import Flight
from turnfold.gateway.turns.sampling.reply import merged


class FlightEvents:
    """Server-sent events of a flight for one client.

    events = FlightEvents(protocol, call, flight)
    events.due()        what has come since the last time
    events.end(answer)  the rest, once the turn is recorded
    """

    def __init__(self, protocol: ModelProtocol, call: ModelCall, flight: Flight) -> None:
        self._protocol = protocol
        self._call = call
        self._flight = flight
        self._stream: AnswerStream | None = None
        self.num_known = 0
        """Pieces of the flight that the client has had."""

    def due(self) -> bytes:
        """The events that the client has not had; those of a whole turn wait for its end."""
        if self._flight.head is None:
            return b""
        events: list[bytes] = []
        if self._stream is None:
            self._stream = self._protocol.begin_stream(self._flight.head, self._call)
            events += self._stream.begin()
        pieces = self._flight.pieces[self.num_known :]
        self.num_known += len(pieces)
        for piece in merged(pieces):
            events += self._stream.add(piece)
        return b"".join(events)

    def end(self, answer: Answer) -> bytes:
        """The last events of an answer that the log has acknowledged."""
        if self._stream is None:
            return b"".join(self._protocol.answer_events(answer, self._call))
        return self.due() + b"".join(self._stream.end(answer))

    def error(self, refusal: Refusal, request_id: str) -> bytes:
        """The last event of a turn that failed."""
        if self._stream is None:
            return self._protocol.error_event(refusal, request_id)
        return self._stream.error(refusal, request_id)
