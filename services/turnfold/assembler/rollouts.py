"""A rollout that has ended, without its tokens, and whether it can be trained. Pure."""

from __future__ import annotations

import math

import msgspec

from turnfold.schemas.batches import RolloutRef
from turnfold.schemas.events import Split
from turnfold.schemas.run import RunConfig
from turnfold.schemas.trajectories import Status, Trajectory


class RolloutSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory without its tokens: what a decision needs to know."""

    run_id: str
    group_id: str
    task_id: str
    dispatch_index: int
    split: Split
    revision: int
    status: Status
    reason: str
    rollout_id: str
    index: int
    attempt: int
    partition: int
    offset: int
    digest: str
    reward: float | None
    num_rows: int
    num_tokens: int
    num_trained: int
    max_row_tokens: int
    min_policy_version: int
    max_policy_version: int

    @property
    def is_completed(self) -> bool:
        return self.status != "aborted" and self.reward is not None

    @property
    def rank(self) -> tuple[int, str]:
        """Of several rollouts of one slot, the lowest rank counts."""
        return (self.attempt, self.rollout_id)

    def ref(self) -> RolloutRef:
        """The entry of a manifest. The rollout must have a reward."""
        assert self.reward is not None, f"rollout {self.rollout_id} has no reward"
        return RolloutRef(
            rollout_id=self.rollout_id,
            index=self.index,
            attempt=self.attempt,
            partition=self.partition,
            offset=self.offset,
            digest=self.digest,
            reward=self.reward,
            num_rows=self.num_rows,
            num_tokens=self.num_tokens,
            num_trained=self.num_trained,
            max_row_tokens=self.max_row_tokens,
            min_policy_version=self.min_policy_version,
            max_policy_version=self.max_policy_version,
        )


def summary(trajectory: Trajectory, partition: int, offset: int, digest: str) -> RolloutSummary:
    """The trajectory at this place of the log, without its tokens."""
    lengths = [len(row.token_ids) for row in trajectory.rows]
    return RolloutSummary(
        run_id=trajectory.run_id,
        group_id=trajectory.group_id,
        task_id=trajectory.task_id,
        dispatch_index=trajectory.dispatch_index,
        split=trajectory.split,
        revision=trajectory.revision,
        status=trajectory.status,
        reason=trajectory.reason,
        rollout_id=trajectory.rollout_id,
        index=trajectory.index,
        attempt=trajectory.attempt,
        partition=partition,
        offset=offset,
        digest=digest,
        reward=trajectory.reward,
        num_rows=len(lengths),
        num_tokens=sum(lengths),
        num_trained=sum(row.num_trained for row in trajectory.rows),
        max_row_tokens=max(lengths, default=0),
        min_policy_version=trajectory.min_policy_version,
        max_policy_version=trajectory.max_policy_version,
    )


def reason_for_no_reward(rollout: RolloutSummary) -> str | None:
    """Why it has no reward that counts; None when it has one."""
    if rollout.status == "aborted":
        return f"aborted:{rollout.reason}" if rollout.reason else "aborted"
    if rollout.reward is None:
        return "no_reward"
    return None if math.isfinite(rollout.reward) else "reward_not_finite"


def reason_to_leave_out(rollout: RolloutSummary, config: RunConfig) -> str | None:
    """Why nothing can be learnt from it; None when it can be trained."""
    reason = reason_for_no_reward(rollout)
    if reason is not None:
        return reason
    if rollout.num_rows == 0:
        return "no_rows"
    if rollout.num_trained == 0:
        return "no_trained_tokens"
    if rollout.max_row_tokens > config.max_row_tokens:
        return "row_too_long"
    return None


def precedence(rollout: RolloutSummary) -> tuple[int, int, int]:
    """Of two trajectories of one rollout the newer revision counts, then the first in the log."""
    return (-rollout.revision, rollout.partition, rollout.offset)
