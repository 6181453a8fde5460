"""Compaction of one partition: what stays, what goes, and crashes in the middle of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turnfold.embedded.broker.compaction import (
    finish_compaction,
    plan_compaction,
    write_compacted,
)
from turnfold.embedded.broker.partition_log import PartitionLog
from turnfold.embedded.broker.records import read_header, read_records
from turnfold.embedded.broker.topic_config import TopicConfig

MakeBatch = Callable[..., bytes]
MAX = 1 << 20
NOW_MS = 10_000_000
CONFIG = TopicConfig({"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.1"})


def open_log(directory: Path) -> PartitionLog:
    return PartitionLog(directory, segment_bytes=1 << 20)


def compact(log: PartitionLog, config: TopicConfig = CONFIG, now_ms: int = NOW_MS) -> bool:
    plan = plan_compaction(log, config, now_ms)
    return plan is not None and finish_compaction(log, plan, write_compacted(plan))


def records(log: PartitionLog) -> list[tuple[int, bytes | None, bytes | None]]:
    """(offset, key, value) of every data record that is stored."""
    found: list[tuple[int, Any, Any]] = []
    data = b"".join(log.read(log.start_offset, 1 << 30, read_committed=False).chunks)
    while data:
        header = read_header(data)
        raw, data = data[: header.size], data[header.size :]
        if not header.is_control:
            found += [(r.offset, r.key, r.value) for r in read_records(raw)]
    return found


def fill(
    log: PartitionLog, make_batch: MakeBatch, *pairs: tuple[bytes | None, bytes | None]
) -> None:
    """Append each (key, value) as a batch of its own."""
    for key, value in pairs:
        log.append(make_batch(value, key=key, timestamp=1000), max_bytes=MAX)


def test_only_the_newest_record_of_a_key_stays_and_keeps_its_offset(
    tmp_path: Path, make_batch: MakeBatch
) -> None:
    log = open_log(tmp_path)
    fill(log, make_batch, (b"a", b"1"), (b"b", b"2"), (b"a", b"3"), (None, b"4"), (b"c", b"5"))

    assert compact(log)

    expected = [(1, b"b", b"2"), (2, b"a", b"3"), (3, None, b"4"), (4, b"c", b"5")]
    assert records(log) == expected
    assert log.end_offset == 5
    log.close()
    assert records(open_log(tmp_path)) == expected


def test_the_newest_batch_stays_even_if_nothing_in_it_would(
    tmp_path: Path, make_batch: MakeBatch
) -> None:
    # Whoever reads up to the end offset waits for the last batch.
    log = open_log(tmp_path)
    log.append(make_batch(b"1", b"2", b"3", key=b"a"), max_bytes=MAX)

    compact(log)

    assert [offset for offset, _, _ in records(log)] == [0, 1, 2]
    fill(log, make_batch, (b"a", b"4"))
    assert compact(log)
    assert records(log) == [(3, b"a", b"4")]
    assert log.end_offset == 4


@pytest.mark.parametrize("compression", [0, 1, 2, 3, 4])
def test_a_batch_of_which_some_records_go_keeps_its_span_and_compression(
    tmp_path: Path, make_batch: MakeBatch, compression: int
) -> None:
    log = open_log(tmp_path)
    batch = make_batch(b"x" * 500, b"y" * 500, key=b"a", compression=compression)
    log.append(batch, max_bytes=MAX)
    fill(log, make_batch, (b"b", b"tail"))

    assert compact(log)

    assert records(log) == [(1, b"a", b"y" * 500), (2, b"b", b"tail")]
    header = read_header(log.read(0, MAX, read_committed=False).chunks[0])
    assert (header.base_offset, header.last_offset, header.compression) == (0, 1, compression)


def test_nothing_happens_until_enough_is_dirty(tmp_path: Path, make_batch: MakeBatch) -> None:
    config = TopicConfig({"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.5"})
    log = open_log(tmp_path)
    fill(log, make_batch, *[(str(i).encode(), b"x") for i in range(10)])
    assert compact(log, config)

    fill(log, make_batch, (b"1", b"y"))
    assert not compact(log, config)
    fill(log, make_batch, *[(b"1", b"y")] * 10)
    assert compact(log, config)
    assert not compact(log, config)


def test_records_younger_than_the_lag_are_left_alone(tmp_path: Path, make_batch: MakeBatch) -> None:
    config = TopicConfig({"cleanup.policy": "compact", "min.compaction.lag.ms": "5000"})
    log = open_log(tmp_path)
    fill(log, make_batch, (b"a", b"1"), (b"a", b"2"))

    assert not compact(log, config, now_ms=5999)
    assert compact(log, config, now_ms=6000)


def test_tombstones_go_when_readers_had_the_time_to_see_them(
    tmp_path: Path, make_batch: MakeBatch
) -> None:
    config = TopicConfig({"cleanup.policy": "compact", "delete.retention.ms": "5000"})
    log = open_log(tmp_path)
    fill(log, make_batch, (b"a", b"1"), (b"a", None), (b"b", b"2"))

    compact(log, config, now_ms=1000)
    assert records(log) == [(1, b"a", None), (2, b"b", b"2")]

    fill(log, make_batch, (b"b", b"3"), (b"c", b"4"))
    compact(log, config, now_ms=6001)
    assert records(log) == [(3, b"b", b"3"), (4, b"c", b"4")]


def test_aborted_records_go_and_do_not_displace_committed_ones(
    tmp_path: Path, make_batch: MakeBatch
) -> None:
    log = open_log(tmp_path)
    fill(log, make_batch, (b"a", b"good"))
    void = make_batch(b"void", key=b"a", producer=(1, 0, 0), is_transactional=True)
    log.append(void, max_bytes=MAX)
    log.append_marker(1, 0, is_commit=False, now_ms=1)
    kept = make_batch(b"kept", key=b"b", producer=(1, 0, 1), is_transactional=True)
    log.append(kept, max_bytes=MAX)
    log.append_marker(1, 0, is_commit=True, now_ms=1)
    fill(log, make_batch, (b"c", b"tail"))

    assert compact(log)

    assert records(log) == [(0, b"a", b"good"), (3, b"b", b"kept"), (5, b"c", b"tail")]
    assert log.read(0, MAX, read_committed=True).aborted == []
    log.close()
    reopened = open_log(tmp_path)
    assert reopened.last_stable_offset == reopened.end_offset == 6


def test_what_an_open_transaction_may_still_change_is_left_alone(
    tmp_path: Path, make_batch: MakeBatch
) -> None:
    log = open_log(tmp_path)
    fill(log, make_batch, (b"a", b"1"), (b"a", b"2"))
    log.append(make_batch(b"3", key=b"a", producer=(1, 0, 0), is_transactional=True), max_bytes=MAX)
    assert not compact(log)

    log.append_marker(1, 0, is_commit=False, now_ms=1)
    assert compact(log)
    assert records(log) == [(1, b"a", b"2")]


def test_resent_batches_are_recognised_after_compaction_and_a_crash(
    tmp_path: Path, make_batch: MakeBatch
) -> None:
    log = open_log(tmp_path)
    for sequence in range(3):
        batch = make_batch(b"x", key=b"a", producer=(7, 0, sequence))
        log.append(batch, max_bytes=MAX)
    fill(log, make_batch, (b"b", b"tail"))
    assert compact(log)
    for segment in log.segments:
        segment.close()

    reopened = open_log(tmp_path)

    assert reopened.append(make_batch(b"x", key=b"a", producer=(7, 0, 1)), max_bytes=MAX) == 1
    assert reopened.append(make_batch(b"x", key=b"a", producer=(7, 0, 3)), max_bytes=MAX) == 4


class Crashed(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize("survived_steps", range(6))
def test_a_crash_at_any_step_of_the_replacement_leaves_the_newest_records(
    tmp_path: Path,
    make_batch: MakeBatch,
    monkeypatch: pytest.MonkeyPatch,
    survived_steps: int,
) -> None:
    log = open_log(tmp_path)
    fill(log, make_batch, (b"a", b"1"), (b"b", b"2"))
    log.roll()
    fill(log, make_batch, (b"a", b"3"))
    void = make_batch(b"void", key=b"b", producer=(1, 0, 0), is_transactional=True)
    log.append(void, max_bytes=MAX)
    log.append_marker(1, 0, is_commit=False, now_ms=1)
    fill(log, make_batch, (b"c", b"tail"))
    plan = plan_compaction(log, CONFIG, NOW_MS)
    assert plan is not None
    batches = write_compacted(plan)
    steps = iter(range(survived_steps))

    def crash_after(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **keywords: Any) -> Any:
            if next(steps, None) is None:
                raise Crashed
            return function(*arguments, **keywords)

        return wrapper

    # Replacing consists of renaming and removing files; stop before each of these in turn.
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", crash_after(Path.replace))
        patch.setattr(Path, "unlink", crash_after(Path.unlink))
        try:
            finish_compaction(log, plan, batches)
        except Crashed:
            pass
        else:
            assert survived_steps == 5, "fewer steps than this test counts on"

    reopened = open_log(tmp_path)

    newest = {key: value for _, key, value in records(reopened) if value != b"void"}
    assert newest == {b"a": b"3", b"b": b"2", b"c": b"tail"}
    assert reopened.last_stable_offset == reopened.end_offset == 6
    void_is_marked = any(t.producer_id == 1 for t in reopened.producers.aborted)
    void_is_stored = any(value == b"void" for _, _, value in records(reopened))
    assert void_is_marked or not void_is_stored
    assert not (tmp_path / "swap.json").exists()


def test_a_log_that_was_cut_meanwhile_is_not_replaced(
    tmp_path: Path, make_batch: MakeBatch
) -> None:
    log = open_log(tmp_path)
    fill(log, make_batch, (b"a", b"1"), (b"a", b"2"))
    plan = plan_compaction(log, CONFIG, NOW_MS)
    assert plan is not None
    batches = write_compacted(plan)
    log.delete_before(2)

    assert not finish_compaction(log, plan, batches)

    assert (log.start_offset, log.end_offset, records(log)) == (2, 2, [])
    assert [path.suffix for path in tmp_path.iterdir() if path.name != "state.json"] == [".log"]
