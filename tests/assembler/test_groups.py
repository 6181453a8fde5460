"""The fold of tasks, trajectories and decisions."""

from __future__ import annotations

from typing import Any

from turnfold.assembler.cut import Wait
from turnfold.assembler.groups import GroupsState, summary
from turnfold.schemas.batches import BatchCut, GroupDropped, Positions
from turnfold.schemas.run import RunConfig
from turnfold.schemas.testing import row, task, trajectory

EMPTY = Positions(tasks={}, trajectories={})


def test_a_summary_keeps_counts_and_no_tokens() -> None:
    rows = [row([1, 2, 3, 4], [0, 0, 1, 1]), row([5, 6], [0, 1])]
    got = summary(trajectory("r1", rows=rows, policy_version=3), 2, 7, "abc")
    assert (got.num_rows, got.num_tokens, got.num_trained, got.max_row_tokens) == (2, 6, 3, 4)
    assert (got.partition, got.offset, got.digest, got.min_policy_version) == (2, 7, "abc", 3)
    assert got.is_completed


def test_positions_are_one_past_the_last_record_of_each_partition_read() -> None:
    state = GroupsState(RunConfig())
    state.add_task(task("a"), partition=1, offset=4)
    state.mark_read("trajectories", 3, 9)
    assert state.positions == Positions(tasks={1: 5}, trajectories={3: 10})


def test_records_of_others_count_as_read() -> None:
    state = GroupsState(RunConfig())
    state.add_task(task("a", run_id="other"), partition=0, offset=0)
    state.add_task(task("b", split="eval"), partition=0, offset=1)
    assert state.positions.tasks == {0: 2}
    assert state.open == {}


def test_a_redelivered_record_changes_nothing(desk: Any) -> None:
    d = desk(groups_per_batch=1)
    d.dispatch("a")
    d.finish_group("a")
    before = d.decide()
    d.num_tasks = d.num_trajectories = 0
    d.dispatch("a")
    d.finish_group("a", policy_version=99)
    assert d.decide() == before


def test_the_first_batch_of_an_index_wins(desk: Any) -> None:
    d = desk(groups_per_batch=1)
    for name in "ab":
        d.dispatch(name)
        d.finish_group(name)
    winner = d.decide()
    loser = BatchCut(
        run_id="default", index=1, groups=(), positions=EMPTY, at=0.0, config_digest=""
    )
    assert d.state.add_decision(winner)
    assert not d.state.add_decision(loser)
    assert not d.state.add_decision(winner)
    assert d.state.next_index == 2
    assert list(d.state.open) == ["b"]


def test_a_batch_with_a_group_that_was_dropped_before_does_not_count(desk: Any) -> None:
    d = desk(groups_per_batch=1)
    d.dispatch("a")
    d.finish_group("a")
    cut = d.decide()
    drop = GroupDropped(
        run_id="default",
        group_id="a",
        dispatch_index=0,
        reason="stale",
        positions=EMPTY,
        at=0.0,
        config_digest="",
    )
    assert d.state.add_decision(drop)
    assert not d.state.add_decision(cut)
    assert isinstance(d.decide(), Wait)


def test_decisions_may_be_folded_before_the_records_they_are_about(desk: Any) -> None:
    d = desk(groups_per_batch=1)
    d.dispatch("a")
    d.finish_group("a")
    (cut,) = d.decide_all()

    restarted = desk(groups_per_batch=1)
    assert restarted.state.add_decision(cut)
    restarted.dispatch("a")
    restarted.finish_group("a")
    assert restarted.state.open == {}
    assert restarted.state.positions == d.state.positions


def test_a_task_read_after_its_trajectories_still_sets_the_size_of_its_group(desk: Any) -> None:
    d = desk(group_size=2, groups_per_batch=1)
    d.finish("a", 0, dispatch_index=0)
    d.dispatch("a", n=3)
    d.finish("a", 1, dispatch_index=0)
    assert isinstance(d.decide(), Wait)
    d.finish("a", 2, dispatch_index=0)
    assert d.decide().num_rollouts == 3


def test_counts_of_running_and_complete_groups(desk: Any) -> None:
    d = desk()
    for name in "abc":
        d.dispatch(name)
    d.finish_group("b")
    assert (d.state.num_running, d.state.num_complete) == (2, 1)
