"""kill -9 of the broker under load: nothing acknowledged is lost, nothing idempotent is doubled."""

import asyncio
import contextlib
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from turnfold.embedded.broker.testing import BrokerProcess

BATCH = 20


async def restart(broker: BrokerProcess) -> None:
    await asyncio.to_thread(broker.kill9)
    await asyncio.to_thread(broker.start)


class Load:
    """Producers that write numbers until told to stop, and what was acknowledged to them."""

    def __init__(self, kafka: Any) -> None:
        self.kafka = kafka
        self.acknowledged: dict[str, list[int]] = {}
        self.is_over = False

    async def write(self, topic: str, **settings: Any) -> None:
        acknowledged = self.acknowledged.setdefault(topic, [])
        producer = await self.kafka.producer(**settings)
        number = 0
        while not self.is_over:
            numbers = range(number, number + BATCH)
            sent = [await producer.send(topic, str(n).encode(), partition=0) for n in numbers]
            for n, ack in zip(numbers, sent, strict=True):
                # A plain producer may give up on a record; an idempotent one must not.
                with contextlib.suppress(
                    *(() if "enable_idempotence" in settings else (KafkaError,))
                ):
                    await ack
                    acknowledged.append(n)
            number += BATCH

    async def progress(self, topic: str, count: int = 10 * BATCH) -> None:
        """Wait until `count` more records were acknowledged."""
        goal = len(self.acknowledged.get(topic, [])) + count
        await self.kafka.until(lambda: len(self.acknowledged.get(topic, [])) >= goal)


async def kill_under_load(broker: BrokerProcess, kafka: Any, rounds: int) -> None:
    for topic in ("plain", "idempotent"):
        await kafka.create_named_topic(topic)
    load = Load(kafka)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load.write("plain"))
        tasks.create_task(load.write("idempotent", enable_idempotence=True))
        for _ in range(rounds):
            await load.progress("idempotent")
            await restart(broker)
        await load.progress("idempotent")
        load.is_over = True

    stored = {t: [int(r.value) for r in await kafka.read_all(t)] for t in load.acknowledged}

    assert set(load.acknowledged["plain"]) <= set(stored["plain"])
    assert stored["idempotent"] == list(range(len(stored["idempotent"])))
    assert load.acknowledged["idempotent"] == stored["idempotent"]
    assert len(stored["idempotent"]) >= (rounds + 1) * 10 * BATCH


async def test_killing_the_broker_under_load_loses_and_doubles_nothing(
    own_broker: BrokerProcess, connect: Any
) -> None:
    await kill_under_load(own_broker, connect(own_broker.bootstrap), rounds=3)


@pytest.mark.slow
async def test_killing_the_broker_many_times_loses_and_doubles_nothing(
    own_broker: BrokerProcess, connect: Any
) -> None:
    await kill_under_load(own_broker, connect(own_broker.bootstrap), rounds=20)


class Copier:
    """Moves records from one topic to another in transactions; starts anew after every error."""

    def __init__(self, kafka: Any, source: str, target: str) -> None:
        self.kafka = kafka
        self.source = TopicPartition(source, 0)
        self.target = target
        self.moved = 0
        self.errors: list[str] = []

    async def run(self) -> None:
        while True:
            try:
                await self._copy()
            except KafkaError as error:
                self.errors.append(type(error).__name__)
                await asyncio.sleep(0.05)

    async def _copy(self) -> None:
        consumer = await self.kafka.consumer(group_id="copier", isolation_level="read_committed")
        consumer.assign([self.source])
        producer = await self.kafka.producer(transactional_id="copier", request_timeout_ms=8000)
        try:
            while True:
                batches = await consumer.getmany(timeout_ms=200, max_records=50)
                for records in batches.values():
                    await self._copy_in_transaction(producer, records)
        finally:
            stops = (consumer.stop(), producer.stop())
            await asyncio.gather(*stops, return_exceptions=True)

    async def _copy_in_transaction(self, producer: Any, records: list[Any]) -> None:
        async with producer.transaction():
            sent = [await producer.send(self.target, r.value, partition=0) for r in records]
            await asyncio.gather(*sent)
            position = {self.source: records[-1].offset + 1}
            await producer.send_offsets_to_transaction(position, "copier")
        self.moved += len(records)


async def copy_under_kills(broker: BrokerProcess, kafka: Any, rounds: int) -> None:
    for topic in ("source", "target"):
        await kafka.create_named_topic(topic)
    load = Load(kafka)
    copier = Copier(kafka, "source", "target")
    copying = asyncio.create_task(copier.run())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load.write("source", enable_idempotence=True))
        for _ in range(rounds):
            before = copier.moved
            await kafka.until(lambda before=before: copier.moved > before + 50, timeout=90)
            await restart(broker)
        load.is_over = True
    try:
        admin = await kafka.admin()
        (source_end,) = (await (await kafka.consumer()).end_offsets([copier.source])).values()

        async def is_done() -> bool:
            offsets = await admin.list_consumer_group_offsets("copier")
            return copier.source in offsets and offsets[copier.source].offset == source_end

        await kafka.until(is_done, timeout=90)
    finally:
        copying.cancel()
        await asyncio.gather(copying, return_exceptions=True)

    copied = [int(r.value) for r in await kafka.read_all("target", "read_committed")]

    assert copied == load.acknowledged["source"] == list(range(source_end)), copier.errors


async def test_transactions_copy_each_record_once_though_the_broker_is_killed(
    own_broker: BrokerProcess, connect: Any
) -> None:
    await copy_under_kills(own_broker, connect(own_broker.bootstrap), rounds=2)


@pytest.mark.slow
async def test_transactions_copy_each_record_once_though_the_broker_is_killed_often(
    own_broker: BrokerProcess, connect: Any
) -> None:
    await copy_under_kills(own_broker, connect(own_broker.bootstrap), rounds=12)


async def test_killing_the_broker_while_it_compacts_keeps_the_newest_value_of_every_key(
    own_broker: BrokerProcess, connect: Any
) -> None:
    kafka = connect(own_broker.bootstrap)
    topic = await kafka.create_topic(cleanup_policy="compact", min_cleanable_dirty_ratio=0.01)
    (partition,) = own_broker.data.glob(f"topics/{topic}@*/0")
    producer = await kafka.producer(enable_idempotence=True)
    newest: dict[bytes, bytes] = {}
    number = 0

    async def write_batch() -> None:
        nonlocal number
        sent = []
        for _ in range(BATCH):
            key, value = f"k{number % 7}".encode(), b"%d " % number * 300
            sent.append(await producer.send(topic, value, key=key, partition=0))
            newest[key] = value
            number += 1
        await asyncio.gather(*sent)

    for _ in range(4):
        async with asyncio.timeout(60):
            while not (partition / "compacted.new").exists():
                await write_batch()
        await restart(own_broker)

    records = await kafka.read_all(topic)

    assert {r.key: r.value for r in records} == newest
    assert [r.offset for r in records] == sorted({r.offset for r in records})
