"""Trajectories from events, for a whole log: the healer's fold, one partition beside the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import assert_never

from turnfold.healer.partition import (
    Ended,
    Ignored,
    Opened,
    PartitionFold,
    Rejected,
    Released,
    RestartPoint,
    Revisions,
    RevisionWanted,
)
from turnfold.healer.recorded import decode_event
from turnfold.log.records import Record
from turnfold.replay.ranges import OffsetRanges
from turnfold.schemas import codec
from turnfold.schemas.events import HistoryMode, RolloutStarted
from turnfold.schemas.trajectories import Trajectory


class Selection:
    """Which rollouts to look at: those named, those of the groups named, or all.

    Of these `runs` leaves only those of the runs named, and `offsets` only those whose start lies
    there; both look at whole rollouts, also at events that came after the range.
    """

    def __init__(
        self,
        rollouts: Collection[str] = (),
        groups: Collection[str] = (),
        runs: Collection[str] = (),
        offsets: OffsetRanges | None = None,
    ) -> None:
        self._rollouts, self._groups, self._runs = set(rollouts), set(groups), set(runs)
        self.offsets = offsets
        self.is_everything = not (rollouts or groups or runs) and offsets is None
        is_narrowed = bool(self._runs) or offsets is not None
        self._is_learnt = is_narrowed or bool(self._groups)
        """Whether a start has to be looked at to tell."""
        self.chosen = set[bytes]() if is_narrowed else {name.encode() for name in rollouts}
        """Keys of the rollouts that are known to belong to it."""

    @property
    def question(self) -> str:
        """What is asked for, the same text for the same selection."""
        offsets = "all" if self.offsets is None else str(sorted(self.offsets.items()))
        return (
            f"rollouts {sorted(self._rollouts)}, groups {sorted(self._groups)}, "
            f"runs {sorted(self._runs)}, offsets {offsets}"
        )

    def holds_event(self, record: Record) -> bool:
        """Whether an event belongs to it. Group and run of a rollout are learnt from its start."""
        if self.is_everything or record.key in self.chosen:
            return True
        if not self._is_learnt or not self._is_in_range(record.partition, record.offset):
            return False
        try:
            event = decode_event(record)
        except codec.CodecError:
            return False
        if not isinstance(event, RolloutStarted) or not self._is_named(event):
            return False
        self.chosen.add(event.rollout_id.encode())
        return True

    def holds_rollout(self, rollout_id: str, group_id: str) -> bool:
        """By its names alone."""
        is_named = rollout_id in self._rollouts or group_id in self._groups
        return is_named or not (self._rollouts or self._groups)

    def holds_trajectory(self, trajectory: Trajectory) -> bool:
        source = trajectory.source
        return self._is_named(trajectory) and self._is_in_range(
            source.partition, source.first_offset
        )

    def _is_named(self, rollout: RolloutStarted | Trajectory) -> bool:
        is_in_run = not self._runs or rollout.run_id in self._runs
        return is_in_run and self.holds_rollout(rollout.rollout_id, rollout.group_id)

    def _is_in_range(self, partition: int, offset: int) -> bool:
        return self.offsets is None or offset in self.offsets.get(partition, ())


class Rebuild:
    """Folds the records of all partitions.

    rebuild = Rebuild()
    for record in log:                       # in order within each partition
        trajectories += rebuild.feed(record)
    if rebuild.revised:                      # rewards revised after the end: read the log again
        revisions = rebuild.revisions()
        trajectories += filter(None, map(revisions.feed, log))
    """

    def __init__(self, mode: HistoryMode | None = None, *, log_time: float = 0.0) -> None:
        self.mode = mode
        self._log_time = log_time
        self.num_events = 0
        self.revised: list[str] = []
        """Rollouts whose reward was revised after they were released."""
        self.rejected: list[tuple[Record, str]] = []
        self.ignored: Counter[str] = Counter()
        self._folds: dict[tuple[str, int], PartitionFold] = {}

    @property
    def open_rollouts(self) -> list[str]:
        """Rollouts without an end in the log."""
        return sorted(rollout_id for fold in self._folds.values() for rollout_id in fold.open)

    @property
    def has_open_rollouts(self) -> bool:
        return any(fold.open for fold in self._folds.values())

    def restart_point(self, topic: str, partition: int, next_offset: int) -> RestartPoint:
        """Where a rebuild must begin to come to the state of this one, with its `log_time`."""
        fold = self._folds.get((topic, partition))
        if fold is None:
            return RestartPoint(next_offset, self._log_time)
        return fold.restart_point(next_offset)

    def warm_up(self, record: Record) -> None:
        """Fold a record of which everything that came is known already."""
        self._fold_of(record).warm_up(record)

    def feed(self, record: Record) -> list[Trajectory]:
        """The trajectories that a record completes."""
        self.num_events += 1
        finished: list[Trajectory] = []
        for outcome in self._fold_of(record).feed(record):
            match outcome:
                case Released(trajectory):
                    finished.append(trajectory)
                case Rejected(rejected, reason):
                    self.rejected.append((rejected, reason))
                case RevisionWanted(rollout_id, _):
                    self.revised.append(rollout_id)
                case Ignored(kind):
                    self.ignored[kind] += 1
                case Opened() | Ended():
                    pass
                case _:
                    assert_never(outcome)
        return finished

    def _fold_of(self, record: Record) -> PartitionFold:
        place = (record.topic, record.partition)
        fold = self._folds.get(place)
        if fold is None:
            fold = self._folds[place] = PartitionFold(
                *place, mode=self.mode, log_time=self._log_time
            )
        return fold

    def revisions(self) -> Revisions:
        """A second reader of the same log, for the superseding trajectories."""
        return Revisions(self.revised, mode=self.mode)
