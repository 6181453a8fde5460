"""One partition of the log: records in, finished trajectories out.

A rollout lives in one partition, so a partition can be folded alone. Only open rollouts are held,
and the names of those that ended lately, so that a start which is delivered again opens nothing:

    start of r1, deadline 100 s       end of r1        …        start of r1 once more
    |------------------------ remembered ------------------------| deadline + 300 s
                                                                 after that it is late by itself

Both rules compare times that are in the log, and a restart reads from the start of the oldest
rollout that is still remembered, so it is told the same as one that never stopped. The same code
runs live and in a replay; neither looks at a clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import msgspec

from turnfold.healer.fold import RolloutState, RunningFold, open_rollout
from turnfold.healer.lineage import Lineage, resolve
from turnfold.healer.opened import OpenRollouts
from turnfold.healer.recorded import decode_for_fold
from turnfold.healer.rows import trajectory
from turnfold.log.records import Record
from turnfold.schemas import codec
from turnfold.schemas.events import Event, HistoryMode, RewardRevised, RolloutStarted, TurnCompleted
from turnfold.schemas.trajectories import Trajectory

REMEMBERED_S = 300.0
"""Seconds after its deadline for which a rollout's name is kept. A producer delivers again within
seconds; the rest is for clocks that differ."""

NO_DEADLINE_S = 3600.0
"""What stands for a deadline, from the start on, in a rollout that has none."""


class Opened(msgspec.Struct, frozen=True):
    """A rollout began."""

    started: RolloutStarted


class Released(msgspec.Struct, frozen=True):
    """A rollout was closed; its state is let go."""

    trajectory: Trajectory


class Ended(msgspec.Struct, frozen=True):
    """A rollout was closed while warming up, when nobody wants its trajectory."""

    rollout_id: str


class Rejected(msgspec.Struct, frozen=True):
    """A record that cannot be used, for the dead letters."""

    record: Record
    reason: str


class RevisionWanted(msgspec.Struct, frozen=True):
    """The reward of a released rollout was revised: fold its events again with `Revisions`."""

    rollout_id: str
    record: Record


class Ignored(msgspec.Struct, frozen=True):
    """An event that changes nothing: `duplicate` or `late`."""

    kind: str


Outcome = Opened | Released | Ended | Rejected | RevisionWanted | Ignored


class RestartPoint(msgspec.Struct, frozen=True):
    """Where a fold must begin to come to the state of this one."""

    offset: int
    log_time: float
    """Latest time of a record before it."""


class _Known(msgspec.Struct):
    begins: RestartPoint
    until: float
    """Log time until which it is remembered after its end."""
    last_start: int
    """Offset at which its start was delivered last."""


class PartitionFold:
    """The open rollouts of one partition.

    partition = PartitionFold("turnfold.events", 0)
    for record in records:
        for outcome in partition.feed(record): ...

    A fold that begins at the restart point of another one, with its `log_time`, comes to the state of
    that one at the place where it stood.
    """

    def __init__(
        self,
        topic: str,
        partition: int,
        *,
        mode: HistoryMode | None = None,
        log_time: float = 0.0,
        opened: OpenRollouts | None = None,
    ) -> None:
        self.topic, self.partition, self.mode = topic, partition, mode
        self.log_time = log_time
        """Latest time of a record, Unix seconds."""
        self.open = OpenRollouts() if opened is None else opened
        self._is_warming_up = False
        self._known: dict[str, _Known] = {}
        """Open and remembered rollouts, in the order in which they began."""
        # Turns whose parent is not known (yet), whole, in case they end in the dead letters.
        self._doubtful: dict[str, dict[int, Record]] = {}

    def restart_point(self, next_offset: int) -> RestartPoint:
        """The start of the oldest rollout that is open or remembered.

        A rollout that is neither is let go only together with every start of it that was delivered:
        a restart that read such a start without the first one would take it for new.
        """
        num_ended, last_start = 0, -1
        num_forgotten, point = 0, RestartPoint(next_offset, self.log_time)
        for rollout_id, known in self._known.items():
            if last_start < known.begins.offset:
                num_forgotten, point = num_ended, known.begins
            if rollout_id in self.open or self._is_remembered(rollout_id):
                break
            num_ended, last_start = num_ended + 1, max(last_start, known.last_start)
        else:
            num_forgotten, point = num_ended, RestartPoint(next_offset, self.log_time)
        for rollout_id in list(islice(self._known, num_forgotten)):
            del self._known[rollout_id]
        return point

    def warm_up(self, record: Record) -> list[Outcome]:
        """As `feed`, for a record whose outcome is in the log already: no rows are made."""
        self._is_warming_up = True
        try:
            return self.feed(record)
        finally:
            self._is_warming_up = False

    def feed(self, record: Record) -> list[Outcome]:
        """Fold one record. Records come in the order of their offsets."""
        log_time_before = self.log_time
        self.log_time = max(self.log_time, record.timestamp)
        try:
            event = decode_for_fold(record)
        except codec.CodecError as error:
            return [self._undecodable(record, str(error))]
        if isinstance(event, RolloutStarted) and event.rollout_id in self._known:
            self._known[event.rollout_id].last_start = record.offset
        running = self.open.get(event.rollout_id)
        if running is not None:
            return self._fold(running, event, record)
        match event:
            case RewardRevised():
                return [RevisionWanted(event.rollout_id, record)]
            case _ if self._is_remembered(event.rollout_id):
                return [Ignored("late")]
            case RolloutStarted():
                return [self._opened(event, record, log_time_before)]
            case _:
                return [Rejected(record, _not_open(event))]

    def _opened(self, event: RolloutStarted, record: Record, log_time_before: float) -> Outcome:
        deadline = event.deadline_at
        if deadline is None:
            deadline = record.timestamp + NO_DEADLINE_S
        until = deadline + REMEMBERED_S
        if record.timestamp > until:
            return Ignored("late")
        known = self._known.get(event.rollout_id)
        if known is not None:
            known.until = until  # another of the same name, long after the first
        else:
            begins = RestartPoint(record.offset, log_time_before)
            self._known[event.rollout_id] = _Known(begins, until, last_start=record.offset)
        self.open.add(RunningFold(open_rollout(event, record.offset)), len(record.value or b""))
        return Opened(event)

    def _is_remembered(self, rollout_id: str) -> bool:
        known = self._known.get(rollout_id)
        return known is not None and self.log_time <= known.until

    def _undecodable(self, record: Record, reason: str) -> Rejected:
        running = self.open.get((record.key or b"").decode(errors="replace"))
        if running is not None:
            running.mark_undecodable(record.offset, reason)
        return Rejected(record, reason)

    def _fold(self, running: RunningFold, event: Event, record: Record) -> list[Outcome]:
        num_duplicates = running.num_duplicates
        problem = running.add(event, record.offset)
        if running.num_duplicates > num_duplicates:
            return [Ignored("duplicate")]
        outcomes: list[Outcome] = [Rejected(record, problem.detail)] if problem else []
        if isinstance(event, TurnCompleted) and problem is None:
            self._keep_if_doubtful(running, event, record)
        if running.is_closed:
            outcomes += self._released(running)
        else:
            self.open.grew(running.rollout_id, len(record.value or b""))
        return outcomes

    def _keep_if_doubtful(self, running: RunningFold, event: TurnCompleted, record: Record) -> None:
        if event.shared_len == 0:
            return
        doubtful = self._doubtful.get(running.rollout_id)
        parent = running.turns.get(event.parent_turn_id or "")
        is_sound = (
            parent is not None
            and not parent.untrusted
            and (doubtful is None or parent.offset not in doubtful)
            and event.shared_len <= parent.num_tokens
        )
        if not is_sound:
            self._doubtful.setdefault(running.rollout_id, {})[record.offset] = record

    def _released(self, running: RunningFold) -> list[Outcome]:
        self.open.remove(running.rollout_id)
        doubtful = self._doubtful.pop(running.rollout_id, {})
        if self._is_warming_up:
            return [Ended(running.rollout_id)]
        state = running.state()
        lineage = resolve(state.turns.values())
        rejected = [
            Rejected(doubtful[gap.offset], gap.detail)
            for gap in lineage.gaps
            if gap.offset in doubtful
        ]
        return [*rejected, Released(self._trajectory(state, lineage))]

    def _trajectory(self, state: RolloutState, lineage: Lineage) -> Trajectory:
        return trajectory(
            state, topic=self.topic, partition=self.partition, mode=self.mode, lineage=lineage
        )


class Revisions:
    """Folds chosen rollouts again, from the start of their partition, for their revised rewards."""

    def __init__(self, rollout_ids: Iterable[str], *, mode: HistoryMode | None = None) -> None:
        self.mode = mode
        self._wanted = {rollout_id.encode() for rollout_id in rollout_ids}
        self._folds: dict[str, RunningFold] = {}
        self._reasons: dict[int, str] = {}
        """What was wrong with the record at an offset."""

    def feed(self, record: Record) -> Trajectory | None:
        """The superseding trajectory when this record revised a reward, else None."""
        if record.key not in self._wanted:
            return None
        try:
            event = decode_for_fold(record)
        except codec.CodecError as error:
            self._mark(record, str(error))
            return None
        running = self._folds.get(event.rollout_id)
        if running is None:
            if isinstance(event, RolloutStarted):
                self._folds[event.rollout_id] = RunningFold(open_rollout(event, record.offset))
            return None
        revision = running.revision
        problem = running.add(event, record.offset)
        if problem is not None:
            self._reasons[record.offset] = problem.detail
        if running.revision == revision:
            return None
        return trajectory(
            running.state(), topic=record.topic, partition=record.partition, mode=self.mode
        )

    def reason_against(self, record: Record) -> str:
        """Why a revision that gave no trajectory was not accepted; empty for a redelivery."""
        rollout_id = (record.key or b"").decode(errors="replace")
        if rollout_id not in self._folds:
            return f"rollout {rollout_id}: a reward was revised, but its start is not in the log"
        return self._reasons.get(record.offset, "")

    def _mark(self, record: Record, reason: str) -> None:
        rollout_id = (record.key or b"").decode(errors="replace")
        if rollout_id in self._folds:
            self._folds[rollout_id].mark_undecodable(record.offset, reason)


def _not_open(event: Event) -> str:
    return (
        f"rollout {event.rollout_id} is not open: expected a rollout_started event before this "
        f"{type(event).__name__}, or the rollout was closed long ago"
    )
