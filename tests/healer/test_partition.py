"""A partition of the log: what is released, refused and remembered."""

from collections.abc import Iterable, Sequence

import pytest

from turnfold.healer.partition import (
    REMEMBERED_S,
    Ignored,
    Outcome,
    PartitionFold,
    Rejected,
    Released,
    Revisions,
    RevisionWanted,
)
from turnfold.log.records import Record
from turnfold.schemas import codec
from turnfold.schemas.events import Event
from turnfold.schemas.testing import RolloutScript, finished, revised, started, turn
from turnfold.schemas.trajectories import Trajectory


def record(
    value: bytes | None, offset: int, key: str = "r1", content_type: str = "", at: float = 0.0
) -> Record:
    return Record(
        topic="turnfold.events",
        partition=0,
        offset=offset,
        key=key.encode(),
        value=value,
        timestamp=at,
        headers=(("content-type", content_type.encode()),) if content_type else (),
    )


def records(events: Iterable[Event], first: int = 0, at: float = 0.0) -> list[Record]:
    return [
        record(codec.encode(event), first + index, event.rollout_id, at=at)
        for index, event in enumerate(events)
    ]


def fed(log: Sequence[Record], partition: PartitionFold | None = None) -> list[Outcome]:
    partition = partition or PartitionFold("turnfold.events", 0)
    return [outcome for item in log for outcome in partition.feed(item)]


def released(outcomes: Iterable[Outcome]) -> list[Trajectory]:
    return [outcome.trajectory for outcome in outcomes if isinstance(outcome, Released)]


def rejected(outcomes: Iterable[Outcome]) -> list[tuple[int, str]]:
    return [(o.record.offset, o.reason) for o in outcomes if isinstance(o, Rejected)]


def script(rollout_id: str = "r1", num_turns: int = 2) -> RolloutScript:
    made = RolloutScript(rollout_id)
    for index in range(num_turns):
        parent = f"t{index - 1}" if index else None
        prompt = [*made.sequence(parent), 50 + index] if parent else [1, 2]
        made.turn(f"t{index}", prompt, [10 + index], parent=parent)
    made.finish()
    return made


def test_a_finished_rollout_is_released_and_forgotten() -> None:
    partition = PartitionFold("turnfold.events", 0)
    (trajectory,) = released(fed(records(script().events), partition))
    assert trajectory.rollout_id == "r1"
    assert not partition.open


def test_a_restart_begins_at_the_start_of_the_oldest_open_or_remembered_rollout() -> None:
    partition = PartitionFold("turnfold.events", 0)
    starts = [started(name, deadline_at=100.0) for name in "abc"]
    fed(records(starts, first=5, at=50.0), partition)
    assert partition.restart_point(8).offset == 5
    fed(records([finished("a"), finished("c")], first=8, at=60.0), partition)
    assert partition.restart_point(10).offset == 5  # the start of a may be delivered again
    fed(
        records([started("d", deadline_at=900.0)], first=10, at=100.0 + REMEMBERED_S + 1), partition
    )
    assert partition.restart_point(11).offset == 6
    fed(records([finished("b"), finished("d")], first=11, at=900.0 + REMEMBERED_S + 1), partition)
    assert partition.restart_point(13).offset == 13


@pytest.mark.parametrize("at", [60.0, 100.0, 100.0 + REMEMBERED_S, 5000.0])
def test_a_start_that_is_delivered_again_after_the_end_opens_nothing(at: float) -> None:
    partition = PartitionFold("turnfold.events", 0)
    begun = started("r1", deadline_at=100.0)
    fed(records([begun, finished("r1")], at=50.0), partition)
    again = fed(records([started("other", deadline_at=9e9), begun], first=2, at=at), partition)
    assert again[1:] == [Ignored("late")]
    assert list(partition.open) == ["other"]


def test_a_restart_knows_what_ended_before() -> None:
    log = records([started("r1", deadline_at=100.0), finished("r1")], at=50.0)
    first = PartitionFold("turnfold.events", 0)
    fed(log, first)
    point = first.restart_point(2)
    second = PartitionFold("turnfold.events", 0, log_time=point.log_time)
    fed(log[point.offset :], second)
    assert fed(records([started("r1", deadline_at=100.0)], first=2, at=60.0), second) == [
        Ignored("late")
    ]


def test_a_rollout_is_not_let_go_before_every_start_of_it_that_was_delivered() -> None:
    partition = PartitionFold("turnfold.events", 0)
    begun = started("r1", deadline_at=100.0)
    other = started("other", deadline_at=9e9)
    log = records([begun, finished("r1"), other, begun], at=50.0)
    fed(log, partition)
    long_after = 100.0 + REMEMBERED_S + 1
    fed(records([finished("nobody")], first=4, at=long_after), partition)
    assert partition.restart_point(5).offset == 0  # from 2 on, the start at 3 would look new
    fed(records([finished("other")], first=5, at=long_after), partition)
    assert partition.restart_point(6).offset == 0
    fed(records([started("next", deadline_at=9e9)], first=6, at=9e9 + REMEMBERED_S), partition)
    fed(records([finished("nobody")], first=7, at=9e9 + REMEMBERED_S + 1), partition)
    assert partition.restart_point(8).offset == 6


def test_a_json_event_from_another_language_is_folded_like_any_other() -> None:
    events = script().events
    as_json = [
        record(codec.encode_json(event), index, content_type="application/json; charset=utf-8")
        for index, event in enumerate(events)
    ]
    (from_json,), (from_msgpack,) = released(fed(as_json)), released(fed(records(events)))
    assert codec.encode(from_json) == codec.encode(from_msgpack)


def test_a_record_that_is_no_event_is_rejected_and_its_rollout_marked() -> None:
    log = records(script().events)
    damaged = record(b"\xc1 not an event", 4)
    shifted = record(log[-1].value, 5)
    outcomes = fed([*log[:-1], damaged, shifted])
    (offset, reason), (trajectory,) = *rejected(outcomes), released(outcomes)
    assert offset == 4
    assert "msgpack (14 bytes)" in reason
    assert trajectory.marks == ("undecodable",)
    assert trajectory.ledger.num_trained == 2


def test_a_tombstone_a_foreign_key_and_a_missing_id_are_rejected() -> None:
    event = codec.encode(started("r1"))
    no_id = b'{"type": "rollout_finished", "event_id": "e", "reward": 1}'
    outcomes = fed(
        [
            record(None, 0),
            record(event, 1, key="r2"),
            record(no_id, 2, content_type="application/json"),
        ]
    )
    reasons = [reason for _, reason in rejected(outcomes)]
    assert "without a value" in reasons[0]
    assert "expected the key to be the rollout_id 'r1', got b'r2'" in reasons[1]
    assert "rollout_id" in reasons[2]


def test_an_event_of_a_rollout_that_was_never_started_is_rejected() -> None:
    outcomes = fed(records([turn("r1", "t0", prompt=[1], output=[2])]))
    assert "rollout r1 is not open: expected a rollout_started" in rejected(outcomes)[0][1]


def test_what_comes_after_the_end_is_late() -> None:
    late = turn("r1", "late", prompt=[1], output=[2])
    outcomes = fed(records([*script().events, late, started("r1")]))
    assert [o for o in outcomes if isinstance(o, Ignored)] == [Ignored("late"), Ignored("late")]
    assert len(released(outcomes)) == 1


def test_every_record_delivered_twice_gives_the_same_bytes() -> None:
    log = records([*script("a").events, *script("b", 3).events])
    doubled = [item for item in log for _ in range(2)]
    once, twice = released(fed(log)), released(fed(doubled))
    assert [codec.digest(t) for t in twice] == [codec.digest(t) for t in once]


def test_turns_after_a_gap_go_to_the_dead_letters_whole() -> None:
    events = script(num_turns=5).events
    log = [item for item in records(events) if item.offset != 2]  # t1 is missing
    outcomes = fed(log)
    assert [offset for offset, _ in rejected(outcomes)] == [3, 4, 5]
    assert "turn t2: parent t1 is missing or damaged" in rejected(outcomes)[0][1]
    values = [o.record.value for o in outcomes if isinstance(o, Rejected)]
    assert values == [item.value for item in log[2:5]]
    (trajectory,) = released(outcomes)
    assert trajectory.marks == ("gap:t2", "gap:t3", "gap:t4")
    assert trajectory.ledger.num_trained == 1


def test_a_parent_that_comes_after_its_child_is_no_gap() -> None:
    events = script(num_turns=3).events
    swapped = [events[0], events[2], events[1], *events[3:]]
    outcomes = fed(records(swapped))
    assert rejected(outcomes) == []
    assert released(outcomes)[0].rows == released(fed(records(events)))[0].rows


def test_a_revised_reward_asks_for_the_history_and_supersedes() -> None:
    log = records([*script().events, revised("r1", reward=0.25)])
    outcomes = fed(log)
    wanted = [o for o in outcomes if isinstance(o, RevisionWanted)]
    assert wanted == [RevisionWanted("r1", log[-1])]
    revisions = Revisions(["r1"])
    made = [found for item in log if (found := revisions.feed(item))]
    assert [(t.revision, t.reward) for t in made] == [(1, 0.25)]
    assert made[0].rows == released(outcomes)[0].rows
    assert revisions.reason_against(log[-1]) == ""


def test_a_revision_of_an_unknown_or_aborted_rollout_says_why_it_is_refused() -> None:
    lost = records([revised("r1", reward=0.25)], first=7)[0]
    revisions = Revisions(["r1"])
    assert revisions.feed(lost) is None
    assert "its start is not in the log" in revisions.reason_against(lost)

    ended = RolloutScript("r1")
    ended.abort("deadline")
    log = records([*ended.events, revised("r1", reward=0.25)])
    revisions = Revisions(["r1"])
    assert [revisions.feed(item) for item in log] == [None] * 3
    assert "was aborted (deadline)" in revisions.reason_against(log[-1])


def test_a_rollout_is_forgotten_when_no_delivery_of_it_can_be_due() -> None:
    partition = PartitionFold("turnfold.events", 0)
    fed(records([started("r1", deadline_at=100.0), finished("r1")], at=50.0), partition)
    late = turn("r1", "late", prompt=[1], output=[2])
    assert fed(records([late], first=2, at=60.0), partition) == [Ignored("late")]
    long_after = 100.0 + REMEMBERED_S + 1
    assert isinstance(fed(records([late], first=3, at=long_after), partition)[0], Rejected)
    assert partition.restart_point(4).offset == 4
