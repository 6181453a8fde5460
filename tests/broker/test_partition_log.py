"""One partition on disk: appending, reading, deleting, and what is left of it after a crash."""

import asyncio
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turnfold.embedded.broker.errors import ErrorCode, Refused
from turnfold.embedded.broker.partition_log import PartitionLog
from turnfold.embedded.broker.records import HEADER_SIZE, read_header, read_records

MakeBatch = Callable[..., bytes]
MAX = 1 << 20


def open_log(directory: Path, segment_bytes: int = 1 << 20, **settings: Any) -> PartitionLog:
    return PartitionLog(directory, segment_bytes=segment_bytes, **settings)


def crash(log: PartitionLog) -> None:
    """Drop the files as a killed process does: nothing is saved."""
    for segment in log.segments:
        segment.close()


def values(log: PartitionLog, offset: int = 0, **how: Any) -> list[bytes]:
    """Values of all records from `offset`, as a consumer would see them before it filters anything."""
    found = []
    how = {"read_committed": False, **how}
    while offset < log.end_offset:
        chunks, _ = log.read(offset, MAX, **how)
        if not chunks:
            break
        for raw in split_batches(b"".join(chunks)):
            header = read_header(raw)
            found += [r.value for r in read_records(raw) if not header.is_control]
            offset = header.last_offset + 1
    return found


def split_batches(data: bytes) -> list[bytes]:
    batches = []
    while data:
        size = read_header(data).size
        batches.append(data[:size])
        data = data[size:]
    return batches


def test_offsets_count_records_and_reading_starts_at_the_batch_that_holds_one(
    tmp_path: Path, make_batch: MakeBatch
) -> None:
    log = open_log(tmp_path)

    assert log.append(make_batch(b"a", b"b", b"c"), max_bytes=MAX) == 0
    assert log.append(make_batch(b"d"), max_bytes=MAX) == 3
    assert log.append(make_batch(b"e"), max_bytes=MAX) == 4

    assert log.end_offset == 5
    chunks, aborted = log.read(2, MAX, read_committed=False)
    assert [read_header(raw).base_offset for raw in split_batches(chunks[0])] == [0, 3, 4]
    assert aborted is None


def test_reading_returns_one_batch_however_small_the_limit(
    tmp_path: Path, make_batch: MakeBatch
) -> None:
    log = open_log(tmp_path)
    for _ in range(3):
        log.append(make_batch(b"x" * 1000), max_bytes=MAX)

    (chunk,) = log.read(1, 10, read_committed=False).chunks

    assert [read_header(raw).base_offset for raw in split_batches(chunk)] == [1]
    assert log.available_bytes(1, MAX, read_committed=False) == 2 * len(chunk)


@pytest.mark.parametrize("was_shut_down", [True, False])
def test_a_reopened_log_is_the_same(
    tmp_path: Path, make_batch: MakeBatch, was_shut_down: bool
) -> None:
    log = open_log(tmp_path, segment_bytes=200)
    for i in range(10):
        log.append(make_batch(str(i).encode()), max_bytes=MAX)
    if was_shut_down:
        log.close()
    else:
        crash(log)

    reopened = open_log(tmp_path, segment_bytes=200, was_shut_down=was_shut_down)

    assert len(list(tmp_path.glob("*.log"))) > 1
    assert values(reopened) == [str(i).encode() for i in range(10)]
    assert reopened.append(make_batch(b"next"), max_bytes=MAX) == 10


@pytest.mark.parametrize("left", [1, 11, HEADER_SIZE - 1, HEADER_SIZE, HEADER_SIZE + 5])
def test_a_batch_of_which_only_the_beginning_was_written_is_cut_off(
    tmp_path: Path, make_batch: MakeBatch, left: int
) -> None:
    log = open_log(tmp_path)
    log.append(make_batch(b"whole"), max_bytes=MAX)
    whole = log.size
    log.append(make_batch(b"torn" * 100), max_bytes=MAX)
    crash(log)
    (path,) = tmp_path.glob("*.log")
    path.write_bytes(path.read_bytes()[: whole + left])

    reopened = open_log(tmp_path)

    assert (reopened.end_offset, reopened.size, path.stat().st_size) == (1, whole, whole)
    assert reopened.append(make_batch(b"next"), max_bytes=MAX) == 1
    assert values(reopened) == [b"whole", b"next"]


def test_a_last_batch_with_a_wrong_checksum_is_cut_off(
    tmp_path: Path, make_batch: MakeBatch
) -> None:
    log = open_log(tmp_path)
    log.append(make_batch(b"whole"), max_bytes=MAX)
    log.append(make_batch(b"torn" * 100), max_bytes=MAX)
    crash(log)
    (path,) = tmp_path.glob("*.log")
    # The file had grown, but the disk had not got the last bytes yet.
    path.write_bytes(path.read_bytes()[:-50] + bytes(50))

    assert values(open_log(tmp_path)) == [b"whole"]


def test_resent_batches_are_recognised_after_a_crash(tmp_path: Path, make_batch: MakeBatch) -> None:
    log = open_log(tmp_path)
    for sequence in range(8):
        log.append(make_batch(b"x", producer=(7, 0, sequence)), max_bytes=MAX)
    crash(log)

    reopened = open_log(tmp_path)

    assert reopened.append(make_batch(b"x", producer=(7, 0, 5)), max_bytes=MAX) == 5
    assert reopened.end_offset == 8
    with pytest.raises(Refused, match="OUT_OF_ORDER"):
        reopened.append(make_batch(b"x", producer=(7, 0, 9)), max_bytes=MAX)
    with pytest.raises(Refused, match="OUT_OF_ORDER"):  # older than the five that are remembered
        reopened.append(make_batch(b"x", producer=(7, 0, 1)), max_bytes=MAX)
    assert reopened.append(make_batch(b"x", producer=(7, 0, 8)), max_bytes=MAX) == 8


def test_a_new_epoch_starts_at_zero_and_fences_the_old_one(
    tmp_path: Path, make_batch: MakeBatch
) -> None:
    log = open_log(tmp_path)
    log.append(make_batch(b"x", b"y", producer=(7, 0, 0)), max_bytes=MAX)

    with pytest.raises(Refused, match="OUT_OF_ORDER"):
        log.append(make_batch(b"x", producer=(7, 1, 2)), max_bytes=MAX)
    assert log.append(make_batch(b"x", producer=(7, 1, 0)), max_bytes=MAX) == 2
    with pytest.raises(Refused, match="INVALID_PRODUCER_EPOCH"):
        log.append(make_batch(b"x", producer=(7, 0, 2)), max_bytes=MAX)


def test_sequence_numbers_start_again_after_the_largest(
    tmp_path: Path, make_batch: MakeBatch
) -> None:
    log = open_log(tmp_path)
    log.append(make_batch(b"x", b"y", producer=(7, 0, 2**31 - 1)), max_bytes=MAX)

    assert log.append(make_batch(b"z", producer=(7, 0, 1)), max_bytes=MAX) == 2


def test_only_one_sound_batch_is_accepted(tmp_path: Path, make_batch: MakeBatch) -> None:
    log = open_log(tmp_path)
    batch = make_batch(b"value")
    older_format = bytearray(batch)
    older_format[16] = 1
    refused = {
        "no header": (batch[:20], ErrorCode.CORRUPT_MESSAGE),
        "cut short": (batch[:-1], ErrorCode.CORRUPT_MESSAGE),
        "changed": (batch[:-1] + b"?", ErrorCode.CORRUPT_MESSAGE),
        "older format": (bytes(older_format), ErrorCode.CORRUPT_MESSAGE),
        "two batches": (batch + batch, ErrorCode.INVALID_RECORD),
        "too large": (make_batch(bytes(MAX)), ErrorCode.MESSAGE_TOO_LARGE),
        "negative length": (
            batch[:8] + struct.pack(">i", -100) + batch[12:],
            ErrorCode.CORRUPT_MESSAGE,
        ),
    }

    for name, (data, code) in refused.items():
        with pytest.raises(Refused) as caught:
            log.append(data, max_bytes=MAX)
        assert caught.value.code is code, name
    assert (log.end_offset, log.size) == (0, 0)


def test_committed_readers_stop_at_the_first_open_transaction(
    tmp_path: Path, make_batch: MakeBatch
) -> None:
    log = open_log(tmp_path)
    log.append(make_batch(b"plain"), max_bytes=MAX)
    log.append(make_batch(b"a", producer=(1, 0, 0), is_transactional=True), max_bytes=MAX)
    log.append(make_batch(b"b", producer=(2, 0, 0), is_transactional=True), max_bytes=MAX)
    assert (log.last_stable_offset, values(log, read_committed=True)) == (1, [b"plain"])

    log.append_marker(1, 0, is_commit=False, now_ms=1)
    assert log.last_stable_offset == 2
    log.append_marker(2, 0, is_commit=True, now_ms=1)

    assert log.last_stable_offset == log.end_offset == 5
    aborted = log.read(0, MAX, read_committed=True).aborted
    assert aborted == [(1, 1, 3)]
    assert log.read(4, MAX, read_committed=True).aborted == []


def test_transactions_are_known_after_a_crash(tmp_path: Path, make_batch: MakeBatch) -> None:
    log = open_log(tmp_path)
    log.append(make_batch(b"a", producer=(1, 0, 0), is_transactional=True), max_bytes=MAX)
    log.append_marker(1, 0, is_commit=False, now_ms=1)
    log.append(make_batch(b"b", producer=(2, 0, 0), is_transactional=True), max_bytes=MAX)
    crash(log)

    reopened = open_log(tmp_path)

    assert reopened.last_stable_offset == 2
    assert reopened.producers.aborted == [(1, 0, 1)]
    reopened.append_marker(2, 0, is_commit=True, now_ms=1)
    assert reopened.last_stable_offset == 4


def test_deleted_records_stay_deleted_and_producers_stay_known(
    tmp_path: Path, make_batch: MakeBatch
) -> None:
    log = open_log(tmp_path, segment_bytes=200)
    for sequence in range(10):
        log.append(make_batch(b"x", producer=(7, 0, sequence)), max_bytes=MAX)
    size = log.size

    assert log.delete_before(4) == 4
    assert log.size < size
    crash(log)
    log = open_log(tmp_path, segment_bytes=200)
    assert (log.start_offset, len(values(log, 4))) == (4, 6)

    assert log.delete_before(10) == 10
    assert log.size == 0
    crash(log)
    log = open_log(tmp_path, segment_bytes=200)
    assert (log.start_offset, log.end_offset) == (10, 10)
    assert log.append(make_batch(b"x", producer=(7, 0, 9)), max_bytes=MAX) == 9
    assert log.append(make_batch(b"x", producer=(7, 0, 10)), max_bytes=MAX) == 10


def test_retention_deletes_old_batches_and_what_is_over_the_size(
    tmp_path: Path, make_batch: MakeBatch
) -> None:
    log = open_log(tmp_path)
    for timestamp in (100, 200, 300, 400):
        log.append(make_batch(b"x" * 100, timestamp=timestamp), max_bytes=MAX)
    size = log.size // 4

    log.expire(oldest_ms=200, max_size=None)
    assert log.start_offset == 1
    log.expire(oldest_ms=None, max_size=2 * size)
    assert log.start_offset == 2
    log.expire(oldest_ms=None, max_size=2 * size - 1)
    assert log.start_offset == 2  # deleting another would leave less than the topic may keep
    log.expire(oldest_ms=None, max_size=None)
    assert log.start_offset == 2


def test_retention_spares_open_transactions(tmp_path: Path, make_batch: MakeBatch) -> None:
    log = open_log(tmp_path)
    log.append(make_batch(b"old"), max_bytes=MAX)
    log.append(make_batch(b"a", producer=(1, 0, 0), is_transactional=True), max_bytes=MAX)

    log.expire(oldest_ms=10**15, max_size=None)

    assert (log.start_offset, log.last_stable_offset) == (1, 1)


def test_a_full_disk_is_an_error_and_leaves_the_log_as_it_was(
    tmp_path: Path, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(tmp_path)
    log.append(make_batch(b"kept"), max_bytes=MAX)

    def no_space(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("turnfold.embedded.broker.segments.os.pwrite", no_space)
        with pytest.raises(Refused, match=r"KAFKA_STORAGE_ERROR: .*No space left"):
            log.append(make_batch(b"lost"), max_bytes=MAX)

    assert log.append(make_batch(b"next"), max_bytes=MAX) == 1
    assert values(log) == [b"kept", b"next"]


def test_the_first_record_at_or_after_a_time_is_found_inside_a_compressed_batch(
    tmp_path: Path, make_batch: MakeBatch
) -> None:
    log = open_log(tmp_path)
    log.append(make_batch(b"a", b"b", timestamp=1000, compression=1), max_bytes=MAX)
    log.append(make_batch(b"c", timestamp=3000), max_bytes=MAX)

    assert log.find_timestamp(0) == (0, 1000)
    assert log.find_timestamp(1001) == (2, 3000)
    assert log.find_timestamp(3001) is None


async def test_waiters_are_woken_by_records_markers_and_closing(
    tmp_path: Path, make_batch: MakeBatch
) -> None:
    log = open_log(tmp_path)
    news = asyncio.Event()
    log.add_waiter(news)
    transactional = make_batch(b"a", producer=(1, 0, 0), is_transactional=True)
    for happen in (
        lambda: log.append(transactional, max_bytes=MAX),
        lambda: log.append_marker(1, 0, is_commit=True, now_ms=1),
        log.close,
    ):
        news.clear()
        happen()
        assert news.is_set()
