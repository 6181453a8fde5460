"""What a partition knows of its producers: their recent batches, and their open and aborted transactions.

All of it is a fold over batch headers, so that it can be rebuilt from the log after a crash.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from turnfold.embedded.broker.errors import ErrorCode, Refused
from turnfold.embedded.broker.records import MAX_SEQUENCE, BatchHeader

DEDUPE_WINDOW = 5
"""Batches remembered for each producer; a producer has at most this many in flight (Kafka's own number)."""


class SentBatch(NamedTuple):
    """The sequence numbers of one batch, and the offset it was given."""

    first_sequence: int
    last_sequence: int
    base_offset: int


class AbortedTransaction(NamedTuple):
    """Offsets `first_offset` to `last_offset` (the marker); of these, the producer's batches are void."""

    producer_id: int
    first_offset: int
    last_offset: int


@dataclass
class Producer:
    """One producer: its epoch and its newest batches, oldest first."""

    epoch: int
    recent: list[SentBatch] = field(default_factory=list)


class ProducerStates:
    """The producers of one partition."""

    def __init__(self) -> None:
        self.producers: dict[int, Producer] = {}
        self.open_transactions: dict[int, int] = {}
        """First offset of the open transaction, by producer id."""
        self.aborted: list[AbortedTransaction] = []

    def find_duplicate(self, header: BatchHeader) -> int | None:
        """The offset this very batch was given before, or None if it is the next one.

        Raises Refused: INVALID_PRODUCER_EPOCH for an epoch that was fenced off,
        OUT_OF_ORDER_SEQUENCE_NUMBER where a batch is missing in between.
        """
        if not header.is_idempotent:
            return None
        producer = self.producers.get(header.producer_id)
        # A producer whose batches have all been deleted may go on with any number.
        if producer is None:
            return None
        if header.producer_epoch < producer.epoch:
            raise Refused(
                ErrorCode.INVALID_PRODUCER_EPOCH,
                f"producer {header.producer_id} is at epoch {producer.epoch}, "
                f"the batch came with {header.producer_epoch}",
            )
        recent = producer.recent if header.producer_epoch == producer.epoch else []
        for sent in recent:
            if (sent.first_sequence, sent.last_sequence) == (
                header.base_sequence,
                header.last_sequence,
            ):
                return sent.base_offset
        expected = (recent[-1].last_sequence + 1) & MAX_SEQUENCE if recent else 0
        if header.base_sequence != expected:
            raise Refused(
                ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
                f"expected sequence {expected} of producer {header.producer_id}, "
                f"got {header.base_sequence}",
            )
        return None

    def apply(self, header: BatchHeader) -> None:
        """Take note of a data batch that was appended at `header.base_offset`."""
        if not header.is_idempotent:
            return
        producer = self._producer_at(header.producer_id, header.producer_epoch)
        sent = SentBatch(header.base_sequence, header.last_sequence, header.base_offset)
        producer.recent = [*producer.recent, sent][-DEDUPE_WINDOW:]
        if header.is_transactional:
            self.open_transactions.setdefault(header.producer_id, header.base_offset)

    def apply_marker(self, header: BatchHeader, *, is_commit: bool) -> None:
        """Take note of a marker that was appended at `header.base_offset`."""
        self._producer_at(header.producer_id, header.producer_epoch)
        first_offset = self.open_transactions.pop(header.producer_id, None)
        if first_offset is not None and not is_commit:
            self.aborted.append(
                AbortedTransaction(header.producer_id, first_offset, header.base_offset)
            )

    def last_stable_offset(self, end_offset: int) -> int:
        """The offset below which every transaction is decided."""
        return min(self.open_transactions.values(), default=end_offset)

    def aborted_between(self, first_offset: int, last_offset: int) -> list[AbortedTransaction]:
        """Aborted transactions that overlap these offsets, both included."""
        return [
            transaction
            for transaction in self.aborted
            if transaction.last_offset >= first_offset and transaction.first_offset <= last_offset
        ]

    def is_void(self, producer_id: int, offset: int) -> bool:
        """Whether a transactional batch of this producer at `offset` was aborted."""
        return any(
            transaction.producer_id == producer_id
            and transaction.first_offset <= offset <= transaction.last_offset
            for transaction in self.aborted
        )

    def forget_aborted_before(self, offset: int) -> None:
        """Drop the aborted transactions that ended below `offset`: none of their batches is left."""
        self.aborted = [t for t in self.aborted if t.last_offset >= offset]

    def to_json(self) -> dict[str, Any]:
        """All of the state, in JSON types."""
        return {
            "producers": [
                [producer_id, producer.epoch, producer.recent]
                for producer_id, producer in self.producers.items()
            ],
            "open_transactions": list(self.open_transactions.items()),
            "aborted": self.aborted,
        }

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> "ProducerStates":
        """The inverse of `to_json`."""
        states = cls()
        for producer_id, epoch, recent in state["producers"]:
            states.producers[producer_id] = Producer(epoch, [SentBatch(*sent) for sent in recent])
        states.open_transactions = dict(state["open_transactions"])
        states.aborted = [AbortedTransaction(*transaction) for transaction in state["aborted"]]
        return states

    def _producer_at(self, producer_id: int, epoch: int) -> Producer:
        """The producer, starting afresh if `epoch` is a new one."""
        producer = self.producers.get(producer_id)
        if producer is None or producer.epoch != epoch:
            producer = self.producers[producer_id] = Producer(epoch)
        return producer
