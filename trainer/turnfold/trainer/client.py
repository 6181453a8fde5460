"""What the trainer reads from the log and writes to it."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from typing import Self

from turnfold.log.client import Producer, Reader, reader_from_start
from turnfold.log.records import Record
from turnfold.log.settings import Kafka
from turnfold.schemas import codec
from turnfold.schemas.batches import BatchCut, Decision
from turnfold.schemas.decisions import DecisionLog
from turnfold.schemas.policies import PolicyEvent, PolicyPublished, PolicyServed
from turnfold.schemas.run import RunConfig
from turnfold.schemas.topics import Topics
from turnfold.schemas.trajectories import Trajectory
from turnfold.trainer.source import (
    Batch,
    SourceError,
    check_manifest,
    check_trained,
    check_trajectory,
    refs,
    runs,
)

log = logging.getLogger("turnfold.trainer")

_MAX_NAMED = 5
"""Rollouts that an error names."""


class BatchSource:
    """The batches of a run in order, each with its trajectories.

    async with BatchSource(kafka, topics, run) as source:
        await source.open(after=7, manifest_digest=…)
        batch = await source.next()         # batch 8; waits until it is cut

    Manifests are read from the start of the topic, so that the rule about which of them count is
    the same as everybody's. Raises SourceError when the log does not hold what a manifest names.
    """

    def __init__(self, kafka: Kafka, topics: Topics, run: RunConfig) -> None:
        self._kafka, self._topics, self._run = kafka, topics, run
        self._decisions = DecisionLog(run.run_id)
        self._waiting: deque[BatchCut] = deque()
        self._after, self._manifest_digest = 0, ""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self._manifests = await stack.enter_async_context(Reader(self._kafka))
            self._trajectories = await stack.enter_async_context(Reader(self._kafka))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def open(self, *, after: int, manifest_digest: str = "") -> None:
        """Start behind batch `after`, whose manifest must have this digest. Raises MissingTopic."""
        self._after, self._manifest_digest = after, manifest_digest
        await self._trajectories.partitions(self._topics.trajectories)
        await self._manifests.assign_from_start([self._topics.batches])

    async def next(self) -> Batch:
        """The next batch, as soon as it is cut."""
        while not self._waiting:
            for record in await self._manifests.poll():
                self._take(record)
        cut = self._waiting.popleft()
        check_manifest(cut, self._run)
        return Batch(cut=cut, trajectories=await self._fetch(cut))

    async def find(self, index: int) -> Batch:
        """A batch that is cut already. Raises SourceError when it is not."""
        async with reader_from_start(self._kafka, self._topics.batches) as reader:
            async for record in reader.read_to_end():
                self._take(record)
        for cut in self._waiting:
            if cut.index == index:
                check_manifest(cut, self._run)
                return Batch(cut=cut, trajectories=await self._fetch(cut))
        cuts = ", ".join(str(cut.index) for cut in self._waiting) or "none"
        raise SourceError(
            f"run {self._run.run_id} has no batch {index} on {self._topics.batches}; cut: {cuts}"
        )

    def _take(self, record: Record) -> None:
        try:
            decision = codec.decode(Decision, record.value or b"", record.content_type)
        except codec.CodecError as error:
            log.warning("%s is passed over: %s", record, error)
            return
        if not self._decisions.add(decision) or not isinstance(decision, BatchCut):
            return
        if decision.index == self._after and self._manifest_digest:
            check_trained(decision, self._manifest_digest)
        elif decision.index > self._after:
            self._waiting.append(decision)

    async def _fetch(self, cut: BatchCut) -> tuple[Trajectory, ...]:
        """All trajectories that a manifest names, in its order, verified."""
        await self._refuse_expired(cut)
        wanted: dict[int, list[int]] = defaultdict(list)
        for _, ref in refs(cut):
            wanted[ref.partition].append(ref.offset)
        found: dict[tuple[int, int], Record] = {}
        for partition, offsets in wanted.items():
            for part in runs(offsets):
                for record in await self._read(partition, part, cut.index):
                    found[partition, record.offset] = record
        trajectories = []
        for group, ref in refs(cut):
            trajectory = _decode(found[ref.partition, ref.offset])
            check_trajectory(group, ref, trajectory)
            trajectories.append(trajectory)
        return tuple(trajectories)

    async def _refuse_expired(self, cut: BatchCut) -> None:
        """Raise SourceError naming the rollouts that the topic holds no more, or never held."""
        topic = self._topics.trajectories
        pairs = sorted({(topic, ref.partition) for _, ref in refs(cut)})
        starts = await self._trajectories.start_offsets(pairs)
        ends = await self._trajectories.end_offsets(pairs)
        lost = [
            ref
            for _, ref in refs(cut)
            if not starts[topic, ref.partition] <= ref.offset < ends[topic, ref.partition]
        ]
        if lost:
            first = lost[0]
            pair = (topic, first.partition)
            named = ", ".join(ref.rollout_id for ref in lost[:_MAX_NAMED])
            raise SourceError(
                f"batch {cut.index} trains {len(lost)} rollouts that {topic} does not hold: "
                f"{named}{', …' if len(lost) > _MAX_NAMED else ''}. The first should lie at "
                f"{topic}/{first.partition}@{first.offset}, where {starts[pair]} to "
                f"{ends[pair] - 1} are left: they have expired or were lost. Keep trajectories "
                "until they are trained (`turnfold topics check` warns before); `turnfold replay` "
                "still shows what the rows were"
            )

    async def _read(self, partition: int, offsets: Sequence[int], index: int) -> list[Record]:
        """The records at these offsets, by one sequential read."""
        pair = (self._topics.trajectories, partition)
        await self._trajectories.assign({pair: offsets[0]})
        missing, found = set(offsets), []
        while missing:
            for record in await self._trajectories.poll():
                if record.offset in missing:
                    missing.remove(record.offset)
                    found.append(record)
            if missing and await self._trajectories.position(*pair) > max(missing):
                raise SourceError(
                    f"batch {index} names {pair[0]}/{partition}@{min(missing)}, where the topic "
                    "holds no record"
                )
        return found


async def prefetched(source: BatchSource, depth: int, stop: asyncio.Event) -> AsyncGenerator[Batch]:
    """Batches in order, up to `depth` of them read ahead, until `stop` is set.

    An error while reading ahead is raised once the batches read before it are used up.
    """
    queue: asyncio.Queue[Batch] = asyncio.Queue(depth)

    async def fill() -> None:
        while True:
            await queue.put(await source.next())

    filling = asyncio.create_task(fill())
    stopping = asyncio.create_task(stop.wait())
    try:
        while not stop.is_set():
            if queue.empty():
                log.info("waiting for the next batch")
            getting = asyncio.create_task(queue.get())
            await asyncio.wait({getting, filling, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if getting.done() and not stop.is_set():
                yield getting.result()
                continue
            getting.cancel()
            if filling.done():
                filling.result()
    finally:
        filling.cancel()
        stopping.cancel()


class PolicyLog:
    """Versions that were published and served, and the place to publish the next one.

    async with PolicyLog(kafka, topics, run_id) as policies:
        policies.published          # newest version on the topic, None when there is none
    """

    def __init__(self, kafka: Kafka, topics: Topics, run_id: str) -> None:
        self._kafka, self._topic, self._run_id = kafka, topics.policies, run_id
        self.published: int | None = None
        self.served: int | None = None
        """Newest version that every engine confirmed."""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self._producer = await stack.enter_async_context(Producer(self._kafka))
            self._reader = await stack.enter_async_context(Reader(self._kafka))
            await self._reader.assign_from_start([self._topic])
            async for record in self._reader.read_to_end():
                self._take(record)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def refresh(self) -> None:
        """Read what was confirmed since."""
        for record in await self._reader.poll(timeout_s=0.0):
            self._take(record)

    async def publish(self, event: PolicyPublished) -> None:
        """Announce a version, unless it or a newer one is on the topic already."""
        if self.published is not None and event.policy_version <= self.published:
            return
        await self._producer.send(self._topic, key=self._run_id, message=event)
        self.published = event.policy_version

    def _take(self, record: Record) -> None:
        if record.value is None:
            return
        try:
            event = codec.decode(PolicyEvent, record.value, record.content_type)
        except codec.CodecError as error:
            log.warning("%s is passed over: %s", record, error)
            return
        if event.run_id != self._run_id:
            return
        match event:
            case PolicyPublished():
                self.published = max(event.policy_version, self.published or 0)
            case PolicyServed():
                self.served = max(event.policy_version, self.served or 0)


def _decode(record: Record) -> Trajectory:
    try:
        return codec.decode(Trajectory, record.value or b"", record.content_type)
    except codec.CodecError as error:
        raise SourceError(f"{record}: {error}") from error
