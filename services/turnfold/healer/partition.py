"""One partition of the log: records in, finished trajectories out.

A rollout lives in one partition, so a partition can be folded alone. Only open rollouts are held.
The same code runs live and in a replay; neither looks at a clock.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from turnfold.healer.fold import RolloutState, fold, mark_undecodable, open_rollout
from turnfold.healer.lineage import Lineage, resolve
from turnfold.healer.rows import trajectory
from turnfold.log.records import Record
from turnfold.schemas import codec
from turnfold.schemas.events import Event, HistoryMode, RewardRevised, RolloutStarted, TurnCompleted
from turnfold.schemas.trajectories import Trajectory

MAX_REMEMBERED = 200_000
"""Finished rollouts whose ids are kept, to tell a late event from one that was never started."""


class Opened(msgspec.Struct, frozen=True):
    """A rollout began."""

    started: RolloutStarted


class Released(msgspec.Struct, frozen=True):
    """A rollout was closed; its state is let go."""

    trajectory: Trajectory


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


Outcome = Opened | Released | Rejected | RevisionWanted | Ignored


class PartitionFold:
    """The open rollouts of one partition.

    partition = PartitionFold("turnfold.events", 0)
    for record in records:
        for outcome in partition.feed(record): ...
    """

    def __init__(self, topic: str, partition: int, *, mode: HistoryMode | None = None) -> None:
        self.topic, self.partition, self.mode = topic, partition, mode
        self.open: dict[str, RolloutState] = {}
        """By rollout_id, the oldest first."""
        self._finished: dict[str, None] = {}
        # Turns whose parent is not known (yet), whole, in case they end in the dead letters.
        self._doubtful: dict[str, dict[int, Record]] = {}

    def low_watermark(self, next_offset: int) -> int:
        """Where a restart must begin to read: at the first event of the oldest open rollout."""
        oldest = next(iter(self.open.values()), None)
        return next_offset if oldest is None else oldest.first_offset

    def feed(self, record: Record) -> list[Outcome]:
        """Fold one record. Records come in the order of their offsets."""
        try:
            event = decode_event(record)
        except codec.CodecError as error:
            return [self._undecodable(record, str(error))]
        state = self.open.get(event.rollout_id)
        if state is not None:
            return self._fold(state, event, record)
        if event.rollout_id in self._finished and not isinstance(event, RewardRevised):
            return [Ignored("late")]
        match event:
            case RolloutStarted():
                self.open[event.rollout_id] = open_rollout(event, record.offset)
                return [Opened(event)]
            case RewardRevised():
                return [RevisionWanted(event.rollout_id, record)]
            case _:
                return [Rejected(record, _not_open(event))]

    def _undecodable(self, record: Record, reason: str) -> Rejected:
        rollout_id = (record.key or b"").decode(errors="replace")
        if rollout_id in self.open:
            state = self.open[rollout_id]
            self.open[rollout_id] = mark_undecodable(state, record.offset, reason)
        return Rejected(record, reason)

    def _fold(self, before: RolloutState, event: Event, record: Record) -> list[Outcome]:
        state = fold(before, event, record.offset)
        self.open[state.rollout_id] = state
        if state.num_duplicates > before.num_duplicates:
            return [Ignored("duplicate")]
        problem = state.problem_at(record.offset)
        outcomes: list[Outcome] = [Rejected(record, problem.detail)] if problem else []
        if isinstance(event, TurnCompleted) and problem is None:
            self._keep_if_doubtful(state, event, record)
        if state.is_closed:
            outcomes += self._released(state)
        return outcomes

    def _keep_if_doubtful(self, state: RolloutState, event: TurnCompleted, record: Record) -> None:
        if event.shared_len == 0:
            return
        doubtful = self._doubtful.get(state.rollout_id, {})
        parent = state.turns.get(event.parent_turn_id or "")
        is_sound = (
            parent is not None
            and not parent.untrusted
            and parent.offset not in doubtful
            and event.shared_len <= parent.num_tokens
        )
        if not is_sound:
            self._doubtful.setdefault(state.rollout_id, doubtful)[record.offset] = record

    def _released(self, state: RolloutState) -> list[Outcome]:
        del self.open[state.rollout_id]
        self._finished[state.rollout_id] = None
        if len(self._finished) > MAX_REMEMBERED:
            del self._finished[next(iter(self._finished))]
        lineage = resolve(state.turns.values())
        doubtful = self._doubtful.pop(state.rollout_id, {})
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
        self._states: dict[str, RolloutState] = {}

    def feed(self, record: Record) -> Trajectory | None:
        """The superseding trajectory when this record revised a reward, else None."""
        if record.key not in self._wanted:
            return None
        try:
            event = decode_event(record)
        except codec.CodecError as error:
            self._mark(record, str(error))
            return None
        before = self._states.get(event.rollout_id)
        if before is None:
            if isinstance(event, RolloutStarted):
                self._states[event.rollout_id] = open_rollout(event, record.offset)
            return None
        state = self._states[event.rollout_id] = fold(before, event, record.offset)
        if state.revision == before.revision:
            return None
        return trajectory(state, topic=record.topic, partition=record.partition, mode=self.mode)

    def reason_against(self, record: Record) -> str:
        """Why a revision that gave no trajectory was not accepted; empty for a redelivery."""
        rollout_id = (record.key or b"").decode(errors="replace")
        state = self._states.get(rollout_id)
        if state is None:
            return f"rollout {rollout_id}: a reward was revised, but its start is not in the log"
        problem = state.problem_at(record.offset)
        return problem.detail if problem else ""

    def _mark(self, record: Record, reason: str) -> None:
        rollout_id = (record.key or b"").decode(errors="replace")
        if rollout_id in self._states:
            state = self._states[rollout_id]
            self._states[rollout_id] = mark_undecodable(state, record.offset, reason)


def decode_event(record: Record) -> Event:
    """The event in a record. Raises CodecError saying what is wrong with it."""
    if record.value is None:
        raise codec.CodecError("expected an event, got a record without a value")
    event: Event = codec.decode(Event, record.value, record.content_type)
    if record.key != event.rollout_id.encode():
        raise codec.CodecError(
            f"expected the key to be the rollout_id {event.rollout_id!r}, got {record.key!r}: "
            "all events of a rollout must lie in one partition"
        )
    return event


def _not_open(event: Event) -> str:
    return (
        f"rollout {event.rollout_id} is not open: expected a rollout_started event before this "
        f"{type(event).__name__}, or the rollout was closed long ago"
    )
