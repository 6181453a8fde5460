"""A replay in parts: ranges, processes and checkpoints all come to what one long replay comes to."""

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from turnfold.log.records import Record
from turnfold.replay import app
from turnfold.replay.client import FileLog
from turnfold.replay.folding.part import Part
from turnfold.replay.logfile import Header, LogWriter
from turnfold.replay.rebuild import Selection
from turnfold.schemas import codec
from turnfold.schemas.errors import UserError
from turnfold.schemas.events import Event
from turnfold.schemas.testing import RolloutScript, revised

TOPIC = "turnfold.events"
NUM_PARTITIONS = 3


def rollout(number: int) -> list[Event]:
    script = RolloutScript(f"r{number:02d}", group_id=f"g{number // 4}", index=number % 4)
    script.turn("t0", [1, 2], [3, 4])
    script.turn("t1", [1, 2, 3, 4, number], [6], parent="t0")
    if number % 5 == 4:
        return [*script.events]  # never ends
    script.finish(float(number))
    return [*script.events, *script.events[1:2]]


def interleaved(rollouts: Iterable[list[Event]]) -> Iterator[Event]:
    """Turn about, so that several are open at any place."""
    waiting = [list(events) for events in rollouts]
    while waiting:
        for events in waiting:
            yield events.pop(0)
        waiting = [events for events in waiting if events]


def log() -> list[Record]:
    """Twenty rollouts in three partitions, four at a time, with a revised reward at the end."""
    records, offsets = list[Record](), [0] * NUM_PARTITIONS
    events = [e for n in range(0, 20, 4) for e in interleaved(map(rollout, range(n, n + 4)))]
    for event in [*events, revised("r05", reward=9.0)]:
        partition = int(event.rollout_id[1:]) % NUM_PARTITIONS
        offsets[partition] += 1
        records.append(
            Record(
                topic=TOPIC,
                partition=partition,
                offset=offsets[partition] - 1,
                key=event.rollout_id.encode(),
                value=codec.encode(event),
                timestamp=100.0 + len(records),
            )
        )
    return records


def log_file(path: Path, records: Iterable[Record]) -> FileLog:
    with path.open("wb") as file:
        header = Header(namespace="turnfold", topics={TOPIC: NUM_PARTITIONS})
        writer = LogWriter(file, header)
        for record in records:
            writer.add(record)
        writer.close()
    return FileLog(path)


@pytest.fixture
def whole(tmp_path: Path) -> FileLog:
    return log_file(tmp_path / "whole.tflog", log())


def replay(source: FileLog, **options: object) -> app.Report:
    return asyncio.run(app.replay(source, is_compared=False, **options))  # type: ignore[arg-type]


def test_the_log_is_worth_the_tests(whole: FileLog) -> None:
    report = replay(whole)
    assert report.num_trajectories == 16 + 1
    assert len(report.open_rollouts) == 4
    assert report.ignored == {"late": 16}


def test_two_processes_come_to_the_same_and_count_what_they_read(whole: FileLog) -> None:
    counted: list[int] = []
    assert replay(whole, num_processes=2, on_progress=counted.append) == replay(whole)
    assert sum(counted) == len(log())


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_resumed_replay_of_a_grown_log_comes_to_the_same(
    tmp_path: Path, whole: FileLog, num_processes: int
) -> None:
    folder = tmp_path / "replay.d"
    records = log()
    for number, cut in enumerate(range(20, len(records), 15)):
        part = log_file(tmp_path / f"{cut}.tflog", records[:cut])
        replay(part, checkpoints=folder, is_resumed=number > 0, num_processes=num_processes)
    assert replay(whole, checkpoints=folder, is_resumed=True) == replay(whole)


def test_a_resumed_replay_does_not_read_what_has_ended_before(whole: FileLog) -> None:
    part = Part(TOPIC, 0, mode=None)
    records = [record for record in log() if record.partition == 0]
    for record in records:
        part.feed(record)
    checkpoint = part.checkpoint("", set())
    assert checkpoint.through == records[-1].offset + 1
    assert checkpoint.restart_at <= checkpoint.through


def test_a_checkpoint_answers_its_own_question_only(tmp_path: Path, whole: FileLog) -> None:
    folder = tmp_path / "replay.d"
    replay(whole, checkpoints=folder)
    with pytest.raises(UserError, match="is a checkpoint of another replay"):
        replay(whole, checkpoints=folder, is_resumed=True, mode="tree")
    with pytest.raises(UserError, match="holds no checkpoint: start without --resume"):
        replay(whole, checkpoints=tmp_path / "other.d", is_resumed=True)


def test_without_resume_an_old_checkpoint_counts_for_nothing(
    tmp_path: Path, whole: FileLog
) -> None:
    folder = tmp_path / "replay.d"
    replay(whole, checkpoints=folder, mode="tree")
    assert replay(whole, checkpoints=folder) == replay(whole)


def test_a_damaged_checkpoint_is_named(tmp_path: Path, whole: FileLog) -> None:
    folder = tmp_path / "replay.d"
    replay(whole, checkpoints=folder)
    (folder / "partition-1.checkpoint").write_bytes(b"{")
    with pytest.raises(UserError, match=r"partition-1\.checkpoint is no checkpoint of a replay"):
        replay(whole, checkpoints=folder, is_resumed=True)


def ranged(source: FileLog, since: float | None, until: float | None) -> app.Report:
    offsets = asyncio.run(app.offsets_between(source, since, until))
    return replay(source, selection=Selection(offsets=offsets))


def test_adjoining_time_ranges_share_every_rollout_out_once(whole: FileLog) -> None:
    parts = [ranged(whole, None, 130.0), ranged(whole, 130.0, 160.0), ranged(whole, 160.0, None)]
    assert all(part.num_trajectories for part in parts)
    everything = replay(whole)
    assert sum(part.num_trajectories for part in parts) == everything.num_trajectories
    together = [rollout for part in parts for rollout in part.open_rollouts]
    assert sorted(together) == everything.open_rollouts


def test_a_range_is_left_as_soon_as_its_rollouts_have_ended(whole: FileLog) -> None:
    counted: list[int] = []
    records = [record for record in log() if record.partition == 1]
    selection = Selection(offsets={1: range(1)})
    report = replay(
        log_file(whole.path.with_name("one.tflog"), records),
        selection=selection,
        on_progress=counted.append,
    )
    assert report.num_trajectories == 1
    assert report.num_events < 8
