"""Which evaluation tasks come next: rounds at chosen policy versions. Pure.

A round is the same tasks, sent when the engines have reached a version that is due:

    every 10 versions, 25 versions in all      rounds at 0, 10, 20 and 25

Like the cursor of training, rounds are in the log: a dispatcher that starts again folds the tasks
that it sent and the decisions on them, and sends what is missing. An evaluation takes no seat of
the pace, so training goes on as if it were not there; it shares the workers, and so only
`max_in_flight` groups of it run at a time.

When the engines pass several due versions at once, or while an earlier round is still being sent,
the newest one is evaluated: the others can no longer be sampled.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from turnfold.schemas.batches import Decision, EvaluationCompleted, GroupEvaluated
from turnfold.schemas.tasks import Evaluation, Task


class RoundPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is evaluated, and how often."""

    every: int
    """Versions between two rounds."""
    num_tasks: int
    pass_reward: float = 1.0
    max_in_flight: int = 8
    """Groups in flight at a time."""


class RoundSlot(msgspec.Struct, frozen=True, order=True):
    """A task of a round, for the first time or once more."""

    version: int
    cursor: int
    attempt: int = 0


class RoundState:
    """The fold of evaluation tasks and the decisions on them, in any order of topics.

    state = RoundState()
    state.add_task(task); state.add_decision(decision)      those of one run, each once
    slots = next_evaluations(state, plan, served_version=20, final_version=None)
    """

    def __init__(self) -> None:
        self.next_dispatch_index = 0
        self.newest: int | None = None
        """Version of the newest round that was begun."""
        self.last: Task | None = None
        """A task of the newest round, to know its data set by."""
        self.outstanding: dict[str, RoundSlot] = {}
        """Groups dispatched and not decided on."""
        self.rounds: dict[int, Evaluation] = {}
        """Rounds that were begun and are not complete."""
        self.completed: set[int] = set()
        self._sent: dict[int, set[RoundSlot]] = {}
        self._lost: dict[int, set[RoundSlot]] = {}
        """Attempts to be made because the one before was lost, by version."""
        self._decided_early: set[str] = set()
        """Groups decided on whose task has not been read yet."""

    def add_task(self, task: Task) -> None:
        if task.evaluation is None:
            return
        version = task.evaluation.version
        self.next_dispatch_index = max(self.next_dispatch_index, task.dispatch_index + 1)
        if self.newest is None or version >= self.newest:
            self.newest, self.last = version, task
        slot = RoundSlot(version, task.cursor, task.attempt)
        if task.group_id in self._decided_early:
            self._decided_early.remove(task.group_id)
        elif version not in self.completed:
            self.outstanding[task.group_id] = slot
        if version not in self.completed:
            self.rounds.setdefault(version, task.evaluation)
            self._sent.setdefault(version, set()).add(slot)

    def add_decision(self, decision: Decision) -> None:
        """Take in a decision that counts."""
        if isinstance(decision, GroupEvaluated):
            if self.outstanding.pop(decision.group_id, None) is None:
                self._decided_early.add(decision.group_id)
            if decision.is_retried:
                version = decision.evaluation.version
                again = RoundSlot(version, decision.cursor, decision.attempt + 1)
                self._lost.setdefault(version, set()).add(again)
        elif isinstance(decision, EvaluationCompleted):
            self.completed.add(decision.version)
            for by_version in (self.rounds, self._sent, self._lost):
                by_version.pop(decision.version, None)

    def missing(self) -> Iterator[RoundSlot]:
        """Lost tasks of all begun rounds, then those that were never sent; the oldest round first."""
        for version in sorted(self.rounds):
            yield from sorted(self._lost.get(version, set()) - self._sent[version])
        for version, evaluation in sorted(self.rounds.items()):
            for cursor in range(evaluation.num_tasks):
                slot = RoundSlot(version, cursor)
                if slot not in self._sent[version]:
                    yield slot


def next_evaluations(
    state: RoundState, plan: RoundPlan, served_version: int | None, final_version: int | None
) -> list[RoundSlot]:
    """The evaluation tasks that may be dispatched now.

    `final_version` is the last version that the run makes, which is evaluated whatever `every` is;
    None while that is not known.
    """
    slots = list(state.missing())
    due = due_version(plan, served_version, final_version)
    is_new = due is not None and (state.newest is None or due > state.newest)
    if due is not None and is_new and not slots:
        slots = [RoundSlot(due, cursor) for cursor in range(plan.num_tasks)]
    return slots[: max(0, plan.max_in_flight - len(state.outstanding))]


def due_version(
    plan: RoundPlan, served_version: int | None, final_version: int | None
) -> int | None:
    """The newest version to evaluate that the engines have reached."""
    if served_version is None:
        return None
    if final_version is not None and served_version >= final_version:
        return final_version
    return served_version - served_version % plan.every


def evaluation_of(state: RoundState, plan: RoundPlan, slot: RoundSlot) -> Evaluation:
    """The round that a slot belongs to, as it was begun."""
    begun = state.rounds.get(slot.version)
    return begun or Evaluation(
        version=slot.version, num_tasks=plan.num_tasks, pass_reward=plan.pass_reward
    )


def is_evaluated(state: RoundState, final_version: int) -> bool:
    """Whether nothing remains to be evaluated when the run ends with this version."""
    return not state.rounds and final_version in state.completed
