"""A partition with many rollouts, in any order, doubled, and cut in two anywhere."""

import random
from collections.abc import Iterable, Sequence

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from turnfold.healer.partition import PartitionFold, Released, Revisions
from turnfold.log.records import Record
from turnfold.schemas import codec
from turnfold.schemas.events import Event
from turnfold.schemas.testing import RolloutScript
from turnfold.schemas.trajectories import Source, Trajectory

steady = settings(deadline=None)  # a busy machine is no failure


@st.composite
def rollouts(draw: st.DrawFn) -> list[list[Event]]:
    """A few rollouts: retried, aborted, revised, without an end, with a turn missing."""
    made = []
    for number in range(draw(st.integers(1, 5))):
        script = RolloutScript(f"r{number}", group_id=f"g{number % 2}")
        previous: str | None = None
        for index in range(draw(st.integers(0, 4))):
            prompt = [*script.sequence(previous), 100 + index] if previous else [1, 2]
            for attempt in range(draw(st.integers(1, 2))):
                turn_id = f"t{index}.{attempt}"
                script.turn(turn_id, prompt, [10 * index + attempt], parent=previous)
            previous = turn_id
        end = draw(st.sampled_from(["finished", "aborted", "revised", "open", "gap"]))
        if end == "gap" and len(script.events) > 1:
            del script.events[draw(st.integers(1, len(script.events) - 1))]
        if end == "aborted":
            script.abort()
        elif end != "open":
            script.finish(0.5)
        if end == "revised":
            script.revise(1.0)
        made.append(script.events)
    return made


def interleaved(made: Sequence[Sequence[Event]], order: random.Random) -> list[Event]:
    waiting = [list(events) for events in made]
    choices = [number for number, events in enumerate(made) for _ in events]
    order.shuffle(choices)
    return [waiting[number].pop(0) for number in choices]


def records(events: Iterable[Event]) -> list[Record]:
    return [
        Record(
            topic="turnfold.events",
            partition=0,
            offset=offset,
            key=event.rollout_id.encode(),
            value=codec.encode(event),
            timestamp=0.0,
        )
        for offset, event in enumerate(events)
    ]


def released(log: Iterable[Record], through: int = 0) -> list[Trajectory]:
    """What a healer writes that starts at the first of these records and writes from `through`."""
    fold = PartitionFold("turnfold.events", 0)
    return [
        outcome.trajectory
        for record in log
        for outcome in fold.feed(record)
        if isinstance(outcome, Released) and record.offset >= through
    ]


def encoded(trajectories: Iterable[Trajectory]) -> list[bytes]:
    return sorted(codec.encode(trajectory) for trajectory in trajectories)


def without_offsets(trajectories: Iterable[Trajectory]) -> list[bytes]:
    nowhere = Source(topic="", partition=0, first_offset=0, last_offset=0)
    return encoded(msgspec.structs.replace(made, source=nowhere) for made in trajectories)


orders = st.randoms(use_true_random=False)


@steady
@given(rollouts(), orders, st.data())
def test_a_healer_cut_off_anywhere_writes_each_trajectory_once(
    made: list[list[Event]], order: random.Random, data: st.DataObject
) -> None:
    log = records(interleaved(made, order))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(log)), max_size=3)))
    written: list[Trajectory] = []
    start = through = 0
    for cut in [*cuts, len(log)]:
        written += released(log[start:cut], through)
        fold = PartitionFold("turnfold.events", 0)
        for record in log[start:cut]:
            fold.feed(record)
        start, through = fold.low_watermark(cut), max(through, cut)
    assert encoded(written) == encoded(released(log))


@steady
@given(rollouts(), orders, orders)
def test_the_order_of_rollouts_changes_nothing_but_the_offsets(
    made: list[list[Event]], one: random.Random, other: random.Random
) -> None:
    first = released(records(interleaved(made, one)))
    second = released(records(interleaved(made, other)))
    assert without_offsets(first) == without_offsets(second)


@steady
@given(rollouts(), orders)
def test_a_log_in_which_every_event_lies_twice_gives_the_same_rows(
    made: list[list[Event]], order: random.Random
) -> None:
    events = interleaved(made, order)
    doubled = [event for event in events for _ in range(2)]
    again = [*events, *events]  # all of it once more, after everything has ended
    expected = without_offsets(released(records(events)))
    assert without_offsets(released(records(doubled))) == expected
    assert without_offsets(released(records(again))) == expected


@steady
@given(rollouts(), orders)
def test_every_revised_reward_supersedes_once(
    made: list[list[Event]], order: random.Random
) -> None:
    log = records(interleaved(made, order))
    first = {made.rollout_id: made for made in released(log)}
    revisions = Revisions(first)
    revised = [found for record in log for _ in range(2) if (found := revisions.feed(record))]
    assert {trajectory.rollout_id for trajectory in revised} == {
        events[0].rollout_id for events in made if type(events[-1]).__name__ == "RewardRevised"
    }
    for trajectory in revised:
        before = first[trajectory.rollout_id]
        assert (trajectory.revision, trajectory.reward) == (1, 1.0)
        assert (trajectory.rows, trajectory.ledger) == (before.rows, before.ledger)
