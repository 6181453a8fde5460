"""A broker for the tests of this folder, and clients that are closed when a test ends.

With TURNFOLD_TEST_BOOTSTRAP=host:port the conformance tests (the `kafka` fixture) run against that broker
instead of one of our own.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import for_code
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from turnfold.embedded.broker.testing import BrokerProcess

EXTERNAL = os.environ.get("TURNFOLD_TEST_BOOTSTRAP", "")


class Kafka:
    """Clients of one broker, with settings that suit tests."""

    def __init__(
        self, bootstrap: str, closing: AsyncExitStack, new_name: Callable[[str], str]
    ) -> None:
        self.bootstrap = bootstrap
        self._new_name = new_name
        self._closing = closing
        # Apache Kafka does its housekeeping every few minutes, the development broker every second.
        self.housekeeping_timeout_s = 400.0 if EXTERNAL else 20.0

    def unique(self, name: str) -> str:
        """A name that no other test uses."""
        return self._new_name(name)

    async def admin(self) -> AIOKafkaAdminClient:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap, request_timeout_ms=10_000)
        await admin.start()
        self._closing.push_async_callback(admin.close)
        return admin

    async def create_topic(self, name: str = "topic", partitions: int = 1, **config: Any) -> str:
        """Create a topic under a unique name; `retention_ms=1` sets `retention.ms`."""
        topic = self.unique(name)
        await self.create_named_topic(topic, partitions, **config)
        return topic

    async def create_named_topic(self, topic: str, partitions: int = 1, **config: Any) -> None:
        """Raises the KafkaError of the broker's answer."""
        settings = {key.replace("_", "."): str(value) for key, value in config.items()}
        admin = await self.admin()
        answer = await admin.create_topics([NewTopic(topic, partitions, 1, topic_configs=settings)])
        for _, code, message in answer.topic_errors:
            if code:
                raise for_code(code)(message)

    async def skip_unless(self, name: str, default: str) -> None:
        """Skip where somebody else has set a broker otherwise than Apache Kafka is by default."""
        if not EXTERNAL:
            return
        admin = await self.admin()
        node = min(broker.nodeId for broker in admin._client.cluster.brokers())
        resource = ConfigResource(ConfigResourceType.BROKER, str(node))
        (answer,) = await admin.describe_configs([resource])
        found = {entry[0]: entry[1] for *_, entries in answer.resources for entry in entries}
        if found.get(name, default) != default:
            pytest.skip(f"{name} is {found[name]} at {EXTERNAL}, and {default} by default")

    async def producer(self, **settings: Any) -> AIOKafkaProducer:
        settings = {"request_timeout_ms": 10_000, **settings}
        producer = AIOKafkaProducer(bootstrap_servers=self.bootstrap, **settings)
        await producer.start()
        self._closing.push_async_callback(stop_quietly, producer)
        return producer

    async def consumer(self, *topics: str, **settings: Any) -> AIOKafkaConsumer:
        """A consumer that starts at the beginning and commits only when told to."""
        settings = {
            "auto_offset_reset": "earliest",
            "enable_auto_commit": False,
            "request_timeout_ms": 15_000,
            **settings,
        }
        consumer = AIOKafkaConsumer(*topics, bootstrap_servers=self.bootstrap, **settings)
        await consumer.start()
        self._closing.push_async_callback(stop_quietly, consumer)
        return consumer

    async def send(self, topic: str, *values: bytes | None, **settings: Any) -> None:
        """Write records to partition 0, one batch each."""
        producer = await self.producer()
        for value in values:
            await producer.send_and_wait(topic, value, partition=0, **settings)
        await producer.stop()

    async def read(self, consumer: AIOKafkaConsumer, count: int, timeout: float = 20) -> list[Any]:
        """The next `count` records."""
        records: list[Any] = []
        async with asyncio.timeout(timeout):
            while len(records) < count:
                for batch in (await consumer.getmany(timeout_ms=200)).values():
                    records += batch
        return records

    async def read_all(
        self, topic: str, isolation_level: str = "read_uncommitted", timeout: float = 30
    ) -> list[Any]:
        """All records that are there now, partition by partition."""
        consumer = await self.consumer(isolation_level=isolation_level)
        numbers = await self.partition_numbers(topic)
        partitions = [TopicPartition(topic, number) for number in numbers]
        consumer.assign(partitions)
        ends = await consumer.end_offsets(partitions)
        records: list[Any] = []
        async with asyncio.timeout(timeout):
            for partition in partitions:
                while await consumer.position(partition) < ends[partition]:
                    for batch in (await consumer.getmany(partition, timeout_ms=100)).values():
                        records += batch
        await consumer.stop()
        return records

    async def partition_numbers(self, topic: str) -> list[int]:
        admin = await self.admin()
        (description,) = await admin.describe_topics([topic])
        return sorted(partition["partition"] for partition in description["partitions"])

    async def until(
        self,
        condition: Callable[[], bool | Awaitable[bool]],
        *consumers: AIOKafkaConsumer,
        timeout: float = 60,
    ) -> None:
        """Poll the consumers until `condition()`, which may be a coroutine, is true."""
        async with asyncio.timeout(timeout):
            while True:
                outcome = condition()
                if outcome if isinstance(outcome, bool) else await outcome:
                    return
                for consumer in consumers:
                    await consumer.getmany(timeout_ms=50)
                await asyncio.sleep(0.01)

    async def eventually(
        self, read: Callable[[], Awaitable[object]], expected: object, timeout: float = 20
    ) -> None:
        """Read until it gives `expected`: Apache Kafka writes the markers of a transaction after it has
        confirmed the commit."""
        deadline = time.monotonic() + timeout
        while (found := await read()) != expected:
            assert time.monotonic() < deadline, f"expected {expected!r}, still {found!r}"
            await asyncio.sleep(0.05)


async def stop_quietly(client: AIOKafkaProducer | AIOKafkaConsumer) -> None:
    """Stop a client that may be fenced, or cut off from its broker.

    The test is over: its clients' troubles are not its outcome. In a task of its own, because aiokafka's `stop`
    may raise the cancellation of a task inside it, which would look like ours.
    """
    stopping = asyncio.create_task(client.stop())
    await asyncio.wait({stopping}, timeout=10)
    if not stopping.done():
        stopping.cancel()
    for outcome in await asyncio.gather(stopping, return_exceptions=True):
        if outcome is not None:
            print(f"stopping {type(client).__name__}: {outcome!r}")


@pytest.fixture(scope="session")
def shared_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("broker")) as broker:
        yield broker


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker that the test may kill."""
    with BrokerProcess(tmp_path / "broker") as broker:
        yield broker


@pytest.fixture
async def connect(new_namespace: Callable[[str], str]) -> AsyncIterator[Callable[[str], Kafka]]:
    """Clients for any broker address."""
    async with AsyncExitStack() as closing:
        yield lambda bootstrap: Kafka(bootstrap, closing, new_namespace)


@pytest.fixture
def kafka(request: pytest.FixtureRequest, connect: Callable[[str], Kafka]) -> Kafka:
    """Clients of the broker that the conformance tests examine."""
    bootstrap = EXTERNAL or request.getfixturevalue("shared_broker").bootstrap
    return connect(bootstrap)


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool]], None]:
    """Wait for a condition outside of Kafka, up to 20 seconds."""

    def wait(condition: Callable[[], bool], timeout: float = 20) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true in time"
            time.sleep(0.01)

    return wait


@pytest.fixture
def make_batch() -> Callable[..., bytes]:
    """Builds a batch as a producer would send it."""

    def make(
        *values: bytes | None,
        key: bytes | None = None,
        timestamp: int = 1000,
        producer: tuple[int, int, int] = (-1, -1, -1),
        is_transactional: bool = False,
        compression: int = 0,
    ) -> bytes:
        """`producer` is (id, epoch, first sequence)."""
        producer_id, epoch, sequence = producer
        builder = DefaultRecordBatchBuilder(
            magic=2,
            compression_type=compression,
            is_transactional=is_transactional,
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
            batch_size=1 << 26,
        )
        for number, value in enumerate(values):
            builder.append(number, timestamp=timestamp, key=key, value=value, headers=[])
        return bytes(builder.build())

    return make
