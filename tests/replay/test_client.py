"""A log on a broker, read by commands that have somebody waiting for them."""

import asyncio
import random
from collections.abc import Callable

import pytest

from turnfold.embedded.broker.testing import BrokerProcess
from turnfold.log.client import Producer, create_topics
from turnfold.replay import client
from turnfold.replay.client import BrokerSilent, KafkaLog

VALUE_BYTES, NUM_RECORDS = 900_000, 8
"""More than comes in one answer."""


async def test_a_read_goes_on_after_a_broker_that_was_away_and_does_not_wait_for_ever(
    killable_broker: BrokerProcess,
    new_namespace: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = KafkaLog(killable_broker.bootstrap, new_namespace())
    await create_topics(killable_broker.bootstrap, source.topics.specs(num_partitions=1))
    async with Producer(killable_broker.bootstrap) as producer:
        for _ in range(NUM_RECORDS):
            value = random.randbytes(VALUE_BYTES)
            await producer.send_raw(source.topics.events, key=b"k", value=value)

    async def read(during: Callable[[], object]) -> int:
        num_read = 0
        async for _ in source.read(source.topics.events):
            if num_read == 0:
                await asyncio.to_thread(during)
            num_read += 1
        return num_read

    def restart() -> None:
        killable_broker.kill9()
        killable_broker.start()

    assert await read(restart) == NUM_RECORDS
    monkeypatch.setattr(client, "_PATIENCE_S", 1.0)
    try:
        with pytest.raises(BrokerSilent, match=r"nothing has come from .* for 1 s"):
            await read(killable_broker.kill9)
    finally:
        killable_broker.start()
