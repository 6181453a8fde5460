"""The checks of a disturbed run notice what they should."""

from typing import Any

import msgspec

from turnfold.embedded.chaos.findings import (
    AGAIN_HEADER,
    Left,
    beyond_staleness,
    doubled,
    lost_groups,
    lost_rewards,
    lost_turns,
    num_resampled,
    refused_records,
    unequal_rows,
    wrong_steps,
    wrong_tasks,
)
from turnfold.schemas.batches import BatchCut, GroupRef, Positions, RolloutRef
from turnfold.schemas.dead_letters import DeadLetter
from turnfold.schemas.tasks import Task
from turnfold.schemas.testing import finished, row, trajectory, turn

TURN = turn("r1", "t0", prompt=[1, 2], output=[3])


def left(**fields: Any) -> Left:
    defaults: dict[str, Any] = {
        "acknowledged_turns": (("r1", "t0"),),
        "events": (TURN, TURN),
        "trajectories": (),
        "decisions": (),
        "undisturbed": frozenset({"r1"}),
        "max_staleness": 1,
        "num_batches_trained": 2,
        "num_steps": 4,
        "num_steps_a_batch": 2,
    }
    return Left(**{**defaults, **fields})


def task(index: int, *, cursor: int = 0, epoch: int = 0, attempt: int = 0) -> Task:
    return Task(
        run_id="chaos",
        group_id=f"g{index}",
        task_id=f"row-{cursor}",
        dispatch_index=index,
        n=2,
        payload={},
        attempt=attempt,
        epoch=epoch,
        cursor=cursor,
    )


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


def test_a_reward_that_was_confirmed_and_is_not_in_the_log_is_found() -> None:
    confirmed = (("r1", 1.0),)
    assert (
        lost_rewards(left(events=(finished("r1", reward=1.0),), acknowledged_rewards=confirmed))
        == []
    )
    assert lost_rewards(left(acknowledged_rewards=confirmed)) == [
        "rollout r1: reward 1.0 acknowledged, not in the log"
    ]
    other = finished("r1", reward=0.5)
    assert len(lost_rewards(left(events=(other,), acknowledged_rewards=confirmed))) == 1


def test_a_request_that_was_answered_twice_is_counted() -> None:
    first = msgspec.structs.replace(TURN, idempotency_key="k")
    second = msgspec.structs.replace(first, turn_id="t1", event_id="another")
    assert num_resampled(left(events=(first, first))) == 0
    assert num_resampled(left(events=(first, second))) == 1


def test_a_trajectory_a_batch_or_a_rollout_that_is_there_twice_is_found() -> None:
    once = trajectory("r1")
    assert doubled(left(trajectories=(once,), decisions=(cut(1, "r1"), cut(2, "r2")))) == []
    assert doubled(left(trajectories=(once, once))) == ["trajectory ('r1', 0) was written 2 times"]
    assert doubled(left(decisions=(cut(1, "r1"), cut(1, "r1")))) == ["1 decisions were made twice"]
    assert doubled(left(decisions=(cut(1, "r1"), cut(2, "r1")))) == ["rollout r1 is in 2 batches"]


def test_rows_or_rewards_that_differ_from_the_undisturbed_ones_are_found() -> None:
    first = trajectory("r1", task_id="a")
    same = trajectory("r2", task_id="a")
    other = trajectory("r3", task_id="a", rows=[row([1, 2, 3, 5], [0, 0, 1, 1])])
    other_reward = msgspec.structs.replace(trajectory("r4", task_id="a"), reward=0.25)
    unknown = trajectory("r5", task_id="b")
    assert unequal_rows(left(trajectories=(first, same))) == []
    for wrong in (other, other_reward, unknown):
        assert unequal_rows(left(trajectories=(first, same, wrong))) == [
            f"rollout {wrong.rollout_id} has other rows or another reward than undisturbed"
        ]


def test_a_task_that_was_skipped_or_dispatched_twice_is_found() -> None:
    tasks = [task(0, cursor=0), task(1, cursor=1), task(2, cursor=0, epoch=1)]
    assert wrong_tasks(left(tasks=tuple(tasks), num_rows=2)) == []
    again = task(3, cursor=1, attempt=1)
    assert wrong_tasks(left(tasks=(*tasks, again), num_rows=2)) == []
    assert "task (0, 1) was skipped" in wrong_tasks(left(tasks=(tasks[0], tasks[2]), num_rows=2))
    twice = wrong_tasks(left(tasks=(*tasks, task(3, cursor=1)), num_rows=2))
    assert twice == ["task (0, 1, 0) was dispatched 2 times"]
    early = wrong_tasks(left(tasks=(*tasks, task(3, cursor=1, attempt=2)), num_rows=2))
    assert early == ["attempt 2 at task (0, 1) follows no attempt 1"]
    miscounted = wrong_tasks(left(tasks=(tasks[0], task(2, cursor=1)), num_rows=2))
    assert miscounted == ["groups were counted as [0, 2]"]


def test_a_group_that_vanished_is_found() -> None:
    ended = tuple(trajectory(f"r{n}", group_id="g1") for n in range(2))
    assert lost_groups(left(tasks=(task(1),), trajectories=ended)) == []
    assert lost_groups(left(tasks=(task(1),), decisions=(cut(1, "r1"),))) == []
    assert lost_groups(left(tasks=(task(1),), trajectories=ended[:1])) == [
        "group g1: 1 of 2 rollouts have ended"
    ]


def test_a_record_that_was_refused_although_nobody_sent_it_twice_is_found() -> None:
    letter = DeadLetter(
        topic="turnfold.events",
        partition=1,
        offset=7,
        reason="not open",
        key=b"r1",
        value=b"",
        headers=((AGAIN_HEADER, b"1"),),
        at=0.0,
    )
    assert refused_records(left(dead_letters=(letter,))) == []
    unmarked = msgspec.structs.replace(letter, headers=())
    assert refused_records(left(dead_letters=(letter, unmarked))) == [
        "turnfold.events/1@7: not open"
    ]


def test_staleness_beyond_its_bound_is_found() -> None:
    assert beyond_staleness(left(decisions=(cut(1, "r1"), cut(2, "r2")))) == []
    stale = (cut(1, "r1"), cut(2, "r2"), cut(3, "r3", sampled_by=0))
    assert beyond_staleness(left(decisions=stale)) == ["batch 3, rollout r3: versions 0 to 0"]
    assert len(beyond_staleness(left(decisions=(cut(1, "r1", sampled_by=1),)))) == 1


def test_optimizer_steps_other_than_configured_are_found() -> None:
    assert wrong_steps(left()) == []
    assert wrong_steps(left(num_steps=5)) == ["5 optimizer steps for 2 batches, not 4"]
