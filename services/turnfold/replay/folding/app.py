"""A whole log folded: trajectory by trajectory, or in parallel down to their digests.

Partitions are folded apart, so they can be divided among processes without changing a byte.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ProcessPoolExecutor

import msgspec

from turnfold.log.client import Record
from turnfold.replay.client import LogSource
from turnfold.replay.compare import Key
from turnfold.replay.rebuild import Rebuild, Selection
from turnfold.replay.writers import Writer
from turnfold.schemas import codec
from turnfold.schemas.events import HistoryMode
from turnfold.schemas.trajectories import Trajectory

OnProgress = Callable[[int], None]
"""Called with the number of records just read."""


class Folded(msgspec.Struct, kw_only=True):
    """What a log, or some partitions of it, came to; nothing is kept of a trajectory's tokens."""

    digests: dict[Key, str] = {}
    num_events: int = 0
    open_rollouts: list[str] = []
    """Without an end in the log."""
    rejected: list[tuple[Record, str]] = []
    ignored: Counter[str] = msgspec.field(default_factory=Counter)

    def add(self, other: Folded) -> None:
        """Take in what other partitions came to."""
        self.digests.update(other.digests)
        self.num_events += other.num_events
        self.open_rollouts = sorted([*self.open_rollouts, *other.open_rollouts])
        self.rejected += other.rejected
        self.ignored += other.ignored


async def rebuilt(
    source: LogSource,
    rebuild: Rebuild,
    selection: Selection,
    on_progress: OnProgress,
    partitions: Collection[int] | None = None,
) -> AsyncIterator[Trajectory]:
    """Every trajectory that the chosen events give, those of revised rewards last."""
    async for record in source.read(source.topics.events, partitions=partitions):
        on_progress(1)
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
    on_progress: OnProgress = lambda _: None,
) -> Folded:
    """Fold the chosen events and hand each trajectory to the writer."""
    rebuild, digests = Rebuild(mode), dict[Key, str]()
    async for trajectory in rebuilt(source, rebuild, selection, on_progress, partitions):
        digests[trajectory.rollout_id, trajectory.revision] = codec.digest(trajectory)
        if writer is not None:
            writer.add(trajectory)
    return Folded(
        digests=digests,
        num_events=rebuild.num_events,
        open_rollouts=rebuild.open_rollouts,
        rejected=rebuild.rejected,
        ignored=rebuild.ignored,
    )


async def fold_in_parallel(
    source: LogSource,
    *,
    mode: HistoryMode | None = None,
    selection: Selection,
    num_processes: int,
    on_progress: OnProgress = lambda _: None,
) -> Folded:
    """As `fold`, with the partitions of the events topic divided among processes."""
    events = source.topics.events
    num_partitions = (await source.num_partitions([events])).get(events, 0)
    shares = [range(first, num_partitions, num_processes) for first in range(num_processes)]
    folded = Folded()
    # A forked child would share our sockets and threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        loop = asyncio.get_running_loop()
        parts = [
            loop.run_in_executor(pool, _fold_share, source, mode, selection, share)
            for share in shares
            if share
        ]
        for part in asyncio.as_completed(parts):
            done = await part
            on_progress(done.num_events)
            folded.add(done)
    return folded


def _fold_share(
    source: LogSource, mode: HistoryMode | None, selection: Selection, share: Sequence[int]
) -> Folded:
    return asyncio.run(fold(source, mode=mode, selection=selection, partitions=share))
