"""What became of each rollout after its trajectory: in which batch it is, or why in none. Pure."""

from __future__ import annotations

from typing import assert_never

import msgspec

from turnfold.schemas.batches import (
    BatchCut,
    Decision,
    EvaluationCompleted,
    GroupDropped,
    GroupEvaluated,
)
from turnfold.schemas.decisions import DecisionLog, group_ids
from turnfold.schemas.policies import PolicyEvent, PolicyPublished, UpdateSchedule


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rollout went."""

    batch: int | None = None
    is_trained: bool = False
    """Whether the version that its batch makes was published."""
    reason: str = ""
    """Why it is in no batch: `group_dropped:stale`, `left_out:superseded`, `group_decided_before`;
    empty while its group is not decided on."""


class Assignments:
    """The decisions of all runs, and how far each was trained.

    assignments = Assignments()
    assignments.add_decision(decision)       in the order of the log
    assignments.add_policy(event)
    assignments.of(run_id, group_id, rollout_id)
    """

    def __init__(self) -> None:
        self.batches: dict[tuple[str, int], BatchCut] = {}
        """Manifests that count, by run and index."""
        self.published: dict[str, PolicyPublished] = {}
        """The newest version of each run."""
        self._schedules: dict[tuple[str, int], UpdateSchedule] = {}
        """By run and batch, as far as compaction has left them."""
        self._logs: dict[str, DecisionLog] = {}
        self._by_group: dict[tuple[str, str], Decision] = {}

    def add_decision(self, decision: Decision) -> None:
        log = self._logs.setdefault(decision.run_id, DecisionLog(decision.run_id))
        if not log.add(decision):
            return
        if isinstance(decision, BatchCut):
            self.batches[decision.run_id, decision.index] = decision
        for group_id in group_ids(decision):
            self._by_group[decision.run_id, group_id] = decision

    def add_policy(self, event: PolicyEvent) -> None:
        if isinstance(event, PolicyPublished):
            if event.schedule is not None:
                self._schedules[event.run_id, event.policy_version] = event.schedule
            known = self.published.get(event.run_id)
            if known is None or event.policy_version >= known.policy_version:
                self.published[event.run_id] = event

    def has_decided(self, run_id: str) -> bool:
        """Whether anything was decided in the run; without an assembler nothing is."""
        return run_id in self._logs

    def is_trained(self, run_id: str, index: int) -> bool:
        """Whether the trainer has published the version that this batch makes."""
        published = self.published.get(run_id)
        return published is not None and index <= published.policy_version

    def schedule(self, run_id: str, index: int) -> UpdateSchedule | None:
        """How the trainer divided a batch; None when it did not log it.

        The policies topic is compacted to the newest version of a run. A run has one schedule, so
        the newest stands for a batch whose own record is gone.
        """
        newest = self.published.get(run_id)
        return self._schedules.get((run_id, index), newest.schedule if newest else None)

    def of(self, run_id: str, group_id: str, rollout_id: str) -> Assignment:
        """What was decided about a rollout."""
        match self._by_group.get((run_id, group_id)):
            case None:
                return Assignment()
            case GroupDropped() as dropped:
                left_out = {left.rollout_id: left.reason for left in dropped.left_out}
                reason = left_out.get(rollout_id)
                if reason is not None and reason != dropped.reason:
                    return Assignment(reason=f"left_out:{reason}")
                return Assignment(reason=f"group_dropped:{dropped.reason}")
            case BatchCut() as cut:
                return self._in_batch(cut, group_id, rollout_id)
            case GroupEvaluated() | EvaluationCompleted():
                return Assignment(reason="eval_split")
            case other:
                assert_never(other)

    def _in_batch(self, cut: BatchCut, group_id: str, rollout_id: str) -> Assignment:
        group = next(group for group in cut.groups if group.group_id == group_id)
        if any(ref.rollout_id == rollout_id for ref in group.rollouts):
            return Assignment(batch=cut.index, is_trained=self.is_trained(cut.run_id, cut.index))
        left_out = {left.rollout_id: left.reason for left in group.left_out}
        if left_out.get(rollout_id, "not_finished") == "not_finished":
            return Assignment(reason="group_decided_before")
        return Assignment(reason=f"left_out:{left_out[rollout_id]}")
