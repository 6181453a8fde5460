"""Trajectories from events, for a whole log: the healer's fold, one partition beside the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import assert_never

from turnfold.healer.partition import (
    Ignored,
    Opened,
    PartitionFold,
    Rejected,
    Released,
    Revisions,
    RevisionWanted,
    decode_event,
)
from turnfold.log.records import Record
from turnfold.schemas import codec
from turnfold.schemas.events import HistoryMode, RolloutStarted
from turnfold.schemas.trajectories import Trajectory


class Selection:
    """Which rollouts to look at: those named, those of the groups named, or all."""

    def __init__(self, rollouts: Collection[str] = (), groups: Collection[str] = ()) -> None:
        self._rollouts = {rollout_id.encode() for rollout_id in rollouts}
        self._groups = set(groups)
        self.is_everything = not self._rollouts and not self._groups

    def holds_event(self, record: Record) -> bool:
        """Whether an event belongs to it. A rollout's group is learnt from its start."""
        if self.is_everything or record.key in self._rollouts:
            return True
        if self._groups:
            try:
                event = decode_event(record)
            except codec.CodecError:
                return False
            if isinstance(event, RolloutStarted) and event.group_id in self._groups:
                self._rollouts.add(event.rollout_id.encode())
                return True
        return False

    def holds_rollout(self, rollout_id: str, group_id: str) -> bool:
        is_named = rollout_id.encode() in self._rollouts or group_id in self._groups
        return self.is_everything or is_named


class Rebuild:
    """Folds the records of all partitions.

    rebuild = Rebuild()
    for record in log:                       # in order within each partition
        trajectories += rebuild.feed(record)
    if rebuild.revised:                      # rewards revised after the end: read the log again
        revisions = rebuild.revisions()
        trajectories += filter(None, map(revisions.feed, log))
    """

    def __init__(self, mode: HistoryMode | None = None) -> None:
        self.mode = mode
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

    def feed(self, record: Record) -> list[Trajectory]:
        self.num_events += 1
        place = (record.topic, record.partition)
        if place not in self._folds:
            self._folds[place] = PartitionFold(*place, mode=self.mode)
        finished: list[Trajectory] = []
        for outcome in self._folds[place].feed(record):
            match outcome:
                case Released(trajectory):
                    finished.append(trajectory)
                case Rejected(rejected, reason):
                    self.rejected.append((rejected, reason))
                case RevisionWanted(rollout_id, _):
                    self.revised.append(rollout_id)
                case Ignored(kind):
                    self.ignored[kind] += 1
                case Opened():
                    pass
                case _:
                    assert_never(outcome)
        return finished

    def revisions(self) -> Revisions:
        """A second reader of the same log, for the superseding trajectories."""
        return Revisions(self.revised, mode=self.mode)
