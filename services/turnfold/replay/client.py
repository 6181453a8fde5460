"""Where a log is read from: a broker, or an exported file. Both give the same records."""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Protocol

from turnfold.log.client import MissingTopic, Producer, Reader, Record
from turnfold.log.connection import settings_of
from turnfold.log.settings import Kafka
from turnfold.replay.logfile import LogReader
from turnfold.schemas.errors import UserError
from turnfold.schemas.topics import Topics

_PATIENCE_S = 60.0
"""How long a read waits for a broker that went away: a restart of one takes seconds."""

OnProgress = Callable[[int], None]
"""Called with the number of records just read."""


class LogSource(Protocol):
    """A log as it is when a read begins."""

    topics: Topics

    async def num_records(self, *topics: str) -> int:
        """How many records a read will give, roughly: transaction markers count in Kafka."""

    async def num_partitions(self, topics: Iterable[str]) -> dict[str, int]:
        """Partitions of the topics that exist."""

    def read(
        self, *topics: str, partitions: Collection[int] | None = None
    ) -> AsyncGenerator[Record]:
        """All records of these topics, or of these partitions of theirs, each in its order."""

    def batches(
        self,
        *topics: str,
        partitions: Collection[int] | None = None,
        starts: Mapping[int, int] = {},
    ) -> AsyncGenerator[list[Record]]:
        """As `read`, in lists; `starts` names the first offset of a partition that is wanted."""

    async def offsets_at(self, topic: str, at: float) -> dict[int, int]:
        """The first offset of each partition whose record is not older than `at`, Unix seconds."""

    async def end_offsets(self, topic: str) -> dict[int, int]:
        """The next offset of each partition."""


class _ReadInBatches(ABC):
    """Gives single records to those who do not care for batches."""

    @abstractmethod
    def batches(
        self,
        *topics: str,
        partitions: Collection[int] | None = None,
        starts: Mapping[int, int] = {},
    ) -> AsyncGenerator[list[Record]]: ...

    async def read(
        self, *topics: str, partitions: Collection[int] | None = None
    ) -> AsyncGenerator[Record]:
        async with aclosing(self.batches(*topics, partitions=partitions)) as batches:
            async for records in batches:
                for record in records:
                    yield record


class BrokerSilent(UserError):
    """A broker that was there gives no more records, though the log has not come to its end."""

    def __init__(self, bootstrap: str) -> None:
        super().__init__(
            f"nothing has come from {bootstrap} for {_PATIENCE_S:g} s, and the log is not read to "
            "its end: look whether the broker is there, then give the command again (a replay with "
            "--checkpoint goes on with --resume)"
        )


class KafkaLog(_ReadInBatches):
    """The log of a namespace on a broker.

    Raises BrokerUnavailable, MissingTopic, and BrokerSilent.
    """

    def __init__(self, kafka: Kafka, namespace: str) -> None:
        self.kafka = kafka
        self.topics = Topics(namespace=namespace)

    async def num_records(self, *topics: str) -> int:
        async with Reader(self.kafka) as reader:
            pairs = [(t, p) for t in topics for p in await reader.partitions(t)]
            starts, ends = await reader.start_offsets(pairs), await reader.end_offsets(pairs)
        return sum(ends[pair] - starts[pair] for pair in pairs)

    async def num_partitions(self, topics: Iterable[str]) -> dict[str, int]:
        found = {}
        async with Reader(self.kafka) as reader:
            for topic in topics:
                try:
                    found[topic] = len(await reader.partitions(topic))
                except MissingTopic:
                    continue
        return found

    async def batches(
        self,
        *topics: str,
        partitions: Collection[int] | None = None,
        starts: Mapping[int, int] = {},
    ) -> AsyncGenerator[list[Record]]:
        async with Reader(self.kafka) as reader:
            places = [
                (topic, partition)
                for topic in topics
                for partition in await reader.partitions(topic)
                if partitions is None or partition in partitions
            ]
            positions = {
                (topic, partition): max(start, starts.get(partition, 0))
                for (topic, partition), start in (await reader.start_offsets(places)).items()
            }
            await reader.assign(positions)
            heard_at = time.monotonic()
            async with aclosing(reader.batches_to_end()) as batches:
                async for records in batches:
                    if records:
                        yield records
                        heard_at = time.monotonic()
                    elif time.monotonic() > heard_at + _PATIENCE_S:
                        raise BrokerSilent(settings_of(self.kafka).bootstrap)

    async def offsets_at(self, topic: str, at: float) -> dict[int, int]:
        async with Reader(self.kafka) as reader:
            places = [(topic, partition) for partition in await reader.partitions(topic)]
            found = await reader.offsets_at(places, at)
        return {partition: offset for (_, partition), offset in found.items()}

    async def end_offsets(self, topic: str) -> dict[int, int]:
        async with Reader(self.kafka) as reader:
            places = [(topic, partition) for partition in await reader.partitions(topic)]
            found = await reader.end_offsets(places)
        return {partition: offset for (_, partition), offset in found.items()}


class FileLog(_ReadInBatches):
    """An exported log. Raises LogFileError when the file is not one, or not whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise UserError(f"{path} is not a file: expected one written by `turnfold export`")
        with path.open("rb") as file:
            self.header = LogReader(file, str(path)).header
        self.topics = Topics(namespace=self.header.namespace)
        self._counts: Counter[str] = Counter()
        """Records of each topic, once they have been counted."""

    async def num_records(self, *topics: str) -> int:
        if not self._counts:
            with self.path.open("rb") as file:
                self._counts.update(record.topic for record in LogReader(file, str(self.path)))
        return sum(self._counts[topic] for topic in topics)

    async def num_partitions(self, topics: Iterable[str]) -> dict[str, int]:
        known = self.header.topics
        return {topic: known[topic] for topic in topics if topic in known}

    async def batches(
        self,
        *topics: str,
        partitions: Collection[int] | None = None,
        starts: Mapping[int, int] = {},
    ) -> AsyncGenerator[list[Record]]:
        with self.path.open("rb") as file:
            for records in LogReader(file, str(self.path)).batches():
                yield [
                    record
                    for record in records
                    if record.topic in topics
                    and (partitions is None or record.partition in partitions)
                    and record.offset >= starts.get(record.partition, 0)
                ]

    async def offsets_at(self, topic: str, at: float) -> dict[int, int]:
        """After the newest record where all are older."""
        found: dict[int, int] = {}
        ends = dict.fromkeys(range(self.header.topics.get(topic, 0)), 0)
        async for record in self.read(topic):
            ends[record.partition] = record.offset + 1
            if record.timestamp >= at:
                found.setdefault(record.partition, record.offset)
        return ends | found

    async def end_offsets(self, topic: str) -> dict[int, int]:
        return await self.offsets_at(topic, math.inf)


async def append(producer: Producer, records: Iterable[Record], topics: dict[str, str]) -> int:
    """Write records to the topics that theirs map to, keeping partition and order; how many."""
    by_partition: dict[tuple[str, int], list[Record]] = defaultdict(list)
    for record in records:
        by_partition[topics[record.topic], record.partition].append(record)
    sends = [_append(producer, *place, found) for place, found in by_partition.items()]
    await asyncio.gather(*sends)
    return sum(len(found) for found in by_partition.values())


async def _append(producer: Producer, topic: str, partition: int, records: list[Record]) -> None:
    for record in records:
        await producer.send_raw(
            topic,
            key=record.key,
            value=record.value,
            partition=partition,
            headers={name: value.decode(errors="replace") for name, value in record.headers},
            timestamp=record.timestamp,
        )
