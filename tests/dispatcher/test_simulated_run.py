"""Pace and cut together: dispatcher, agents, assembler and trainer on a clock of their own."""

from __future__ import annotations

import heapq
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnfold.assembler.cut import Wait, decide, decide_early, is_too_early, strands_running
from turnfold.assembler.groups import GroupsState
from turnfold.assembler.rollouts import summary
from turnfold.dispatcher.plan import DispatchState, Limits, is_done, next_slots
from turnfold.schemas.batches import BatchCut, Decision, GroupDropped
from turnfold.schemas.run import RunConfig
from turnfold.schemas.testing import served, task, trajectory


class Simulation:
    """Events on a heap: rollouts end, batches are trained one after another, versions served.

    `duration(group, slot)` is how long a rollout takes; None is one that never ends.
    """

    def __init__(
        self,
        config: RunConfig,
        limits: Limits,
        duration: Any,
        train_s: float,
        max_ahead: int | None = None,
        is_held: bool = False,
    ) -> None:
        self.config, self.limits, self.duration = config, limits, duration
        self.max_ahead = max_ahead
        self.is_held = is_held
        self.train_s = train_s
        self.dispatcher = DispatchState(config)
        self.assembler = GroupsState(config)
        self.decisions: list[Decision] = []
        self.events: list[tuple[float, int, str, Any]] = []
        self.now = 1000.0
        self.num_events = self.num_trajectories = self.trained = 0
        self.trainer_free_at = 0.0
        self.outstanding_peak = 0

    def run(self, max_events: int = 20_000) -> None:
        self.serve(0)
        for _ in range(max_events):
            self.decide_and_dispatch()
            if is_done(self.dispatcher, 1000, self.limits):
                return
            self.step()
        raise AssertionError("the run does not come to an end")

    def step(self) -> None:
        wait = decide(self.assembler, self.config, self.now)
        wait = wait if isinstance(wait, Wait) else Wait(self.assembler.next_deadline(self.now))
        if self.events and (wait.until is None or self.events[0][0] <= wait.until):
            self.now, _, kind, what = heapq.heappop(self.events)
            if kind == "served":
                self.serve(what)
            else:
                self.end_rollout(*what)
        else:
            assert wait.until is not None, "nothing is in flight and nothing will ever happen"
            self.now = wait.until

    def serve(self, version: int) -> None:
        self.trained = version
        self.dispatcher.add_policy(served(version))

    def decide_and_dispatch(self) -> None:
        while (decision := self.next_decision()) is not None:
            assert self.assembler.add_decision(decision)
            assert self.dispatcher.add_decision(decision)
            self.decisions.append(decision)
            if isinstance(decision, BatchCut):
                # The trainer takes batches in order; cut ones queue.
                self.trainer_free_at = max(self.now, self.trainer_free_at) + self.train_s
                self.push(self.trainer_free_at, "served", decision.index)
        for slot in next_slots(self.dispatcher, 1000, self.limits):
            index = self.dispatcher.next_dispatch_index
            sent = task(
                f"g{index:04d}",
                n=self.config.group_size,
                dispatch_index=index,
                epoch=slot.place.epoch,
                cursor=slot.place.cursor,
                attempt=slot.attempt,
                dispatched_at=self.now,
                policy_version=self.trained,
            )
            self.dispatcher.add_task(sent)
            self.assembler.add_task(sent, 0, index)
            for number in range(sent.n):
                seconds = self.duration(index, number)
                if seconds is not None:
                    what = (sent.group_id, number, self.trained)
                    self.push(self.now + seconds, "ended", what)
        self.outstanding_peak = max(self.outstanding_peak, len(self.dispatcher.outstanding))

    def next_decision(self) -> Decision | None:
        """As the assembler chooses it."""
        decision = decide(self.assembler, self.config, self.now)
        if isinstance(decision, BatchCut) and self.had_better_wait(decision):
            decision = Wait()
        if isinstance(decision, Wait):
            return decide_early(self.assembler, self.config, self.now)
        return decision

    def had_better_wait(self, cut: BatchCut) -> bool:
        if is_too_early(cut, self.trained, self.max_ahead):
            return True
        return self.is_held and strands_running(self.assembler, cut, self.now)

    def push(self, at: float, kind: str, what: Any) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (at, self.num_events, kind, what))

    def end_rollout(self, group_id: str, slot: int, version: int) -> None:
        ended = trajectory(
            f"{group_id}-{slot:02d}",
            group_id=group_id,
            index=slot,
            reward=float(slot % 2),
            min_policy_version=version,
            max_policy_version=self.trained,
        )
        self.assembler.add_rollout(summary(ended, 0, self.num_trajectories, "digest"))
        self.num_trajectories += 1

    @property
    def cuts(self) -> list[BatchCut]:
        return [decision for decision in self.decisions if isinstance(decision, BatchCut)]

    @property
    def drops(self) -> list[GroupDropped]:
        return [decision for decision in self.decisions if isinstance(decision, GroupDropped)]


def config(max_staleness: int, **fields: Any) -> RunConfig:
    defaults: dict[str, Any] = {
        "group_size": 3,
        "groups_per_batch": 4,
        "group_timeout_s": 500.0,
        "max_staleness": max_staleness,
    }
    return RunConfig(**{**defaults, **fields})


def check_staleness(simulation: Simulation, bound: int) -> None:
    for cut in simulation.cuts:
        for ref in (ref for group in cut.groups for ref in group.rollouts):
            assert 0 <= cut.policy_version - ref.min_policy_version <= bound
            assert ref.max_policy_version <= cut.policy_version


@pytest.mark.field_case("slime#1800")
@given(
    seed=st.integers(0, 10_000),
    max_staleness=st.integers(0, 3),
    train_s=st.sampled_from([0.1, 5.0, 60.0]),
    is_tail_heavy=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_no_trained_rollout_is_staler_than_the_bound(
    seed: int, max_staleness: int, train_s: float, is_tail_heavy: bool
) -> None:
    drawn = random.Random(seed)

    def duration(group: int, slot: int) -> float | None:
        if drawn.random() < 0.02:
            return None  # its worker died
        return 10.0 * drawn.paretovariate(1.1) if is_tail_heavy else drawn.uniform(5.0, 15.0)

    simulation = Simulation(config(max_staleness), Limits(num_batches=8), duration, train_s)
    simulation.run()
    assert [cut.index for cut in simulation.cuts] == list(range(1, 9))
    check_staleness(simulation, max_staleness)
    assert simulation.outstanding_peak <= (max_staleness + 1) * 4


@given(max_staleness=st.integers(0, 3), train_s=st.sampled_from([0.1, 5.0, 60.0, 1000.0]))
@settings(deadline=None)
def test_groups_that_finish_in_order_are_all_trained_whatever_the_trainers_speed(
    max_staleness: int, train_s: float
) -> None:
    simulation = Simulation(
        config(max_staleness), Limits(num_batches=10), lambda group, slot: 10.0, train_s
    )
    simulation.run()
    assert simulation.drops == []
    check_staleness(simulation, max_staleness)


@pytest.mark.field_case("verl#4449")
@given(
    seed=st.integers(0, 10_000),
    train_s=st.sampled_from([0.1, 5.0, 60.0]),
    max_ahead=st.sampled_from([None, 0, 1]),
    is_held=st.booleans(),
    lookahead=st.sampled_from([None, 0, 1]),
)
@settings(max_examples=40, deadline=None)
def test_a_bound_of_zero_is_strictly_on_policy_in_every_run(
    seed: int, train_s: float, max_ahead: int | None, is_held: bool, lookahead: int | None
) -> None:
    """Weights change under rollouts that still run: none of these may be trained."""
    drawn = random.Random(seed)

    def duration(group: int, slot: int) -> float | None:
        return None if drawn.random() < 0.03 else 10.0 * drawn.paretovariate(1.1)

    limits = Limits(num_batches=6, lookahead=lookahead)
    simulation = Simulation(config(0), limits, duration, train_s, max_ahead, is_held)
    simulation.run()
    assert [cut.index for cut in simulation.cuts] == list(range(1, 7))
    for cut in simulation.cuts:
        for ref in (ref for group in cut.groups for ref in group.rollouts):
            assert ref.min_policy_version == ref.max_policy_version == cut.policy_version


def test_with_staleness_zero_every_token_is_sampled_by_the_policy_that_it_trains() -> None:
    drawn = random.Random(3)
    simulation = Simulation(
        config(0), Limits(num_batches=10), lambda group, slot: drawn.uniform(1.0, 100.0), 5.0
    )
    simulation.run()
    for cut in simulation.cuts:
        for ref in (ref for group in cut.groups for ref in group.rollouts):
            assert ref.min_policy_version == ref.max_policy_version == cut.policy_version


@pytest.mark.field_case("tinker-cookbook#822")
def test_a_slow_group_goes_into_a_later_batch_while_others_overtake_it() -> None:
    simulation = Simulation(
        config(3), Limits(num_batches=6), lambda group, slot: 22.0 if group == 0 else 10.0, 5.0
    )
    simulation.run()
    (index,) = [c.index for c in simulation.cuts if any(g.dispatch_index == 0 for g in c.groups)]
    assert index > 1
    assert simulation.drops == []


@pytest.mark.field_case("NeMo RL#3238")
def test_a_hanging_rollout_costs_its_group_nothing_but_the_wait_for_the_deadline() -> None:
    simulation = Simulation(
        config(0, group_timeout_s=50.0),
        Limits(num_batches=2),
        lambda group, slot: None if (group, slot) == (1, 2) else 10.0,
        1.0,
    )
    simulation.run()
    (group,) = [g for g in simulation.cuts[0].groups if g.dispatch_index == 1]
    assert [ref.index for ref in group.rollouts] == [0, 1]
    assert [left.reason for left in group.left_out] == ["not_finished"]


@pytest.mark.field_case("verl#7155")
@pytest.mark.field_case("prime-rl#1512")
def test_a_task_whose_rollouts_never_end_is_tried_max_attempts_times_and_then_given_up() -> None:
    simulation = Simulation(
        config(1, group_timeout_s=20.0, max_attempts=3),
        Limits(num_batches=6),
        lambda group, slot: None if group in hopeless else 10.0,
        5.0,
    )
    hopeless = {0}
    original = simulation.dispatcher.add_task

    def add_task(sent: Any) -> None:
        if (sent.epoch, sent.cursor) == (0, 0):
            hopeless.add(sent.dispatch_index)
        original(sent)

    simulation.dispatcher.add_task = add_task  # type: ignore[method-assign]
    simulation.run()
    assert [drop.reason for drop in simulation.drops] == ["group_timeout"] * 3
    assert len(simulation.cuts) == 6


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_every_task_of_an_epoch_is_trained_or_dropped_with_a_reason(max_staleness: int) -> None:
    drawn = random.Random(max_staleness)
    limits = Limits(epochs=1)
    simulation = Simulation(
        config(max_staleness),
        limits,
        lambda group, slot: drawn.choice([5.0, 10.0, 200.0, None]),
        10.0,
    )
    simulation.run()
    trained = {g.group_id for cut in simulation.cuts for g in cut.groups}
    dropped = {drop.group_id for drop in simulation.drops}
    assert len(trained) + len(dropped) == simulation.dispatcher.next_dispatch_index
    assert all(drop.reason for drop in simulation.drops)


class Example:
    """The worked example of docs/schedule.md: two groups a batch, max_staleness 1, C is slow."""

    def __init__(self, *, is_held: bool) -> None:
        self.simulation = Simulation(
            config(1, group_size=1, min_group_size=1, groups_per_batch=2),
            Limits(lookahead=1 if is_held else None),
            lambda *_: None,
            0,
            max_ahead=1 if is_held else None,
            is_held=is_held,
        )
        self.versions: dict[str, int] = {}

    def serve(self, version: int) -> None:
        self.simulation.serve(version)

    def dispatched(self) -> str:
        """Decide and dispatch; the letters of the groups that were sent."""
        before = set(self.versions)
        self.simulation.decide_and_dispatch()
        for name in self.simulation.dispatcher.outstanding:
            self.versions.setdefault(name, self.simulation.trained)
        return letters(set(self.versions) - before)

    def end(self, groups: str) -> None:
        for group in groups:
            name = f"g{ord(group) - ord('A'):04d}"
            self.simulation.end_rollout(name, 0, self.versions[name])

    @property
    def row(self) -> tuple[int, int, int, int]:
        """Served, in batches, in flight, seats: the numbers of a row of the table."""
        state = self.simulation.dispatcher
        served = state.served_version or 0
        seats = (served + state.config.max_staleness + 1) * state.config.groups_per_batch
        return served, state.num_cut, len(state.outstanding), seats

    @property
    def last_batch(self) -> tuple[int, str, list[int]]:
        cut = self.simulation.cuts[-1]
        refs = [group.rollouts[0] for group in cut.groups]
        staleness = [cut.policy_version - ref.min_policy_version for ref in refs]
        return cut.index, letters(group.group_id for group in cut.groups), staleness


def letters(names: Any) -> str:
    return "".join(sorted(chr(ord("A") + int(name[1:])) for name in names))


def test_the_example_of_the_documentation_row_by_row() -> None:
    page = (Path(__file__).parents[2] / "docs" / "schedule.md").read_text()
    table = re.findall(r"^\| .* \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", page, re.MULTILINE)
    shown = [tuple(map(int, numbers)) for numbers in table]
    example = Example(is_held=True)
    example.serve(0)
    rows = [example.row]
    assert example.dispatched() == "ABCD"
    example.end("AB")
    assert example.dispatched() == ""
    assert example.last_batch == (1, "AB", [0, 0])
    rows.append(example.row)
    example.serve(1)
    rows.append(example.row)
    assert example.dispatched() == "EF"
    example.end("DE")
    assert example.dispatched() == ""
    assert len(example.simulation.cuts) == 1, "C would be stale in batch 3"
    rows.append(example.row)
    example.end("C")
    assert example.dispatched() == ""
    assert example.last_batch == (2, "CD", [1, 1])
    rows.append(example.row)
    example.serve(2)
    rows.append(example.row)
    assert example.dispatched() == "GH"
    example.end("F")
    assert example.dispatched() == ""
    assert example.last_batch == (3, "EF", [1, 1])
    rows.append(example.row)
    assert rows == shown


def test_the_example_of_the_documentation_when_nobody_waits_for_slow_groups() -> None:
    example = Example(is_held=False)
    example.serve(0)
    assert example.dispatched() == "ABCD"
    example.end("AB")
    assert example.dispatched() == ""
    example.serve(1)
    assert example.dispatched() == "EF"
    example.end("DE")
    assert example.dispatched() == ""
    assert example.last_batch == (2, "DE", [1, 0])
    example.serve(2)
    assert example.dispatched() == "GH"
    example.end("C")
    assert example.dispatched() == "I"
    drops = example.simulation.drops
    assert [(drop.group_id, drop.reason) for drop in drops] == [("g0002", "stale")]
    example.end("FG")
    assert example.dispatched() == ""
    assert example.last_batch == (3, "FG", [1, 0])


def test_cutting_only_what_the_trainer_needs_next_loses_fewer_slow_groups_and_no_time() -> None:
    """Cut at once, quick groups would fill the batches that slow ones could still be trained in."""

    def run(max_ahead: int | None) -> Simulation:
        drawn = random.Random(1)

        def duration(group: int, slot: int) -> float:
            return 10.0 * drawn.lognormvariate(0.0, 1.0)

        simulation = Simulation(config(3), Limits(num_batches=60), duration, 40.0, max_ahead)
        simulation.run()
        check_staleness(simulation, 3)
        return simulation

    in_time, at_once = run(1), run(None)
    assert 2 * len(in_time.drops) < len(at_once.drops)
    assert in_time.now - 1000.0 < 1.05 * (at_once.now - 1000.0)
