"""Some partitions of a log: their events folded, and the trajectories that were written there.

Both are told without a token, so that they can be handed from one process to another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec

from turnfold.assembler.rollouts import RolloutSummary, summary
from turnfold.log.records import Record
from turnfold.replay.client import LogSource, OnProgress
from turnfold.replay.decisions import decoded
from turnfold.replay.folding.app import Folded, fold
from turnfold.replay.folding.client import CheckpointFolder
from turnfold.replay.folding.part import Checkpoint
from turnfold.replay.processes.app import Share
from turnfold.replay.rebuild import Selection
from turnfold.schemas import codec
from turnfold.schemas.events import HistoryMode
from turnfold.schemas.trajectories import Source, Trajectory

if TYPE_CHECKING:
    from turnfold.replay.writers import Writer  # imports pyarrow, which a worker has no use for


class WrittenTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory that the healer wrote."""

    summary: RolloutSummary
    """As the assembler saw it; its digest is that of the message."""
    source: Source
    fold_version: int
    digest: str
    """Of the record: the same as that of the message, unless another writer encoded it."""
    is_selected: bool


class WrittenRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A record of the trajectories topic."""

    partition: int
    offset: int
    trajectory: WrittenTrajectory | None
    """None where it could not be decoded."""


class ShareOfReplay(msgspec.Struct, kw_only=True):
    """What one process found."""

    folded: Folded
    written: list[WrittenRecord]
    """In order within each partition."""


async def replay_share(
    share: Share,
    on_progress: OnProgress,
    *,
    source: LogSource,
    mode: HistoryMode | None,
    selection: Selection,
    is_compared: bool,
    writer: Writer | None = None,
    folder: CheckpointFolder | None = None,
    resumed: Mapping[int, Checkpoint] | None = None,
) -> ShareOfReplay:
    """Fold, then read what was written; the arguments are those of `replay` and of `fold`.

    In this order: a healer that is at work meanwhile has written what comes of the events that were
    folded, and whatever else it wrote is of later ones.
    """
    topics = source.topics
    found = await source.num_partitions([topics.events, topics.trajectories])
    own = {
        topic: share.of_partitions(range(found.get(topic, 0)))
        for topic in (topics.events, topics.trajectories)
    }
    folded = await fold(
        source,
        mode=mode,
        selection=selection,
        writer=writer,
        partitions=own[topics.events],
        folder=folder,
        resumed=resumed,
        on_progress=on_progress,
    )
    written = list[WrittenRecord]()
    if is_compared:
        made = source.batches(topics.trajectories, partitions=own[topics.trajectories])
        async with aclosing(made) as batches:
            async for records in batches:
                written += (_written(record, selection) for record in records)
                on_progress(len(records))
    return ShareOfReplay(folded=folded, written=written)


def _written(record: Record, selection: Selection) -> WrittenRecord:
    place = {"partition": record.partition, "offset": record.offset}
    trajectory: Trajectory | None = decoded(Trajectory, record)
    if trajectory is None:
        return WrittenRecord(**place, trajectory=None)
    # The assembler names the digest of the message, which is that of its bytes unless another
    # writer encoded it.
    value, encoded = record.value or b"", codec.encode(trajectory)
    digest = hashlib.sha256(encoded).hexdigest()
    return WrittenRecord(
        **place,
        trajectory=WrittenTrajectory(
            summary=summary(trajectory, **place, digest=digest),
            source=trajectory.source,
            fold_version=trajectory.fold_version,
            digest=digest if value == encoded else hashlib.sha256(value).hexdigest(),
            is_selected=selection.holds_trajectory(trajectory),
        ),
    )
