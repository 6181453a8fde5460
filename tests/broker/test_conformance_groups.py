"""What every Kafka broker does for consumer groups.

Runs against the broker at TURNFOLD_TEST_BOOTSTRAP if that is set.
"""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiokafka import TopicPartition
from aiokafka.protocol.admin import DeleteGroupsRequest
from aiokafka.protocol.commit import OffsetCommitRequest

ILLEGAL_GENERATION = 22
UNKNOWN_MEMBER_ID = 25
NON_EMPTY_GROUP = 68

# The shortest session that Apache Kafka allows with its default settings.
SESSION = {"session_timeout_ms": 6000, "heartbeat_interval_ms": 500}

MEMBER_SCRIPT = """
import asyncio, sys
from aiokafka import AIOKafkaConsumer

async def main(bootstrap, topic, group):
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=bootstrap, group_id=group,
        session_timeout_ms=6000, heartbeat_interval_ms=500)
    await consumer.start()
    while True:
        await consumer.getmany(timeout_ms=200)

asyncio.run(main(*sys.argv[1:]))
"""


@contextmanager
def member_process(bootstrap: str, topic: str, group: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A group member in a process of its own, which can be killed."""
    process = subprocess.Popen([sys.executable, "-c", MEMBER_SCRIPT, bootstrap, topic, group])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def fill(kafka: Any, topic: str, values: range, partitions: int) -> None:
    producer = await kafka.producer()
    for i in values:
        await producer.send(topic, str(i).encode(), partition=i % partitions)
    await producer.stop()


async def test_a_group_resumes_at_its_committed_offset(kafka: Any) -> None:
    topic = await kafka.create_topic()
    group = kafka.unique("group")
    partition = TopicPartition(topic, 0)
    await fill(kafka, topic, range(100), 1)
    consumer = await kafka.consumer(topic, group_id=group)
    await kafka.read(consumer, 50)

    await consumer.commit({partition: 50})
    assert await consumer.committed(partition) == 50
    await consumer.stop()
    successor = await kafka.consumer(topic, group_id=group)

    assert (await asyncio.wait_for(successor.getone(), 20)).value == b"50"


async def test_the_text_committed_with_an_offset_comes_back(kafka: Any) -> None:
    topic = await kafka.create_topic()
    group = kafka.unique("group")
    partition = TopicPartition(topic, 0)
    await fill(kafka, topic, range(1), 1)
    consumer = await kafka.consumer(topic, group_id=group)
    await kafka.read(consumer, 1)

    await consumer.commit({partition: (1, "checkpoint=step-17")})

    offsets = await (await kafka.admin()).list_consumer_group_offsets(group)
    assert (offsets[partition].offset, offsets[partition].metadata) == (1, "checkpoint=step-17")


async def test_an_assigned_consumer_commits_without_being_a_member(kafka: Any) -> None:
    topic = await kafka.create_topic()
    group = kafka.unique("group")
    partition = TopicPartition(topic, 0)
    consumer = await kafka.consumer(group_id=group)
    consumer.assign([partition])

    await consumer.commit({partition: 7})

    assert await consumer.committed(partition) == 7


async def test_two_consumers_share_the_partitions_and_one_takes_over_when_the_other_leaves(
    kafka: Any,
) -> None:
    topic = await kafka.create_topic(partitions=4)
    group = kafka.unique("group")
    first = await kafka.consumer(topic, group_id=group, **SESSION)
    await kafka.until(lambda: len(first.assignment()) == 4, first)
    second = await kafka.consumer(topic, group_id=group, **SESSION)

    await kafka.until(
        lambda: len(first.assignment()) == 2 and len(second.assignment()) == 2, first, second
    )
    assert first.assignment() | second.assignment() == {
        TopicPartition(topic, number) for number in range(4)
    }
    await second.stop()
    await kafka.until(lambda: len(first.assignment()) == 4, first)


async def test_the_partitions_of_a_killed_member_are_taken_over(kafka: Any) -> None:
    topic = await kafka.create_topic(partitions=4)
    group = kafka.unique("group")
    await fill(kafka, topic, range(40), 4)
    with member_process(kafka.bootstrap, topic, group) as other:
        survivor = await kafka.consumer(topic, group_id=group, **SESSION)
        await kafka.until(lambda: len(survivor.assignment()) == 2, survivor)

        other.kill()
        other.wait()
        await kafka.until(lambda: len(survivor.assignment()) == 4, survivor)

    received: set[bytes] = set()
    await fill(kafka, topic, range(40, 60), 4)
    expected = {str(i).encode() for i in range(40, 60)}
    async with asyncio.timeout(20):
        while not expected <= received:
            received |= {r.value for r in await kafka.read(survivor, 1)}


async def test_a_commit_of_another_generation_is_refused(kafka: Any) -> None:
    topic = await kafka.create_topic()
    group = kafka.unique("group")
    consumer = await kafka.consumer(topic, group_id=group, **SESSION)
    await kafka.until(lambda: len(consumer.assignment()) == 1, consumer)
    coordinator = consumer._coordinator

    async def commit(generation: int, member_id: str) -> int:
        request = OffsetCommitRequest(group, generation, member_id, -1, [(topic, [(0, 1, "")])])
        answer = await consumer._client.send(coordinator.coordinator_id, request, group=1)
        ((_, ((_, code),)),) = answer.topics
        return int(code)

    assert await commit(coordinator.generation + 5, coordinator.member_id) == ILLEGAL_GENERATION
    assert await commit(coordinator.generation, "somebody-else") == UNKNOWN_MEMBER_ID
    assert await commit(-1, "") == UNKNOWN_MEMBER_ID
    assert await consumer.committed(TopicPartition(topic, 0)) is None
    assert await commit(coordinator.generation, coordinator.member_id) == 0
    assert await consumer.committed(TopicPartition(topic, 0)) == 1


async def test_a_static_member_comes_back_to_its_partitions_without_a_rebalance(
    kafka: Any,
) -> None:
    topic = await kafka.create_topic(partitions=4)
    group = kafka.unique("group")

    async def start(instance: str) -> Any:
        return await kafka.consumer(topic, group_id=group, group_instance_id=instance, **SESSION)

    first, second = await asyncio.gather(start("one"), start("two"))
    await kafka.until(
        lambda: len(first.assignment()) == 2 and len(second.assignment()) == 2, first, second
    )
    before = (first.assignment(), second.assignment(), first._coordinator.generation)
    await second.stop()
    second = await start("two")
    await kafka.until(lambda: len(second.assignment()) == 2, first, second)

    assert (first.assignment(), second.assignment(), first._coordinator.generation) == before


async def test_groups_are_listed_and_described(kafka: Any) -> None:
    topic = await kafka.create_topic(partitions=2)
    group = kafka.unique("group")
    await fill(kafka, topic, range(1), 2)
    consumer = await kafka.consumer(topic, group_id=group)
    await kafka.read(consumer, 1)
    await consumer.commit({TopicPartition(topic, 0): 1})
    admin = await kafka.admin()

    assert (group, "consumer") in await admin.list_consumer_groups()
    (answer,) = await admin.describe_consumer_groups([group])
    _, name, state, protocol_type, _, members = answer.groups[0][:6]
    assert (name, state, protocol_type, len(members)) == (group, "Stable", "consumer", 1)
    offsets = await admin.list_consumer_group_offsets(group)
    assert offsets[TopicPartition(topic, 0)].offset == 1


async def test_a_group_without_members_keeps_its_offsets_until_it_is_deleted(kafka: Any) -> None:
    topic = await kafka.create_topic()
    group = kafka.unique("group")
    partition = TopicPartition(topic, 0)
    consumer = await kafka.consumer(topic, group_id=group)
    await kafka.until(lambda: len(consumer.assignment()) == 1, consumer)
    await consumer.commit({partition: 3})
    admin = await kafka.admin()

    assert await delete_group(admin, group) == NON_EMPTY_GROUP
    await consumer.stop()
    assert (await admin.list_consumer_group_offsets(group))[partition].offset == 3
    assert await delete_group(admin, group) == 0
    assert group not in [name for name, _ in await admin.list_consumer_groups()]


async def delete_group(admin: Any, group: str) -> int:
    """The error code; aiokafka's own method does not look at it."""
    coordinator = await admin.find_coordinator(group)
    answer = await admin._send_request(DeleteGroupsRequest([group]), coordinator)
    ((_, code),) = answer.results
    return int(code)
