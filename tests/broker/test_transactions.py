"""The transaction coordinator, with a clock that the test moves, and crashes at its every step."""

from collections.abc import Callable
from pathlib import Path

import pytest

from turnfold.embedded.broker.errors import Refused
from turnfold.embedded.broker.store import CommittedOffset, Store
from turnfold.embedded.broker.topics import Topics
from turnfold.embedded.broker.transactions import LAST_EPOCH, TransactionCoordinator

MakeBatch = Callable[..., bytes]
MAX = 1 << 20
OFFSET = CommittedOffset("group", "t", 0, 17, "text")


class Harness:
    """A coordinator with one topic of two partitions, "t"."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.now_ms = 1_000_000
        self.open()
        self.topics.create("t", 2, {})

    def open(self) -> None:
        self.store = Store(self.directory / "store.sqlite", fsync=False)
        self.topics = Topics(
            self.directory / "topics", self.store, fsync=False, was_shut_down=False
        )
        self.transactions = TransactionCoordinator(self.store, self.topics, lambda: self.now_ms)

    def crash_and_restart(self) -> None:
        self.store.close()
        for topic in self.topics:
            for log in topic.partitions:
                for segment in log.segments:
                    segment.close()
        self.open()

    def is_open_in(self, number: int) -> bool:
        return bool(self.topics.partition("t", number).producers.open_transactions)

    def committed(self) -> list[CommittedOffset]:
        return self.store.committed_offsets("group")


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


def write(harness: Harness, make_batch: MakeBatch, producer_id: int, epoch: int) -> None:
    """Begin a transaction of "id" with one record in each partition, and an offset."""
    coordinator = harness.transactions
    coordinator.add_partitions("id", producer_id, epoch, [("t", 0), ("t", 1)])
    for number in (0, 1):
        coordinator.check_write(producer_id, epoch, "t", number, is_transactional=True)
        batch = make_batch(b"x", producer=(producer_id, epoch, 0), is_transactional=True)
        harness.topics.partition("t", number).append(batch, max_bytes=MAX)
    coordinator.add_group("id", producer_id, epoch)
    coordinator.add_offsets("id", producer_id, epoch, [OFFSET])


def test_producer_ids_differ_and_a_transactional_id_keeps_its_own(harness: Harness) -> None:
    coordinator = harness.transactions
    plain = {coordinator.init_producer(None, 0)[0] for _ in range(3)}
    first = coordinator.init_producer("id", 1000)
    harness.crash_and_restart()
    second = harness.transactions.init_producer("id", 1000)

    assert len(plain | {first[0]}) == 4
    assert second == (first[0], first[1] + 1)
    assert harness.transactions.init_producer(None, 0)[0] not in plain


def test_a_commit_marks_every_partition_and_commits_the_offsets(
    harness: Harness, make_batch: MakeBatch
) -> None:
    producer = harness.transactions.init_producer("id", 1000)
    write(harness, make_batch, *producer)
    assert harness.is_open_in(0)
    assert harness.committed() == []

    harness.transactions.end("id", *producer, is_commit=True)

    assert not harness.is_open_in(0)
    assert not harness.is_open_in(1)
    assert harness.committed() == [OFFSET]


def test_ending_again_is_fine_only_if_it_asks_for_what_happened(
    harness: Harness, make_batch: MakeBatch
) -> None:
    producer = harness.transactions.init_producer("id", 1000)
    with pytest.raises(Refused, match="INVALID_TXN_STATE"):
        harness.transactions.end("id", *producer, is_commit=True)
    write(harness, make_batch, *producer)
    harness.transactions.end("id", *producer, is_commit=False)
    harness.crash_and_restart()

    harness.transactions.end("id", *producer, is_commit=False)
    with pytest.raises(Refused, match="cannot commit a transaction of 'id' that is aborted"):
        harness.transactions.end("id", *producer, is_commit=True)
    assert harness.committed() == []


def test_writing_needs_an_open_transaction_with_the_partition_in_it(harness: Harness) -> None:
    coordinator = harness.transactions
    producer_id, epoch = coordinator.init_producer("id", 1000)

    with pytest.raises(Refused, match="INVALID_TXN_STATE"):
        coordinator.check_write(producer_id, epoch, "t", 0, is_transactional=True)
    coordinator.add_partitions("id", producer_id, epoch, [("t", 0)])
    coordinator.check_write(producer_id, epoch, "t", 0, is_transactional=True)
    with pytest.raises(Refused, match="partition 1 of 't' is in no open transaction"):
        coordinator.check_write(producer_id, epoch, "t", 1, is_transactional=True)
    with pytest.raises(Refused, match="INVALID_TXN_STATE"):
        coordinator.check_write(999, 0, "t", 0, is_transactional=True)
    coordinator.check_write(999, 0, "t", 0, is_transactional=False)


def test_the_old_epoch_can_do_nothing_any_more(harness: Harness, make_batch: MakeBatch) -> None:
    coordinator = harness.transactions
    producer_id, old = coordinator.init_producer("id", 1000)
    write(harness, make_batch, producer_id, old)

    coordinator.init_producer("id", 1000)

    assert not harness.is_open_in(0)
    attempts: list[Callable[[], None]] = [
        lambda: coordinator.add_partitions("id", producer_id, old, [("t", 0)]),
        lambda: coordinator.add_group("id", producer_id, old),
        lambda: coordinator.add_offsets("id", producer_id, old, [OFFSET]),
        lambda: coordinator.end("id", producer_id, old, is_commit=True),
        lambda: coordinator.check_write(producer_id, old, "t", 0, is_transactional=True),
    ]
    for attempt in attempts:
        with pytest.raises(Refused, match="INVALID_PRODUCER_EPOCH"):
            attempt()
    assert harness.committed() == []


def test_a_transaction_is_aborted_when_its_time_is_up(
    harness: Harness, make_batch: MakeBatch
) -> None:
    producer = harness.transactions.init_producer("id", 1000)
    write(harness, make_batch, *producer)
    harness.now_ms += 1000
    harness.transactions.tick()
    assert harness.is_open_in(0)

    harness.now_ms += 1
    harness.transactions.tick()

    assert not harness.is_open_in(0)
    with pytest.raises(Refused, match="INVALID_PRODUCER_EPOCH"):
        harness.transactions.end("id", *producer, is_commit=True)


def test_an_open_transaction_outlives_a_restart_but_not_its_time(
    harness: Harness, make_batch: MakeBatch
) -> None:
    producer = harness.transactions.init_producer("id", 1000)
    write(harness, make_batch, *producer)

    harness.crash_and_restart()

    assert harness.is_open_in(0)
    harness.transactions.end("id", *producer, is_commit=True)
    assert harness.committed() == [OFFSET]
    write_again = harness.transactions.init_producer("id", 1000)
    harness.transactions.add_partitions("id", *write_again, [("t", 0)])
    harness.crash_and_restart()
    harness.now_ms += 1001
    harness.transactions.tick()
    with pytest.raises(Refused, match="INVALID_PRODUCER_EPOCH"):
        harness.transactions.end("id", *write_again, is_commit=True)


class Crashed(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize("is_commit", [True, False])
@pytest.mark.parametrize("survived_steps", range(1, 5))
def test_a_decision_is_carried_out_after_a_crash_at_any_later_step(
    harness: Harness,
    make_batch: MakeBatch,
    monkeypatch: pytest.MonkeyPatch,
    survived_steps: int,
    is_commit: bool,
) -> None:
    producer = harness.transactions.init_producer("id", 1000)
    write(harness, make_batch, *producer)
    steps = iter(range(survived_steps))

    def crash_after(function: Callable[..., None]) -> Callable[..., None]:
        def wrapper(*arguments: object, **keywords: object) -> None:
            if next(steps, None) is None:
                raise Crashed
            function(*arguments, **keywords)

        return wrapper

    # The decision, a marker in each of two partitions, the offsets if it commits, the result.
    with monkeypatch.context() as patch:
        patch.setattr(Store, "save_transaction", crash_after(Store.save_transaction))
        patch.setattr(Store, "commit_offsets", crash_after(Store.commit_offsets))
        for number in (0, 1):
            log = harness.topics.partition("t", number)
            patch.setattr(log, "append_marker", crash_after(log.append_marker))
        try:
            harness.transactions.end("id", *producer, is_commit=is_commit)
        except Crashed:
            pass
        else:
            assert survived_steps == 4
            assert not is_commit
    harness.crash_and_restart()

    ends = [harness.topics.partition("t", number).end_offset for number in (0, 1)]
    aborted = [bool(harness.topics.partition("t", n).producers.aborted) for n in (0, 1)]
    assert ends == [2, 2]  # the record and one marker
    assert aborted == [not is_commit] * 2
    assert not harness.is_open_in(0)
    assert not harness.is_open_in(1)
    assert harness.committed() == ([OFFSET] if is_commit else [])
    harness.transactions.end("id", *producer, is_commit=is_commit)


@pytest.mark.parametrize("is_next_producer", [False, True])
@pytest.mark.parametrize("is_commit", [True, False])
@pytest.mark.parametrize("survived_steps", range(5))
def test_a_decision_is_carried_out_once_the_disk_is_no_longer_full(
    harness: Harness,
    make_batch: MakeBatch,
    monkeypatch: pytest.MonkeyPatch,
    survived_steps: int,
    is_commit: bool,
    is_next_producer: bool,
) -> None:
    """The request fails at one of its steps; then it is repeated, or another producer begins."""
    producer = harness.transactions.init_producer("id", 1000)
    write(harness, make_batch, *producer)
    steps = iter(range(survived_steps))

    def full_after(function: Callable[..., None]) -> Callable[..., None]:
        def wrapper(*arguments: object, **keywords: object) -> None:
            if next(steps, None) is None:
                raise OSError("no space left on device")
            function(*arguments, **keywords)

        return wrapper

    # The decision, a marker in each of two partitions, the offsets if it commits, the result.
    with monkeypatch.context() as patch:
        patch.setattr(Store, "save_transaction", full_after(Store.save_transaction))
        patch.setattr(Store, "commit_offsets", full_after(Store.commit_offsets))
        for number in (0, 1):
            log = harness.topics.partition("t", number)
            patch.setattr(log, "append_marker", full_after(log.append_marker))
        if survived_steps < 4 or is_commit:
            with pytest.raises(OSError, match="no space"):
                harness.transactions.end("id", *producer, is_commit=is_commit)
    if is_next_producer:
        producer = harness.transactions.init_producer("id", 1000)
    else:
        harness.transactions.end("id", *producer, is_commit=is_commit)

    # What was not stored was not decided: the next producer finds it open, and aborts it.
    is_committed = is_commit and not (is_next_producer and survived_steps == 0)
    assert harness.committed() == ([OFFSET] if is_committed else [])
    for number in (0, 1):
        log = harness.topics.partition("t", number)
        assert log.end_offset == 2  # the record and one marker
        assert bool(log.producers.aborted) is not is_committed
        assert not log.producers.open_transactions
    write(harness, make_batch, *producer)
    harness.transactions.end("id", *producer, is_commit=False)
    assert harness.committed() == ([OFFSET] if is_committed else [])


def test_a_producer_at_its_last_epoch_gets_a_new_id(harness: Harness) -> None:
    coordinator = harness.transactions
    producer_id, _ = coordinator.init_producer("id", 1000)
    coordinator._transactions["id"].epoch = LAST_EPOCH - 1

    other_id, epoch = coordinator.init_producer("id", 1000)

    assert other_id != producer_id
    assert epoch == 0


@pytest.mark.parametrize("timeout_ms", [0, -1, 900_001])
def test_impossible_timeouts_are_refused(harness: Harness, timeout_ms: int) -> None:
    with pytest.raises(Refused, match="INVALID_TRANSACTION_TIMEOUT: expected 1 to 900000 ms"):
        harness.transactions.init_producer("id", timeout_ms)
