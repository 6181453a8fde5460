"""What holds for every log: random groups, failures, revisions, interleavings and times."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from turnfold.assembler.cut import Wait, decide, staleness, survivors
from turnfold.assembler.groups import GroupsState, RolloutSummary, summary
from turnfold.schemas import codec
from turnfold.schemas.batches import BatchCut, Decision, GroupDropped, Positions
from turnfold.schemas.decisions import group_ids
from turnfold.schemas.run import RunConfig
from turnfold.schemas.tasks import Task
from turnfold.schemas.testing import row, task, trajectory

NUM_PARTITIONS = 3


class Record(msgspec.Struct, frozen=True):
    """A task or a trajectory at its place in the log, in the order in which it came."""

    partition: int
    offset: int
    value: Task | RolloutSummary

    @property
    def topic(self) -> str:
        return "tasks" if isinstance(self.value, Task) else "trajectories"


def place(values: list[Any]) -> list[Record]:
    """Append to a log: a group stays in one partition, as its key decides."""
    ends: Counter[tuple[str, int]] = Counter()
    records = []
    for value in values:
        partition = sum(value.group_id.encode()) % NUM_PARTITIONS
        topic = "tasks" if isinstance(value, Task) else "trajectories"
        offset = ends[topic, partition]
        # Offsets have holes: transaction markers take some.
        ends[topic, partition] += 1 + (offset % 3 == 2)
        if not isinstance(value, Task):
            value = summary(value, partition, offset, codec.digest(value))
        records.append(Record(partition, offset, value))
    return records


def feed(state: GroupsState, record: Record) -> None:
    if isinstance(record.value, Task):
        state.add_task(record.value, record.partition, record.offset)
    else:
        state.add_rollout(record.value)


@st.composite
def runs(draw: st.DrawFn) -> tuple[RunConfig, list[Record]]:
    """A configuration, and tasks with the ends of their rollouts, interleaved at random."""
    config = RunConfig(
        group_size=draw(st.integers(1, 3)),
        min_group_size=1,
        groups_per_batch=draw(st.integers(1, 3)),
        max_staleness=draw(st.integers(0, 2)),
        on_stale=draw(st.sampled_from(["drop", "drop", "train"])),
        is_zero_variance_dropped=draw(st.booleans()),
        group_timeout_s=10.0,
        max_row_tokens=4,
    )
    values: list[Any] = []
    for index in range(draw(st.integers(0, 8))):
        name = f"g{index}"
        if draw(st.integers(0, 5)) > 0:  # the others are foreign: nobody dispatched them
            values.append(
                task(name, n=config.group_size, dispatch_index=index, dispatched_at=100.0 + index)
            )
            dispatch_index = index
        else:
            dispatch_index = -1
        for slot in range(config.group_size):
            for revision in range(draw(st.integers(0, 2))):
                values.append(draw(_ends(name, slot, revision, dispatch_index)))
    order = draw(st.permutations(range(len(values))))
    # A later revision follows the earlier one: they are in one partition.
    shuffled = sorted(zip(order, values, strict=True), key=lambda pair: pair[0])
    return config, place(_revisions_in_order([value for _, value in shuffled]))


@st.composite
def _ends(draw: st.DrawFn, group: str, slot: int, revision: int, dispatch_index: int) -> Any:
    version = draw(st.integers(0, 3))
    is_aborted = revision == 0 and draw(st.integers(0, 4)) == 0
    rows = draw(st.sampled_from([(row([1, 2], [0, 1]),), (), (row([1] * 5, [1] * 5),)]))
    return trajectory(
        f"{group}-{slot:02d}",
        group_id=group,
        index=slot,
        revision=revision,
        dispatch_index=dispatch_index,
        reward=None if is_aborted else float(draw(st.integers(0, 1))),
        rows=() if is_aborted else rows,
        policy_version=version,
    )


def _revisions_in_order(values: list[Any]) -> list[Any]:
    counts: Counter[str] = Counter()
    result = []
    for value in values:
        if not isinstance(value, Task):
            revision = counts[value.rollout_id]
            counts[value.rollout_id] += 1
            value = msgspec.structs.replace(value, revision=revision)
        result.append(value)
    return result


def play(config: RunConfig, records: list[Record]) -> tuple[GroupsState, list[Decision]]:
    """Feed the log, deciding all there is to decide after each record, one second apart."""
    state = GroupsState(config)
    decisions: list[Decision] = []
    now = 100.0
    for record in [*records, None, None]:
        if record is not None:
            feed(state, record)
        now += 1.0 if record is not None else 1000.0
        while not isinstance(decision := decide(state, config, now), Wait):
            assert state.add_decision(decision)
            decisions.append(decision)
    return state, decisions


def read_to(positions: Positions, records: list[Record]) -> list[Record]:
    ends = {"tasks": positions.tasks, "trajectories": positions.trajectories}
    return [r for r in records if r.offset < ends[r.topic].get(r.partition, 0)]


@given(run=runs(), order=st.randoms(use_true_random=False))
@settings(max_examples=80, deadline=None)
def test_a_decision_retaken_from_its_positions_is_byte_identical(
    run: tuple[RunConfig, list[Record]], order: Any
) -> None:
    config, records = run
    _, decisions = play(config, records)
    for number, decision in enumerate(decisions):
        replay = GroupsState(config)
        events: list[Any] = read_to(decision.positions, records)
        for event in _interleaved([*events], decisions[:number], order):
            if isinstance(event, Record):
                feed(replay, event)
            else:
                replay.add_decision(event)
        assert codec.encode(decide(replay, config, decision.at)) == codec.encode(decision)


def _interleaved(records: list[Record], decisions: list[Decision], order: Any) -> list[Any]:
    """The same records in another order that Kafka allows: each partition keeps its own."""
    queues: dict[Any, list[Any]] = {"batches": list(decisions)}
    for record in records:
        queues.setdefault((record.topic, record.partition), []).append(record)
    result = []
    while queues := {name: queue for name, queue in queues.items() if queue}:
        result.append(queues[order.choice(sorted(queues, key=str))].pop(0))
    return result


@given(run=runs(), order=st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_the_state_does_not_depend_on_how_partitions_are_interleaved(
    run: tuple[RunConfig, list[Record]], order: Any
) -> None:
    config, records = run
    first, second = GroupsState(config), GroupsState(config)
    for record in records:
        feed(first, record)
    for record in _interleaved(records, [], order):
        feed(second, record)
        feed(second, record)  # redelivered
    for now in (0.0, 105.0, 109.0, 1e6):
        assert decide(first, config, now) == decide(second, config, now)
    assert first.open == second.open


@given(run=runs())
@settings(max_examples=80, deadline=None)
def test_staleness_of_every_trained_rollout_is_within_the_bound(
    run: tuple[RunConfig, list[Record]],
) -> None:
    config, records = run
    _, decisions = play(config, records)
    for cut in decisions:
        if not isinstance(cut, BatchCut):
            continue
        assert len(cut.groups) == config.groups_per_batch
        for ref in (ref for group in cut.groups for ref in group.rollouts):
            assert ref.max_policy_version <= cut.policy_version
            if config.on_stale == "drop":
                assert cut.policy_version - ref.min_policy_version <= config.max_staleness


@given(run=runs())
@settings(max_examples=80, deadline=None)
def test_no_group_is_decided_on_twice_and_batches_count_up(
    run: tuple[RunConfig, list[Record]],
) -> None:
    config, records = run
    _, decisions = play(config, records)
    decided = [name for decision in decisions for name in group_ids(decision)]
    assert len(decided) == len(set(decided))
    indexes = [cut.index for cut in decisions if isinstance(cut, BatchCut)]
    assert indexes == list(range(1, len(indexes) + 1))


@given(run=runs())
@settings(max_examples=80, deadline=None)
def test_every_rollout_of_a_decided_group_is_trained_or_left_out_with_a_reason(
    run: tuple[RunConfig, list[Record]],
) -> None:
    config, records = run
    _, decisions = play(config, records)
    for decision in decisions:
        dropped = isinstance(decision, GroupDropped)
        for entry in [decision] if dropped else decision.groups:
            trained = [] if dropped else [ref.rollout_id for ref in entry.rollouts]
            left_out = [left.rollout_id for left in entry.left_out]
            accounted = Counter(trained + left_out)
            assert set(accounted.values()) <= {1}
            seen = {
                record.value.rollout_id
                for record in read_to(decision.positions, records)
                if isinstance(record.value, RolloutSummary)
                and record.value.group_id == entry.group_id
            }
            assert seen <= set(accounted)
            assert all(left.reason for left in entry.left_out)
            if entry.dispatch_index >= 0 and any(
                isinstance(record.value, Task) and record.value.group_id == entry.group_id
                for record in read_to(decision.positions, records)
            ):
                slots = {f"{entry.group_id}-{i:02d}" for i in range(config.group_size)}
                assert slots <= set(accounted)


@given(run=runs())
@settings(max_examples=60, deadline=None)
def test_what_stays_open_at_the_end_is_a_remainder_or_waits_for_a_version_or_is_foreign(
    run: tuple[RunConfig, list[Record]],
) -> None:
    config, records = run
    state, _ = play(config, records)
    closed = [*state.complete(), *state.overdue(1e9)]
    assert all(group.task is None for group in state.open.values() if group not in closed)
    remainder = []
    for group in closed:
        trained, _ = survivors(group, config)
        if max(ref.max_policy_version for ref in trained) < state.next_index:
            remainder.append(group)
            is_fresh = staleness(trained, state.next_index) <= config.max_staleness
            assert is_fresh or config.on_stale == "train"
    assert len(remainder) < config.groups_per_batch
