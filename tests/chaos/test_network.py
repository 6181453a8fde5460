"""Connections through a link: they carry everything, and are disturbed when asked to."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from turnfold.embedded.broker.testing import BrokerProcess
from turnfold.embedded.chaos.network import Link
from turnfold.log.client import Producer, create_topics, reader_from_start
from turnfold.schemas.topics import TopicSpec

TOPIC = TopicSpec(name="letters", num_partitions=2, config={}, purpose="tests")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    directory: Path = tmp_path_factory.mktemp("broker")
    with BrokerProcess(directory, auto_create_topics=False) as running:
        asyncio.run(create_topics(running.bootstrap, [TOPIC]))
        yield running


@pytest.fixture
async def link(broker: BrokerProcess) -> AsyncIterator[Link]:
    async with Link("test to broker", (broker.host, broker.port), is_kafka=True) as between:
        yield between


def bootstrap(link: Link) -> str:
    return "{}:{}".format(*link.address)


async def test_a_kafka_client_stays_on_the_link(link: Link, broker: BrokerProcess) -> None:
    async with Producer(bootstrap(link)) as producer:
        await producer.send_raw("letters", key=b"a", value=b"1")
        nodes = producer._kafka.client.cluster.brokers()
        assert {(node.host, node.port) for node in nodes} == {link.address}
    # A group's coordinator is asked for with another request.
    async with reader_from_start(bootstrap(link), "letters") as reader:
        assert b"1" in {record.value async for record in reader.read_to_end()}
    assert link.address[1] != broker.port


async def test_a_transaction_goes_through_its_coordinator(link: Link) -> None:
    async with Producer(bootstrap(link), transactional_id="writer") as producer:
        async with producer.transaction():
            await producer.send_raw("letters", key=b"t", value=b"whole")
        known = producer._kafka.client.cluster.brokers()
        assert {node.port for node in known} == {link.address[1]}
    async with reader_from_start(bootstrap(link), "letters") as reader:
        assert b"whole" in {record.value async for record in reader.read_to_end()}


async def test_a_producer_outlives_a_cut(link: Link) -> None:
    async with Producer(bootstrap(link)) as producer:
        await producer.send_raw("letters", key=b"c", value=b"before")
        cutting = asyncio.create_task(link.cut(0.3))
        await asyncio.sleep(0)
        await producer.send_raw("letters", key=b"c", value=b"after")
        assert cutting.done()
    assert await found(link, b"before", b"after") == [b"before", b"after"]


async def test_a_record_whose_acknowledgement_was_lost_is_sent_again_and_kept_once(
    link: Link, broker: BrokerProcess
) -> None:
    async with Producer(bootstrap(link)) as producer:
        await producer.send_raw("letters", key=b"l", value=b"first")
        losing = asyncio.create_task(link.lose_answers(0.5))
        await asyncio.sleep(0)
        sending = asyncio.create_task(producer.send_raw("letters", key=b"l", value=b"lost"))
        while b"lost" not in await values(broker.bootstrap):
            assert not sending.done()
        await losing
        await sending
    assert await found(link, b"first", b"lost") == [b"first", b"lost"]


async def test_what_is_held_is_delivered_afterwards(link: Link, broker: BrokerProcess) -> None:
    async with Producer(bootstrap(link)) as producer:
        await producer.send_raw("letters", key=b"h", value=b"early")
        holding = asyncio.create_task(link.hold(0.3))
        await asyncio.sleep(0)
        sending = asyncio.create_task(producer.send_raw("letters", key=b"h", value=b"held"))
        assert b"held" not in await values(broker.bootstrap)
        await sending
        await holding
    assert await found(link, b"early", b"held") == [b"early", b"held"]


async def test_any_other_connection_is_carried_to_its_end() -> None:
    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.readline()).upper() * 10_000)
        writer.close()

    server = await asyncio.start_server(shout, "127.0.0.1", 0)
    async with Link("test", server.sockets[0].getsockname()[:2]) as link:
        reader, writer = await asyncio.open_connection(*link.address)
        writer.write(b"hello\n")
        assert await reader.read() == b"HELLO\n" * 10_000
        writer.close()
    server.close()


async def test_nobody_behind_a_link_resets_the_connection() -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()[:2]
    server.close()
    await server.wait_closed()
    async with Link("test", address) as link:
        reader, writer = await asyncio.open_connection(*link.address)
        with pytest.raises(ConnectionError):
            await reader.read()
        writer.close()


async def values(address: str) -> set[bytes | None]:
    async with reader_from_start(address, "letters") as reader:
        return {record.value async for record in reader.read_to_end()}


async def found(link: Link, *wanted: bytes) -> list[bytes]:
    """Those of the wanted values that the log holds, in order, as often as it holds them."""
    async with reader_from_start(bootstrap(link), "letters") as reader:
        records = [record async for record in reader.read_to_end()]
    return [record.value for record in records if record.value in wanted]
