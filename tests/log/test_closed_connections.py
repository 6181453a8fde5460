"""A client on uvloop whose connection closes just before it writes."""

import asyncio
from collections.abc import Iterator

import pytest
import uvloop
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.metadata import MetadataRequest

from turnfold.embedded.broker.testing import BrokerProcess
from turnfold.log.client import create_topics, reader_from_start
from turnfold.log.closed_connections import expect_closed_connections
from turnfold.schemas.topics import TopicSpec

TOPIC = TopicSpec(name="letters", num_partitions=1, config={}, purpose="tests")


@pytest.fixture(scope="module")
def bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with BrokerProcess(tmp_path_factory.mktemp("broker"), auto_create_topics=False) as broker:
        asyncio.run(create_topics(broker.bootstrap, [TOPIC]))
        yield broker.bootstrap


def test_a_request_on_a_connection_that_has_just_closed_finds_it_broken(bootstrap: str) -> None:
    async def ask_after_close() -> None:
        async with reader_from_start(bootstrap, "letters") as reader:
            connection = next(iter(reader._kafka._client._conns.values()))
            connection._writer.transport.abort()
            # Now uvloop closes the transport; aiokafka's own task hears of it in the next round.
            await asyncio.sleep(0)
            with pytest.raises(KafkaConnectionError, match="broken"):
                connection.send(MetadataRequest([]))
            await asyncio.wait_for(reader.end_offsets([("letters", 0)]), 20)

    expect_closed_connections()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(ask_after_close())
