"""What every Kafka broker does with records: order, idempotence, compression, seeking, sizes.

Runs against the broker at TURNFOLD_TEST_BOOTSTRAP if that is set.
"""

import asyncio
import os
import random
import time
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import MessageSizeTooLargeError, OffsetOutOfRangeError
from aiokafka.producer.message_accumulator import BatchBuilder
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.produce import ProduceRequest

MIB = 1 << 20
OUT_OF_ORDER_SEQUENCE_NUMBER = 45


async def send_raw_batch(producer: Any, topic: str, sequence: int, value: bytes) -> tuple[int, int]:
    """Send one numbered batch past the producer's own bookkeeping; (error code, offset)."""
    manager = producer._txn_manager
    builder = BatchBuilder(MIB, 0, is_transactional=False)
    builder._builder.set_producer_state(manager.producer_id, manager.producer_epoch, sequence)
    builder.append(key=None, value=value, timestamp=None)
    request = ProduceRequest(
        transactional_id=None,
        required_acks=-1,
        timeout=5000,
        topics=[(topic, [(0, bytes(builder._build()))])],
    )
    leader = producer.client.cluster.leader_for_partition(TopicPartition(topic, 0))
    answer = await producer.client.send(leader, request)
    _, partitions = answer.topics[0]
    return partitions[0][1], partitions[0][2]


async def test_records_with_the_same_key_stay_in_order_in_one_partition(kafka: Any) -> None:
    topic = await kafka.create_topic(partitions=4)
    producer = await kafka.producer(linger_ms=2)
    sent = [
        await producer.send(topic, str(i).encode(), key=f"k{i % 10}".encode()) for i in range(500)
    ]
    await asyncio.gather(*sent)

    records = await kafka.read_all(topic)

    values: dict[bytes, list[int]] = {}
    partitions: dict[bytes, set[int]] = {}
    for record in records:
        values.setdefault(record.key, []).append(int(record.value))
        partitions.setdefault(record.key, set()).add(record.partition)
    assert values == {f"k{k}".encode(): list(range(k, 500, 10)) for k in range(10)}
    assert all(len(numbers) == 1 for numbers in partitions.values())
    assert len(set.union(*partitions.values())) > 1


async def test_a_topic_is_created_when_a_producer_first_uses_it(kafka: Any) -> None:
    await kafka.skip_unless("auto.create.topics.enable", "true")
    topic = kafka.unique("auto")

    await kafka.send(topic, b"first")

    assert [r.value for r in await kafka.read_all(topic)] == [b"first"]


async def test_an_idempotent_producer_writes_each_record_once(kafka: Any) -> None:
    topic = await kafka.create_topic(partitions=2)
    producer = await kafka.producer(enable_idempotence=True)
    sent = [await producer.send(topic, str(i).encode(), partition=i % 2) for i in range(200)]
    await asyncio.gather(*sent)

    values = [int(r.value) for r in await kafka.read_all(topic)]

    assert values == [*range(0, 200, 2), *range(1, 200, 2)]


async def test_a_batch_that_is_sent_again_is_appended_once(kafka: Any) -> None:
    topic = await kafka.create_topic()
    producer = await kafka.producer(enable_idempotence=True)
    await producer.send_and_wait(topic, b"a", partition=0)

    first = await send_raw_batch(producer, topic, 1, b"again")
    second = await send_raw_batch(producer, topic, 1, b"again")

    assert first == (0, 1)
    # Apache Kafka says where the first copy is, or just that there was one.
    assert second in [(0, 1), (0, -1)]
    assert [r.value for r in await kafka.read_all(topic)] == [b"a", b"again"]


async def test_each_of_the_newest_five_batches_is_recognised_when_sent_again(kafka: Any) -> None:
    topic = await kafka.create_topic()
    producer = await kafka.producer(enable_idempotence=True)
    await producer.send_and_wait(topic, b"0", partition=0)
    for sequence in range(1, 6):
        await send_raw_batch(producer, topic, sequence, str(sequence).encode())

    codes = [
        (await send_raw_batch(producer, topic, sequence, b"resent"))[0] for sequence in range(1, 6)
    ]

    assert codes == [0] * 5
    assert [r.value for r in await kafka.read_all(topic)] == [b"0", b"1", b"2", b"3", b"4", b"5"]


async def test_a_gap_in_the_sequence_is_rejected(kafka: Any) -> None:
    topic = await kafka.create_topic()
    producer = await kafka.producer(enable_idempotence=True)
    await producer.send_and_wait(topic, b"a", partition=0)

    code, _ = await send_raw_batch(producer, topic, 77, b"gap")

    assert code == OUT_OF_ORDER_SEQUENCE_NUMBER
    assert [r.value for r in await kafka.read_all(topic)] == [b"a"]


@pytest.mark.parametrize("compression", ["gzip", "snappy", "lz4", "zstd"])
async def test_compressed_records_come_back_as_they_were(kafka: Any, compression: str) -> None:
    topic = await kafka.create_topic()
    producer = await kafka.producer(compression_type=compression, linger_ms=20)
    values = [random.randbytes(50) * 40 for _ in range(100)]
    sent = [await producer.send(topic, value, partition=0) for value in values]
    await asyncio.gather(*sent)

    assert [r.value for r in await kafka.read_all(topic)] == values


async def test_headers_missing_keys_and_tombstones_come_back_as_they_were(kafka: Any) -> None:
    topic = await kafka.create_topic()
    headers = [("a", b"1"), ("a", b"2"), ("trace", b"\x00\xff")]
    await kafka.send(topic, b"value", headers=headers)
    await kafka.send(topic, None, key=b"key")

    first, second = await kafka.read_all(topic)

    assert (first.key, first.value, list(first.headers)) == (None, b"value", headers)
    assert (second.key, second.value, list(second.headers)) == (b"key", None, [])


async def test_a_consumer_seeks_by_offset(kafka: Any) -> None:
    topic = await kafka.create_topic()
    partition = TopicPartition(topic, 0)
    producer = await kafka.producer()
    for i in range(100):
        await producer.send(topic, str(i).encode(), partition=0)
    await producer.flush()
    consumer = await kafka.consumer()
    consumer.assign([partition])

    assert [int(r.value) for r in await kafka.read(consumer, 100)] == list(range(100))
    await consumer.seek_to_beginning(partition)
    assert (await consumer.getone()).offset == 0
    consumer.seek(partition, 37)
    record = await consumer.getone()
    assert (record.offset, record.value) == (37, b"37")
    assert await consumer.beginning_offsets([partition]) == {partition: 0}
    assert await consumer.end_offsets([partition]) == {partition: 100}
    await consumer.seek_to_end(partition)
    assert await consumer.position(partition) == 100
    assert consumer.highwater(partition) == 100


async def test_offsets_are_found_by_time(kafka: Any) -> None:
    topic = await kafka.create_topic()
    partition = TopicPartition(topic, 0)
    start_ms = int(time.time() * 1000) - 100_000
    producer = await kafka.producer(linger_ms=5)
    for i in range(50):
        await producer.send(topic, b"x", timestamp_ms=start_ms + 1000 * i, partition=0)
    await producer.flush()
    consumer = await kafka.consumer()
    consumer.assign([partition])

    found = await consumer.offsets_for_times({partition: start_ms + 20_500})
    exact = await consumer.offsets_for_times({partition: start_ms + 20_000})
    too_late = await consumer.offsets_for_times({partition: start_ms + 10**9})

    assert (found[partition].offset, found[partition].timestamp) == (21, start_ms + 21_000)
    assert exact[partition].offset == 20
    assert too_late[partition] is None


async def test_reading_beyond_the_end_is_an_error(kafka: Any) -> None:
    topic = await kafka.create_topic()
    await kafka.send(topic, b"0")
    consumer = await kafka.consumer(auto_offset_reset="none")
    consumer.assign([TopicPartition(topic, 0)])
    consumer.seek(TopicPartition(topic, 0), 500)

    with pytest.raises(OffsetOutOfRangeError):
        await asyncio.wait_for(consumer.getone(), 10)


@pytest.mark.parametrize(
    ("size_mib", "compression"), [(4, None), (16, "zstd"), (32, None)], ids=str
)
async def test_a_large_message_comes_back_with_default_consumer_settings(
    kafka: Any, size_mib: int, compression: str | None
) -> None:
    topic = await kafka.create_topic(max_message_bytes=40 * MIB)
    value = (
        os.urandom(size_mib * MIB) if compression is None else b"abcdefgh" * (size_mib * MIB // 8)
    )
    producer = await kafka.producer(
        max_request_size=40 * MIB, compression_type=compression, request_timeout_ms=60_000
    )
    await producer.send_and_wait(topic, value, partition=0)

    (record,) = await kafka.read_all(topic)

    assert record.value == value


async def test_a_message_over_the_default_limit_of_one_mebibyte_is_refused(kafka: Any) -> None:
    await kafka.skip_unless("message.max.bytes", "1048588")
    topic = await kafka.create_topic()
    producer = await kafka.producer(max_request_size=40 * MIB)

    with pytest.raises(MessageSizeTooLargeError):
        await producer.send_and_wait(topic, os.urandom(4 * MIB), partition=0)
    await producer.send_and_wait(topic, os.urandom(MIB - 1024), partition=0)

    assert len(await kafka.read_all(topic)) == 1


async def test_each_topic_has_its_own_size_limit(kafka: Any) -> None:
    small = await kafka.create_topic(max_message_bytes=2000)
    producer = await kafka.producer()

    await producer.send_and_wait(small, b"x" * 1500, partition=0)
    with pytest.raises(MessageSizeTooLargeError):
        await producer.send_and_wait(small, b"x" * 2500, partition=0)


async def test_several_large_messages_are_read_one_after_the_other(kafka: Any) -> None:
    topic = await kafka.create_topic(max_message_bytes=8 * MIB)
    values = [os.urandom(4 * MIB) for _ in range(5)]
    producer = await kafka.producer(max_request_size=8 * MIB)
    for value in values:
        await producer.send_and_wait(topic, value, partition=0)

    assert [r.value for r in await kafka.read_all(topic)] == values


async def test_an_answer_keeps_to_the_total_size_that_was_asked_for(kafka: Any) -> None:
    topic = await kafka.create_topic(partitions=2)
    producer = await kafka.producer()
    for i in range(8):
        await producer.send_and_wait(topic, bytes(1000), partition=i % 2)
    await producer.client.force_metadata_update()
    leader = producer.client.cluster.leader_for_partition(TopicPartition(topic, 0))

    async def fetched(max_bytes: int) -> list[int]:
        """Records in the answer, by partition."""
        wanted = [(topic, [(0, 0, MIB), (1, 0, MIB)])]
        answer = await producer.client.send(leader, FetchRequest(0, 1, max_bytes, 0, wanted))
        ((_, partitions),) = answer.topics
        return [len(partition[-1]) // 1000 for partition in partitions]

    assert await fetched(MIB) == [4, 4]
    assert await fetched(2500) == [2, 0]
    # The first record comes in any case, or a reader with too small a limit would be stuck.
    assert await fetched(10) == [1, 0]


async def test_a_paused_partition_yields_nothing_until_resumed(kafka: Any) -> None:
    topic = await kafka.create_topic(partitions=2)
    producer = await kafka.producer()
    for i in range(20):
        await producer.send_and_wait(topic, str(i).encode(), partition=i % 2)
    partitions = [TopicPartition(topic, 0), TopicPartition(topic, 1)]
    consumer = await kafka.consumer()
    consumer.assign(partitions)

    consumer.pause(partitions[0])
    assert {r.partition for r in await kafka.read(consumer, 10)} == {1}
    consumer.resume(partitions[0])
    assert {r.partition for r in await kafka.read(consumer, 10)} == {0}


async def test_offsets_are_dense_when_many_producers_write_at_once(kafka: Any) -> None:
    topic = await kafka.create_topic(partitions=4)
    producers = [await kafka.producer() for _ in range(32)]
    await asyncio.gather(
        *[
            producer.send_and_wait(topic, f"{i}-{j}".encode(), key=str(i).encode())
            for j in range(20)
            for i, producer in enumerate(producers)
        ]
    )

    records = await kafka.read_all(topic)

    assert len({r.value for r in records}) == 640
    for number in range(4):
        offsets = [r.offset for r in records if r.partition == number]
        assert offsets == list(range(len(offsets)))


async def test_a_waiting_consumer_is_woken_by_a_new_record(kafka: Any) -> None:
    topic = await kafka.create_topic()
    # A broker that answers only when the wait is over would need ten times as long as is allowed here.
    consumer = await kafka.consumer(fetch_max_wait_ms=20_000, request_timeout_ms=60_000)
    consumer.assign([TopicPartition(topic, 0)])
    producer = await kafka.producer()
    async with asyncio.timeout(20):
        for i in range(10):
            waiting = asyncio.create_task(consumer.getone())
            await asyncio.sleep(0)
            await producer.send_and_wait(topic, str(i).encode(), partition=0)
            assert (await waiting).value == str(i).encode()
