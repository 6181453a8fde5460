"""A partition with many rollouts, in any order, doubled, and cut in two anywhere."""

import random
from collections.abc import Iterable, Sequence

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from turnfold.healer.partition import PartitionFold, Released, Revisions
from turnfold.log.records import Record
from turnfold.schemas import codec
from turnfold.schemas.events import Event, RolloutStarted
from turnfold.schemas.testing import RolloutScript, aborted, finished, started
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


def records(events: Iterable[Event], seconds_apart: float = 0.0) -> list[Record]:
    return [
        Record(
            topic="turnfold.events",
            partition=0,
            offset=offset,
            key=event.rollout_id.encode(),
            value=codec.encode(event),
            timestamp=offset * seconds_apart,
        )
        for offset, event in enumerate(events)
    ]


def released(
    log: Sequence[Record], through: int = 0, fold: PartitionFold | None = None
) -> list[Trajectory]:
    """What a healer writes that starts at the first of these records and writes from `through`."""
    fold = fold or PartitionFold("turnfold.events", 0)
    for record in log:
        if record.offset < through:
            fold.warm_up(record)
    return [
        outcome.trajectory
        for record in log
        if record.offset >= through
        for outcome in fold.feed(record)
        if isinstance(outcome, Released)
    ]


def encoded(trajectories: Iterable[Trajectory]) -> list[bytes]:
    return sorted(codec.encode(trajectory) for trajectory in trajectories)


def without_offsets(trajectories: Iterable[Trajectory]) -> list[bytes]:
    nowhere = Source(topic="", partition=0, first_offset=0, last_offset=0)
    return encoded(msgspec.structs.replace(made, source=nowhere) for made in trajectories)


orders = st.randoms(use_true_random=False)


@st.composite
def logs_with_redeliveries(draw: st.DrawFn) -> list[Record]:
    """Rollouts with deadlines that pass within the log, some events a second time, and aborts."""
    seconds_apart = draw(st.sampled_from([0.0, 40.0, 150.0, 400.0]))
    made = draw(rollouts())
    deadlines = {f"r{number}": draw(st.floats(0.0, 2000.0)) for number in range(len(made))}
    events = [
        msgspec.structs.replace(event, deadline_at=deadlines[event.rollout_id])
        if isinstance(event, RolloutStarted)
        else event
        for event in interleaved(made, draw(orders))
    ]
    for _ in range(draw(st.integers(0, 10))):
        again = draw(st.integers(0, len(events) - 1))
        events.insert(draw(st.integers(again + 1, len(events))), events[again])
    # What a healer appends for whatever it takes to be open.
    events += [aborted(rollout_id, reason="deadline") for rollout_id in deadlines]
    return records(events, seconds_apart)


@st.composite
def short_logs_of_starts_and_ends(draw: st.DrawFn) -> list[Record]:
    """Few enough kinds of events for every order of them to come up."""
    names = ["r1", "r2", "r3"]
    events: list[Event] = []
    for _ in range(draw(st.integers(2, 9))):
        rollout_id = draw(st.sampled_from(names))
        soon = {"r1": 100.0, "r2": 100.0, "r3": 1e6}[rollout_id]
        start = started(rollout_id, deadline_at=soon)
        events.append(draw(st.sampled_from([start, finished(rollout_id)])))
    events += [aborted(rollout_id, reason="deadline") for rollout_id in names]
    times = sorted(draw(st.sampled_from([0.0, 300.0, 500.0])) for _ in events)
    return [
        msgspec.structs.replace(record, timestamp=at)
        for record, at in zip(records(events), times, strict=True)
    ]


@settings(deadline=None, max_examples=300)
@given(logs_with_redeliveries() | short_logs_of_starts_and_ends(), st.data())
def test_a_healer_cut_off_anywhere_writes_what_one_that_never_stopped_writes(
    log: list[Record], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(log)), max_size=4)))
    written: list[Trajectory] = []
    start, through, log_time = 0, 0, 0.0
    for cut in [*cuts, len(log)]:
        fold = PartitionFold("turnfold.events", 0, log_time=log_time)
        written += released(log[start:cut], through, fold)
        point = fold.restart_point(cut)
        start, through, log_time = point.offset, max(through, cut), point.log_time
    assert encoded(written) == encoded(released(log))


@steady
@given(logs_with_redeliveries())
def test_events_that_are_delivered_again_release_no_rollout_twice(log: list[Record]) -> None:
    names = [trajectory.rollout_id for trajectory in released(log)]
    assert len(names) == len(set(names))


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
