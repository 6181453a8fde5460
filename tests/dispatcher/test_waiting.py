"""A dispatcher that sends nothing says whom it waits for."""

from __future__ import annotations

import pytest

from turnfold.dispatcher.plan import DispatchState
from turnfold.dispatcher.waiting import awaited
from turnfold.schemas.run import RunConfig
from turnfold.schemas.tasks import Evaluation
from turnfold.schemas.testing import served, task


@pytest.mark.field_case("verl#3895")
def test_the_party_that_everything_waits_for_is_named() -> None:
    state = DispatchState(RunConfig())
    assert awaited(state, 0.0) == "waiting for the engines to serve policy version 0"
    state.add_policy(served(4))
    assert awaited(state, 0.0) == "waiting for the engines to serve a version after 4"
    evaluation = Evaluation(version=0, num_tasks=2)
    for cursor in (1, 0):
        state.add_task(task(f"eval-{cursor}", split="eval", cursor=cursor, evaluation=evaluation))
    assert awaited(state, 0.0) == "waiting for 2 evaluation groups, such as eval-0"
    state.add_task(task("young", dispatch_index=8, dispatched_at=150.0))
    state.add_task(task("old", dispatch_index=7, dispatched_at=100.0))
    assert awaited(state, 412.0) == (
        "waiting for a decision on group old, dispatched 312 s ago, and 1 more"
    )
