"""Evaluation groups in flight, and rounds of evaluation that are not complete. Pure.

They are kept apart from the groups to be trained, so that nothing about them can move a batch.
Only groups that a dispatcher sent as part of a round are kept: what others mark as evaluation has
no round to count in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import msgspec

from turnfold.assembler.listing import COMPLETE, Listing, Place
from turnfold.assembler.rollouts import RolloutSummary, precedence
from turnfold.schemas.batches import Decision, EvaluationCompleted, GroupEvaluated
from turnfold.schemas.run import RunConfig
from turnfold.schemas.tasks import Evaluation, Task


class EvaluationTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task of a round without its payload."""

    task_id: str
    n: int
    cursor: int
    attempt: int
    evaluation: Evaluation
    dispatched_at: float
    partition: int
    offset: int


class EvaluationGroup(msgspec.Struct, kw_only=True):
    """A group of a round that has not been decided on."""

    group_id: str
    task: EvaluationTask | None = None
    """None while its task has not been read."""
    rollouts: dict[str, RolloutSummary] = {}
    """Newest revision by rollout_id."""
    place: Place | None = None


class EvaluationState:
    """The fold of evaluation tasks, their trajectories and the decisions on them.

    Driven by `GroupsState`, which knows what has been read and decided.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.open: dict[str, EvaluationGroup] = {}
        self.results: dict[int, dict[int, GroupEvaluated]] = {}
        """Final results of incomplete rounds, by version and place in the round."""
        self._listing = Listing()
        self._ignored: set[str] = set()
        """Groups whose task belongs to no round."""

    def reconfigure(self, config: RunConfig) -> None:
        self.config = config
        for group in self.open.values():
            self._relist(group)

    def add_task(self, task: Task, partition: int, offset: int) -> None:
        if task.evaluation is None:
            self.open.pop(task.group_id, None)
            self._ignored.add(task.group_id)
            return
        group = self._group(task.group_id)
        if group.task is None:
            group.task = EvaluationTask(
                task_id=task.task_id,
                n=task.n,
                cursor=task.cursor,
                attempt=task.attempt,
                evaluation=task.evaluation,
                dispatched_at=task.dispatched_at,
                partition=partition,
                offset=offset,
            )
        self._relist(group)

    def add_rollout(self, rollout: RolloutSummary) -> None:
        if rollout.dispatch_index < 0 or rollout.group_id in self._ignored:
            return  # no dispatcher sent it, so no task will come that names its round
        group = self._group(rollout.group_id)
        known = group.rollouts.get(rollout.rollout_id)
        if known is None or precedence(rollout) < precedence(known):
            group.rollouts[rollout.rollout_id] = rollout
        self._relist(group)

    def add_decision(self, decision: Decision) -> None:
        """Take in a decision that counts."""
        if isinstance(decision, EvaluationCompleted):
            self.results.pop(decision.version, None)
        elif isinstance(decision, GroupEvaluated):
            group = self.open.pop(decision.group_id, None)
            if group is not None:
                self._listing.move(group.place, None)
            if not decision.is_retried:
                found = self.results.setdefault(decision.evaluation.version, {})
                found.setdefault(decision.cursor, decision)

    def first_closed(self, now: float) -> EvaluationGroup | None:
        """Of the groups that are complete or past their deadline, the first in its round."""
        orders = (*self._listing.complete(), *self._listing.overdue(now))
        if not orders:
            return None
        _, _, group_id = min(orders)
        return self.open[group_id]

    def next_deadline(self, now: float) -> float | None:
        return self._listing.next_deadline(now)

    def places(self) -> Iterator[tuple[Literal["tasks", "trajectories"], int, int]]:
        """Where in the log the open groups lie: topic, partition, offset."""
        for group in self.open.values():
            if group.task is not None:
                yield "tasks", group.task.partition, group.task.offset
            for rollout in group.rollouts.values():
                yield "trajectories", rollout.partition, rollout.offset

    def _group(self, group_id: str) -> EvaluationGroup:
        if group_id not in self.open:
            self.open[group_id] = EvaluationGroup(group_id=group_id)
        return self.open[group_id]

    def _relist(self, group: EvaluationGroup) -> None:
        place = self._place(group)
        if place != group.place:
            self._listing.move(group.place, place)
            group.place = place

    def _place(self, group: EvaluationGroup) -> Place | None:
        task = group.task
        if task is None:
            return None
        order = (task.evaluation.version, task.cursor, group.group_id)
        slots = {rollout.index for rollout in group.rollouts.values()}
        if slots.issuperset(range(task.n)):
            return (COMPLETE, order)
        is_timed = task.dispatched_at > 0
        return (task.dispatched_at + self.config.group_timeout_s if is_timed else math.inf, order)
