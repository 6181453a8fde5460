"""Connections to Kafka with the settings that keep every acknowledged record.

Producers are idempotent with `acks=all`; readers are assigned partitions by hand and see committed
records only, so there is no group to rebalance and every position is the caller's own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, Self

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import (
    GroupAuthorizationFailedError,
    InvalidProducerEpoch,
    KafkaError,
    ProducerFenced,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
    for_code,
)

from turnfold.log.connection import client_options, settings_of
from turnfold.log.diagnosis import BrokerUnavailable as BrokerUnavailable
from turnfold.log.diagnosis import NotLetIn as NotLetIn
from turnfold.log.diagnosis import WorkEnded as WorkEnded
from turnfold.log.diagnosis import why_ended as why_ended
from turnfold.log.diagnosis import why_not_started
from turnfold.log.records import Record as Record  # as both errors, part of this module's interface
from turnfold.log.settings import Kafka, KafkaSettings
from turnfold.schemas import codec
from turnfold.schemas.dead_letters import DeadLetter
from turnfold.schemas.errors import UserError
from turnfold.schemas.topics import MAX_MESSAGE_BYTES, TopicSpec

# What it has to say about a broker that is away reaches the caller as an exception; the rest repeats
# itself many times a second.
logging.getLogger("aiokafka").setLevel(logging.CRITICAL)

# The request that carries the largest message is a little larger than the message.
_MAX_REQUEST_BYTES = MAX_MESSAGE_BYTES + 1024 * 1024

_TRANSACTION_S = 60
"""A transaction that stays open for longer is ended by the broker."""


class MissingTopic(UserError):
    """A topic that should exist does not; the text says how to create it."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"topic {topic} does not exist: run `turnfold topics create` first")


class TopicRefused(UserError):
    """The broker does not create a topic as it is asked to; the text gives its reason."""

    def __init__(self, topic: str, code: int, reason: str = "") -> None:
        super().__init__(f"cannot create topic {topic}: {reason or for_code(code).__name__}")


RENEW_S = 6 * 3600.0
"""Kafka forgets positions, and the names of producers, that were not written for a week: one who has
nothing to write for so long writes the same again."""

FENCED = (ProducerFenced, InvalidProducerEpoch)
"""What a transactional producer raises when a newer one has taken its name."""


class Replaced(UserError):
    """The broker lets a producer write no more: another one has its name, or it took too long."""

    def __init__(self, what: str, run: str) -> None:
        super().__init__(
            f"another {what} has taken over, or this one stood still for {_TRANSACTION_S} s in the "
            f"middle of a write; it ends, and can be started again: run {run}"
        )


class ReadingEnded(WorkEnded):
    """A connection that gives no more records whatever the log holds; only a new process helps."""

    what = "reading from"


class Ack(msgspec.Struct, frozen=True):
    """Where an acknowledged record went."""

    partition: int
    offset: int


class Producer:
    """Idempotent producer; with a `transactional_id` a fenced, transactional one.

    async with Producer(kafka) as producer:
        ack = await producer.send(topics.events, key="r1", message=event)

    Raises BrokerUnavailable when nobody answers, NotLetIn when a broker wants other credentials.
    """

    def __init__(self, kafka: Kafka, *, transactional_id: str | None = None) -> None:
        self._settings = settings_of(kafka)
        self._kafka = AIOKafkaProducer(
            **client_options(kafka),
            enable_idempotence=True,
            acks="all",
            transactional_id=transactional_id,
            transaction_timeout_ms=_TRANSACTION_S * 1000,
            compression_type="zstd",
            max_request_size=_MAX_REQUEST_BYTES,
            request_timeout_ms=20_000,
        )

    async def __aenter__(self) -> Self:
        await _start(self._kafka, self._settings)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._kafka.stop()

    async def send(
        self,
        topic: str,
        *,
        key: str,
        message: msgspec.Struct,
        partition: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Ack:
        """Send one message and wait until Kafka has acknowledged it."""
        return await self.send_raw(
            topic,
            key=key.encode(),
            value=codec.encode(message),
            partition=partition,
            headers={"content-type": codec.MSGPACK, **(headers or {})},
        )

    async def send_raw(
        self,
        topic: str,
        *,
        key: bytes | None,
        value: bytes | None,
        partition: int | None = None,
        headers: Mapping[str, str] | None = None,
        timestamp: float | None = None,
    ) -> Ack:
        """Send bytes as they are; a `value` of None is a tombstone.

        `timestamp` is the record's time in Unix seconds when it is not now, as for a copy.
        """
        pairs = [(name, text.encode()) for name, text in (headers or {}).items()]
        future = await self._kafka.send(
            topic,
            value,
            key=key,
            partition=partition,
            headers=pairs or None,
            timestamp_ms=None if timestamp is None else round(timestamp * 1000),
        )
        meta = await future
        return Ack(meta.partition, meta.offset)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """Commit on success, abort on an exception.

        aiokafka commits a transaction although one of its sends failed, unless that send's future
        is awaited; `send` always awaits it.
        """
        async with self._kafka.transaction():
            yield

    async def commit_offset(
        self, group: str, topic: str, partition: int, offset: int, metadata: str = ""
    ) -> None:
        """Commit a position inside the running transaction."""
        from aiokafka.structs import OffsetAndMetadata

        await self._kafka.send_offsets_to_transaction(
            {TopicPartition(topic, partition): OffsetAndMetadata(offset, metadata)}, group
        )


class Reader:
    """Reads assigned partitions from given positions, committed records only.

    async with Reader(kafka, {("turnfold.events", 0): 17}) as reader:
        records = await reader.poll()        # [] when nothing came within the timeout

    Positions may lie outside the log: an offset that was deleted raises LookupError naming it.
    """

    def __init__(
        self,
        kafka: Kafka,
        positions: Mapping[tuple[str, int], int] | None = None,
        *,
        group: str | None = None,
    ) -> None:
        self._settings = settings_of(kafka)
        self._positions = dict(positions or {})
        self._kafka = AIOKafkaConsumer(
            **client_options(kafka),
            group_id=group,
            enable_auto_commit=False,
            auto_offset_reset="none",
            isolation_level="read_committed",
            # A broker hands out a message whole, whatever is asked for; more at a time does not
            # stay in the processor's cache, and takes 20 to 40 % longer.
            max_partition_fetch_bytes=1024 * 1024,
            fetch_max_wait_ms=200,
            request_timeout_ms=20_000,
        )

    async def __aenter__(self) -> Self:
        await _start(self._kafka, self._settings)
        if self._positions:
            await self.assign(self._positions)
        return self

    async def __aexit__(self, *exc: object) -> None:
        # aiokafka's stop raises the cancellation of its own fetch task while no broker answers; to
        # our caller that would look like being cancelled itself.
        await asyncio.gather(self._kafka.stop(), return_exceptions=True)

    async def partitions(self, topic: str) -> list[int]:
        """Partitions of a topic in order. Raises MissingTopic."""
        # Asking for one topic by name would create it where brokers create topics on demand.
        cluster = await self._kafka._client.fetch_all_metadata()
        found = cluster.partitions_for_topic(topic)
        if not found:
            raise MissingTopic(topic)
        return sorted(found)

    async def assign(self, positions: Mapping[tuple[str, int], int]) -> None:
        """Read these partitions from these offsets, forgetting what was assigned before."""
        self._kafka.assign([TopicPartition(topic, part) for topic, part in positions])
        for (topic, part), offset in positions.items():
            self._kafka.seek(TopicPartition(topic, part), offset)

    async def assign_from_start(self, topics: Iterable[str]) -> None:
        """Read all partitions of these topics from their first offset that still exists."""
        pairs = [(topic, part) for topic in topics for part in await self.partitions(topic)]
        await self.assign(await self.start_offsets(pairs))

    async def start_offsets(self, pairs: Iterable[tuple[str, int]]) -> dict[tuple[str, int], int]:
        return await self._offsets(self._kafka.beginning_offsets, pairs)

    async def end_offsets(self, pairs: Iterable[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Next offset that a committed record can get, by partition."""
        return await self._offsets(self._kafka.end_offsets, pairs)

    async def _offsets(
        self, ask: Any, pairs: Iterable[tuple[str, int]]
    ) -> dict[tuple[str, int], int]:
        places = [TopicPartition(topic, part) for topic, part in pairs]
        for topic in {place.topic for place in places}:
            # A topic that it has not heard of yet would cost it a rest of 100 ms.
            await self._kafka._client.add_topic(topic)
        found = await ask(places)
        return {(tp.topic, tp.partition): offset for tp, offset in found.items()}

    async def offsets_at(
        self, pairs: Iterable[tuple[str, int]], at: float
    ) -> dict[tuple[str, int], int]:
        """The first offset whose record is not older than `at` (Unix seconds), by partition.

        The end of the partition where all records are older.
        """
        places = {TopicPartition(topic, part): round(at * 1000) for topic, part in pairs}
        ends = await self.end_offsets((tp.topic, tp.partition) for tp in places)
        found = await self._kafka.offsets_for_times(places)
        return {
            (tp.topic, tp.partition): ends[tp.topic, tp.partition] if meta is None else meta.offset
            for tp, meta in found.items()
        }

    async def position(self, topic: str, partition: int) -> int:
        """Next offset to read; moves past transaction markers, which are not records."""
        return int(await self._kafka.position(TopicPartition(topic, partition)))

    async def committed(self, topic: str, partition: int) -> tuple[int, str] | None:
        """Offset and metadata that this reader's group committed. Raises NotLetIn."""
        try:
            found = await self._kafka._coordinator.fetch_committed_offsets(
                [TopicPartition(topic, partition)]
            )
        except GroupAuthorizationFailedError as error:
            raise why_ended(self._settings, error) from error
        if TopicPartition(topic, partition) not in found:
            return None
        meta = found[TopicPartition(topic, partition)]
        return int(meta.offset), str(meta.metadata)

    async def poll(self, timeout_s: float = 0.2, max_records: int = 500) -> list[Record]:
        """The next records of all assigned partitions, in order within each partition.

        Raises ReadingEnded when none would ever come again.
        """
        found = await self._kafka.getmany(timeout_ms=int(timeout_s * 1000), max_records=max_records)
        if not found:
            self._raise_if_fetching_ended()
        return [_record(raw) for records in found.values() for raw in records]

    def _raise_if_fetching_ended(self) -> None:
        """aiokafka only logs what ended its fetching; from then on nothing would ever come."""
        fetching = self._kafka._fetcher.error_future
        if fetching.done() and not fetching.cancelled():
            raise ReadingEnded(self._settings.bootstrap, fetching.exception())

    async def read_to_end(self) -> AsyncGenerator[Record]:
        """Every record up to the ends that the assigned partitions have now."""
        async with aclosing(self.batches_to_end()) as batches:
            async for records in batches:
                for record in records:
                    yield record

    async def batches_to_end(self) -> AsyncGenerator[list[Record]]:
        """As `read_to_end`, in lists as they come: for those who read millions of records."""
        assigned = [(tp.topic, tp.partition) for tp in self._kafka.assignment()]
        ends = await self.end_offsets(assigned)
        while await self._is_behind(ends):
            records = await self.poll()
            yield [r for r in records if r.offset < ends[r.topic, r.partition]]

    async def _is_behind(self, ends: Mapping[tuple[str, int], int]) -> bool:
        for (topic, partition), end in ends.items():
            if await self.position(topic, partition) < end:
                return True
        return False


@asynccontextmanager
async def reader_from_start(kafka: Kafka, *topics: str) -> AsyncIterator[Reader]:
    """A reader at the start of all partitions of these topics."""
    async with Reader(kafka) as reader:
        await reader.assign_from_start(topics)
        yield reader


async def dead_letter(producer: Producer, topic: str, record: Record, reason: str) -> None:
    """Keep a record that could not be used, whole, with the reason."""
    await producer.send(
        topic,
        key=str(record),
        message=DeadLetter(
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            reason=reason,
            key=record.key,
            value=record.value,
            headers=record.headers,
            at=record.timestamp,
        ),
    )


async def create_topics(
    kafka: Kafka, specs: Iterable[TopicSpec], replication: int = 1
) -> list[str]:
    """Create what is missing and return the names created. Raises BrokerUnavailable, TopicRefused."""
    created = []
    async with _admin(kafka) as admin:
        for spec in specs:
            topic = NewTopic(
                name=spec.name,
                num_partitions=spec.num_partitions,
                replication_factor=replication,
                topic_configs=dict(spec.config),
            )
            response = await admin.create_topics([topic])
            for name, code, *reason in response.topic_errors:
                if code == 0:
                    created.append(name)
                elif code != TopicAlreadyExistsError.errno:
                    raise TopicRefused(name, code, *filter(None, reason))
    return created


async def delete_topics(kafka: Kafka, names: Iterable[str]) -> None:
    """Delete those of these topics that exist. Raises KafkaError where the broker does not allow it."""
    async with _admin(kafka) as admin:
        existing = set(await admin.list_topics())
        response = await admin.delete_topics([name for name in names if name in existing])
        for name, code in response.topic_error_codes:
            if code not in (0, UnknownTopicOrPartitionError.errno):
                raise for_code(code)(f"cannot delete topic {name}")


async def topic_differences(kafka: Kafka, specs: Iterable[TopicSpec]) -> dict[str, list[str]]:
    """What differs from the specs, by topic: `max.message.bytes: expected 33554432, found 1048588`.

    An empty list means that the topic is as it should be.
    """
    differences: dict[str, list[str]] = {}
    async with _admin(kafka) as admin:
        existing = set(await admin.list_topics())
        for spec in specs:
            if spec.name not in existing:
                differences[spec.name] = ["does not exist"]
                continue
            differences[spec.name] = await _differences(admin, spec)
    return differences


async def topic_configs(kafka: Kafka, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """The settings that these topics have now; topics that do not exist are left out."""
    found: dict[str, dict[str, str]] = {}
    async with _admin(kafka) as admin:
        existing = set(await admin.list_topics())
        for name in names:
            if name in existing:
                found[name] = await _config(admin, name)
    return found


async def _config(admin: AIOKafkaAdminClient, name: str) -> dict[str, str]:
    resource = ConfigResource(ConfigResourceType.TOPIC, name)
    (response,) = await admin.describe_configs([resource])
    return {entry[0]: entry[1] for *_, entries in response.resources for entry in entries}


async def _differences(admin: AIOKafkaAdminClient, spec: TopicSpec) -> list[str]:
    found: list[str] = []
    (described,) = await admin.describe_topics([spec.name])
    num_partitions = len(described["partitions"])
    if num_partitions != spec.num_partitions:
        found.append(f"partitions: expected {spec.num_partitions}, found {num_partitions}")
    actual = await _config(admin, spec.name)
    for name, expected in spec.config.items():
        if actual.get(name) != expected:
            found.append(f"{name}: expected {expected}, found {actual.get(name)}")
    # More than there are, and each write waits for ever: the default of many clusters is 2.
    needed = actual.get("min.insync.replicas", "1")
    num_copies = min(len(partition["replicas"]) for partition in described["partitions"])
    if int(needed) > num_copies:
        found.append(
            f"min.insync.replicas: expected at most {num_copies}, as there are copies, found {needed}"
        )
    return found


@asynccontextmanager
async def _admin(kafka: Kafka) -> AsyncIterator[AIOKafkaAdminClient]:
    admin = AIOKafkaAdminClient(**client_options(kafka), request_timeout_ms=20_000)
    try:
        await _start(admin, settings_of(kafka))
        yield admin
    finally:
        await admin.close()


async def _start(client: Any, settings: KafkaSettings) -> None:
    """Raises BrokerUnavailable, or NotLetIn where a broker answers that wants something else."""
    try:
        await client.start()
    except (KafkaError, OSError) as error:
        stop = getattr(client, "stop", None) or client.close
        await stop()
        raise await why_not_started(settings, error) from error


def _record(raw: Any) -> Record:
    return Record(
        topic=raw.topic,
        partition=raw.partition,
        offset=raw.offset,
        key=raw.key,
        value=raw.value,
        timestamp=raw.timestamp / 1000,
        headers=tuple(raw.headers),
    )


async def wait_for_topics(kafka: Kafka, topics: Iterable[str], deadline_s: float) -> None:
    """Return when all topics exist, or raise MissingTopic after `deadline_s` seconds."""
    end = asyncio.get_running_loop().time() + deadline_s
    wanted = list(topics)
    while True:
        async with _admin(kafka) as admin:
            missing = [topic for topic in wanted if topic not in set(await admin.list_topics())]
        if not missing:
            return
        if asyncio.get_running_loop().time() > end:
            raise MissingTopic(missing[0])
        await asyncio.sleep(0.2)
