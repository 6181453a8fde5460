"""Which rollouts of a log were trained, by their length and task. Pure.

Only groups that were decided on count: of the others nobody knows yet. A rollout's length is known
when it has ended. One that was cut off, at its deadline for instance, is as long as it got, so it
tells of bias only together with the others; `completed` leaves these out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal, get_args

import msgspec

from turnfold.replay.assignments import Assignments
from turnfold.replay.stragglers.bias import BiasTest, GroupLengths, compare
from turnfold.schemas.events import RolloutAborted, RolloutEvent, RolloutFinished, RolloutStarted
from turnfold.schemas.tasks import Task
from turnfold.schemas.trajectories import Trajectory

Measure = Literal["tokens", "turns", "seconds"]
MEASURES: tuple[Measure, ...] = get_args(Measure)

QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


class Bin(msgspec.Struct, frozen=True, kw_only=True):
    """Rollouts between two quantiles of length."""

    first: float
    last: float
    num_rollouts: int
    num_trained: int


class ByLength(msgspec.Struct, frozen=True, kw_only=True):
    """One measure of length."""

    bins: tuple[Bin, ...]
    all: BiasTest | None
    """Trained against all rollouts that have ended."""
    completed: BiasTest | None
    """Trained against those that have a reward."""


class ByTask(msgspec.Struct, frozen=True, kw_only=True):
    task_id: str
    num_rollouts: int
    """Dispatched, in groups that were decided on."""
    num_trained: int
    mean_tokens: float | None


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """The account of one run."""

    run_id: str
    num_groups: int
    num_undecided_groups: int
    num_rollouts: int
    """Dispatched, in groups that were decided on."""
    num_ended: int
    num_trained: int
    """In a batch, trained already or not."""
    reasons: dict[str, int]
    """Why the others are in no batch."""
    by_length: dict[str, ByLength]
    tasks: tuple[ByTask, ...]
    """The smallest trained share first."""


class _Rollout(msgspec.Struct, kw_only=True):
    """What is known of the length of a rollout."""

    tokens: float | None = None
    """Sampled."""
    turns: float | None = None
    seconds: float | None = None
    started_at: float = 0.0
    is_completed: bool = False
    revision: int = -1

    def length(self, measure: Measure) -> float | None:
        match measure:
            case "tokens":
                return self.tokens
            case "turns":
                return self.turns
            case "seconds":
                return self.seconds


class Stragglers:
    """Collects a log.

    found = Stragglers(assignments)
    found.add_task(task); found.add_event(event); found.add_trajectory(trajectory)
    found.reports(permutations=1000)
    """

    def __init__(self, assignments: Assignments) -> None:
        self._assignments = assignments
        self._tasks: dict[str, dict[str, tuple[str, int]]] = defaultdict(dict)
        """Of each run: group_id → (task_id, n)."""
        self._rollouts: defaultdict[str, _Rollout] = defaultdict(lambda: _Rollout())
        self._slots: defaultdict[str, dict[int, str]] = defaultdict(dict)
        """Of each group: slot → rollout_id."""

    def add_task(self, task: Task) -> None:
        if task.split == "train":
            self._tasks[task.run_id].setdefault(task.group_id, (task.task_id, task.n))

    def add_event(self, event: RolloutEvent) -> None:
        match event:
            case RolloutStarted():
                self._slots[event.group_id].setdefault(event.index, event.rollout_id)
                self._rollouts[event.rollout_id].started_at = event.at
            case RolloutFinished() | RolloutAborted():
                found = self._rollouts[event.rollout_id]
                # The first end counts, as it does for the healer.
                if found.started_at > 0 and event.at > 0 and found.seconds is None:
                    found.seconds = max(0.0, event.at - found.started_at)

    def add_trajectory(self, trajectory: Trajectory) -> None:
        self._slots[trajectory.group_id].setdefault(trajectory.index, trajectory.rollout_id)
        found = self._rollouts[trajectory.rollout_id]
        if trajectory.revision <= found.revision:
            return
        found.revision = trajectory.revision
        # Sampled ones, and not those of the rows: an aborted rollout has no rows.
        found.tokens = float(trajectory.ledger.num_sampled)
        found.turns = float(trajectory.num_turns)
        found.is_completed = trajectory.status != "aborted" and trajectory.reward is not None

    def reports(self, *, permutations: int) -> list[RunReport]:
        """One report for each run that was dispatched, by name."""
        return [self._report(run_id, permutations) for run_id in sorted(self._tasks)]

    def _report(self, run_id: str, permutations: int) -> RunReport:
        groups, num_undecided = [], 0
        for group_id in sorted(self._tasks[run_id]):
            made = self._fates(run_id, group_id)
            if made is None:
                num_undecided += 1
            else:
                groups.append(made)
        slots = [slot for group in groups for slot in group.slots]
        return RunReport(
            run_id=run_id,
            num_groups=len(self._tasks[run_id]),
            num_undecided_groups=num_undecided,
            num_rollouts=len(slots),
            num_ended=sum(slot.rollout.tokens is not None for slot in slots),
            num_trained=sum(slot.is_trained for slot in slots),
            reasons=dict(Counter(s.reason for s in slots if not s.is_trained).most_common()),
            by_length={measure: _by_length(groups, measure, permutations) for measure in MEASURES},
            tasks=_by_task(groups),
        )

    def _fates(self, run_id: str, group_id: str) -> _Group | None:
        """What became of each slot of a group; None when that is not decided."""
        task_id, n = self._tasks[run_id][group_id]
        slots = []
        for index in range(n):
            rollout_id = self._slots[group_id].get(index, f"{group_id}-{index:02d}")
            fate = self._assignments.of(run_id, group_id, rollout_id)
            if fate.batch is None and not fate.reason:
                return None
            slots.append(
                _Slot(
                    rollout=self._rollouts.get(rollout_id, _Rollout()),
                    is_trained=fate.batch is not None,
                    reason=fate.reason,
                )
            )
        return _Group(task_id=task_id, slots=tuple(slots))


class _Slot(msgspec.Struct, frozen=True, kw_only=True):
    rollout: _Rollout
    is_trained: bool
    reason: str


class _Group(msgspec.Struct, frozen=True, kw_only=True):
    task_id: str
    slots: tuple[_Slot, ...]


def _by_length(groups: Sequence[_Group], measure: Measure, permutations: int) -> ByLength:
    ended = [_lengths(group, measure, is_completed_only=False) for group in groups]
    completed = [_lengths(group, measure, is_completed_only=True) for group in groups]
    return ByLength(
        bins=_bins(ended),
        all=compare(ended, permutations=permutations),
        completed=compare(completed, permutations=permutations),
    )


def _lengths(group: _Group, measure: Measure, *, is_completed_only: bool) -> GroupLengths:
    known = [
        (length, slot.is_trained)
        for slot in group.slots
        if (length := slot.rollout.length(measure)) is not None
        and (slot.rollout.is_completed or not is_completed_only)
    ]
    return GroupLengths(
        group.task_id, tuple(length for length, _ in known), tuple(trained for _, trained in known)
    )


def _bins(groups: Iterable[GroupLengths]) -> tuple[Bin, ...]:
    """Rollouts of one length may lie in two bins: they are divided by number."""
    pairs = sorted(
        pair for group in groups for pair in zip(group.lengths, group.trained, strict=True)
    )
    edges = [round(quantile * len(pairs)) for quantile in QUANTILES]
    found = []
    for start, end in pairwise(edges):
        if inside := pairs[start:end]:
            found.append(
                Bin(
                    first=inside[0][0],
                    last=inside[-1][0],
                    num_rollouts=len(inside),
                    num_trained=sum(trained for _, trained in inside),
                )
            )
    return tuple(found)


def _by_task(groups: Sequence[_Group]) -> tuple[ByTask, ...]:
    slots: dict[str, list[_Slot]] = defaultdict(list)
    for group in groups:
        slots[group.task_id] += group.slots
    made = [_task(task_id, found) for task_id, found in slots.items()]
    return tuple(
        sorted(made, key=lambda task: (task.num_trained / task.num_rollouts, task.task_id))
    )


def _task(task_id: str, slots: Sequence[_Slot]) -> ByTask:
    tokens = [slot.rollout.tokens for slot in slots if slot.rollout.tokens is not None]
    return ByTask(
        task_id=task_id,
        num_rollouts=len(slots),
        num_trained=sum(slot.is_trained for slot in slots),
        mean_tokens=sum(tokens) / len(tokens) if tokens else None,
    )
