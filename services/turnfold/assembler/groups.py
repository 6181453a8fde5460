"""The groups in flight: a fold of tasks, trajectories and decisions. Pure.

Only numbers and log positions are kept, never tokens, so memory grows with the rollouts in flight.
What the fold holds depends on which records it has seen and not on the order in which partitions
were read: any interleaving gives the same state, and so the same decisions.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

import msgspec

from turnfold.assembler.evaluation import EvaluationState
from turnfold.assembler.listing import COMPLETE, Listing, Order, Place
from turnfold.assembler.rollouts import RolloutSummary as RolloutSummary
from turnfold.assembler.rollouts import precedence, reason_to_leave_out
from turnfold.assembler.rollouts import summary as summary
from turnfold.schemas.batches import Decision, Positions
from turnfold.schemas.decisions import DecisionLog, group_ids
from turnfold.schemas.run import RunConfig
from turnfold.schemas.tasks import Task

TopicName = Literal["tasks", "trajectories"]

NEVER = -1
"""The last batch of a group that no batch can hold, not even the first."""


class TaskSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A task without its payload."""

    task_id: str
    dispatch_index: int
    n: int
    policy_version: int
    """Served when it was dispatched: no rollout of it is sampled by an older one."""
    dispatched_at: float
    partition: int
    offset: int


class Standing(NamedTuple):
    """What the ends of its rollouts so far say of a dispatched group."""

    oldest_version: int
    """No version older than this has sampled what may be trained of it."""
    is_open: bool
    """Not complete, and with a deadline."""
    last_batch: int | None
    """Index of the last batch that could hold it, whatever becomes of what still runs; None while
    that is not known, and when it is complete."""


class Group(msgspec.Struct, kw_only=True):
    """An open group: neither in a batch nor dropped."""

    group_id: str
    task: TaskSummary | None = None
    """None while its task has not been read, or when nobody dispatched it."""
    rollouts: dict[str, RolloutSummary] = {}
    """Newest revision by rollout_id."""
    place: Place | None = None
    """Where the state lists it."""
    standing: Standing | None = None
    """As the state counts it; None for a group that nobody dispatched."""

    # Kept along with `rollouts`, so that the next end need not look at all of them again.
    slots: int = 0
    """Slots that have ended, as bits."""
    has_repeats: bool = False
    """Whether a slot ended twice, or one that the task does not have."""
    num_completed: int = 0
    oldest_completed: int | None = None
    """Oldest version that sampled a completed rollout."""
    num_trainable: int = 0
    oldest_trainable: int | None = None

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
        oldest = self.oldest_completed
        if self.task is not None and len(self.rollouts) < self.task.n:
            served = self.task.policy_version
            return served if oldest is None else min(oldest, served)
        return 0 if oldest is None else oldest

    def is_complete(self, group_size: int) -> bool:
        """Whether every slot has a terminal trajectory.

        A group that nobody dispatched has no slots: it is complete with `group_size` rewards.
        """
        if self.task is None:
            return self.num_completed >= group_size
        all_slots = (1 << self.task.n) - 1
        return self.slots & all_slots == all_slots

    def add(self, rollout: RolloutSummary, config: RunConfig) -> bool:
        """Take in a rollout or a newer revision of one; False when it changes nothing."""
        known = self.rollouts.get(rollout.rollout_id)
        if known is not None and precedence(known) <= precedence(rollout):
            return False
        self.rollouts[rollout.rollout_id] = rollout
        if known is None:
            self._count(rollout, config)
        else:
            self.recount(config)
        return True

    def recount(self, config: RunConfig) -> None:
        """Look at all rollouts again: one was replaced, or what they are counted by has changed."""
        self.slots, self.has_repeats = 0, False
        self.num_completed, self.oldest_completed = 0, None
        self.num_trainable, self.oldest_trainable = 0, None
        for rollout in self.rollouts.values():
            self._count(rollout, config)

    def _count(self, rollout: RolloutSummary, config: RunConfig) -> None:
        index, version = rollout.index, rollout.min_policy_version
        if index < 0 or (self.task is not None and index >= self.task.n):
            self.has_repeats = True
        else:
            self.has_repeats = self.has_repeats or bool(self.slots >> index & 1)
            self.slots |= 1 << index
        if rollout.is_completed:
            self.num_completed += 1
            oldest = self.oldest_completed
            self.oldest_completed = version if oldest is None else min(oldest, version)
        if reason_to_leave_out(rollout, config) is None:
            self.num_trainable += 1
            oldest = self.oldest_trainable
            self.oldest_trainable = version if oldest is None else min(oldest, version)


class GroupsState:
    """All open groups of a run, which of them are complete, and how far the log has been read.

    state = GroupsState(config)
    state.add_task(task, partition=0, offset=0)
    state.add_rollout(summary(trajectory, partition=2, offset=7, digest="…"))
    state.add_decision(decision)            once it is read back from the log

    Redelivered and late records change nothing. Records of other runs count as read and are
    otherwise ignored; those of evaluations are kept apart, in `evaluations`.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.decisions = DecisionLog(config.run_id)
        self.open: dict[str, Group] = {}
        self.evaluations = EvaluationState(config)
        self._listing = Listing()
        self._next: dict[TopicName, dict[int, int]] = {"tasks": {}, "trajectories": {}}
        self._num_open: Counter[int] = Counter()
        """Dispatched groups by oldest version, and of these those that are open by `Standing`."""
        self._num_running: Counter[int] = Counter()
        self._doomed: list[tuple[int, Order]] = []
        """Heap of (last batch, order); entries that are no longer true are left in it."""

    def reconfigure(self, config: RunConfig) -> None:
        """Go on under another configuration of the same run, as after a restart with new sizes."""
        assert config.run_id == self.config.run_id, (config.run_id, self.config.run_id)
        self.config = config
        self.evaluations.reconfigure(config)
        for group in self.open.values():
            group.recount(config)
            self._relist(group)

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
        return _positions(self._next)

    def low_positions(self) -> Positions:
        """Where to begin reading to find every record of the open groups again.

        What lies below is of groups that have been decided on, or of no group of this run.
        """
        low = {topic: dict(positions) for topic, positions in self._next.items()}
        for group in self.open.values():
            if group.task is not None:
                _lower(low["tasks"], group.task.partition, group.task.offset)
            for rollout in group.rollouts.values():
                _lower(low["trajectories"], rollout.partition, rollout.offset)
        for topic, partition, offset in self.evaluations.places():
            _lower(low[topic], partition, offset)
        return _positions(low)

    def skip_to(self, positions: Positions) -> None:
        """Begin to read at `low_positions` of a state that had taken in the same decisions."""
        assert not self.open, "skip before the first record of a task or trajectory"
        self._next = {"tasks": dict(positions.tasks), "trajectories": dict(positions.trajectories)}

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
        if task.run_id != self.config.run_id or task.group_id in self.decisions.decided:
            return
        if task.split != "train":
            self.evaluations.add_task(task, partition, offset)
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
                partition=partition,
                offset=offset,
            )
            group.recount(self.config)
            self._relist(group)

    def add_rollout(self, rollout: RolloutSummary) -> None:
        if not self.mark_read("trajectories", rollout.partition, rollout.offset):
            return
        if rollout.run_id != self.config.run_id or rollout.group_id in self.decisions.decided:
            return
        if rollout.split != "train":
            self.evaluations.add_rollout(rollout)
            return
        group = self._group(rollout.group_id)
        if group.add(rollout, self.config):
            self._relist(group, has_moved=group.task is None)

    def add_decision(self, decision: Decision) -> bool:
        """Take in a decision read from the log; False when another one has won."""
        if not self.decisions.add(decision):
            return False
        self.evaluations.add_decision(decision)
        for group_id in group_ids(decision):
            if group_id in self.open:
                self._unlist(self.open.pop(group_id))
        return True

    def complete(self) -> Iterator[Group]:
        """Groups of which every rollout has ended, oldest dispatched first."""
        return self._groups(self._listing.complete())

    def overdue(self, now: float) -> Iterator[Group]:
        """Groups past their deadline that are not complete, oldest dispatched first."""
        return self._groups(self._listing.overdue(now))

    def running(self, now: float) -> Iterator[Group]:
        """Dispatched groups that are neither complete nor overdue, by deadline."""
        return self._groups(order for _, order in self._listing.running(now))

    def doomed(self) -> Group | None:
        """A group that still runs and that no batch can hold any more, the most hopeless first."""
        while self._doomed and self._doomed[0][0] < self.next_index:
            last_batch, (_, _, group_id) = self._doomed[0]
            group = self.open.get(group_id)
            standing = group.standing if group is not None else None
            if standing is not None and standing.last_batch == last_batch:
                return group
            heapq.heappop(self._doomed)
        return None

    def seats_taken(self) -> Iterator[tuple[int, int, int]]:
        """(version, dispatched groups, of these not complete), by the oldest version of the group.

        Groups that are past their deadline are among those that are not complete.
        """
        for version in sorted(self._num_open):
            yield version, self._num_open[version], self._num_running[version]

    def next_deadline(self, now: float) -> float | None:
        """When the next group closes that is neither complete nor overdue; None without one."""
        return self._listing.next_deadline(now)

    def is_running(self, group: Group, now: float) -> bool:
        """Whether it is dispatched and will be complete or past its deadline, but is not yet."""
        return group.place is not None and now < group.place[0] < math.inf

    @property
    def num_running(self) -> int:
        """Open groups that are not complete."""
        return len(self.open) - self._listing.num_complete

    @property
    def num_complete(self) -> int:
        return self._listing.num_complete

    def _groups(self, orders: Iterable[Order]) -> Iterator[Group]:
        for _, _, group_id in orders:
            yield self.open[group_id]

    def _group(self, group_id: str) -> Group:
        if group_id not in self.open:
            self.open[group_id] = Group(group_id=group_id)
        return self.open[group_id]

    def _relist(self, group: Group, *, has_moved: bool = True) -> None:
        """List the group where it belongs now, which is seldom another place than before.

        `has_moved` False: only rollouts were added, so that its order and deadline are the same.
        """
        is_complete = group.is_complete(self.config.group_size)
        place = group.place
        if has_moved or place is None or is_complete != (place[0] == COMPLETE):
            place = self._place(group, is_complete)
            if place != group.place:
                self._listing.move(group.place, place)
                group.place = place
        known, task = group.standing, group.task
        if task is None or place is None:
            self._count(known, -1)
            group.standing = None
            return
        oldest_version, is_open = group.oldest_version, not is_complete and place[0] < math.inf
        last_batch = None if is_complete else _last_batch(group, task.n, self.config)
        if known is not None and known == (oldest_version, is_open, last_batch):
            return
        group.standing = standing = Standing(oldest_version, is_open, last_batch)
        if known is None or known[:2] != standing[:2]:
            self._count(known, -1)
            self._count(standing, +1)
        if last_batch is not None:
            heapq.heappush(self._doomed, (last_batch, place[1]))

    def _unlist(self, group: Group) -> None:
        self._listing.move(group.place, None)
        self._count(group.standing, -1)
        group.place = group.standing = None

    def _place(self, group: Group, is_complete: bool) -> Place | None:
        if is_complete:
            return (COMPLETE, group.order)
        return None if group.task is None else (self._deadline(group.task), group.order)

    def _deadline(self, task: TaskSummary) -> float:
        # A publisher that does not say when it dispatched sets no deadline.
        if task.dispatched_at <= 0:
            return math.inf
        return task.dispatched_at + self.config.group_timeout_s

    def _count(self, standing: Standing | None, change: int) -> None:
        if standing is None:
            return
        version = standing.oldest_version
        self._num_open[version] += change
        if standing.is_open:
            self._num_running[version] += change
        if not self._num_open[version]:
            del self._num_open[version]
            self._num_running.pop(version, None)


def _last_batch(group: Group, n: int, config: RunConfig) -> int | None:
    """See `Standing.last_batch`; with group_size 3, min_group_size 2 and max_staleness 1:

    ended: version 4                  last batch 6, whatever the other two are
    ended: one failed                 not known
    ended: two failed                 NEVER: at most one will survive
    """
    if not group.slots or group.has_repeats:
        return None  # of several rollouts of a slot, one to come may win
    if group.num_trainable + n - len(group.rollouts) < config.min_group_size:
        return NEVER
    if group.oldest_trainable is None or config.on_stale == "train":
        return None
    return group.oldest_trainable + config.max_staleness + 1


def _positions(found: Mapping[TopicName, Mapping[int, int]]) -> Positions:
    tasks, trajectories = found["tasks"], found["trajectories"]
    return Positions(
        tasks={partition: tasks[partition] for partition in sorted(tasks)},
        trajectories={partition: trajectories[partition] for partition in sorted(trajectories)},
    )


def _lower(positions: dict[int, int], partition: int, offset: int) -> None:
    positions[partition] = min(positions[partition], offset)
