"""turnfold's messages through FastStream: nothing guessed, nothing lost, nothing acknowledged early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from faststream.kafka import KafkaBroker, KafkaMessage

from turnfold.embedded.broker.testing import RunningBroker
from turnfold.log.client import Producer, Reader, create_topics, reader_from_start
from turnfold.log.faststream import MessageCodec, commit, message_broker
from turnfold.schemas import codec
from turnfold.schemas.dead_letters import DeadLetter
from turnfold.schemas.policies import PolicyEvent, PolicyPublished, PolicyServed
from turnfold.schemas.tasks import Task
from turnfold.schemas.testing import task, trajectory
from turnfold.schemas.topics import Topics
from turnfold.schemas.trajectories import Trajectory

DEADLINE_S = 30.0


def message(body: bytes, content_type: str | None = None) -> Any:
    return SimpleNamespace(body=body, content_type=content_type)


async def test_a_message_is_written_as_msgpack_and_says_so() -> None:
    body, content_type = await MessageCodec(Task).encode(task("g"))
    assert (content_type, body) == (codec.MSGPACK, codec.encode(task("g")))


async def test_msgpack_and_json_are_read() -> None:
    sent = task("g")
    reading = MessageCodec(Task)
    assert await reading.decode(message(codec.encode(sent))) == sent
    assert await reading.decode(message(codec.encode_json(sent), codec.JSON)) == sent


async def test_a_member_of_a_union_is_told_by_its_tag() -> None:
    served = PolicyServed(run_id="r", policy_version=3)
    assert await MessageCodec(PolicyEvent).decode(message(codec.encode(served))) == served


@pytest.mark.parametrize("body", [b"", b"1", b"\xff", codec.encode(task("g"))])
async def test_what_is_not_such_a_message_is_refused(body: bytes) -> None:
    with pytest.raises(codec.CodecError, match="not PolicyPublished in msgpack"):
        await MessageCodec(PolicyPublished).decode(message(body))


async def test_only_messages_are_written() -> None:
    with pytest.raises(TypeError, match="expected a message"):
        await MessageCodec(Task).encode({"run_id": "r"})


@pytest.fixture
async def topics(broker: RunningBroker, new_namespace: Callable[[], str]) -> Topics:
    made = Topics(namespace=new_namespace())
    await create_topics(broker.bootstrap, made.specs(num_partitions=1))
    return made


@pytest.fixture
async def producer(broker: RunningBroker) -> AsyncIterator[Producer]:
    async with Producer(broker.bootstrap) as running:
        yield running


class Received:
    """What a subscriber of tasks got; commits only what it is told to."""

    def __init__(self, bootstrap: str, topics: Topics, kind: Any, topic: str) -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue()
        self.is_committing = True
        self.broker: KafkaBroker = message_broker(bootstrap, kind, topics.dead_letters, logger=None)

        @self.broker.subscriber(topic, group_id=topics.namespace, auto_offset_reset="earliest")
        async def take(body: Any, raw: KafkaMessage) -> None:
            if self.is_committing:
                await commit(raw)
            self.messages.put_nowait(body)

    async def next(self) -> Any:
        return await asyncio.wait_for(self.messages.get(), DEADLINE_S)


async def test_tokens_arrive_as_they_were_sent(
    broker: RunningBroker, topics: Topics, producer: Producer
) -> None:
    received = Received(broker.bootstrap, topics, Trajectory, topics.trajectories)
    sent = trajectory("r1")
    async with received.broker:
        await received.broker.start()
        await received.broker.publish(sent, topic=topics.trajectories, key=b"g1")
        assert await received.next() == sent


async def test_what_a_handler_did_not_commit_comes_again(
    broker: RunningBroker, topics: Topics, producer: Producer
) -> None:
    for name in ("a", "b"):
        await producer.send(topics.tasks, key=name, message=task(name))
    for _ in range(2):
        received = Received(broker.bootstrap, topics, Task, topics.tasks)
        received.is_committing = False
        async with received.broker:
            await received.broker.start()
            assert [(await received.next()).group_id for _ in range(2)] == ["a", "b"]


async def test_damaged_records_go_to_the_dead_letters_and_are_not_met_again(
    broker: RunningBroker, topics: Topics, producer: Producer
) -> None:
    await producer.send_raw(topics.tasks, key=b"k", value=b"1")
    # FastStream decodes headers as text before anybody is asked.
    raw = producer._kafka
    await (await raw.send(topics.tasks, codec.encode(task("x")), headers=[("h", b"\xff")]))
    await producer.send(topics.tasks, key="good", message=task("good"))
    received = Received(broker.bootstrap, topics, Task, topics.tasks)
    received.is_committing = False
    async with received.broker:
        await received.broker.start()
        assert (await received.next()).group_id == "good"
    async with reader_from_start(broker.bootstrap, topics.dead_letters) as reader:
        letters = [
            codec.decode(DeadLetter, record.value or b"") async for record in reader.read_to_end()
        ]
    assert [(letter.offset, letter.headers) for letter in letters] == [
        (0, ()),
        (1, (("h", b"\xff"),)),
    ]
    assert letters[0].value == b"1"
    async with Reader(broker.bootstrap, group=topics.namespace) as reader:
        assert await reader.committed(topics.tasks, 0) == (2, "")
