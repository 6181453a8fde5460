"""Events as the fold reads them from records: those of the schema, but for the arrays of a turn.

A fold puts the bytes of a turn's arrays together and looks at hardly any number in them. To make an
object of each array takes as long as to decode all the rest of the turn, so here they stay bytes.
"""

from __future__ import annotations

from turnfold.log.records import Record
from turnfold.schemas import codec
from turnfold.schemas.events import (
    Event,
    RewardRevised,
    RolloutAborted,
    RolloutFinished,
    RolloutStarted,
    TurnCompleted,
    TurnFailed,
)
from turnfold.schemas.wire import Logprobs, TokenIds


class RecordedTurn(TurnCompleted, frozen=True, kw_only=True, tag="turn_completed"):
    """A turn whose arrays are the bytes that travel."""

    prompt_tail: bytes  # type: ignore[assignment]
    output_ids: bytes  # type: ignore[assignment]
    logprobs: bytes  # type: ignore[assignment]

    @property
    def is_whole(self) -> bool:
        """Whether each array is some whole numbers."""
        num_ids = len(self.prompt_tail) | len(self.output_ids)
        return not num_ids % TokenIds.itemsize and not len(self.logprobs) % Logprobs.itemsize


_EVENTS: codec.Decoder[Event] = codec.Decoder(Event)
_RECORDED: codec.Decoder[Event] = codec.Decoder(
    RolloutStarted | RecordedTurn | TurnFailed | RolloutFinished | RolloutAborted | RewardRevised
)


def decode_event(record: Record) -> Event:
    """The event in a record. Raises CodecError saying what is wrong with it."""
    return _checked(_decoded(record, _EVENTS, record.content_type), record)


def decode_for_fold(record: Record) -> Event:
    """As `decode_event`, but a turn in msgpack is a `RecordedTurn`."""
    content_type = record.content_type
    if content_type is not None and content_type != codec.MSGPACK:
        return decode_event(record)
    try:
        event = _decoded(record, _RECORDED, content_type)
    except codec.CodecError:
        return decode_event(record)  # which says it of the event as the schema has it
    if isinstance(event, RecordedTurn) and not event.is_whole:
        return decode_event(record)
    return _checked(event, record)


def _decoded(record: Record, decoder: codec.Decoder[Event], content_type: str | None) -> Event:
    if record.value is None:
        raise codec.CodecError("expected an event, got a record without a value")
    return decoder.decode(record.value, content_type)


def _checked(event: Event, record: Record) -> Event:
    if record.key != event.rollout_id.encode():
        raise codec.CodecError(
            f"expected the key to be the rollout_id {event.rollout_id!r}, got {record.key!r}: "
            "all events of a rollout must lie in one partition"
        )
    return event
