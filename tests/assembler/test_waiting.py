"""Whoever is waited for is named."""

from __future__ import annotations

from typing import Any

import pytest

from turnfold.assembler.waiting import awaited


def line(desk: Any, held: Any = None, published: int = 0) -> str:
    return awaited(desk.state, held, desk.now, published, 1)


@pytest.mark.field_case("verl#3895")
def test_a_rollout_that_does_not_end_is_named_with_its_group_and_since_when(desk: Any) -> None:
    d = desk(group_size=3)
    d.dispatch("g")
    d.finish("g", 0)
    d.finish("g", 1)
    d.now += 312.0
    assert line(d) == (
        "batch 1 needs 2 groups, 0 have ended: waiting for group g, dispatched 312 s ago: "
        "g-02 has not ended"
    )


def test_of_many_rollouts_some_are_named(desk: Any) -> None:
    d = desk(group_size=8)
    d.dispatch("g")
    assert line(d).endswith("g-00, g-01, g-02 and 5 more have not ended")


@pytest.mark.field_case("verl#5815")
def test_without_a_group_in_flight_the_dispatcher_is_waited_for(desk: Any) -> None:
    assert line(desk()) == (
        "batch 1 needs 2 groups, 0 have ended: waiting for the dispatcher, no group is running"
    )


def test_a_batch_that_nobody_needs_yet_waits_for_the_trainer(desk: Any) -> None:
    d = desk(max_staleness=5)
    for name in "abcdef":
        d.dispatch(name)
        d.finish_group(name)
    for _ in range(2):
        d.state.add_decision(d.decide())
    assert line(d, held=d.decide()) == (
        "batch 3 is ready, and the trainer has published version 0: waiting for the trainer"
    )


def test_a_cut_that_is_put_off_names_the_slow_group(desk: Any) -> None:
    d = desk(max_staleness=0)
    d.dispatch("slow")
    for name in "ab":
        d.dispatch(name)
        d.finish_group(name)
    assert line(d, held=d.decide()) == (
        "batch 1 is ready and waits for group slow, dispatched 0 s ago: "
        "slow-00, slow-01 have not ended"
    )


def test_groups_of_newer_versions_wait_for_the_batches_before(desk: Any) -> None:
    d = desk()
    for name in "ab":
        d.dispatch(name)
        d.finish_group(name, policy_version=3)
    assert "waiting for the batches before it" in line(d)
