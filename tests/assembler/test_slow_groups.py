"""When a cut waits for a group that still runs."""

from __future__ import annotations

from typing import Any

import pytest

from turnfold.assembler.cut import strands_running
from turnfold.schemas.batches import BatchCut


def is_put_off(desk: Any) -> bool:
    cut = desk.decide()
    assert isinstance(cut, BatchCut), cut
    return strands_running(desk.state, cut, desk.now)


def cut_first_batch(desk: Any) -> None:
    for name in "ab":
        desk.dispatch(name)
        desk.finish_group(name)
    assert len(desk.decide_all()) == 1


def test_a_cut_waits_for_a_group_that_would_be_stale_in_the_next_batch(desk: Any) -> None:
    d = desk(max_staleness=1)
    d.dispatch("slow")
    cut_first_batch(d)
    for name in "cd":
        d.dispatch(name, policy_version=1)
        d.finish_group(name, policy_version=1)
    assert is_put_off(d)  # batch 2 is the last that version 0 may go into
    d.finish_group("slow")
    assert not is_put_off(d)


def test_a_group_that_may_go_into_the_next_batch_is_overtaken(desk: Any) -> None:
    d = desk(max_staleness=1)
    d.dispatch("slow", policy_version=1)
    cut_first_batch(d)
    for name in "cd":
        d.dispatch(name, policy_version=1)
        d.finish_group(name, policy_version=1)
    assert not is_put_off(d)


@pytest.mark.parametrize(("slow", "is_waited_for"), [("ef", False), ("efg", True)])
def test_running_groups_keep_a_seat_each_up_to_their_last_batch(
    desk: Any, slow: str, is_waited_for: bool
) -> None:
    """Version 1 may go into batch 3 at the latest, which has two seats."""
    d = desk(max_staleness=1)
    cut_first_batch(d)
    for name in f"{slow}cd":
        d.dispatch(name, policy_version=1)
    for name in "cd":
        d.finish_group(name, policy_version=1)
    assert is_put_off(d) == is_waited_for


def test_nobody_waits_for_a_group_past_its_deadline_or_without_one(desk: Any) -> None:
    d = desk(max_staleness=0, group_timeout_s=50.0)
    d.dispatch("never_dispatched_in_time", dispatched_at=0.0)
    d.dispatch("slow")
    for name in "ab":
        d.dispatch(name)
        d.finish_group(name)
    assert is_put_off(d)
    d.now += 50.0
    d.state.add_decision(d.decide())  # its task is tried again
    assert not is_put_off(d)


def test_nobody_waits_when_there_is_no_seat_for_a_complete_group_anyway(desk: Any) -> None:
    d = desk(max_staleness=0)
    for name in "abc":
        d.dispatch(name)
        d.finish_group(name)
    assert not is_put_off(d)
