"""One partition: segment files, an index of their batches in memory, and what is known of its producers.

The log covers the offsets from `start_offset` up to, but without, `end_offset`. A batch is in the log once
`append` has returned: the operating system has its bytes, so that killing the process does not lose it
(with `fsync`, the disk has them too). On start, the index and the producers are rebuilt from the batch headers.

Files of a partition:
    00000000000000000000.log  batches, see segments.py
    state.json                start offset, and the producers as they were at `applied_to`
    swap.json                 only while a compacted file takes the place of its originals
"""

import asyncio
import bisect
import shutil
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from turnfold.embedded.broker.errors import ErrorCode, Refused
from turnfold.embedded.broker.files import flush_directory, read_json, write_json
from turnfold.embedded.broker.producers import AbortedTransaction, ProducerStates
from turnfold.embedded.broker.records import (
    BatchHeader,
    check_produced_batch,
    marker_is_commit,
    read_header,
    read_records,
    transaction_marker,
    with_base_offset,
)
from turnfold.embedded.broker.segments import Segment, segment_name

COMPACTED_FILE = "compacted.new"


class BatchEntry(NamedTuple):
    """Where one batch is, and the parts of its header that reading needs."""

    base_offset: int
    last_offset: int
    segment: Segment
    position: int
    size: int
    max_timestamp: int
    is_control: bool


class ReadResult(NamedTuple):
    """Whole batches, and the transactions in them to leave out (None: the reader wants everything)."""

    chunks: list[bytes]
    aborted: list[AbortedTransaction] | None


class PartitionLog:
    """An open partition. Everything here runs in the broker's event loop and takes no lock."""

    def __init__(
        self,
        directory: Path,
        *,
        segment_bytes: int,
        fsync: bool = False,
        was_shut_down: bool = False,
    ) -> None:
        """Open the partition in `directory`, or make a new one.

        `was_shut_down` says that the last broker here closed its files; else the newest segment's checksums
        are all computed, to find the tail that a crash may have torn.
        """
        self.directory = directory
        self.segment_bytes = segment_bytes
        self.is_closed = False
        self.start_offset = 0
        self.end_offset = 0
        self.compacted_to = 0
        """Batches below this offset have been through compaction."""
        self.producers = ProducerStates()
        self.segments: list[Segment] = []
        self._index: list[BatchEntry] = []
        self._fsync = fsync
        self._waiters: set[asyncio.Event] = set()
        directory.mkdir(parents=True, exist_ok=True)
        if fsync:
            for parent in list(directory.parents)[:2]:
                flush_directory(parent)
        self._recover(was_shut_down=was_shut_down)

    @property
    def last_stable_offset(self) -> int:
        """Below this offset every transaction is decided; readers of committed records stop here."""
        return max(self.producers.last_stable_offset(self.end_offset), self.start_offset)

    @property
    def size(self) -> int:
        """Bytes in all segment files."""
        return sum(segment.size for segment in self.segments)

    # Writing

    def append(self, batch: bytes, *, max_bytes: int) -> int:
        """Append one batch from a client and return its base offset.

        A batch that is still remembered is not appended again; its first offset is returned.
        Raises Refused as `check_produced_batch` and `ProducerStates.find_duplicate` do, and with
        KAFKA_STORAGE_ERROR when it cannot be written.
        """
        header = check_produced_batch(batch, max_bytes)
        duplicate_of = self.producers.find_duplicate(header)
        if duplicate_of is not None:
            return duplicate_of
        placed = self._write(header, batch)
        self.producers.apply(placed)
        self._wake_waiters()
        return placed.base_offset

    def append_marker(
        self, producer_id: int, producer_epoch: int, *, is_commit: bool, now_ms: int
    ) -> None:
        """End the producer's open transaction; nothing happens if it has none here."""
        if producer_id not in self.producers.open_transactions:
            return
        marker = transaction_marker(producer_id, producer_epoch, is_commit=is_commit, now_ms=now_ms)
        placed = self._write(read_header(marker), marker)
        self.producers.apply_marker(placed, is_commit=is_commit)
        self._wake_waiters()

    # Reading

    def read(self, offset: int, max_bytes: int, *, read_committed: bool) -> ReadResult:
        """Batches from the one that holds `offset`: at least one if there is any, then up to `max_bytes`."""
        limit = self.last_stable_offset if read_committed else self.end_offset
        entries: list[BatchEntry] = []
        size = 0
        for entry in self._entries_from(offset):
            if entry.base_offset >= limit or (entries and size + entry.size > max_bytes):
                break
            entries.append(entry)
            size += entry.size
        aborted = None
        if read_committed:
            last_offset = entries[-1].last_offset if entries else offset
            aborted = self.producers.aborted_between(offset, last_offset)
        return ReadResult(list(_read_runs(entries)), aborted)

    def available_bytes(self, offset: int, enough: int, *, read_committed: bool) -> int:
        """Bytes that `read` could return from `offset`; counting stops at `enough`."""
        limit = self.last_stable_offset if read_committed else self.end_offset
        size = 0
        for entry in self._entries_from(offset):
            if entry.base_offset >= limit or size >= enough:
                break
            size += entry.size
        return size

    def find_timestamp(self, timestamp_ms: int) -> tuple[int, int] | None:
        """(offset, timestamp) of the first record written at `timestamp_ms` or later."""
        for entry in self._index:
            if entry.max_timestamp < timestamp_ms or entry.is_control:
                continue
            for record in read_records(entry.segment.read(entry.position, entry.size)):
                if record.timestamp >= timestamp_ms and record.offset >= self.start_offset:
                    return record.offset, record.timestamp
        return None

    def add_waiter(self, waiter: asyncio.Event) -> None:
        """Set `waiter` whenever something is appended, or the partition is closed."""
        self._waiters.add(waiter)

    def remove_waiter(self, waiter: asyncio.Event) -> None:
        self._waiters.discard(waiter)

    # Deleting

    def delete_before(self, offset: int) -> int:
        """Delete the records below `offset` and return the new start offset."""
        self.start_offset = max(self.start_offset, min(offset, self.end_offset))
        if self.start_offset == self.end_offset and self.segments and self.segments[-1].size:
            self.roll()
        self.producers.forget_aborted_before(self.start_offset)
        # The new start is on file before anything is removed, so that a crash cannot bring half of it back.
        self._save_state()
        self._drop_index_below_start()
        in_use = {id(entry.segment) for entry in self._index} | {id(self.segments[-1])}
        for segment in [s for s in self.segments if id(s) not in in_use]:
            self.segments.remove(segment)
            segment.delete()
        return self.start_offset

    def expire(self, *, oldest_ms: int | None, max_size: int | None) -> None:
        """Delete from the start: batches older than `oldest_ms`, and what exceeds `max_size` bytes.

        Nothing at or above the last stable offset is deleted.
        """
        surplus = sum(entry.size for entry in self._index) - max_size if max_size is not None else 0
        delete_to = self.start_offset
        for entry in self._index:
            is_old = oldest_ms is not None and entry.max_timestamp < oldest_ms
            if (
                not (is_old or surplus >= entry.size)
                or entry.last_offset >= self.last_stable_offset
            ):
                break
            surplus -= entry.size
            delete_to = entry.last_offset + 1
        if delete_to > self.start_offset:
            self.delete_before(delete_to)

    # Compaction (compaction.py plans it and writes the new file)

    def dirty_bytes(self) -> int:
        """Bytes that have not been through compaction."""
        return sum(entry.size for entry in self._entries_from(self.compacted_to))

    def entries_of(self, segment: Segment) -> list[BatchEntry]:
        """The index of one segment."""
        return [entry for entry in self._index if entry.segment is segment]

    def roll(self) -> None:
        """Close the newest segment for writing: what comes next goes to a new file."""
        self.segments.append(Segment(self.directory / segment_name(self.end_offset)))
        if self._fsync:
            flush_directory(self.directory)

    def replace_segments(
        self, old: list[Segment], compacted: Path, batches: list[tuple[BatchHeader, int]]
    ) -> None:
        """Put the file `compacted`, with `batches` at their positions in it, in the place of `old`.

        `old` are the first segments of the log, closed for writing. swap.json is the point of no return: before
        it a crash leaves the old files, after it the next start finishes the job.
        """
        compacted_to = self.segments[len(old)].base_offset
        self.compacted_to = compacted_to
        self.producers.forget_aborted_before(compacted_to)
        names = [segment.path.name for segment in old]
        swap = {"new": compacted.name, "old": names, "state": self._state()}
        write_json(self._swap_path, swap, fsync=self._fsync)
        for segment in old:
            segment.close()
        self._finish_swap()
        segment = Segment(self.directory / names[0])
        self.segments[: len(old)] = [segment]
        kept = [_entry(header, segment, position) for header, position in batches]
        self._index = kept + [e for e in self._index if e.base_offset >= compacted_to]
        self._drop_index_below_start()

    # Closing

    def close(self) -> None:
        """Close the files. Whoever waits for records is woken."""
        if not self.is_closed:
            self.is_closed = True
            self._save_state()
            for segment in self.segments:
                segment.close()
        self._wake_waiters()

    def delete(self) -> None:
        """Close, and remove all files."""
        self.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def _state_path(self) -> Path:
        return self.directory / "state.json"

    @property
    def _swap_path(self) -> Path:
        return self.directory / "swap.json"

    def _write(self, header: BatchHeader, batch: bytes) -> BatchHeader:
        """Append the batch at the end offset, and return its header with that offset."""
        placed = header._replace(base_offset=self.end_offset, leader_epoch=0)
        try:
            if self.segments[-1].size and self.segments[-1].size + header.size > self.segment_bytes:
                self.roll()
            segment = self.segments[-1]
            position = segment.append(with_base_offset(batch, placed.base_offset))
            if self._fsync:
                segment.flush_to_disk()
        except OSError as error:
            raise Refused(ErrorCode.KAFKA_STORAGE_ERROR, str(error)) from error
        self._index.append(_entry(placed, segment, position))
        self.end_offset = placed.last_offset + 1
        return placed

    def _entries_from(self, offset: int) -> Iterator[BatchEntry]:
        """Index entries from the batch that holds `offset`, or else the next one."""
        first = bisect.bisect_left(self._index, offset, key=lambda entry: entry.last_offset)
        for number in range(first, len(self._index)):
            yield self._index[number]

    def _drop_index_below_start(self) -> None:
        first = bisect.bisect_left(
            self._index, self.start_offset, key=lambda entry: entry.last_offset
        )
        del self._index[:first]

    def _wake_waiters(self) -> None:
        for waiter in self._waiters:
            waiter.set()

    # State and recovery

    def _state(self) -> dict[str, Any]:
        return {
            "start_offset": self.start_offset,
            "compacted_to": self.compacted_to,
            "applied_to": self.end_offset,
            **self.producers.to_json(),
        }

    def _save_state(self) -> None:
        write_json(self._state_path, self._state(), fsync=self._fsync)

    def _finish_swap(self) -> None:
        """Do what swap.json says; parts of it may have been done before a crash."""
        swap = read_json(self._swap_path)
        if swap is None:
            return
        new = self.directory / swap["new"]
        if new.exists():
            new.replace(self.directory / swap["old"][0])
        for name in swap["old"][1:]:
            (self.directory / name).unlink(missing_ok=True)
        write_json(self._state_path, swap["state"], fsync=self._fsync)
        self._swap_path.unlink()

    def _recover(self, *, was_shut_down: bool) -> None:
        self._finish_swap()
        (self.directory / COMPACTED_FILE).unlink(missing_ok=True)
        self.segments = [Segment(path) for path in sorted(self.directory.glob("*.log"))]
        state = read_json(self._state_path)
        applied_to = 0
        if state is not None:
            self.start_offset = state["start_offset"]
            self.compacted_to = state["compacted_to"]
            applied_to = state["applied_to"]
            self.producers = ProducerStates.from_json(state)
        self.end_offset = self.start_offset
        for segment in self.segments:
            self.end_offset = max(self.end_offset, segment.base_offset)
            is_newest = segment is self.segments[-1]
            for header, position in segment.scan(verify=is_newest and not was_shut_down):
                self._index.append(_entry(header, segment, position))
                self.end_offset = header.last_offset + 1
                if header.base_offset >= applied_to:
                    self._apply(header, segment, position)
        if self.end_offset < applied_to:
            self._rebuild_producers()
        self._drop_index_below_start()
        if not self.segments:
            self.roll()

    def _rebuild_producers(self) -> None:
        """Fold the producers from the log alone: state.json knows of batches that a power cut took."""
        self.producers = ProducerStates()
        for entry in self._index:
            header = read_header(entry.segment.read(entry.position, entry.size))
            self._apply(header, entry.segment, entry.position)

    def _apply(self, header: BatchHeader, segment: Segment, position: int) -> None:
        if header.is_control:
            is_commit = marker_is_commit(segment.read(position, header.size))
            self.producers.apply_marker(header, is_commit=is_commit)
        else:
            self.producers.apply(header)


def _entry(header: BatchHeader, segment: Segment, position: int) -> BatchEntry:
    return BatchEntry(
        header.base_offset,
        header.last_offset,
        segment,
        position,
        header.size,
        header.max_timestamp,
        header.is_control,
    )


def _read_runs(entries: Iterable[BatchEntry]) -> Iterator[bytes]:
    """The bytes of consecutive batches, with one read for each segment."""
    for _, group in groupby(entries, key=lambda entry: id(entry.segment)):
        run = list(group)
        size = run[-1].position + run[-1].size - run[0].position
        yield run[0].segment.read(run[0].position, size)
