"""The transaction coordinator: which producer may write under a transactional id, and how its transaction ends.

A transaction ends in three steps: the decision is stored, every partition gets a marker, and the result is
stored (with the consumer offsets, if it commits). After a crash, or when the disk was full, the first step
tells what is left to do, and doing the second twice changes nothing.
"""

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import msgspec

from turnfold.embedded.broker.errors import ErrorCode, Refused
from turnfold.embedded.broker.store import CommittedOffset, Store
from turnfold.embedded.broker.topics import Topics

MAX_TIMEOUT_MS = 900_000
"""Longest transaction timeout that a producer may ask for (Kafka's default)."""
LAST_EPOCH = 32_766
"""A producer that gets this far gets a new producer id."""


class Phase(Enum):
    """Where a transactional id is in the life of its newest transaction."""

    EMPTY = "empty"
    ONGOING = "ongoing"
    COMMITTING = "committing"
    ABORTING = "aborting"
    COMMITTED = "committed"
    ABORTED = "aborted"


DECIDED = {Phase.COMMITTING: True, Phase.ABORTING: False}
"""Phases in which markers may still be missing, and whether they commit."""


class Transaction(msgspec.Struct):
    """A transactional id, its producer, and its newest transaction."""

    transactional_id: str
    producer_id: int
    epoch: int = 0
    phase: Phase = Phase.EMPTY
    timeout_ms: int = 60_000
    started_ms: int = 0
    partitions: list[tuple[str, int]] = []
    """Topic and number of the partitions written to."""
    offsets: list[CommittedOffset] = []
    """Consumer offsets to commit together with it."""


class TransactionCoordinator:
    """All transactional ids. `now_ms` is the wall clock; call `tick` now and then."""

    def __init__(self, store: Store, topics: Topics, now_ms: Callable[[], int]) -> None:
        self._store = store
        self._topics = topics
        self._now_ms = now_ms
        self._transactions: dict[str, Transaction] = {}
        self._by_producer: dict[int, Transaction] = {}
        for state in store.transactions():
            self._remember(msgspec.json.decode(state, type=Transaction))
        self._finish_after_crash()

    def init_producer(self, transactional_id: str | None, timeout_ms: int) -> tuple[int, int]:
        """(producer id, epoch) for a producer that starts; whoever had the id before is fenced off.

        An open transaction of the previous producer is aborted. Without a transactional id, a new producer id.
        """
        if transactional_id is None:
            return self._store.next_producer_id(), 0
        if not 0 < timeout_ms <= MAX_TIMEOUT_MS:
            raise Refused(
                ErrorCode.INVALID_TRANSACTION_TIMEOUT,
                f"expected 1 to {MAX_TIMEOUT_MS} ms, got {timeout_ms}",
            )
        transaction = self._transactions.get(transactional_id)
        if transaction is None:
            transaction = Transaction(transactional_id, self._store.next_producer_id())
        else:
            self._fence(transaction)
            if transaction.epoch >= LAST_EPOCH:
                del self._by_producer[transaction.producer_id]
                transaction = Transaction(transactional_id, self._store.next_producer_id())
        transaction.timeout_ms = timeout_ms
        self._remember(transaction)
        self._save(transaction)
        return transaction.producer_id, transaction.epoch

    def add_partitions(
        self,
        transactional_id: str,
        producer_id: int,
        epoch: int,
        partitions: Iterable[tuple[str, int]],
    ) -> None:
        """The producer is about to write to these partitions. Raises Refused if it may not."""
        transaction = self._owned(transactional_id, producer_id, epoch)
        new = [p for p in partitions if p not in transaction.partitions]
        self._open(transaction)
        transaction.partitions.extend(new)
        self._save(transaction)

    def add_group(self, transactional_id: str, producer_id: int, epoch: int) -> None:
        """The producer is about to send offsets of a group. Raises Refused if it may not."""
        transaction = self._owned(transactional_id, producer_id, epoch)
        self._open(transaction)
        self._save(transaction)

    def add_offsets(
        self,
        transactional_id: str,
        producer_id: int,
        epoch: int,
        offsets: Iterable[CommittedOffset],
    ) -> None:
        """Offsets that are committed if the transaction is. Raises Refused if there is none."""
        transaction = self._owned(transactional_id, producer_id, epoch)
        if transaction.phase is not Phase.ONGOING:
            raise Refused(
                ErrorCode.INVALID_TXN_STATE, f"{transactional_id!r} has no open transaction"
            )
        transaction.offsets.extend(offsets)
        self._save(transaction)

    def end(self, transactional_id: str, producer_id: int, epoch: int, *, is_commit: bool) -> None:
        """Commit or abort. A repeated request is fine if it asks for what happened, or was decided.

        Raises Refused: INVALID_TXN_STATE if there is nothing to end, or it ended the other way.
        """
        transaction = self._owned(transactional_id, producer_id, epoch)
        if transaction.phase is (Phase.COMMITTED if is_commit else Phase.ABORTED):
            return
        if DECIDED.get(transaction.phase) is is_commit:
            self._settle(transaction)
            return
        if transaction.phase is not Phase.ONGOING:
            verb = "commit" if is_commit else "abort"
            raise Refused(
                ErrorCode.INVALID_TXN_STATE,
                f"cannot {verb} a transaction of {transactional_id!r} that is "
                f"{transaction.phase.value}",
            )
        self._finish(transaction, is_commit=is_commit)

    def check_write(
        self, producer_id: int, epoch: int, topic: str, partition: int, *, is_transactional: bool
    ) -> None:
        """Raises Refused if this producer may not append to the partition: it was fenced off, or the batch
        is transactional and the partition was not added to its open transaction."""
        transaction = self._by_producer.get(producer_id)
        if transaction is not None and epoch < transaction.epoch:
            raise Refused(
                ErrorCode.INVALID_PRODUCER_EPOCH,
                f"{transaction.transactional_id!r} is at epoch {transaction.epoch}, "
                f"the batch came with {epoch}",
            )
        if not is_transactional:
            return
        is_open = transaction is not None and transaction.phase is Phase.ONGOING
        if transaction is None or not is_open or (topic, partition) not in transaction.partitions:
            raise Refused(
                ErrorCode.INVALID_TXN_STATE,
                f"partition {partition} of {topic!r} is in no open transaction of "
                f"producer {producer_id}",
            )

    def tick(self) -> None:
        """Abort transactions that have been open for too long, and fence off their producers."""
        now_ms = self._now_ms()
        for transaction in self._transactions.values():
            self._settle(transaction)
            is_late = now_ms - transaction.started_ms > transaction.timeout_ms
            if transaction.phase is Phase.ONGOING and is_late:
                self._fence(transaction)

    def _remember(self, transaction: Transaction) -> None:
        self._transactions[transaction.transactional_id] = transaction
        self._by_producer[transaction.producer_id] = transaction

    def _save(self, transaction: Transaction) -> None:
        state = msgspec.json.encode(transaction).decode()
        self._store.save_transaction(transaction.transactional_id, transaction.producer_id, state)

    def _owned(self, transactional_id: str, producer_id: int, epoch: int) -> Transaction:
        """The transaction, if `producer_id` and `epoch` are those that may act on it."""
        transaction = self._transactions.get(transactional_id)
        if transaction is None or transaction.producer_id != producer_id:
            raise Refused(
                ErrorCode.INVALID_PRODUCER_ID_MAPPING,
                f"producer {producer_id} does not belong to {transactional_id!r}",
            )
        if transaction.epoch != epoch:
            raise Refused(
                ErrorCode.INVALID_PRODUCER_EPOCH,
                f"{transactional_id!r} is at epoch {transaction.epoch}, "
                f"the request came with {epoch}",
            )
        return transaction

    def _open(self, transaction: Transaction) -> None:
        self._settle(transaction)
        if transaction.phase is not Phase.ONGOING:
            transaction.phase = Phase.ONGOING
            transaction.started_ms = self._now_ms()

    def _fence(self, transaction: Transaction) -> None:
        """Give the id a new epoch, and abort what the old one left open."""
        self._settle(transaction)
        transaction.epoch += 1
        if transaction.phase is Phase.ONGOING:
            self._finish(transaction, is_commit=False)
        else:
            transaction.phase = Phase.EMPTY
            self._save(transaction)

    def _settle(self, transaction: Transaction) -> None:
        """Carry out what was decided, if a full disk or a crash came in between."""
        is_commit = DECIDED.get(transaction.phase)
        if is_commit is not None:
            self._finish(transaction, is_commit=is_commit)

    def _finish(self, transaction: Transaction, *, is_commit: bool) -> None:
        """Decide, write the markers, and store the result.

        Any of it fails while the disk is full. What is not stored is not decided: only then is the phase
        another one, and a repeated call takes up what is left.
        """
        self._save_as(transaction, phase=Phase.COMMITTING if is_commit else Phase.ABORTING)
        now_ms = self._now_ms()
        for topic, number in transaction.partitions:
            partition = self._topics.find_partition(topic, number)
            if partition is not None:
                partition.append_marker(
                    transaction.producer_id, transaction.epoch, is_commit=is_commit, now_ms=now_ms
                )
        if is_commit and transaction.offsets:
            self._store.commit_offsets(transaction.offsets)
        self._save_as(
            transaction,
            phase=Phase.COMMITTED if is_commit else Phase.ABORTED,
            partitions=[],
            offsets=[],
        )

    def _save_as(self, transaction: Transaction, **changes: Any) -> None:
        """Change the transaction once the change is stored."""
        self._save(msgspec.structs.replace(transaction, **changes))
        for name, value in changes.items():
            setattr(transaction, name, value)

    def _finish_after_crash(self) -> None:
        for transaction in self._transactions.values():
            self._settle(transaction)
