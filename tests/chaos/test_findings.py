"""The checks of a disturbed run notice what they should."""

from itertools import islice
from typing import Any

import msgspec

from turnfold.embedded.chaos.faults import SERVICES, every_kind, schedule
from turnfold.embedded.chaos.findings import (
    Left,
    Report,
    beyond_staleness,
    doubled,
    lost_turns,
    unequal_rows,
    wrong_steps,
)
from turnfold.schemas.batches import BatchCut, GroupRef, Positions, RolloutRef
from turnfold.schemas.testing import row, trajectory, turn

TURN = turn("r1", "t0", prompt=[1, 2], output=[3])


def left(**fields: Any) -> Left:
    defaults: dict[str, Any] = {
        "acknowledged": (("r1", "t0"),),
        "events": (TURN, TURN),
        "trajectories": (),
        "decisions": (),
        "num_undisturbed": 1,
        "max_staleness": 1,
        "num_batches_trained": 2,
        "num_steps": 4,
        "num_steps_a_batch": 2,
    }
    return Left(**{**defaults, **fields})


def cut(index: int, *rollouts: str, sampled_by: int = 0) -> BatchCut:
    refs = tuple(
        RolloutRef(
            rollout_id=name,
            index=0,
            partition=0,
            offset=0,
            digest="",
            reward=1.0,
            num_rows=1,
            num_tokens=4,
            num_trained=2,
            max_row_tokens=4,
            min_policy_version=sampled_by,
            max_policy_version=sampled_by,
        )
        for name in rollouts
    )
    return BatchCut(
        run_id="chaos",
        index=index,
        groups=(GroupRef(group_id=f"g{index}", dispatch_index=index, rollouts=refs),),
        positions=Positions(tasks={}, trajectories={}),
        at=0.0,
        config_digest="",
    )


def test_a_turn_that_was_delivered_again_is_one_turn() -> None:
    assert lost_turns(left()) == []


def test_a_turn_that_is_missing_or_was_sampled_twice_is_found() -> None:
    sampled_again = msgspec.structs.replace(TURN, event_id="another")
    assert lost_turns(left(events=())) == ["rollout r1, turn t0: acknowledged, 0 in the log"]
    assert len(lost_turns(left(events=(TURN, sampled_again)))) == 1


def test_a_trajectory_a_batch_or_a_rollout_that_is_there_twice_is_found() -> None:
    once = trajectory("r1")
    assert doubled(left(trajectories=(once,), decisions=(cut(1, "r1"), cut(2, "r2")))) == []
    assert doubled(left(trajectories=(once, once))) == ["trajectory ('r1', 0) was written 2 times"]
    assert doubled(left(decisions=(cut(1, "r1"), cut(1, "r1")))) == ["1 decisions were made twice"]
    assert doubled(left(decisions=(cut(1, "r1"), cut(2, "r1")))) == ["rollout r1 is in 2 batches"]


def test_rows_that_differ_from_the_undisturbed_ones_are_found() -> None:
    first = trajectory("r1", task_id="a")
    same = trajectory("r2", task_id="a")
    other = trajectory("r3", task_id="a", rows=[row([1, 2, 3, 5], [0, 0, 1, 1])])
    assert unequal_rows(left(trajectories=(first, same))) == []
    assert len(unequal_rows(left(trajectories=(first, same, other)))) == 1


def test_staleness_beyond_its_bound_is_found() -> None:
    assert beyond_staleness(left(decisions=(cut(1, "r1"), cut(2, "r2")))) == []
    stale = (cut(1, "r1"), cut(2, "r2"), cut(3, "r3", sampled_by=0))
    assert beyond_staleness(left(decisions=stale)) == ["batch 3, rollout r3: versions 0 to 0"]
    assert len(beyond_staleness(left(decisions=(cut(1, "r1", sampled_by=1),)))) == 1


def test_optimizer_steps_other_than_configured_are_found() -> None:
    assert wrong_steps(left()) == []
    assert wrong_steps(left(num_steps=5)) == ["5 optimizer steps for 2 batches, not 4"]


def test_the_same_seed_gives_the_same_faults_and_each_kind_comes_as_often_as_the_others() -> None:
    first = list(islice(schedule(7), 2 * len(every_kind())))
    assert first == list(islice(schedule(7), len(first)))
    assert first != list(islice(schedule(8), len(first)))
    names = [fault.name for fault in first]
    assert {names.count(name) for name in names} == {2}
    assert {fault.service for fault in first if fault.service} == set(SERVICES)


def test_the_report_counts_faults_by_kind_and_names_what_does_not_hold() -> None:
    report = Report(seed=7, problems={"all is well": [], "nothing is lost": ["turn t0"]})
    report.faults["kill -9: broker"] = 3
    text = "\n".join(report.lines())
    assert "| kill -9: broker | 3 |" in text
    assert "all is well: yes" in text
    assert "nothing is lost: NO, 1, such as turn t0" in text
