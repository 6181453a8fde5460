"""The other widespread client library, librdkafka, gets along with the broker too."""

import time
import uuid
from typing import Any

import pytest

from turnfold.embedded.broker.testing import BrokerProcess

confluent_kafka = pytest.importorskip("confluent_kafka")
confluent_admin = pytest.importorskip("confluent_kafka.admin")
TIMEOUT_S = 20


@pytest.fixture
def topic(shared_broker: BrokerProcess) -> str:
    name = f"rdkafka-{uuid.uuid4().hex[:8]}"
    admin = confluent_admin.AdminClient({"bootstrap.servers": shared_broker.bootstrap})
    for created in admin.create_topics([confluent_admin.NewTopic(name, 2, 1)]).values():
        created.result(TIMEOUT_S)
    return name


def consume(broker: BrokerProcess, topic: str, count: int, **settings: Any) -> list[bytes]:
    """The first `count` values that a new group gets."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": uuid.uuid4().hex,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            **settings,
        }
    )
    consumer.subscribe([topic])
    values: list[bytes] = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(values) < count and time.monotonic() < deadline:
        message = consumer.poll(0.5)
        if message is not None:
            assert message.error() is None
            values.append(message.value())
    consumer.commit(asynchronous=False)
    consumer.close()
    return values


def test_an_idempotent_producer_and_a_group_of_librdkafka(
    shared_broker: BrokerProcess, topic: str
) -> None:
    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": shared_broker.bootstrap,
            "enable.idempotence": True,
            "compression.type": "zstd",
        }
    )
    errors: list[str] = []
    for i in range(100):
        producer.produce(
            topic,
            str(i),
            key=str(i % 5),
            on_delivery=lambda error, _: errors.append(str(error)) if error else None,
        )
    assert producer.flush(TIMEOUT_S) == 0
    assert errors == []

    values = consume(shared_broker, topic, 100)

    assert sorted(int(value) for value in values) == list(range(100))


def test_transactions_of_librdkafka(shared_broker: BrokerProcess, topic: str) -> None:
    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": shared_broker.bootstrap,
            "transactional.id": uuid.uuid4().hex,
        }
    )
    producer.init_transactions(TIMEOUT_S)
    for value, is_kept in (("kept", True), ("void", False), ("also kept", True)):
        producer.begin_transaction()
        producer.produce(topic, value, partition=0)
        assert producer.flush(TIMEOUT_S) == 0
        if is_kept:
            producer.commit_transaction(TIMEOUT_S)
        else:
            producer.abort_transaction(TIMEOUT_S)

    values = consume(shared_broker, topic, 2, **{"isolation.level": "read_committed"})

    assert values == [b"kept", b"also kept"]
