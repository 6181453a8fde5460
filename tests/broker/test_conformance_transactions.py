"""What every Kafka broker does for transactional producers.

Runs against the broker at TURNFOLD_TEST_BOOTSTRAP if that is set.
"""

import asyncio
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaError, ProducerFenced


async def committed_values(kafka: Any, topic: str) -> list[bytes]:
    return [r.value for r in await kafka.read_all(topic, isolation_level="read_committed")]


async def test_readers_of_committed_records_see_whole_transactions_only(kafka: Any) -> None:
    topic = await kafka.create_topic(partitions=2)
    producer = await kafka.producer(transactional_id=kafka.unique("txn"))
    async with producer.transaction():
        for i in range(4):
            await producer.send_and_wait(topic, f"kept{i}".encode(), partition=i % 2)
    await producer.begin_transaction()
    for i in range(4):
        await producer.send_and_wait(topic, f"void{i}".encode(), partition=i % 2)
    await producer.abort_transaction()
    async with producer.transaction():
        await producer.send_and_wait(topic, b"kept4", partition=0)

    kept = [b"kept0", b"kept2", b"kept4", b"kept1", b"kept3"]
    await kafka.eventually(lambda: committed_values(kafka, topic), kept)
    assert len(await kafka.read_all(topic)) == 9


async def test_an_open_transaction_hides_itself_and_all_that_follows(kafka: Any) -> None:
    topic = await kafka.create_topic()
    producer = await kafka.producer(transactional_id=kafka.unique("txn"))
    await kafka.send(topic, b"before")
    await producer.begin_transaction()
    await producer.send_and_wait(topic, b"open", partition=0)
    await kafka.send(topic, b"after")

    while_open = await committed_values(kafka, topic)
    await producer.commit_transaction()

    assert while_open == [b"before"]
    everything = [b"before", b"open", b"after"]
    await kafka.eventually(lambda: committed_values(kafka, topic), everything)


async def test_a_waiting_reader_of_committed_records_is_woken_by_the_commit(kafka: Any) -> None:
    topic = await kafka.create_topic()
    producer = await kafka.producer(transactional_id=kafka.unique("txn"))
    reader = await kafka.consumer(
        isolation_level="read_committed", fetch_max_wait_ms=60_000, request_timeout_ms=90_000
    )
    reader.assign([TopicPartition(topic, 0)])
    await producer.begin_transaction()
    await producer.send_and_wait(topic, b"value", partition=0)
    waiting = asyncio.create_task(reader.getone())
    await asyncio.sleep(0)

    await producer.commit_transaction()

    assert (await asyncio.wait_for(waiting, 20)).value == b"value"


async def test_consumer_offsets_are_committed_with_the_transaction_or_not_at_all(
    kafka: Any,
) -> None:
    source, target = await kafka.create_topic("source"), await kafka.create_topic("target")
    group = kafka.unique("group")
    partition = TopicPartition(source, 0)
    consumer = await kafka.consumer(group_id=group)
    consumer.assign([partition])
    producer = await kafka.producer(transactional_id=kafka.unique("txn"))
    async with producer.transaction():
        await producer.send_and_wait(target, b"kept", partition=0)
        await producer.send_offsets_to_transaction({partition: 6}, group)
    await kafka.eventually(lambda: consumer.committed(partition), 6)

    await producer.begin_transaction()
    await producer.send_and_wait(target, b"void", partition=0)
    await producer.send_offsets_to_transaction({partition: 10}, group)
    await producer.abort_transaction()

    # The next record shows that the transaction before it has come to its end.
    await kafka.send(target, b"after")
    await kafka.eventually(lambda: committed_values(kafka, target), [b"kept", b"after"])
    assert await consumer.committed(partition) == 6


async def test_a_transaction_of_offsets_alone_commits_them(kafka: Any) -> None:
    source = await kafka.create_topic("source")
    group = kafka.unique("group")
    partition = TopicPartition(source, 0)
    producer = await kafka.producer(transactional_id=kafka.unique("txn"))

    async with producer.transaction():
        await producer.send_offsets_to_transaction({partition: 3}, group)

    consumer = await kafka.consumer(group_id=group)
    consumer.assign([partition])
    await kafka.eventually(lambda: consumer.committed(partition), 3)


async def test_a_second_producer_with_the_same_id_fences_the_first_off(kafka: Any) -> None:
    topic = await kafka.create_topic()
    transactional_id = kafka.unique("txn")
    first = await kafka.producer(transactional_id=transactional_id)
    await first.begin_transaction()
    await first.send_and_wait(topic, b"first", partition=0)

    second = await kafka.producer(transactional_id=transactional_id)
    async with second.transaction():
        await second.send_and_wait(topic, b"second", partition=0)

    async def go_on() -> None:
        await first.send_and_wait(topic, b"zombie", partition=0)
        await first.commit_transaction()

    with pytest.raises((ProducerFenced, KafkaError)):
        await asyncio.wait_for(go_on(), 20)
    await kafka.eventually(lambda: committed_values(kafka, topic), [b"second"])


@pytest.mark.timeout(120)
async def test_a_transaction_that_stays_open_too_long_is_aborted(kafka: Any) -> None:
    topic = await kafka.create_topic()
    producer = await kafka.producer(
        transactional_id=kafka.unique("txn"), transaction_timeout_ms=1000
    )
    await producer.begin_transaction()
    await producer.send_and_wait(topic, b"hanging", partition=0)
    await kafka.send(topic, b"after")
    reader = await kafka.consumer(isolation_level="read_committed")
    reader.assign([TopicPartition(topic, 0)])

    # Apache Kafka looks for such transactions every 10 seconds.
    (record,) = await kafka.read(reader, 1, timeout=60)

    assert record.value == b"after"
    with pytest.raises(KafkaError):
        await producer.commit_transaction()


async def test_a_restarted_producer_aborts_what_it_left_open(kafka: Any) -> None:
    topic = await kafka.create_topic()
    transactional_id = kafka.unique("txn")
    crashed = await kafka.producer(transactional_id=transactional_id)
    await crashed.begin_transaction()
    await crashed.send_and_wait(topic, b"dangling", partition=0)

    await kafka.producer(transactional_id=transactional_id)
    await kafka.send(topic, b"new")

    await kafka.eventually(lambda: committed_values(kafka, topic), [b"new"])
