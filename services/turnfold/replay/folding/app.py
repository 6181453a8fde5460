"""A log, or some partitions of it, folded: trajectory by trajectory, or down to their digests.

Partitions are folded apart, so they can be divided among processes without changing a byte.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec

from turnfold.log.memory import keep_freed_memory
from turnfold.log.records import Record
from turnfold.replay.client import LogSource, OnProgress
from turnfold.replay.compare import Key
from turnfold.replay.folding.client import CheckpointFolder
from turnfold.replay.folding.part import Checkpoint, Part
from turnfold.replay.rebuild import Rebuild, Selection
from turnfold.schemas import codec
from turnfold.schemas.events import HistoryMode
from turnfold.schemas.trajectories import Trajectory

if TYPE_CHECKING:
    from turnfold.replay.writers import Writer  # imports pyarrow, which a worker has no use for

_CHECKPOINT_EVERY_S = 10.0


class Folded(msgspec.Struct, kw_only=True):
    """What a log, or some partitions of it, came to; nothing is kept of a trajectory's tokens."""

    digests: dict[Key, str] = {}
    num_events: int = 0
    open_rollouts: list[str] = []
    """Without an end in the log."""
    rejected: list[tuple[str, str]] = []
    """Place and reason of each record that could not be used."""
    ignored: Counter[str] = msgspec.field(default_factory=Counter)
    reached: dict[int, int] = {}
    """Next offset of each partition."""

    def add(self, other: Folded) -> None:
        """Take in what other partitions came to."""
        self.digests.update(other.digests)
        self.num_events += other.num_events
        self.open_rollouts = sorted([*self.open_rollouts, *other.open_rollouts])
        self.rejected += other.rejected
        self.ignored += other.ignored
        self.reached.update(other.reached)


async def rebuilt(
    source: LogSource,
    rebuild: Rebuild,
    selection: Selection,
    on_progress: OnProgress,
    partitions: Collection[int] | None = None,
) -> AsyncIterator[Trajectory]:
    """Every trajectory that the chosen events give, those of revised rewards last."""
    async with aclosing(source.batches(source.topics.events, partitions=partitions)) as batches:
        async for records in batches:
            on_progress(len(records))
            for record in records:
                if selection.holds_event(record):
                    for trajectory in rebuild.feed(record):
                        yield trajectory
    if not rebuild.revised:
        return
    revisions = rebuild.revisions()
    async for record in source.read(source.topics.events, partitions=partitions):
        revised = revisions.feed(record)
        if revised is not None:
            yield revised


async def fold(
    source: LogSource,
    *,
    mode: HistoryMode | None = None,
    selection: Selection,
    writer: Writer | None = None,
    partitions: Collection[int] | None = None,
    folder: CheckpointFolder | None = None,
    resumed: Mapping[int, Checkpoint] | None = None,
    on_progress: OnProgress = lambda _: None,
) -> Folded:
    """Fold the chosen events and hand each trajectory to the writer.

    With a `folder` it says there now and then, and at the end, how far it has come; `resumed` is
    what it said before.
    """
    keep_freed_memory()
    reading = _Reading(source, mode, selection, writer, partitions, resumed or {})
    next_checkpoint = time.monotonic() + _CHECKPOINT_EVERY_S
    async with aclosing(reading.batches()) as batches:
        async for records in batches:
            reading.fold(records)
            on_progress(len(records))
            if folder and time.monotonic() >= next_checkpoint:
                reading.write_checkpoints(folder)
                next_checkpoint = time.monotonic() + _CHECKPOINT_EVERY_S
            if reading.is_over:
                break
    await reading.fold_revisions()
    if folder:
        reading.write_checkpoints(folder)
    return reading.folded()


class _Reading:
    """The partitions that one process folds."""

    def __init__(
        self,
        source: LogSource,
        mode: HistoryMode | None,
        selection: Selection,
        writer: Writer | None,
        partitions: Collection[int] | None,
        resumed: Mapping[int, Checkpoint],
    ) -> None:
        self.source, self.topic = source, source.topics.events
        self.mode, self.selection, self.writer = mode, selection, writer
        self.partitions = partitions
        self.parts: dict[int, Part] = {}
        if selection.offsets is not None:
            wanted = selection.offsets.keys()
            self.partitions = wanted if partitions is None else wanted & set(partitions)
        for partition, checkpoint in resumed.items():
            if self.partitions is None or partition in self.partitions:
                self.parts[partition] = Part(
                    self.topic, partition, mode=mode, checkpoint=checkpoint
                )
                selection.chosen.update(checkpoint.chosen)

    def batches(self) -> AsyncGenerator[list[Record]]:
        """The records from where each partition begins."""
        starts = {
            partition: offsets.start
            for partition, offsets in (self.selection.offsets or {}).items()
        }
        starts |= {partition: part.start for partition, part in self.parts.items()}
        return self.source.batches(self.topic, partitions=self.partitions, starts=starts)

    def fold(self, records: Sequence[Record]) -> None:
        """Take in the next records, in order within each partition."""
        parts, selection = self.parts, self.selection
        for record in records:
            part = parts.get(record.partition)
            if part is None:
                part = Part(self.topic, record.partition, mode=self.mode)
                parts[record.partition] = part
            if not selection.holds_event(record):
                part.skip(record)
                continue
            for trajectory in part.feed(record):
                self._add(part, trajectory)

    async def fold_revisions(self) -> None:
        """The superseding trajectories of rollouts whose reward was revised after their end."""
        revising = {n: part.revisions() for n, part in self.parts.items() if part.revised}
        if not revising:
            return
        async for record in self.source.read(self.topic, partitions=revising.keys()):
            part = self.parts[record.partition]
            if record.offset < part.position:
                revised = revising[record.partition].feed(record)
                if revised is not None:
                    self._add(part, revised)

    def _add(self, part: Part, trajectory: Trajectory) -> None:
        part.digests[trajectory.rollout_id, trajectory.revision] = codec.digest(trajectory)
        if self.writer is not None:
            self.writer.add(trajectory)

    @property
    def is_over(self) -> bool:
        """Whether the range is behind, and every rollout that began in it has ended."""
        offsets = self.selection.offsets
        if offsets is None:
            return False
        return all(
            partition in self.parts
            and self.parts[partition].position >= wanted.stop
            and not self.parts[partition].has_open_rollouts
            for partition, wanted in offsets.items()
            if self.partitions is None or partition in self.partitions
        )

    def write_checkpoints(self, folder: CheckpointFolder) -> None:
        for part in self.parts.values():
            folder.write(part.checkpoint(folder.question, self.selection.chosen))

    def folded(self) -> Folded:
        found = Folded()
        for partition, part in sorted(self.parts.items()):
            found.add(
                Folded(
                    digests=part.digests,
                    num_events=part.num_events,
                    open_rollouts=part.open_rollouts,
                    rejected=part.rejected,
                    ignored=part.ignored,
                    reached={partition: part.position},
                )
            )
        return found
