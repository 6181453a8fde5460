"""What every Kafka broker lets an administrator do, and its housekeeping.

Runs against the broker at TURNFOLD_TEST_BOOTSTRAP if that is set.
"""

import asyncio
import time
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import NewPartitions, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import (
    InvalidConfigurationError,
    InvalidPartitionsError,
    InvalidTopicError,
    TopicAlreadyExistsError,
)


async def topic_config(admin: Any, topic: str) -> dict[str, str]:
    answers = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
    return {entry[0]: entry[1] for answer in answers for entry in answer.resources[0][4]}


async def test_a_topic_has_the_partitions_it_was_created_with(kafka: Any) -> None:
    topic = await kafka.create_topic(partitions=4)

    assert await kafka.partition_numbers(topic) == [0, 1, 2, 3]


async def test_creating_a_topic_twice_is_an_error(kafka: Any) -> None:
    topic = await kafka.create_topic()

    with pytest.raises(TopicAlreadyExistsError):
        await kafka.create_named_topic(topic)


async def test_impossible_topics_are_refused(kafka: Any) -> None:
    with pytest.raises(InvalidTopicError):
        await kafka.create_named_topic("no spaces")
    with pytest.raises(InvalidPartitionsError):
        await kafka.create_topic(partitions=0)
    with pytest.raises(InvalidConfigurationError):
        await kafka.create_topic(retention_ms="soon")
    with pytest.raises(InvalidConfigurationError):
        await kafka.create_topic(no_such_setting="1")


async def test_topics_and_the_cluster_are_described(kafka: Any) -> None:
    topic = await kafka.create_topic()
    admin = await kafka.admin()

    assert topic in await admin.list_topics()
    cluster = await admin.describe_cluster()
    assert [broker["port"] for broker in cluster["brokers"]]


async def test_settings_of_a_topic_are_described_and_altered(kafka: Any) -> None:
    topic = await kafka.create_topic(retention_ms=123456)
    admin = await kafka.admin()
    before = await topic_config(admin, topic)
    assert (before["retention.ms"], before["cleanup.policy"]) == ("123456", "delete")

    altered = ConfigResource(
        ConfigResourceType.TOPIC, topic, configs={"max.message.bytes": "2000000"}
    )
    await admin.alter_configs([altered])

    after = await topic_config(admin, topic)
    # AlterConfigs replaces all of the topic's own settings.
    assert (after["max.message.bytes"], after["retention.ms"]) == ("2000000", "604800000")


async def test_partitions_are_added(kafka: Any) -> None:
    topic = await kafka.create_topic(partitions=1)
    await kafka.send(topic, b"kept")
    admin = await kafka.admin()

    await admin.create_partitions({topic: NewPartitions(3)})

    assert await kafka.partition_numbers(topic) == [0, 1, 2]
    assert [r.value for r in await kafka.read_all(topic)] == [b"kept"]


async def test_records_are_deleted_up_to_an_offset(kafka: Any) -> None:
    topic = await kafka.create_topic()
    partition = TopicPartition(topic, 0)
    await kafka.send(topic, *[str(i).encode() for i in range(20)])
    admin = await kafka.admin()

    await admin.delete_records({partition: RecordsToDelete(before_offset=12)})

    assert [r.offset for r in await kafka.read_all(topic)] == list(range(12, 20))
    consumer = await kafka.consumer()
    assert await consumer.beginning_offsets([partition]) == {partition: 12}


async def test_a_topic_created_anew_has_none_of_the_old_records(kafka: Any) -> None:
    topic = await kafka.create_topic()
    await kafka.send(topic, b"old")
    group = kafka.unique("group")
    consumer = await kafka.consumer(group_id=group)
    consumer.assign([TopicPartition(topic, 0)])
    await consumer.commit({TopicPartition(topic, 0): 1})
    await consumer.stop()
    admin = await kafka.admin()
    await admin.delete_topics([topic])

    async def is_gone() -> bool:
        offsets = await admin.list_consumer_group_offsets(group)
        return topic not in await admin.list_topics() and not offsets

    await kafka.until(is_gone)

    await kafka.create_named_topic(topic)

    assert await kafka.read_all(topic) == []


@pytest.mark.timeout(500)
async def test_compaction_keeps_the_newest_record_of_each_key(kafka: Any) -> None:
    topic = await kafka.create_topic(
        cleanup_policy="compact",
        segment_ms=100,
        min_cleanable_dirty_ratio=0.01,
        max_compaction_lag_ms=500,
    )
    producer = await kafka.producer()
    for i in range(300):
        await producer.send_and_wait(topic, str(i).encode(), key=f"k{i % 3}".encode())

    records: list[Any] = []
    async with asyncio.timeout(kafka.housekeeping_timeout_s):
        while not 0 < len(records) < 200:
            # Apache Kafka compacts what is older than the segment being written, so something must follow.
            await producer.send_and_wait(topic, b"tail", key=b"tail")
            await asyncio.sleep(0.2)
            records = await kafka.read_all(topic)

    newest = {r.key: r.value for r in records}
    assert newest == {b"k0": b"297", b"k1": b"298", b"k2": b"299", b"tail": b"tail"}
    assert [r.offset for r in records] == sorted(r.offset for r in records)


@pytest.mark.timeout(500)
async def test_records_older_than_the_retention_time_are_deleted(kafka: Any) -> None:
    topic = await kafka.create_topic(retention_ms=60_000, segment_ms=500)
    an_hour_ago = int(time.time() * 1000) - 3_600_000
    await kafka.send(topic, *[b"old"] * 20, timestamp_ms=an_hour_ago)

    values: list[bytes] = []
    async with asyncio.timeout(kafka.housekeeping_timeout_s):
        while b"old" in values or not values:
            await kafka.send(topic, b"new")
            await asyncio.sleep(0.2)
            values = [r.value for r in await kafka.read_all(topic)]

    assert set(values) == {b"new"}
