"""Open rollouts that rest on disk while they are idle come back as they went."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnfold.healer.client import TemporaryStore
from turnfold.healer.fold import RunningFold, open_rollout
from turnfold.healer.opened import NO_LIMIT, OpenRollouts
from turnfold.healer.partition import Ended, Outcome, PartitionFold
from turnfold.log.records import Record
from turnfold.schemas import codec
from turnfold.schemas.events import Event, RolloutStarted
from turnfold.schemas.testing import RolloutScript, finished, started, turn

NUM_TURNS = 5


def rollout(rollout_id: str) -> list[Event]:
    script = RolloutScript(rollout_id)
    parent = None
    for index in range(NUM_TURNS):
        prompt = [*script.sequence(parent), index] if parent else [1, 2]
        script.turn(f"t{index}", prompt, [10, 11], parent=parent)
        parent = f"t{index}"
    damaged = turn(rollout_id, "bad", prompt=[1], output=[2], logprobs=[float("nan")])
    return [*script.events, damaged, script.events[1], finished(rollout_id)]


def log(num_rollouts: int, order: random.Random) -> list[Record]:
    """Rollouts that take turns; each has a damaged turn and one that came twice."""
    waiting = [rollout(f"r{number}") for number in range(num_rollouts)]
    choices = [number for number, events in enumerate(waiting) for _ in events]
    order.shuffle(choices)
    events = [waiting[number].pop(0) for number in choices]
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


def outcomes(records: list[Record], opened: OpenRollouts) -> list[Outcome]:
    fold = PartitionFold("turnfold.events", 0, opened=opened)
    return [outcome for record in records for outcome in fold.feed(record)]


@pytest.mark.field_case("agent-lightning#438")
@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 20_000), st.randoms(use_true_random=False))
def test_a_fold_with_little_memory_comes_to_the_same_outcomes(
    num_rollouts: int, max_bytes: int, order: random.Random
) -> None:
    records = log(num_rollouts, order)
    assert outcomes(records, OpenRollouts({}, max_bytes)) == outcomes(records, OpenRollouts())


def test_memory_is_bounded_by_what_was_idle_longest_going_to_disk() -> None:
    store = TemporaryStore()
    opened = OpenRollouts(store, max_bytes=10_000)
    starts = [started(f"r{number}") for number in range(100)]
    for offset, event in enumerate(starts):
        opened.add(RunningFold(open_rollout(event, offset)), num_bytes=500)
        assert opened.num_bytes <= 10_000
    assert len(opened) == 100
    assert opened.num_idle == len(store) == 90
    assert "r0" in store
    assert "r99" not in store
    assert list(opened) == [event.rollout_id for event in starts]


def test_one_rollout_larger_than_the_memory_is_kept() -> None:
    opened = OpenRollouts({}, max_bytes=100)
    opened.add(RunningFold(open_rollout(started("r1"), 0)), num_bytes=5000)
    assert opened.get("r1") is not None
    assert opened.num_idle == 0


def test_what_has_ended_leaves_neither_memory_nor_disk_in_use() -> None:
    store = TemporaryStore()
    opened = OpenRollouts(store, max_bytes=1000)
    outcomes(log(5, random.Random(1)), opened)
    assert (len(opened), opened.num_bytes, len(store)) == (0, 0, 0)


def test_warming_up_ends_rollouts_without_making_rows() -> None:
    fold = PartitionFold("turnfold.events", 0)
    found = [o for record in log(3, random.Random(2)) for o in fold.warm_up(record)]
    assert sum(isinstance(outcome, Ended) for outcome in found) == 3
    assert not fold.open


def test_a_rollout_is_found_by_name_only_while_it_is_open() -> None:
    opened = OpenRollouts(max_bytes=NO_LIMIT)
    event: RolloutStarted = started("r1")
    opened.add(RunningFold(open_rollout(event, 0)), 1)
    opened.remove("r1")
    assert opened.get("r1") is None
    assert "r1" not in opened


def test_a_store_forgets_on_demand_and_names_what_it_lacks() -> None:
    store = TemporaryStore()
    store["a"] = b"1"
    store["a"] = b"2"
    assert dict(store) == {"a": b"2"}
    with pytest.raises(KeyError, match="b"):
        store["b"]
    with pytest.raises(KeyError, match="b"):
        del store["b"]
    store.clear()
    assert len(store) == 0
    store.close()
