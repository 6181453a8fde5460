"""The groups in flight: a fold of tasks, trajectories and decisions. Pure.

Only numbers and log positions are kept, never tokens, so memory grows with the rollouts in flight.
What the fold holds depends on which records it has seen and not on the order in which partitions
were read: any interleaving gives the same state, and so the same decisions.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import Literal

import msgspec

from turnfold.schemas.batches import Decision, Positions, RolloutRef
from turnfold.schemas.decisions import DecisionLog, group_ids
from turnfold.schemas.events import Split
from turnfold.schemas.run import RunConfig
from turnfold.schemas.tasks import Task
from turnfold.schemas.trajectories import Status, Trajectory

TopicName = Literal["tasks", "trajectories"]

Order = tuple[int, int, str]
"""Sorts groups: the dispatched ones by dispatch index, then foreign ones by name."""


Place = tuple[float, Order]
"""Where a group is listed: its deadline, or -inf when it is complete; then its order."""

_COMPLETE = -math.inf


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


class TaskSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A task without its payload."""

    task_id: str
    dispatch_index: int
    n: int
    policy_version: int
    """Served when it was dispatched: no rollout of it is sampled by an older one."""
    dispatched_at: float


class Group(msgspec.Struct, kw_only=True):
    """An open group: neither in a batch nor dropped."""

    group_id: str
    task: TaskSummary | None = None
    """None while its task has not been read, or when nobody dispatched it."""
    rollouts: dict[str, RolloutSummary] = {}
    """Newest revision by rollout_id."""
    place: Place | None = None
    """Where the state lists it."""

    @property
    def task_id(self) -> str:
        if self.task is not None:
            return self.task.task_id
        return min((rollout.task_id for rollout in self.rollouts.values()), default="")

    @property
    def dispatch_index(self) -> int:
        if self.task is not None:
            return self.task.dispatch_index
        return max((rollout.dispatch_index for rollout in self.rollouts.values()), default=-1)

    @property
    def order(self) -> Order:
        index = self.dispatch_index
        return (0, index, self.group_id) if index >= 0 else (1, 0, self.group_id)

    @property
    def oldest_version(self) -> int:
        """No version older than this has sampled what may be trained of it."""
        done = [r.min_policy_version for r in self.rollouts.values() if r.is_completed]
        if self.task is not None and len(self.rollouts) < self.task.n:
            done.append(self.task.policy_version)
        return min(done, default=0)

    def is_complete(self, group_size: int) -> bool:
        """Whether every slot has a terminal trajectory.

        A group that nobody dispatched has no slots: it is complete with `group_size` rewards.
        """
        if self.task is None:
            return sum(r.is_completed for r in self.rollouts.values()) >= group_size
        if len(self.rollouts) < self.task.n:
            return False
        slots = {rollout.index for rollout in self.rollouts.values()}
        return slots.issuperset(range(self.task.n))


class GroupsState:
    """All open groups of a run, which of them are complete, and how far the log has been read.

    state = GroupsState(config)
    state.add_task(task, partition=0, offset=0)
    state.add_rollout(summary(trajectory, partition=2, offset=7, digest="…"))
    state.add_decision(decision)            once it is read back from the log

    Redelivered and late records change nothing. Records of other runs and of the eval split count
    as read and are otherwise ignored.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.decisions = DecisionLog(config.run_id)
        self.open: dict[str, Group] = {}
        self._complete = _SortedList()
        """Complete groups in order."""
        self._running = _SortedList()
        """Dispatched groups that are not complete, by deadline."""
        self._next: dict[TopicName, dict[int, int]] = {"tasks": {}, "trajectories": {}}

    def reconfigure(self, config: RunConfig) -> None:
        """Go on under another configuration of the same run, as after a restart with new sizes."""
        assert config.run_id == self.config.run_id, (config.run_id, self.config.run_id)
        self.config = config
        for group in self.open.values():
            self._relist(group, self._place(group))

    @property
    def next_index(self) -> int:
        """Index of the batch that is cut next; it trains at version next_index - 1."""
        return self.decisions.next_index

    @property
    def positions(self) -> Positions:
        """Next offset of each partition of which a record has been read.

        It is one more than the offset of the last record, not what a consumer calls its position,
        which also moves over transaction markers: a replay can then find it from records alone.
        """
        tasks, trajectories = self._next["tasks"], self._next["trajectories"]
        return Positions(
            tasks={partition: tasks[partition] for partition in sorted(tasks)},
            trajectories={partition: trajectories[partition] for partition in sorted(trajectories)},
        )

    def mark_read(self, topic: TopicName, partition: int, offset: int) -> bool:
        """Note that a record has been read; False when it had been read before."""
        positions = self._next[topic]
        if offset < positions.get(partition, 0):
            return False
        positions[partition] = offset + 1
        return True

    def add_task(self, task: Task, partition: int, offset: int) -> None:
        if not self.mark_read("tasks", partition, offset):
            return
        if task.run_id != self.config.run_id or task.split != "train":
            return
        if task.group_id in self.decisions.decided:
            return
        group = self._group(task.group_id)
        # Two tasks with one group_id can only be a mistake of a publisher: the first dispatch wins.
        if group.task is None or task.dispatch_index < group.task.dispatch_index:
            group.task = TaskSummary(
                task_id=task.task_id,
                dispatch_index=task.dispatch_index,
                n=task.n,
                policy_version=task.policy_version,
                dispatched_at=task.dispatched_at,
            )
        self._relist(group, self._place(group))

    def add_rollout(self, rollout: RolloutSummary) -> None:
        if not self.mark_read("trajectories", rollout.partition, rollout.offset):
            return
        if rollout.run_id != self.config.run_id or rollout.split != "train":
            return
        if rollout.group_id in self.decisions.decided:
            return
        group = self._group(rollout.group_id)
        known = group.rollouts.get(rollout.rollout_id)
        if known is None or _precedence(rollout) < _precedence(known):
            group.rollouts[rollout.rollout_id] = rollout
        self._relist(group, self._place(group))

    def add_decision(self, decision: Decision) -> bool:
        """Take in a decision read from the log; False when another one has won."""
        if not self.decisions.add(decision):
            return False
        for group_id in group_ids(decision):
            if group_id in self.open:
                self._relist(self.open.pop(group_id), None)
        return True

    def complete(self) -> Iterator[Group]:
        """Groups of which every rollout has ended, oldest dispatched first."""
        for _, (_, _, group_id) in self._complete.places:
            yield self.open[group_id]

    def overdue(self, now: float) -> Iterator[Group]:
        """Groups past their deadline that are not complete, oldest dispatched first."""
        late = self._running.places[: self._running.num_until(now)]
        for _, _, group_id in sorted(order for _, order in late):
            yield self.open[group_id]

    def next_deadline(self, now: float) -> float | None:
        """When the next group closes that is neither complete nor overdue; None without one."""
        start = self._running.num_until(now)
        if start == len(self._running):
            return None
        deadline, _ = self._running.places[start]
        return None if math.isinf(deadline) else deadline

    def is_running(self, group: Group, now: float) -> bool:
        """Whether it is dispatched and will be complete or past its deadline, but is not yet."""
        return group.place is not None and now < group.place[0] < math.inf

    @property
    def num_running(self) -> int:
        """Open groups that are not complete."""
        return len(self.open) - len(self._complete)

    @property
    def num_complete(self) -> int:
        return len(self._complete)

    def _deadline(self, task: TaskSummary) -> float:
        # A publisher that does not say when it dispatched sets no deadline.
        if task.dispatched_at <= 0:
            return math.inf
        return task.dispatched_at + self.config.group_timeout_s

    def _group(self, group_id: str) -> Group:
        if group_id not in self.open:
            self.open[group_id] = Group(group_id=group_id)
        return self.open[group_id]

    def _place(self, group: Group) -> Place | None:
        if group.is_complete(self.config.group_size):
            return (_COMPLETE, group.order)
        return None if group.task is None else (self._deadline(group.task), group.order)

    def _relist(self, group: Group, place: Place | None) -> None:
        """List the group at its new place, which is seldom another than the old one."""
        if place == group.place:
            return
        if group.place is not None:
            self._list_of(group.place).remove(group.place)
        if place is not None:
            self._list_of(place).add(place)
        group.place = place

    def _list_of(self, place: Place) -> _SortedList:
        return self._complete if place[0] == _COMPLETE else self._running


class _SortedList:
    """Places in order. Inserting moves pointers only: fast enough for 100,000 of them."""

    def __init__(self) -> None:
        self.places: list[Place] = []

    def __len__(self) -> int:
        return len(self.places)

    def add(self, place: Place) -> None:
        insort(self.places, place)

    def remove(self, place: Place) -> None:
        index = bisect_left(self.places, place)
        assert self.places[index] == place, f"{place} is not listed"
        del self.places[index]

    def num_until(self, deadline: float) -> int:
        return bisect_right(self.places, deadline, key=lambda place: place[0])


def _precedence(rollout: RolloutSummary) -> tuple[int, int, int]:
    """Of two trajectories of one rollout the newer revision counts, then the first in the log."""
    return (-rollout.revision, rollout.partition, rollout.offset)
