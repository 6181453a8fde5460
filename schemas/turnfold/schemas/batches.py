"""Decisions of the assembler, on the single partition of `<ns>.batches`.

A decision is a pure function of the tasks and trajectories below `positions`, of the decisions
before it, of the run's configuration, and of the time `at`. All of these are in the log, so a
replay can take every decision again and must find the same bytes.
"""

from __future__ import annotations

from turnfold.schemas.run import RunConfig
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


Decision = BatchCut | GroupDropped
