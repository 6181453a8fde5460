"""Decisions of the assembler, on the single partition of `<ns>.batches`.

A decision is a pure function of the tasks and trajectories below `positions`, of the decisions
before it, of the run's configuration, and of the time `at`. All of these are in the log, so a
replay can take every decision again and must find the same bytes.
"""

from __future__ import annotations

import math

from turnfold.schemas.run import RunConfig
from turnfold.schemas.tasks import Evaluation
from turnfold.schemas.wire import Wire


class RolloutRef(Wire, frozen=True, kw_only=True):
    """A trajectory in the log, and what is needed to plan with it without reading it."""

    rollout_id: str
    index: int
    attempt: int = 0
    partition: int
    """Partition and offset on `<ns>.trajectories`."""
    offset: int
    digest: str
    """sha256 of the trajectory's bytes."""
    reward: float
    num_rows: int
    num_tokens: int
    """Tokens of all rows, context included."""
    num_trained: int
    max_row_tokens: int
    min_policy_version: int
    max_policy_version: int


class LeftOut(Wire, frozen=True, kw_only=True):
    """A rollout of a group that is not trained, and why."""

    rollout_id: str
    reason: str


class GroupRef(Wire, frozen=True, kw_only=True):
    """A group in a batch. Its rollouts stay within one mini-batch."""

    group_id: str
    task_id: str = ""
    dispatch_index: int
    rollouts: tuple[RolloutRef, ...]
    """By slot; at least one."""
    left_out: tuple[LeftOut, ...] = ()


class Positions(Wire, frozen=True, kw_only=True):
    """How much of the log a decision has seen: the next offset of each partition."""

    tasks: dict[int, int]
    trajectories: dict[int, int]


class BatchCut(Wire, frozen=True, kw_only=True, tag="batch_cut"):
    """Manifest of a batch. The first one in the log with an index wins."""

    run_id: str
    index: int
    """1, 2, 3, …; trains on top of policy version index - 1 and makes version index."""
    groups: tuple[GroupRef, ...]
    """Oldest dispatched first."""
    positions: Positions
    at: float
    """Unix seconds of the cut."""
    config_digest: str
    """Digest of the RunConfig that it was cut under."""
    config: RunConfig | None = None
    """That configuration whole, so that a replay needs nothing but the log."""

    @property
    def policy_version(self) -> int:
        return self.index - 1

    @property
    def num_rollouts(self) -> int:
        return sum(len(group.rollouts) for group in self.groups)

    @property
    def num_rows(self) -> int:
        return sum(ref.num_rows for group in self.groups for ref in group.rollouts)


class GroupDropped(Wire, frozen=True, kw_only=True, tag="group_dropped"):
    """A group that no batch will hold, and why."""

    run_id: str
    group_id: str
    dispatch_index: int
    reason: str
    """too_few_survivors, stale, zero_variance, …"""
    left_out: tuple[LeftOut, ...] = ()
    positions: Positions
    at: float
    config_digest: str
    config: RunConfig | None = None
    is_early: bool = False
    """Some of its rollouts still ran: whatever became of them, no batch could have held it."""


class EvaluatedRollout(Wire, frozen=True, kw_only=True):
    """What a rollout of an evaluation group scored."""

    rollout_id: str
    index: int
    reward: float
    num_tokens: int
    """Tokens of all rows, context included."""
    min_policy_version: int
    max_policy_version: int


class GroupEvaluated(Wire, frozen=True, kw_only=True, tag="group_evaluated"):
    """An evaluation group has closed. Nothing of it is trained."""

    run_id: str
    group_id: str
    task_id: str = ""
    cursor: int
    """Place of the task in its round."""
    attempt: int = 0
    evaluation: Evaluation
    rollouts: tuple[EvaluatedRollout, ...]
    """Those with a reward, by slot."""
    left_out: tuple[LeftOut, ...] = ()
    """Those without one, and why; a failure is not a reward of 0."""
    is_retried: bool = False
    """No rollout has a reward and the task has attempts left: it is dispatched again."""
    positions: Positions
    at: float
    config_digest: str
    config: RunConfig | None = None

    @property
    def mean_reward(self) -> float | None:
        """None without a reward."""
        rewards = [rollout.reward for rollout in self.rollouts]
        return math.fsum(rewards) / len(rewards) if rewards else None

    @property
    def num_passed(self) -> int:
        return sum(ref.reward >= self.evaluation.pass_reward for ref in self.rollouts)


class EvaluationCompleted(Wire, frozen=True, kw_only=True, tag="evaluation_completed"):
    """All tasks of a round are done: what the policy scored. The first one in the log wins."""

    run_id: str
    version: int
    """The policy version that was due."""
    num_tasks: int
    num_scored: int
    """Tasks with at least one reward; the means below are over these."""
    num_rollouts: int
    """Rollouts with a reward."""
    mean_reward: float | None = None
    """Mean over tasks of the mean over rollouts; None when no task was scored."""
    pass_at: dict[int, float] = {}
    """k → the chance that one of k rollouts passes, for 1, 2, 4, … up to the smallest group."""
    left_out: dict[str, int] = {}
    """Rollouts without a reward, by reason."""
    min_policy_version: int | None = None
    """Versions that sampled: a round that runs while the engines move on has several."""
    max_policy_version: int | None = None
    positions: Positions
    at: float
    config_digest: str
    config: RunConfig | None = None


Decision = BatchCut | GroupDropped | GroupEvaluated | EvaluationCompleted
