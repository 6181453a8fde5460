"""Readers on a real broker."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable

import pytest

from turnfold.embedded.broker.testing import RunningBroker
from turnfold.log.client import (
    Producer,
    Reader,
    ReadingEnded,
    Record,
    TopicRefused,
    create_topics,
    reader_from_start,
    topic_differences,
)
from turnfold.schemas.topics import Topics, TopicSpec

NUM_PARTITIONS = 2
MIB = 1024 * 1024
CONSUMERS = ("trainer", "shadow-trainer", "sft-export", "evaluation")


@pytest.fixture
async def topic(broker: RunningBroker, new_namespace: Callable[[], str]) -> str:
    """An empty topic."""
    topics = Topics(namespace=new_namespace())
    await create_topics(broker.bootstrap, topics.specs(num_partitions=NUM_PARTITIONS))
    return topics.trajectories


@pytest.fixture
async def producer(broker: RunningBroker) -> AsyncIterator[Producer]:
    async with Producer(broker.bootstrap) as found:
        yield found


async def append(producer: Producer, topic: str, first: int, last: int) -> None:
    """One record a number, written at that many seconds; even ones into partition 0."""
    for number in range(first, last):
        await producer.send_raw(
            topic,
            key=b"k",
            value=b"%d" % number,
            partition=number % NUM_PARTITIONS,
            timestamp=float(number),
        )


def numbers(records: list[Record]) -> list[int]:
    return sorted(int(record.value or b"") for record in records)


async def test_any_number_of_consumers_read_one_stream_each_at_its_own_pace(
    broker: RunningBroker, topic: str, producer: Producer
) -> None:
    await append(producer, topic, 0, 40)
    found: dict[str, list[Record]] = {name: [] for name in CONSUMERS}

    async def consume(name: str, num_at_once: int, is_restarted: bool) -> None:
        async with Reader(broker.bootstrap) as reader:
            await reader.assign_from_start([topic])
            while len(found[name]) < 80:
                found[name] += await reader.poll(max_records=num_at_once)
                if is_restarted and len(found[name]) >= 20:  # it goes on from its own positions
                    is_restarted = False
                    places = [(topic, partition) for partition in range(NUM_PARTITIONS)]
                    await reader.assign({place: await reader.position(*place) for place in places})

    await asyncio.gather(
        append(producer, topic, 40, 80),
        *(consume(name, 1 + 7 * n, n % 2 == 1) for n, name in enumerate(CONSUMERS)),
    )
    for name in CONSUMERS:
        assert numbers(found[name]) == list(range(80)), name
        for partition in range(NUM_PARTITIONS):
            offsets = [r.offset for r in found[name] if r.partition == partition]
            assert offsets == sorted(offsets), name


async def test_a_reader_leaves_no_position_for_another(
    broker: RunningBroker, topic: str, producer: Producer
) -> None:
    await append(producer, topic, 0, 10)
    async with reader_from_start(broker.bootstrap, topic) as reader:
        assert numbers([record async for record in reader.read_to_end()]) == list(range(10))
    async with Reader(broker.bootstrap, group=topic) as other:
        assert await other.committed(topic, 0) is None


async def test_batches_hold_what_single_records_hold(
    broker: RunningBroker, topic: str, producer: Producer
) -> None:
    await append(producer, topic, 0, 30)
    async with reader_from_start(broker.bootstrap, topic) as reader:
        records = [
            record for batch in [b async for b in reader.batches_to_end()] for record in batch
        ]
    assert numbers(records) == list(range(30))


async def test_messages_of_any_size_come_one_after_the_other(
    broker: RunningBroker, topic: str, producer: Producer
) -> None:
    """A reader asks for a megabyte at a time; a message that is larger comes whole all the same."""
    sizes = [10, 30 * MIB, 10, 3 * MIB, MIB, 10]
    for size in sizes:
        await producer.send_raw(topic, key=b"k", value=random.randbytes(size), partition=0)
    async with reader_from_start(broker.bootstrap, topic) as reader:
        assert [len(record.value or b"") async for record in reader.read_to_end()] == sizes


async def test_the_offset_of_a_time_is_that_of_the_first_record_not_before_it(
    broker: RunningBroker, topic: str, producer: Producer
) -> None:
    await append(producer, topic, 0, 10)  # partition 0: 0 s, 2 s, … partition 1: 1 s, 3 s, …
    pairs = [(topic, 0), (topic, 1)]
    async with Reader(broker.bootstrap) as reader:
        assert await reader.offsets_at(pairs, 4.0) == {(topic, 0): 2, (topic, 1): 2}
        assert await reader.offsets_at(pairs, 4.5) == {(topic, 0): 3, (topic, 1): 2}
        assert await reader.offsets_at(pairs, 99.0) == {(topic, 0): 5, (topic, 1): 5}


async def test_a_reader_whose_fetching_has_ended_says_so_instead_of_giving_nothing_for_ever(
    broker: RunningBroker, topic: str, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reader_from_start(broker.bootstrap, topic) as reader:
        assert await reader.poll() == []

        async def send(*_: object, **__: object) -> None:
            # Any error that aiokafka does not expect of a connection ends its fetching for good.
            raise RuntimeError("the handler is closed")

        monkeypatch.setattr(reader._kafka._client, "send", send)
        with pytest.raises(ReadingEnded, match="the handler is closed"):
            await asyncio.wait_for(poll_for_ever(reader), 20)


async def poll_for_ever(reader: Reader) -> None:
    while True:
        await reader.poll()


async def test_a_topic_that_the_broker_refuses_is_named_with_its_reason(
    broker: RunningBroker,
) -> None:
    with pytest.raises(TopicRefused, match=r"^cannot create topic not a name\.events: .+"):
        await create_topics(broker.bootstrap, Topics(namespace="not a name").specs())


async def test_a_topic_that_wants_more_copies_than_it_has_is_told(
    broker: RunningBroker, new_namespace: Callable[[], str]
) -> None:
    config = {"min.insync.replicas": "2"}
    spec = TopicSpec(name=new_namespace(), num_partitions=1, config=config, purpose="")
    await create_topics(broker.bootstrap, [spec])
    assert await topic_differences(broker.bootstrap, [spec]) == {
        spec.name: ["min.insync.replicas: expected at most 1, as there are copies, found 2"]
    }
