"""Log compaction: of all records with the same key, only the newest is kept.

Consumers must not notice more than that, hence three rules. The newest batch always stays, because readers
that read up to the end offset wait for it. Batches keep their offsets. Only what lies below the last stable
offset is touched: there every transaction is decided, so that aborted records and markers can go.

Planning and replacing are quick and happen in the event loop; rewriting happens in a thread, on files that
nobody writes to any more.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnfold.embedded.broker.partition_log import COMPACTED_FILE, BatchEntry, PartitionLog
from turnfold.embedded.broker.producers import AbortedTransaction
from turnfold.embedded.broker.records import (
    BatchHeader,
    read_header,
    read_records,
    rebuild_batch,
)
from turnfold.embedded.broker.segments import Segment
from turnfold.embedded.broker.topic_config import TopicConfig


@dataclass(frozen=True)
class CompactionPlan:
    """What to rewrite: whole segments from the start of the log."""

    segments: list[Segment]
    entries: list[BatchEntry]
    aborted: list[AbortedTransaction]
    target: Path
    drop_tombstones_before_ms: int
    """Tombstones older than this go too: readers had the time to see them."""
    fsync: bool


def plan_compaction(
    log: PartitionLog, config: TopicConfig, now_ms: int, *, fsync: bool = False
) -> CompactionPlan | None:
    """What to compact now, or None if too little of the log is dirty.

    The newest segment is closed for writing first, so that its batches can take part.
    """
    dirty = log.dirty_bytes()
    if not dirty or dirty < config.dirty_ratio * log.size:
        return None
    newest_ms = now_ms - config.number("min.compaction.lag.ms")
    tail = log.entries_of(log.segments[-1])
    if tail and _is_settled(log, tail, newest_ms):
        log.roll()
    segments: list[Segment] = []
    entries: list[BatchEntry] = []
    for segment in log.segments[:-1]:
        batches = log.entries_of(segment)
        if not _is_settled(log, batches, newest_ms):
            break
        segments.append(segment)
        entries.extend(batches)
    if not entries or entries[-1].last_offset < log.compacted_to:
        return None
    return CompactionPlan(
        segments,
        entries,
        list(log.producers.aborted),
        log.directory / COMPACTED_FILE,
        now_ms - config.number("delete.retention.ms"),
        fsync,
    )


def write_compacted(plan: CompactionPlan) -> list[tuple[BatchHeader, int]]:
    """Write the new file of `plan`; headers and positions of its batches."""
    newest = _newest_offsets(plan)
    batches: list[tuple[BatchHeader, int]] = []
    position = 0
    with plan.target.open("wb") as file:
        for entry in plan.entries:
            raw = _read(entry)
            is_newest_batch = entry is plan.entries[-1]
            kept = raw if is_newest_batch else _compacted_batch(plan, raw, newest)
            if kept is None:
                continue
            file.write(kept)
            batches.append((read_header(kept), position))
            position += len(kept)
        file.flush()
        if plan.fsync:
            os.fsync(file.fileno())
    return batches


def finish_compaction(
    log: PartitionLog, plan: CompactionPlan, batches: list[tuple[BatchHeader, int]]
) -> bool:
    """Put the new file in place; False if the log was closed or its start deleted in the meantime."""
    if not is_current(log, plan):
        plan.target.unlink(missing_ok=True)
        return False
    log.replace_segments(plan.segments, plan.target, batches)
    return True


def is_current(log: PartitionLog, plan: CompactionPlan) -> bool:
    """Whether the files that `plan` rewrites are still part of the log."""
    return not log.is_closed and log.segments[: len(plan.segments)] == plan.segments


def _is_settled(log: PartitionLog, entries: list[BatchEntry], newest_ms: int) -> bool:
    """Whether all of these batches are decided, and old enough to be compacted."""
    return all(
        entry.last_offset < log.last_stable_offset and entry.max_timestamp <= newest_ms
        for entry in entries
    )


def _newest_offsets(plan: CompactionPlan) -> dict[bytes, int]:
    """The offset of the newest record of each key."""
    return {
        record.key: record.offset
        for entry in plan.entries
        for record in _data_records(plan, _read(entry))
        if record.key is not None
    }


def _compacted_batch(
    plan: CompactionPlan, raw: bytes, newest: dict[bytes, int]
) -> bytes | bytearray | None:
    """The batch with what is left of it: as it was, rebuilt, or None."""
    records = list(_data_records(plan, raw))
    kept = [r for r in records if _survives(r, newest, plan.drop_tombstones_before_ms)]
    if not kept:
        return None
    return raw if len(kept) == len(records) else rebuild_batch(read_header(raw), kept)


def _survives(record: Any, newest: dict[bytes, int], drop_tombstones_before_ms: int) -> bool:
    if record.key is None:
        return True
    is_old_tombstone = record.value is None and record.timestamp < drop_tombstones_before_ms
    return newest[record.key] == record.offset and not is_old_tombstone


def _data_records(plan: CompactionPlan, raw: bytes) -> Iterator[Any]:
    """The records of a batch; none for markers and for aborted batches."""
    header = read_header(raw)
    is_void = header.is_transactional and any(
        transaction.producer_id == header.producer_id
        and transaction.first_offset <= header.base_offset <= transaction.last_offset
        for transaction in plan.aborted
    )
    if not header.is_control and not is_void:
        yield from read_records(raw)


def _read(entry: BatchEntry) -> bytes:
    return entry.segment.read(entry.position, entry.size)
