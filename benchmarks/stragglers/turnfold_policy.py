"""turnfold itself: the dispatcher's pace and plan, the assembler's groups and cut, as they are."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine import SimGroup, Simulation

from turnfold.assembler.cut import (
    Wait,
    decide,
    decide_early,
    is_too_early,
    staleness,
    strands_running,
    survivors,
)
from turnfold.assembler.groups import GroupsState
from turnfold.assembler.rollouts import RolloutSummary
from turnfold.dispatcher.plan import DispatchState, Limits, next_slots
from turnfold.schemas.batches import BatchCut, Decision
from turnfold.schemas.policies import PolicyServed
from turnfold.schemas.run import RunConfig
from turnfold.schemas.tasks import Task


@dataclass
class Turnfold:
    """Drives the pure functions as `dispatcher/app.py` and `assembler/app.py` do."""

    config: RunConfig
    num_tasks: int
    max_ahead: int | None = 1
    """Batches cut beyond the one that the trainer works on."""
    is_held: bool = False
    """Whether a cut is put off that would strand a running group."""
    lookahead: int | None = None
    """Batches beyond the next one that groups are dispatched for."""
    name: str = "turnfold"
    is_deadline_own: bool = True
    decided: dict[str, str] = field(default_factory=dict)
    """Group -> trained, or why it was dropped, as the decisions say."""

    def __post_init__(self) -> None:
        self.assembler = GroupsState(self.config)
        self.dispatcher = DispatchState(self.config)
        self._limits = Limits(lookahead=self.lookahead)
        self._by_id: dict[str, SimGroup] = {}
        self._num_trajectories = 0
        self._published = 0

    def served(self, sim: Simulation, version: int) -> None:
        self.dispatcher.add_policy(
            PolicyServed(run_id=self.config.run_id, policy_version=version, at=sim.now)
        )
        self._dispatch(sim)

    def published(self, sim: Simulation, version: int) -> None:
        self._published = version
        self._decide(sim)

    def rollout_ended(self, sim: Simulation, group: SimGroup, slot: int) -> None:
        num_complete = self.assembler.num_complete
        self.assembler.add_rollout(self._summary(sim, group, slot))
        is_complete = self.assembler.num_complete > num_complete
        is_doomed = self.assembler.doomed() is not None
        if is_doomed or (is_complete and self._may_decide(sim, group)):
            self._decide(sim)

    def group_timed_out(self, sim: Simulation, group: SimGroup) -> None:
        raise AssertionError("the assembler closes overdue groups by itself")

    def woken(self, sim: Simulation) -> None:
        self._decide(sim)

    def _may_decide(self, sim: Simulation, group: SimGroup) -> bool:
        """Whether `decide` may find something new now that this group is complete.

        Saves most of the calls: a batch may be due, or the group itself may have to be dropped.
        """
        index = self.assembler.next_index
        is_early = self.max_ahead is not None and index > self._published + 1 + self.max_ahead
        if not is_early:
            num_closed = self.assembler.num_complete + sum(
                1 for _ in self.assembler.overdue(sim.now)
            )
            if num_closed >= self.config.groups_per_batch:
                return True
        rollouts, _ = survivors(self.assembler.open[group.group_id], self.config)
        if len(rollouts) < self.config.min_group_size:
            return True
        return staleness(rollouts, index) > self.config.max_staleness

    def _decide(self, sim: Simulation) -> None:
        while (decision := self._next_decision(sim)) is not None:
            assert self.assembler.add_decision(decision), decision
            assert self.dispatcher.add_decision(decision), decision
            self._apply(sim, decision)
        sim.wake_at(self.assembler.next_deadline(sim.now))
        self._dispatch(sim)

    def _next_decision(self, sim: Simulation) -> Decision | None:
        """The next decision that is due."""
        decision = decide(self.assembler, self.config, sim.now)
        is_put_off = isinstance(decision, BatchCut) and self._had_better_wait(sim, decision)
        if isinstance(decision, Wait) or is_put_off:
            return decide_early(self.assembler, self.config, sim.now)
        return decision

    def _had_better_wait(self, sim: Simulation, cut: BatchCut) -> bool:
        if is_too_early(cut, self._published, self.max_ahead):
            return True
        return self.is_held and strands_running(self.assembler, cut, sim.now)

    def _apply(self, sim: Simulation, decision: Decision) -> None:
        if not isinstance(decision, BatchCut):
            self.decided[decision.group_id] = decision.reason
            sim.cancel(self._by_id.pop(decision.group_id), decision.reason)
            return
        self.decided.update((group.group_id, "trained") for group in decision.groups)
        groups = [self._by_id.pop(ref.group_id) for ref in decision.groups]
        sim.train(groups, [tuple(ref.index for ref in group.rollouts) for group in decision.groups])
        for group in groups:  # the worker stops what a group without them no longer needs
            sim.stop(group)

    def _dispatch(self, sim: Simulation) -> None:
        for slot in next_slots(self.dispatcher, self.num_tasks, self._limits):
            index = self.dispatcher.next_dispatch_index
            number = slot.place.epoch * self.num_tasks + slot.place.cursor
            group = sim.dispatch(number, slot.attempt)
            task = Task(
                run_id=self.config.run_id,
                group_id=group.group_id,
                task_id=f"task-{group.number % self.num_tasks:06d}",
                dispatch_index=index,
                n=self.config.group_size,
                payload={},
                attempt=slot.attempt,
                epoch=slot.place.epoch,
                cursor=slot.place.cursor,
                policy_version=sim.version,
                dispatched_at=sim.now,
            )
            self._by_id[group.group_id] = group
            self.dispatcher.add_task(task)
            self.assembler.add_task(task, 0, index)
        sim.wake_at(self.assembler.next_deadline(sim.now))

    def _summary(self, sim: Simulation, group: SimGroup, slot: int) -> RolloutSummary:
        """What the healer would say of a rollout that has just ended."""
        outcome, version = group.outcomes[slot], group.versions[slot]
        assert outcome is not None, f"{group.group_id}: slot {slot} has not ended"
        assert version is not None, f"{group.group_id}: slot {slot} has not started"
        is_completed = outcome == "completed"
        offset, self._num_trajectories = self._num_trajectories, self._num_trajectories + 1
        return RolloutSummary(
            run_id=self.config.run_id,
            group_id=group.group_id,
            task_id=f"task-{group.number % self.num_tasks:06d}",
            dispatch_index=group.index,
            split="train",
            revision=0,
            status="completed" if is_completed else "aborted",
            reason="" if is_completed else outcome,
            rollout_id=f"{group.group_id}-{slot:02d}",
            index=slot,
            attempt=group.attempt,
            partition=0,
            offset=offset,
            digest="0" * 64,
            reward=float(slot % 2) if is_completed else None,
            num_rows=1 if is_completed else 0,
            num_tokens=1000,
            num_trained=500,
            max_row_tokens=1000,
            min_policy_version=version,
            max_policy_version=sim.version,
        )
