"""The broker as a process: starting, what goes wrong at the start, stopping."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from turnfold.embedded.broker.testing import BrokerProcess

WaitUntil = Callable[[Callable[[], bool]], None]
COMMAND = [sys.executable, "-m", "turnfold.embedded.broker"]


def run_broker(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the command to its end."""
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60)


def test_one_line_says_that_it_is_ready_and_for_development_only(own_broker: BrokerProcess) -> None:
    assert own_broker.output() == (
        f"turnfold broker (development only) listening on 127.0.0.1:{own_broker.port}, "
        f"data in {own_broker.data}\n"
    )
    with socket.create_connection((own_broker.host, own_broker.port), timeout=5):
        pass


def test_the_help_says_what_it_is_not_for() -> None:
    result = run_broker("--help")

    assert result.returncode == 0
    assert "production is Apache Kafka" in " ".join(result.stdout.split())


def test_a_taken_port_is_explained_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        result = run_broker("--data", str(tmp_path), "--port", str(port))

    assert result.returncode == 1
    assert result.stderr == (
        f"turnfold broker: port {port} on 127.0.0.1 is taken: stop what listens there, "
        "or choose another --port (0 takes any free one)\n"
    )


def test_an_address_that_is_not_ours_is_explained_in_one_line(tmp_path: Path) -> None:
    result = run_broker("--data", str(tmp_path), "--host", "192.0.2.1", "--port", "0")

    assert result.returncode == 1
    assert result.stderr.startswith("turnfold broker: cannot listen on 192.0.2.1:0 (")
    assert result.stderr.count("\n") == 1


def test_data_in_use_by_another_broker_is_explained_in_one_line(own_broker: BrokerProcess) -> None:
    result = run_broker("--data", str(own_broker.data), "--port", "0")

    assert result.returncode == 1
    assert result.stderr == (
        f"turnfold broker: another broker is using the data in {own_broker.data}: "
        "stop it, or choose another --data\n"
    )


def test_an_impossible_data_folder_is_explained_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()

    result = run_broker("--data", str(file / "data"), "--port", "0")

    assert result.returncode == 1
    assert result.stderr.startswith(f"turnfold broker: cannot use {file / 'data'} for data (")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_cleanly_even_with_clients_connected(
    own_broker: BrokerProcess, number: signal.Signals
) -> None:
    with socket.create_connection((own_broker.host, own_broker.port), timeout=5):
        os.kill(own_broker.pid, number)

        assert own_broker.wait() == 0
    assert own_broker.output().count("\n") == 1


def test_it_ends_with_the_process_that_started_it(tmp_path: Path, wait_until: WaitUntil) -> None:
    script = (
        "import os, sys\n"
        "from turnfold.embedded.broker.testing import BrokerProcess\n"
        "broker = BrokerProcess(sys.argv[1]).start()\n"
        "os.kill(os.getpid(), 9)\n"
    )

    subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60)

    wait_until(lambda: (tmp_path / "data" / "clean").exists())
    BrokerProcess(tmp_path).start().stop()  # nobody holds the data any more


async def test_everything_is_there_after_a_restart(own_broker: BrokerProcess, connect: Any) -> None:
    kafka = connect(own_broker.bootstrap)
    topic = await kafka.create_topic(partitions=3, retention_ms=1234567)
    await kafka.send(topic, b"a", b"b")
    consumer = await kafka.consumer(topic, group_id="group")
    await kafka.read(consumer, 2)
    await consumer.commit()
    await consumer.stop()

    for stop in (own_broker.stop, own_broker.kill9):
        stop()
        own_broker.start()
        kafka = connect(own_broker.bootstrap)
        assert [r.value for r in await kafka.read_all(topic)] == [b"a", b"b"]
        assert await kafka.partition_numbers(topic) == [0, 1, 2]
        offsets = await (await kafka.admin()).list_consumer_group_offsets("group")
        assert {tp.partition: o.offset for tp, o in offsets.items()}[0] == 2


async def test_a_group_goes_on_after_the_broker_was_killed(
    own_broker: BrokerProcess, connect: Any
) -> None:
    kafka = connect(own_broker.bootstrap)
    topic = await kafka.create_topic(partitions=2)
    consumers = [await kafka.consumer(topic, group_id="group") for _ in range(2)]
    await kafka.until(lambda: all(len(c.assignment()) == 1 for c in consumers), *consumers)
    await kafka.send(topic, b"before")
    (owner,) = [c for c in consumers if TopicPartition(topic, 0) in c.assignment()]
    assert (await owner.getone()).value == b"before"
    await owner.commit()

    await asyncio.to_thread(own_broker.kill9)
    await asyncio.to_thread(own_broker.start)
    await kafka.send(topic, b"after")

    values: list[bytes] = []
    async with asyncio.timeout(60):
        while b"after" not in values:
            for consumer in consumers:
                batches = await consumer.getmany(timeout_ms=50)
                values += [r.value for records in batches.values() for r in records]
    assert values == [b"after"]


async def test_a_tail_torn_by_a_crash_is_cut_and_writing_goes_on(
    own_broker: BrokerProcess, connect: Any
) -> None:
    kafka = connect(own_broker.bootstrap)
    topic = await kafka.create_topic()
    await kafka.send(topic, b"a", b"b")
    own_broker.kill9()
    (segment,) = own_broker.data.glob(f"topics/{topic}@*/0/*.log")
    whole = segment.read_bytes()
    segment.write_bytes(whole + whole[: len(whole) // 2 - 5])

    own_broker.start()

    assert "damaged bytes after the last whole batch" in own_broker.output()
    kafka = connect(own_broker.bootstrap)
    await kafka.send(topic, b"c")
    assert [r.value for r in await kafka.read_all(topic)] == [b"a", b"b", b"c"]


async def test_with_fsync_it_works_the_same(tmp_path: Path, connect: Any) -> None:
    with BrokerProcess(tmp_path, fsync=True) as broker:
        kafka = connect(broker.bootstrap)
        topic = await kafka.create_topic()
        await kafka.send(topic, b"a", b"b")
        broker.kill9()
        broker.start()
        assert [r.value for r in await connect(broker.bootstrap).read_all(topic)] == [b"a", b"b"]


async def test_topics_come_into_being_only_if_they_may(tmp_path: Path, connect: Any) -> None:
    with BrokerProcess(tmp_path, auto_create_topics=False) as broker:
        kafka = connect(broker.bootstrap)
        producer = await kafka.producer(request_timeout_ms=1000)

        with pytest.raises(KafkaError):
            await producer.send_and_wait("absent", b"x")

        assert await (await kafka.admin()).list_topics() == []
