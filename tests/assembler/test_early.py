"""Groups that no batch can hold are dropped while they still run."""

from __future__ import annotations

from typing import Any

import pytest

from turnfold.assembler.cut import Wait, decide_early
from turnfold.schemas import codec
from turnfold.schemas.batches import GroupDropped


def early(desk: Any) -> GroupDropped | None:
    dropped: GroupDropped | None = decide_early(desk.state, desk.config, desk.now)
    return dropped


def cut_first_batch(desk: Any) -> None:
    for name in "ab":
        desk.dispatch(name)
        desk.finish_group(name)
    assert len(desk.decide_all()) == 1


def test_a_group_of_which_too_many_failed_is_dropped_at_once(desk: Any) -> None:
    d = desk(group_size=3, min_group_size=2)
    d.dispatch("g")
    d.finish("g", 0, status="aborted", reason="agent_error", rows=())
    assert early(d) is None, "two may still survive"
    d.finish("g", 2, status="aborted", reason="agent_error", rows=())
    dropped = early(d)
    assert dropped is not None
    assert (dropped.group_id, dropped.reason, dropped.is_early) == ("g", "too_few_survivors", True)
    assert [(left.rollout_id, left.reason) for left in dropped.left_out] == [
        ("g-00", "aborted:agent_error"),
        ("g-02", "aborted:agent_error"),
        ("g-01", "not_finished"),
    ]


def test_a_group_whose_first_rollout_is_stale_is_dropped_before_the_others_end(desk: Any) -> None:
    d = desk(max_staleness=0)
    d.dispatch("slow")
    d.finish("slow", 0)
    cut_first_batch(d)
    dropped = early(d)
    assert dropped is not None
    assert (dropped.group_id, dropped.reason) == ("slow", "stale")
    assert [(left.rollout_id, left.reason) for left in dropped.left_out] == [
        ("slow-00", "stale"),
        ("slow-01", "not_finished"),
    ]


def test_a_group_of_which_nothing_has_ended_may_have_been_sampled_late(desk: Any) -> None:
    d = desk(max_staleness=0)
    d.dispatch("slow")
    cut_first_batch(d)
    assert early(d) is None, "its rollouts may wait for a worker: then a newer version samples them"


def test_stale_groups_that_are_to_be_trained_are_left_to_run(desk: Any) -> None:
    d = desk(max_staleness=0, on_stale="train")
    d.dispatch("slow")
    d.finish("slow", 0)
    cut_first_batch(d)
    assert early(d) is None


def test_a_slot_that_is_tried_again_is_waited_for(desk: Any) -> None:
    d = desk(group_size=2, min_group_size=2)
    d.dispatch("g")
    d.finish("g", 0, status="aborted", reason="agent_error", rows=())
    d.finish("g", 0, rollout_id="g-00-again", attempt=1)
    assert early(d) is None


@pytest.mark.field_case("prime-rl#1512")
def test_the_seat_of_a_doomed_group_is_free_and_its_later_results_change_nothing(desk: Any) -> None:
    d = desk(group_size=2, min_group_size=2)
    d.dispatch("g")
    d.finish("g", 0, status="aborted", reason="environment_error", rows=())
    assert isinstance(d.decide(), Wait), "it has not closed"
    dropped = early(d)
    assert d.state.add_decision(dropped)
    before = codec.encode(d.state.positions)
    d.finish("g", 1)
    assert early(d) is None
    assert d.state.open == {}
    assert codec.encode(d.state.positions) != before, "it counts as read"
