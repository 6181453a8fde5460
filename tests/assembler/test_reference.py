"""The cut against a reference that keeps no index: it looks at every record, every time."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from turnfold.assembler.cut import Wait, decide, decide_early, strands_running
from turnfold.assembler.groups import GroupsState
from turnfold.assembler.rollouts import RolloutSummary, summary
from turnfold.schemas import codec
from turnfold.schemas.batches import BatchCut, GroupDropped
from turnfold.schemas.decisions import group_ids
from turnfold.schemas.run import RunConfig
from turnfold.schemas.tasks import Task
from turnfold.schemas.testing import row, task, trajectory

TIMEOUT_S = 50.0


class Reference(msgspec.Struct, kw_only=True):
    """All that happened, and the rules in their plainest words."""

    config: RunConfig
    tasks: dict[str, Task] = {}
    ends: dict[str, dict[str, RolloutSummary]] = {}
    decided: set[str] = set()
    num_batches: int = 0

    @property
    def index(self) -> int:
        return self.num_batches + 1

    def open(self) -> list[Task]:
        """Oldest dispatched first."""
        tasks = [t for name, t in self.tasks.items() if name not in self.decided]
        return sorted(tasks, key=lambda t: (t.dispatch_index, t.group_id))

    def is_complete(self, t: Task) -> bool:
        return {r.index for r in self.ends[t.group_id].values()} >= set(range(t.n))

    def is_overdue(self, t: Task, now: float) -> bool:
        return not self.is_complete(t) and t.dispatched_at + TIMEOUT_S <= now

    def is_running(self, t: Task, now: float) -> bool:
        return not self.is_complete(t) and not self.is_overdue(t, now)

    def survivors(self, t: Task) -> list[RolloutSummary]:
        found = []
        for slot in range(t.n):
            completed = [
                r
                for r in self.ends[t.group_id].values()
                if r.index == slot and r.status != "aborted"
            ]
            if completed:
                winner = min(completed, key=lambda r: (r.attempt, r.rollout_id))
                if winner.num_rows and winner.max_row_tokens <= self.config.max_row_tokens:
                    found.append(winner)
        return found

    def is_stale(self, rollouts: list[RolloutSummary]) -> bool:
        oldest = min(r.min_policy_version for r in rollouts)
        is_beyond = self.index - 1 - oldest > self.config.max_staleness
        return is_beyond and self.config.on_stale == "drop"

    def decide(self, now: float) -> tuple[str, list[str]]:
        """("cut", groups), (reason, [group]) or ("wait", [])."""
        ready = []
        for t in self.open():
            if self.is_running(t, now):
                continue
            rollouts = self.survivors(t)
            if len(rollouts) < self.config.min_group_size:
                is_late = self.is_overdue(t, now)
                return "group_timeout" if is_late else "too_few_survivors", [t.group_id]
            if self.is_stale(rollouts):
                return "stale", [t.group_id]
            if max(r.max_policy_version for r in rollouts) <= self.index - 1:
                ready.append(t.group_id)
            if len(ready) == self.config.groups_per_batch:
                return "cut", ready
        return "wait", []

    def strands(self, cut: BatchCut, now: float) -> bool:
        left = []
        for t in self.open():
            if t.group_id not in group_ids(cut):
                done = [
                    r.min_policy_version
                    for r in self.ends[t.group_id].values()
                    if r.status != "aborted"
                ]
                if len(self.ends[t.group_id]) < t.n:
                    done.append(t.policy_version)
                last = min(done, default=0) + self.config.max_staleness + 1
                left.append((max(cut.index, last), t))
        for last, _ in left:
            urgent = [t for other, t in left if other <= last]
            seats = (last - cut.index) * self.config.groups_per_batch
            if len(urgent) > seats and any(self.is_running(t, now) for t in urgent):
                return True
        return False

    def doomed(self) -> set[str]:
        """Groups that are not complete and that no end of what still runs can save."""
        found = set()
        for t in self.open():
            ended = self.ends[t.group_id].values()
            slots = {r.index for r in ended}
            if self.is_complete(t) or not ended or len(slots) < len(ended):
                continue
            rollouts = self.survivors(t)
            most = len(rollouts) + t.n - len(slots)
            if most < self.config.min_group_size or (rollouts and self.is_stale(rollouts)):
                found.add(t.group_id)
        return found


class CutMachine(RuleBasedStateMachine):
    """Dispatches, ends, revises, lets time pass and decides, in any order."""

    @initialize(
        max_staleness=st.integers(0, 2),
        groups_per_batch=st.integers(1, 3),
        on_stale=st.sampled_from(["drop", "drop", "train"]),
        group_size=st.integers(2, 3),
    )
    def start(self, **sizes: Any) -> None:
        self.config = RunConfig(
            min_group_size=2, group_timeout_s=TIMEOUT_S, max_row_tokens=4, **sizes
        )
        self.state = GroupsState(self.config)
        self.reference = Reference(config=self.config)
        self.now = 1000.0
        self.num_trajectories = 0

    @property
    def version(self) -> int:
        return self.reference.num_batches

    @rule(age=st.integers(0, 2))
    def dispatch(self, age: int) -> None:
        self.send(age)

    def send(self, age: int) -> Task:
        number = len(self.reference.tasks)
        made = task(
            f"g{number:03d}",
            n=self.config.group_size,
            dispatch_index=number,
            dispatched_at=self.now,
            policy_version=max(0, self.version - age),
        )
        self.reference.tasks[made.group_id] = made
        self.reference.ends[made.group_id] = {}
        self.state.add_task(made, 0, number)
        return made

    @rule(age=st.integers(0, 2))
    def dispatch_and_finish(self, age: int) -> None:
        """Most groups go well, or nothing else would ever happen."""
        made = self.send(age)
        for slot in range(made.n):
            self.end(made, slot, version=made.policy_version)

    @precondition(lambda self: self.reference.tasks)
    @rule(
        pick=st.integers(0, 1000),
        slot=st.integers(0, 2),
        attempt=st.sampled_from([0, 0, 0, 0, 1]),
        outcome=st.sampled_from(["good", "good", "good", "aborted", "no_rows", "too_long"]),
        ahead=st.integers(-2, 1),
        revision=st.sampled_from([0, 0, 0, 1]),
    )
    def end_rollout(
        self, pick: int, slot: int, attempt: int, outcome: str, ahead: int, revision: int
    ) -> None:
        recent = list(self.reference.tasks.values())[-6:]
        made = recent[pick % len(recent)]
        version = max(0, self.version + ahead)
        self.end(made, slot % made.n, attempt, outcome, version, revision)

    def end(
        self,
        made: Task,
        slot: int,
        attempt: int = 0,
        outcome: str = "good",
        version: int = 0,
        revision: int = 0,
    ) -> None:
        rows = {"good": (row([1, 2], [0, 1]),), "too_long": (row([1] * 5, [1] * 5),)}
        ended = trajectory(
            f"{made.group_id}-{slot:02d}-{attempt}",
            group_id=made.group_id,
            index=slot,
            attempt=attempt,
            revision=revision,
            dispatch_index=made.dispatch_index,
            reward=None if outcome == "aborted" else 1.0,
            rows=rows.get(outcome, ()),
            policy_version=version,
        )
        found = summary(ended, 0, self.num_trajectories, codec.digest(ended))
        self.num_trajectories += 1
        self.state.add_rollout(found)
        if made.group_id not in self.reference.decided:
            known = self.reference.ends[made.group_id].get(found.rollout_id)
            if known is None or found.revision > known.revision:
                self.reference.ends[made.group_id][found.rollout_id] = found

    @rule(seconds=st.sampled_from([1.0, 10.0, 60.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def take_decision(self) -> None:
        decision = decide(self.state, self.config, self.now)
        if not isinstance(decision, Wait):
            self.apply(decision)

    @rule()
    def drop_early(self) -> None:
        dropped = decide_early(self.state, self.config, self.now)
        if dropped is not None:
            assert dropped.is_early
            self.apply(dropped)

    def apply(self, decision: BatchCut | GroupDropped) -> None:
        assert self.state.add_decision(decision)
        self.reference.decided.update(group_ids(decision))
        if isinstance(decision, BatchCut):
            self.reference.num_batches = decision.index

    @invariant()
    def decisions_are_those_of_the_reference(self) -> None:
        expected, names = self.reference.decide(self.now)
        decision = decide(self.state, self.config, self.now)
        match decision:
            case Wait():
                assert expected == "wait"
            case GroupDropped():
                assert (decision.reason, [decision.group_id]) == (expected, names)
            case BatchCut():
                assert (expected, names) == ("cut", group_ids(decision))
                for group in decision.groups:
                    survivors = self.reference.survivors(self.reference.tasks[group.group_id])
                    assert [ref.rollout_id for ref in group.rollouts] == [
                        rollout.rollout_id for rollout in survivors
                    ]
                stranded = strands_running(self.state, decision, self.now)
                assert stranded == self.reference.strands(decision, self.now)

    @invariant()
    def what_is_dropped_early_is_past_saving(self) -> None:
        dropped = decide_early(self.state, self.config, self.now)
        doomed = self.reference.doomed()
        assert (dropped is None) == (not doomed)
        assert dropped is None or dropped.group_id in doomed


TestCut = CutMachine.TestCase
TestCut.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
