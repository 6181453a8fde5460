"""Which tasks come next: the order of the data set, the cursor, and what was lost. Pure.

The tasks topic is the cursor. A dispatcher that starts again folds the tasks it sent, the decisions
on them and the versions served, and goes on after the highest (epoch, cursor) in the log: no task
is skipped and none is sent twice.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from turnfold.dispatcher.pace import num_admissible
from turnfold.dispatcher.rounds import RoundState
from turnfold.schemas.batches import BatchCut, Decision, GroupDropped
from turnfold.schemas.decisions import DecisionLog, group_ids
from turnfold.schemas.policies import PolicyEvent, PolicyServed
from turnfold.schemas.run import RunConfig
from turnfold.schemas.tasks import Task

RETRIED_REASONS = frozenset({"too_few_survivors", "group_timeout"})
"""A group dropped for one of these says nothing about its task, which is dispatched again."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run ends; None is without a limit."""

    num_batches: int | None = None
    """Batches to dispatch groups for."""
    epochs: int | None = None
    """Passes over the data set; the last batch is filled up from the pass after that."""
    max_in_flight: int | None = None
    """Groups in flight at a time, whatever the pace would allow."""
    lookahead: int | None = None
    """Batches beyond the next one that groups are dispatched for, slow groups apart."""


class Place(msgspec.Struct, frozen=True, order=True):
    """A place in the order in which tasks are dispatched."""

    epoch: int
    cursor: int


_Attempt = tuple[Place, int]


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """What to dispatch next: the task at a place, or once more a task that was lost."""

    place: Place
    attempt: int = 0
    lost: Task | None = None


class DispatchState:
    """The fold of tasks, decisions and served versions of one run, in any order of topics.

    Each record is to be added once.

    state = DispatchState(config)
    state.add_task(task); state.add_decision(decision); state.add_policy(event)
    slots = next_slots(state, num_rows=100, limits=Limits(epochs=1))
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.decisions = DecisionLog(config.run_id)
        self.rounds = RoundState()
        """Evaluations; nothing of what follows is about them."""
        self.outstanding: dict[str, Task] = {}
        """Groups dispatched and neither in a batch nor dropped."""
        self.num_cut = 0
        """Groups in batches."""
        self.youngest_cut = -1
        """Highest dispatch index in a batch."""
        self.served_version: int | None = None
        self.next_dispatch_index = 0
        self.last: Task | None = None
        """First attempt at the highest place; the order goes on after it."""
        self._lost: dict[_Attempt, Task] = {}
        """Lost attempts that have not been made again."""
        self._lost_early: set[str] = set()
        """Lost groups whose task has not been read yet."""
        self._retried_early: set[_Attempt] = set()
        """Attempts that were made again and of whose loss has not been read yet."""

    def add_task(self, task: Task) -> None:
        if task.run_id != self.config.run_id:
            return
        if task.evaluation is not None:
            self.rounds.add_task(task)
            return
        self.next_dispatch_index = max(self.next_dispatch_index, task.dispatch_index + 1)
        if task.split != "train":
            return
        if task.attempt > 0:
            self._mark_retried((place_of(task), task.attempt - 1))
        elif self.last is None or place_of(task) > place_of(self.last):
            self.last = task
        if task.group_id not in self.decisions.decided:
            self.outstanding[task.group_id] = task
        elif task.group_id in self._lost_early:
            self._lost_early.remove(task.group_id)
            self._mark_lost(task)

    def add_decision(self, decision: Decision) -> bool:
        """Take in a decision; False when another one has won."""
        if not self.decisions.add(decision):
            return False
        self.rounds.add_decision(decision)
        if isinstance(decision, BatchCut):
            self.num_cut += len(decision.groups)
            youngest = max(group.dispatch_index for group in decision.groups)
            self.youngest_cut = max(self.youngest_cut, youngest)
        for group_id in group_ids(decision):
            task = self.outstanding.pop(group_id, None)
            if isinstance(decision, GroupDropped) and decision.reason in RETRIED_REASONS:
                if task is None:
                    self._lost_early.add(group_id)
                else:
                    self._mark_lost(task)
        return True

    def add_policy(self, event: PolicyEvent) -> None:
        """What counts is what the engines serve, not what the trainer has published."""
        if isinstance(event, PolicyServed) and event.run_id == self.config.run_id:
            self.served_version = event.policy_version

    @property
    def num_overtaken(self) -> int:
        """Outstanding groups that are older than a group in a batch."""
        return sum(task.dispatch_index < self.youngest_cut for task in self.outstanding.values())

    @property
    def next_place(self) -> Place:
        """After the highest place in the log; the cursor may have to wrap into the next epoch."""
        if self.last is None:
            return Place(0, 0)
        return Place(self.last.epoch, self.last.cursor + 1)

    def to_retry(self) -> list[Task]:
        """Tasks whose group was lost and that have attempts left, oldest first."""
        return sorted(self._lost.values(), key=lambda task: task.dispatch_index)

    def _mark_lost(self, task: Task) -> None:
        if task.attempt + 1 >= self.config.max_attempts:
            return
        attempt = (place_of(task), task.attempt)
        if attempt in self._retried_early:
            self._retried_early.remove(attempt)
        else:
            self._lost[attempt] = task

    def _mark_retried(self, attempt: _Attempt) -> None:
        if self._lost.pop(attempt, None) is None:
            self._retried_early.add(attempt)


def next_slots(state: DispatchState, num_rows: int, limits: Limits) -> list[Slot]:
    """Everything that may be dispatched now: lost tasks first, then new ones in order."""
    retries = state.to_retry()
    count = _num_admissible(state, limits)
    slots = [
        Slot(place=place_of(task), attempt=task.attempt + 1, lost=task) for task in retries[:count]
    ]
    in_use = state.num_cut + len(state.outstanding) + len(retries)
    place = state.next_place
    while len(slots) < count:
        place = _wrapped(place, num_rows)
        if _is_over(place, limits) and in_use % state.config.groups_per_batch == 0:
            break
        slots.append(Slot(place=place))
        place = Place(place.epoch, place.cursor + 1)
        in_use += 1
    return slots


def is_done(state: DispatchState, num_rows: int, limits: Limits) -> bool:
    """Whether nothing is in flight and nothing will be dispatched any more."""
    if limits.num_batches is not None and state.decisions.num_batches >= limits.num_batches:
        return True
    if limits.epochs is None or state.outstanding or state.to_retry():
        return False
    is_filled = state.num_cut % state.config.groups_per_batch == 0
    return is_filled and _is_over(_wrapped(state.next_place, num_rows), limits)


def place_of(task: Task) -> Place:
    return Place(task.epoch, task.cursor)


def row_at(place: Place, num_rows: int, seed: int, is_shuffled: bool) -> int:
    """Row of the data set at a place of the order."""
    if not is_shuffled:
        return place.cursor
    return int(epoch_order(num_rows, seed, place.epoch)[place.cursor])


@lru_cache(maxsize=2)
def epoch_order(num_rows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """All rows once, in an order that depends on the three numbers alone, on any machine.

    Rows are sorted by a hash of their number (SplitMix64, Steele, Lea and Flood 2014), so the
    order does not hang on the version of a random number library.
    """
    rows = np.arange(num_rows, dtype=np.uint64)
    key = _mixed(_mixed(np.array([seed % 2**64], np.uint64)) + np.uint64(epoch))
    return np.argsort(_mixed(rows + key), kind="stable")


def task_id(row: dict[str, Any], row_index: int) -> str:
    """`task_id` or `id` of the row when it has one, else its number."""
    for name in ("task_id", "id"):
        value = row.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
            return str(value)
    return f"row-{row_index:06d}"


def _num_admissible(state: DispatchState, limits: Limits) -> int:
    count = num_admissible(
        state.config,
        served_version=state.served_version,
        num_cut=state.num_cut,
        num_outstanding=len(state.outstanding),
        num_batches=limits.num_batches,
        lookahead=limits.lookahead,
        num_overtaken=state.num_overtaken,
    )
    if limits.max_in_flight is not None:
        count = min(count, max(0, limits.max_in_flight - len(state.outstanding)))
    return count


def _is_over(place: Place, limits: Limits) -> bool:
    return limits.epochs is not None and place.epoch >= limits.epochs


def _wrapped(place: Place, num_rows: int) -> Place:
    return place if place.cursor < num_rows else Place(place.epoch + 1, 0)


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's output function; multiplication wraps around at 64 bits."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
