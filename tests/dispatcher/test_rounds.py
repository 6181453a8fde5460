"""Which evaluation tasks are sent when, over restarts, losses and skipped versions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnfold.dispatcher.plan import DispatchState, Limits, next_slots
from turnfold.dispatcher.rounds import (
    RoundPlan,
    RoundSlot,
    RoundState,
    due_version,
    evaluation_of,
    is_evaluated,
    next_evaluations,
)
from turnfold.schemas.batches import GroupEvaluated
from turnfold.schemas.run import RunConfig
from turnfold.schemas.tasks import Task
from turnfold.schemas.testing import completed, evaluated, served, task

PLAN = RoundPlan(every=10, num_tasks=3, max_in_flight=8)


def sent(slot: RoundSlot, state: RoundState, plan: RoundPlan = PLAN) -> Task:
    return task(
        f"eval-{slot.version}-{slot.cursor}-{slot.attempt}",
        split="eval",
        cursor=slot.cursor,
        attempt=slot.attempt,
        dispatch_index=state.next_dispatch_index,
        evaluation=evaluation_of(state, plan, slot),
    )


def slots(state: RoundState, served: int | None, final: int | None = None) -> list[Any]:
    found = next_evaluations(state, PLAN, served, final)
    return [(slot.version, slot.cursor, slot.attempt) for slot in found]


def begun(*cursors: int, version: int = 0) -> RoundState:
    state = RoundState()
    for cursor in cursors:
        state.add_task(sent(RoundSlot(version, cursor), state))
    return state


@pytest.mark.parametrize(
    ("served", "final", "due"),
    [
        (None, 25, None),
        (0, 25, 0),
        (9, 25, 0),
        (19, 25, 10),
        (24, 25, 20),
        (25, 25, 25),
        (33, None, 30),
    ],
)
def test_versions_that_are_due(served: int | None, final: int | None, due: int | None) -> None:
    assert due_version(PLAN, served, final) == due


def test_a_round_is_all_its_tasks_in_the_order_of_the_data_set() -> None:
    assert slots(RoundState(), 0) == [(0, 0, 0), (0, 1, 0), (0, 2, 0)]
    assert slots(RoundState(), None) == []


def test_a_round_that_was_begun_is_finished_and_not_begun_again() -> None:
    assert slots(begun(0, 2), 0) == [(0, 1, 0)]
    assert slots(begun(0, 1, 2), 9) == []


def test_of_versions_that_were_passed_the_newest_is_evaluated() -> None:
    assert slots(begun(0, 1, 2), 34) == [(30, 0, 0), (30, 1, 0), (30, 2, 0)]


def test_a_round_is_sent_whole_before_the_next_one_is_begun() -> None:
    assert slots(begun(0, 1), 20) == [(0, 2, 0)]


def test_only_some_groups_are_in_flight_at_a_time() -> None:
    state, plan = RoundState(), RoundPlan(every=10, num_tasks=5, max_in_flight=2)
    found = next_evaluations(state, plan, 0, None)
    assert [slot.cursor for slot in found] == [0, 1]
    tasks = [sent(slot, state, plan) for slot in found]
    for made in tasks:
        state.add_task(made)
    assert next_evaluations(state, plan, 0, None) == []
    state.add_decision(evaluated(tasks[0]))
    assert [slot.cursor for slot in next_evaluations(state, plan, 0, None)] == [2]


def test_a_lost_group_is_sent_again_once_whichever_topic_is_read_first() -> None:
    first = sent(RoundSlot(0, 1), RoundState())
    lost = evaluated(first, is_retried=True)
    tasks_first, decisions_first = begun(0, 2), begun(0, 2)
    tasks_first.add_task(first)
    tasks_first.add_decision(lost)
    decisions_first.add_decision(lost)
    decisions_first.add_task(first)
    for state in (tasks_first, decisions_first):
        assert slots(state, 0) == [(0, 1, 1)]
        assert len(state.outstanding) == 2
        state.add_task(sent(RoundSlot(0, 1, 1), state))
        assert slots(state, 0) == []


def test_the_last_version_is_evaluated_before_the_run_ends() -> None:
    state = begun(0, 1, 2)
    state.add_decision(completed(0))
    assert not is_evaluated(state, 4)
    assert slots(state, 3, final=4) == []
    assert slots(state, 4, final=4) == [(4, 0, 0), (4, 1, 0), (4, 2, 0)]
    for cursor in range(3):
        state.add_task(sent(RoundSlot(4, cursor), state))
    assert not is_evaluated(state, 4)
    state.add_decision(completed(4))
    assert is_evaluated(state, 4)


def test_tasks_of_a_complete_round_that_are_read_later_change_nothing() -> None:
    state = RoundState()
    made = [sent(RoundSlot(0, cursor), state) for cursor in range(3)]
    for done in made:
        state.add_decision(evaluated(done))
    state.add_decision(completed(0))
    for late in made:
        state.add_task(late)
    assert (state.outstanding, state.rounds, slots(state, 0)) == ({}, {}, [])


def test_a_round_keeps_its_size_when_the_setting_changes() -> None:
    state = begun(0)
    larger = RoundPlan(every=10, num_tasks=50)
    assert [s.cursor for s in next_evaluations(state, larger, 0, None)] == [1, 2]


def test_evaluations_take_no_seat_and_no_dispatch_index_of_training() -> None:
    config = RunConfig(groups_per_batch=2, max_staleness=0)
    plain, beside = DispatchState(config), DispatchState(config)
    for state in (plain, beside):
        state.add_policy(served(0))
    for cursor in range(3):
        beside.add_task(sent(RoundSlot(0, cursor), beside.rounds))
    limits = Limits()
    assert next_slots(plain, 10, limits) == next_slots(beside, 10, limits)
    assert beside.next_dispatch_index == plain.next_dispatch_index == 0
    assert beside.outstanding == {}


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("serve"), st.integers(0, 6)),
        st.tuples(st.just("send"), st.integers(0, 3)),
        st.tuples(st.just("end"), st.integers(0, 9)),
        st.tuples(st.just("lose"), st.integers(0, 9)),
        st.tuples(st.just("restart"), st.just(0)),
    ),
    max_size=60,
)


@given(steps=STEPS, order=st.randoms(use_true_random=False))
@settings(max_examples=80, deadline=None)
def test_over_restarts_no_task_of_a_round_is_skipped_or_doubled(steps: Any, order: Any) -> None:
    plan = RoundPlan(every=2, num_tasks=3, max_in_flight=4)
    state, served = RoundState(), 0
    tasks: list[Task] = []
    decisions: list[Any] = []
    in_flight: list[Task] = []

    def decide(decision: Any) -> None:
        decisions.append(decision)
        state.add_decision(decision)

    def end(made: Task, is_lost: bool) -> None:
        decide(evaluated(made, is_retried=is_lost and made.attempt == 0))
        version = made.evaluation.version if made.evaluation else 0
        final = {
            d.cursor
            for d in decisions
            if isinstance(d, GroupEvaluated)
            and d.evaluation.version == version
            and not d.is_retried
        }
        if len(final) == plan.num_tasks:
            decide(completed(version))

    for kind, number in [*steps, *[("send", 9), ("end", 0)] * 40]:
        if kind == "serve":
            served = max(served, number)
        elif kind == "send":
            for slot in next_evaluations(state, plan, served, None)[:number]:
                made = sent(slot, state, plan)
                tasks.append(made)
                in_flight.append(made)
                state.add_task(made)
        elif kind == "restart":
            state = RoundState()
            topics = [[*tasks], [*decisions]]
            while topics := [topic for topic in topics if topic]:
                message = order.choice(topics).pop(0)
                if isinstance(message, Task):
                    state.add_task(message)
                else:
                    state.add_decision(message)
        elif in_flight:
            end(in_flight.pop(number % len(in_flight)), kind == "lose")
    keys = [(t.evaluation.version, t.cursor, t.attempt) for t in tasks if t.evaluation]
    assert len(keys) == len(set(keys))
    rounds = {version for version, _, _ in keys}
    assert {(v, c) for v, c, _ in keys} == {(v, c) for v in rounds for c in range(plan.num_tasks)}
    assert served - served % 2 in rounds
    assert state.rounds == {}
    assert state.completed == rounds
