"""Which tasks come next."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnfold.dispatcher.plan import (
    DispatchState,
    Limits,
    Place,
    epoch_order,
    is_done,
    next_slots,
    row_at,
    task_id,
)
from turnfold.schemas.batches import Decision
from turnfold.schemas.policies import PolicyPublished
from turnfold.schemas.run import RunConfig
from turnfold.schemas.tasks import Task
from turnfold.schemas.testing import cut, dropped, served, task


class Run:
    """A dispatcher without a broker: what it sends is read back at once."""

    def __init__(self, num_rows: int = 6, limits: Limits | None = None, **config: Any) -> None:
        defaults: dict[str, Any] = {"groups_per_batch": 2, "max_staleness": 0, "max_attempts": 2}
        self.config = RunConfig(**{**defaults, **config})
        self.state = DispatchState(self.config)
        self.num_rows = num_rows
        self.limits = limits or Limits()
        self.sent: list[Task] = []
        self.decisions: list[Decision] = []

    def dispatch(self) -> list[Task]:
        """Send what may be sent now."""
        new = []
        for slot in next_slots(self.state, self.num_rows, self.limits):
            index = self.state.next_dispatch_index
            new.append(
                task(
                    f"g{index}",
                    dispatch_index=index,
                    epoch=slot.place.epoch,
                    cursor=slot.place.cursor,
                    attempt=slot.attempt,
                )
            )
            self.state.add_task(new[-1])
        self.sent += new
        return new

    def decide(self, decision: Decision) -> None:
        assert self.state.add_decision(decision)
        self.decisions.append(decision)

    def train(self) -> None:
        """The two oldest groups in flight are cut and trained, and the new version is served."""
        groups = list(self.state.outstanding)[: self.config.groups_per_batch]
        self.decide(cut(self.state.decisions.next_index, *groups))
        self.state.add_policy(served(self.state.decisions.num_batches))

    @property
    def is_done(self) -> bool:
        return is_done(self.state, self.num_rows, self.limits)


def places(tasks: list[Task]) -> list[tuple[int, int]]:
    return [(one.epoch, one.cursor) for one in tasks]


def test_nothing_is_dispatched_before_version_zero_is_served() -> None:
    run = Run()
    run.state.add_policy(PolicyPublished(run_id="default", policy_version=0, weights_uri="w"))
    run.state.add_policy(served(0, run_id="other"))
    assert run.dispatch() == []
    run.state.add_policy(served(0))
    assert len(run.dispatch()) == 2


def test_with_staleness_zero_a_batch_is_dispatched_only_when_the_one_before_is_served() -> None:
    run = Run()
    run.state.add_policy(served(0))
    assert places(run.dispatch()) == [(0, 0), (0, 1)]
    run.decide(cut(1, "g0", "g1"))
    assert run.dispatch() == []
    run.state.add_policy(served(1))
    assert places(run.dispatch()) == [(0, 2), (0, 3)]


def test_a_losing_manifest_gives_no_seat() -> None:
    run = Run()
    run.state.add_policy(served(0))
    run.dispatch()
    run.decide(cut(1, "g0", "g1"))
    assert not run.state.add_decision(cut(1, "g0"))
    assert run.state.num_cut == 2


def test_the_order_wraps_into_the_next_epoch() -> None:
    run = Run(num_rows=3)
    run.state.add_policy(served(0))
    for _ in range(3):
        run.dispatch()
        run.train()
    assert places(run.sent) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


@pytest.mark.field_case("OpenRLHF#1320")
def test_three_tasks_in_batches_of_two_are_all_offered_and_then_it_ends() -> None:
    # Two batches: the last one is filled up from the next epoch, no task is left out.
    run = Run(num_rows=3, limits=Limits(epochs=1))
    run.state.add_policy(served(0))
    run.dispatch()
    run.train()
    assert not run.is_done
    run.dispatch()
    run.train()
    assert run.dispatch() == []
    assert run.is_done
    assert places(run.sent) == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_a_run_of_some_batches_dispatches_exactly_the_groups_that_these_need() -> None:
    run = Run(limits=Limits(num_batches=2), max_staleness=9)
    run.state.add_policy(served(0))
    assert len(run.dispatch()) == 4
    run.train()
    assert not run.is_done
    run.train()
    assert run.dispatch() == []
    assert run.is_done


def test_groups_in_flight_can_be_limited_further() -> None:
    run = Run(limits=Limits(max_in_flight=3), max_staleness=9)
    run.state.add_policy(served(0))
    assert len(run.dispatch()) == 3
    run.decide(dropped("g1", "stale"))
    assert len(run.dispatch()) == 1


def test_a_lost_group_is_dispatched_again_before_new_tasks() -> None:
    run = Run()
    run.state.add_policy(served(0))
    run.dispatch()
    run.decide(dropped("g0", "group_timeout"))
    (again,) = run.dispatch()
    assert (again.group_id, again.dispatch_index, again.cursor, again.attempt) == ("g2", 2, 0, 1)


@pytest.mark.field_case("prime-rl#1512")
def test_a_task_is_dispatched_at_most_max_attempts_times() -> None:
    run = Run(max_attempts=3)
    run.state.add_policy(served(0))
    run.dispatch()
    for _ in range(3):
        lost = next(name for name, one in run.state.outstanding.items() if one.cursor == 0)
        run.decide(dropped(lost, "too_few_survivors"))
        run.dispatch()
    assert [one.attempt for one in run.sent if one.cursor == 0] == [0, 1, 2]


@pytest.mark.field_case("miles#2030")
@pytest.mark.parametrize("reason", ["stale", "zero_variance"])
def test_a_group_that_ran_to_its_end_is_not_dispatched_again(reason: str) -> None:
    run = Run()
    run.state.add_policy(served(0))
    run.dispatch()
    run.decide(dropped("g0", reason))
    assert places(run.dispatch()) == [(0, 2)]


def test_an_epoch_of_which_every_group_is_dropped_ends() -> None:
    run = Run(num_rows=3, limits=Limits(epochs=1))
    run.state.add_policy(served(0))
    for _ in range(10):
        run.dispatch()
        for name in list(run.state.outstanding):
            run.decide(dropped(name, "zero_variance"))
    assert run.is_done
    assert {one.cursor for one in run.sent} == {0, 1, 2}


def test_an_epoch_does_not_end_while_a_lost_task_has_attempts_left() -> None:
    run = Run(num_rows=2, limits=Limits(epochs=1))
    run.state.add_policy(served(0))
    run.dispatch()
    run.decide(dropped("g0", "group_timeout"))
    run.decide(dropped("g1", "stale"))
    assert not run.is_done
    assert [one.attempt for one in run.dispatch()] == [1, 0]


def test_evaluation_tasks_take_no_seat_but_their_dispatch_index() -> None:
    run = Run()
    run.state.add_policy(served(0))
    run.state.add_task(task("e", split="eval", dispatch_index=7))
    assert [one.dispatch_index for one in run.dispatch()] == [8, 9]


def test_every_row_is_once_in_the_order_of_an_epoch() -> None:
    first, second = epoch_order(100, 7, 0), epoch_order(100, 7, 1)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(100))
    assert first.tolist() != second.tolist() != list(range(100))
    assert epoch_order(100, 8, 0).tolist() != first.tolist()


def test_the_order_is_the_same_on_every_machine() -> None:
    assert epoch_order(8, 0, 0).tolist() == [4, 0, 1, 7, 6, 2, 5, 3]


def test_without_shuffling_the_order_is_that_of_the_data_set() -> None:
    assert [row_at(Place(3, i), 4, 0, is_shuffled=False) for i in range(4)] == [0, 1, 2, 3]


def test_a_task_is_named_by_its_own_id_or_by_its_row() -> None:
    assert task_id({"task_id": "t7"}, 3) == "t7"
    assert task_id({"id": 41}, 3) == "41"
    assert task_id({"id": True, "question": "?"}, 3) == "row-000003"


# A run in which groups are cut, dropped or served in any order, and restarted anywhere.
_steps = st.lists(
    st.sampled_from(["train", "lose_oldest", "lose_newest", "stale", "dispatch"]), max_size=40
)


def _played(steps: list[str], **config: Any) -> Run:
    run = Run(num_rows=5, **config)
    run.state.add_policy(served(0))
    for step in steps:
        names = list(run.state.outstanding)
        if step == "train" and len(names) >= 2:
            run.train()
        elif step == "lose_oldest" and names:
            run.decide(dropped(names[0], "group_timeout"))
        elif step == "lose_newest" and names:
            run.decide(dropped(names[-1], "too_few_survivors"))
        elif step == "stale" and names:
            run.decide(dropped(names[-1], "stale"))
        else:
            run.dispatch()
    return run


@given(steps=_steps, order=st.randoms(use_true_random=False), max_staleness=st.integers(0, 3))
def test_a_dispatcher_that_starts_again_sends_what_it_would_have_sent(
    steps: list[str], order: Any, max_staleness: int
) -> None:
    run = _played(steps, max_staleness=max_staleness)
    # The topics are read in any interleaving; decisions keep their order, on one partition.
    again = Run(num_rows=5, max_staleness=max_staleness)
    tasks, decisions = list(run.sent), list(run.decisions)
    order.shuffle(tasks)
    while tasks or decisions:
        if tasks and (not decisions or order.random() < 0.5):
            again.state.add_task(tasks.pop())
        else:
            again.state.add_decision(decisions.pop(0))
    again.state.add_policy(served(run.state.decisions.num_batches))
    assert next_slots(again.state, 5, Limits()) == next_slots(run.state, 5, Limits())
    assert again.state.next_dispatch_index == run.state.next_dispatch_index


@given(steps=_steps)
@pytest.mark.field_case("trl#7274")
def test_no_task_is_skipped_or_sent_twice(steps: list[str]) -> None:
    run = _played(steps)
    first_attempts = places([one for one in run.sent if one.attempt == 0])
    expected = [(i // 5, i % 5) for i in range(len(first_attempts))]
    assert first_attempts == expected
    attempts = [
        (*place, one.attempt) for one, place in zip(run.sent, places(run.sent), strict=True)
    ]
    assert len(set(attempts)) == len(attempts)
    assert [one.dispatch_index for one in run.sent] == list(range(len(run.sent)))
