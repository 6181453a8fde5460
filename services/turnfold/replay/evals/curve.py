"""The rounds of evaluation of a log. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from turnfold.schemas.batches import Decision, EvaluationCompleted, GroupEvaluated
from turnfold.schemas.decisions import DecisionLog


class TaskScore(msgspec.Struct, frozen=True, kw_only=True):
    """What one task of a round scored."""

    cursor: int
    task_id: str
    rewards: tuple[float, ...]
    num_passed: int
    left_out: dict[str, str]
    """rollout_id → why it has no reward that counts."""

    @property
    def mean_reward(self) -> float | None:
        return sum(self.rewards) / len(self.rewards) if self.rewards else None


class Round(msgspec.Struct, kw_only=True):
    """One point of the curve."""

    run_id: str
    version: int
    num_tasks: int
    completed: EvaluationCompleted | None = None
    """None while it is under way."""
    tasks: list[TaskScore] = []
    """Those that are done, by their place in the round."""
    num_retries: int = 0


class Curve:
    """Collects the evaluations of all runs.

    curve = Curve()
    for decision in decisions: curve.add(decision)        in the order of the log
    curve.rounds()
    """

    def __init__(self) -> None:
        self._rounds: dict[tuple[str, int], Round] = {}
        self._logs: dict[str, DecisionLog] = {}

    def add(self, decision: Decision) -> None:
        log = self._logs.setdefault(decision.run_id, DecisionLog(decision.run_id))
        if not log.add(decision):
            return
        if isinstance(decision, GroupEvaluated):
            evaluation = decision.evaluation
            found = self._round(decision.run_id, evaluation.version, evaluation.num_tasks)
            if decision.is_retried:
                found.num_retries += 1
            else:
                found.tasks.append(_score(decision))
        elif isinstance(decision, EvaluationCompleted):
            found = self._round(decision.run_id, decision.version, decision.num_tasks)
            found.completed = decision

    def rounds(self) -> list[Round]:
        """By run and version."""
        for found in self._rounds.values():
            found.tasks.sort(key=lambda task: task.cursor)
        return [self._rounds[key] for key in sorted(self._rounds)]

    def _round(self, run_id: str, version: int, num_tasks: int) -> Round:
        new = Round(run_id=run_id, version=version, num_tasks=num_tasks)
        return self._rounds.setdefault((run_id, version), new)


def curve_of(decisions: Iterable[Decision]) -> list[Round]:
    curve = Curve()
    for decision in decisions:
        curve.add(decision)
    return curve.rounds()


def _score(decision: GroupEvaluated) -> TaskScore:
    return TaskScore(
        cursor=decision.cursor,
        task_id=decision.task_id,
        rewards=tuple(rollout.reward for rollout in decision.rollouts),
        num_passed=decision.num_passed,
        left_out={left.rollout_id: left.reason for left in decision.left_out},
    )
