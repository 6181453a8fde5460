"""A state that begins to read at its checkpoint is the one that has read everything."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnfold.assembler.checkpoint import checkpoint_text, read_checkpoint
from turnfold.assembler.cut import Wait, decide
from turnfold.assembler.groups import GroupsState
from turnfold.assembler.rollouts import summary
from turnfold.schemas import codec
from turnfold.schemas.batches import Decision
from turnfold.schemas.run import RunConfig
from turnfold.schemas.tasks import Evaluation, Task
from turnfold.schemas.testing import task, trajectory

CONFIG = RunConfig(group_size=2, groups_per_batch=2, max_staleness=5)
NUM_PARTITIONS = 2


class Log:
    """Records by topic and partition."""

    def __init__(self) -> None:
        self.records: list[tuple[int, int, Any]] = []
        self._ends = {(kind, part): 0 for kind in (True, False) for part in range(NUM_PARTITIONS)}

    def append(self, message: Any) -> tuple[int, int, Any]:
        partition = sum(message.group_id.encode()) % NUM_PARTITIONS
        place = (isinstance(message, Task), partition)
        record = (partition, self._ends[place], message)
        self._ends[place] += 1
        self.records.append(record)
        return record


def feed(state: GroupsState, record: tuple[int, int, Any]) -> None:
    partition, offset, message = record
    if isinstance(message, Task):
        state.add_task(message, partition, offset)
    else:
        state.add_rollout(summary(message, partition, offset, codec.digest(message)))


def messages(groups: list[tuple[int, bool]]) -> list[Any]:
    """A task and the ends of so many of its rollouts, for each group."""
    made: list[Any] = []
    for number, (num_ended, is_eval) in enumerate(groups):
        name = f"g{number:02d}"
        fields: dict[str, Any] = {"dispatch_index": number, "split": "eval" if is_eval else "train"}
        evaluation = Evaluation(version=0, num_tasks=99) if is_eval else None
        made.append(task(name, n=2, dispatched_at=1e9, evaluation=evaluation, **fields))
        made += [
            trajectory(f"{name}-{index:02d}", group_id=name, index=index, **fields)
            for index in range(num_ended)
        ]
    return made


@given(
    groups=st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=12),
    order=st.randoms(use_true_random=False),
    share=st.floats(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_skipping_to_a_checkpoint_changes_no_decision(
    groups: Any, order: Any, share: float
) -> None:
    log, whole = Log(), GroupsState(CONFIG)
    decisions: list[Decision] = []
    waiting = messages(groups)
    order.shuffle(waiting)
    text = ""
    for number, message in enumerate(waiting):
        feed(whole, log.append(message))
        while not isinstance(decision := decide(whole, CONFIG, 0.0), Wait):
            assert whole.add_decision(decision)
            decisions.append(decision)
        if number <= share * len(waiting):
            text = checkpoint_text(whole, len(decisions))
    again = GroupsState(CONFIG)
    for decision in decisions:
        again.add_decision(decision)
    found = read_checkpoint(text) if text else None
    if found is not None:
        again.skip_to(found.positions)
    for record in log.records:
        feed(again, record)
    assert again.positions == whole.positions
    assert again.open == whole.open
    assert again.evaluations.open == whole.evaluations.open
    for now in (0.0, 2e9):
        assert decide(again, CONFIG, now) == decide(whole, CONFIG, now)


def test_a_checkpoint_names_the_lowest_place_of_what_is_open(desk: Any) -> None:
    d = desk()
    for name in "abc":
        d.dispatch(name)
    d.finish_group("a")
    d.finish("b", 0)
    d.finish_group("c")
    assert len(d.decide_all()) == 1
    found = read_checkpoint(checkpoint_text(d.state, 7))
    assert found is not None
    assert (found.offset, found.num_decided) == (7, 2)
    assert found.positions.tasks == {0: 1}
    assert found.positions.trajectories == {0: 2}


def test_a_text_that_is_no_checkpoint_is_none() -> None:
    assert read_checkpoint("") is None
    assert read_checkpoint('{"offset": "x"}') is None


def test_a_log_of_too_many_partitions_has_no_checkpoint(desk: Any) -> None:
    state = desk().state
    for partition in range(1000):
        state.mark_read("tasks", partition, 10**9)
    assert checkpoint_text(state, 0) == ""


@pytest.mark.field_case("prime-rl#2821")
def test_nothing_of_what_was_decided_stays_in_memory_but_its_name(desk: Any) -> None:
    """Memory grows with what is in flight, and not with the run."""
    d = desk(max_staleness=1)
    for number in range(100):
        name = f"g{number}"
        d.dispatch(name, policy_version=number // 2)
        d.finish(name, 0, policy_version=number // 2)
        d.finish(name, 1, policy_version=number // 2)
        d.decide_all()
    state = d.state
    assert state.num_complete == state.num_running == len(state.open) == 0
    assert list(state.seats_taken()) == []
    assert state.doomed() is None
    assert len(state._doomed) <= 8
    assert len(state.decisions.decided) == 100
