"""Throughput and latency of the development broker, through the aiokafka client on the same machine.

    python benchmarks/broker.py
    python benchmarks/broker.py --bootstrap 127.0.0.1:9092 --only round_trip

Prints one JSON object. With --bootstrap it measures whatever broker listens there. The client takes a good
part of the time: compare figures of one machine with each other, not with those of another.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from turnfold.embedded.broker.testing import BrokerProcess

MIB = 1 << 20
Figures = dict[str, float]


async def create_topic(bootstrap: str, partitions: int) -> str:
    name = f"bench-{uuid.uuid4().hex[:8]}"
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    config = {"max.message.bytes": str(40 * MIB)}
    await admin.create_topics([NewTopic(name, partitions, 1, topic_configs=config)])
    await admin.close()
    return name


async def throughput(
    bootstrap: str, *, size: int, count: int, compression: str | None, idempotent: bool = False
) -> Figures:
    """Send `count` records of `size` bytes, half of it random, to 4 partitions; then read them."""
    topic = await create_topic(bootstrap, 4)
    value = os.urandom(size // 2) + b"a" * (size - size // 2)
    producer = AIOKafkaProducer(
        bootstrap_servers=bootstrap,
        linger_ms=5,
        max_batch_size=MIB,
        max_request_size=40 * MIB,
        compression_type=compression,
        enable_idempotence=idempotent,
    )
    await producer.start()
    began = time.perf_counter()
    for first in range(0, count, 2000):
        numbers = range(first, min(first + 2000, count))
        sent = [await producer.send(topic, value, key=b"%d" % (i % 64)) for i in numbers]
        await asyncio.gather(*sent)
    produced_s = time.perf_counter() - began
    await producer.stop()
    consumer = AIOKafkaConsumer(
        topic,
        bootstrap_servers=bootstrap,
        auto_offset_reset="earliest",
        max_partition_fetch_bytes=8 * MIB,
    )
    await consumer.start()
    began = time.perf_counter()
    received = 0
    while received < count:
        batches = await consumer.getmany(timeout_ms=1000)
        received += sum(len(records) for records in batches.values())
    consumed_s = time.perf_counter() - began
    await consumer.stop()
    return {
        "produce_records_per_s": count / produced_s,
        "produce_mb_per_s": count * size / produced_s / 1e6,
        "consume_records_per_s": count / consumed_s,
        "consume_mb_per_s": count * size / consumed_s / 1e6,
    }


async def round_trip(bootstrap: str, *, size: int, count: int) -> Figures:
    """One record at a time: until it is acknowledged, and until a waiting consumer has it."""
    topic = await create_topic(bootstrap, 1)
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, max_request_size=40 * MIB)
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap)
    await producer.start()
    await consumer.start()
    consumer.assign([TopicPartition(topic, 0)])
    await consumer.seek_to_beginning()
    value = os.urandom(size)
    acknowledged_ms, received_ms = [], []
    for _ in range(count):
        began = time.perf_counter()
        await producer.send_and_wait(topic, value)
        acknowledged_ms.append(1000 * (time.perf_counter() - began))
        await consumer.getone()
        received_ms.append(1000 * (time.perf_counter() - began))
    await producer.stop()
    await consumer.stop()
    return {**percentiles("ack", acknowledged_ms), **percentiles("received", received_ms)}


async def transactions(bootstrap: str, *, count: int) -> Figures:
    """Transactions of ten 1 KB records and one consumer offset."""
    topic = await create_topic(bootstrap, 1)
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=uuid.uuid4().hex)
    await producer.start()
    took_ms = []
    for number in range(count):
        began = time.perf_counter()
        async with producer.transaction():
            sent = [await producer.send(topic, b"x" * 1000) for _ in range(10)]
            await asyncio.gather(*sent)
            await producer.send_offsets_to_transaction({TopicPartition(topic, 0): number}, "bench")
        took_ms.append(1000 * (time.perf_counter() - began))
    await producer.stop()
    return percentiles("transaction", took_ms)


async def commits(bootstrap: str, *, count: int) -> Figures:
    """Commits of one consumer offset."""
    topic = await create_topic(bootstrap, 1)
    partition = TopicPartition(topic, 0)
    async with AsyncExitStack() as closing:
        consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, group_id=uuid.uuid4().hex)
        await consumer.start()
        closing.push_async_callback(consumer.stop)
        consumer.assign([partition])
        took_ms = []
        for number in range(count):
            began = time.perf_counter()
            await consumer.commit({partition: number})
            took_ms.append(1000 * (time.perf_counter() - began))
    return percentiles("commit", took_ms)


async def restart(broker: BrokerProcess, *, count: int) -> Figures:
    """Start-up time after kill -9 with `count` batches of 1 KB in the log."""
    topic = await create_topic(broker.bootstrap, 1)
    producer = AIOKafkaProducer(bootstrap_servers=broker.bootstrap, max_batch_size=100)
    await producer.start()
    for first in range(0, count, 2000):
        numbers = range(first, min(first + 2000, count))
        await asyncio.gather(*[await producer.send(topic, b"x" * 1000) for _ in numbers])
    await producer.stop()
    broker.kill9()
    began = time.perf_counter()
    broker.start()
    return {"start_s": time.perf_counter() - began}


def percentiles(name: str, values_ms: list[float]) -> Figures:
    cuts = statistics.quantiles(values_ms, n=100)
    return {f"{name}_p50_ms": cuts[49], f"{name}_p99_ms": cuts[98]}


def resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


Benchmark = Callable[[str], Awaitable[Figures]]
BENCHMARKS: dict[str, Benchmark] = {
    "throughput_1kb": lambda b: throughput(b, size=1024, count=20_000, compression=None),
    "throughput_1kb_lz4": lambda b: throughput(b, size=1024, count=20_000, compression="lz4"),
    "throughput_1kb_idempotent": lambda b: throughput(
        b, size=1024, count=20_000, compression=None, idempotent=True
    ),
    "throughput_50kb": lambda b: throughput(b, size=51_200, count=2000, compression=None),
    "throughput_50kb_zstd": lambda b: throughput(b, size=51_200, count=2000, compression="zstd"),
    "throughput_1mib": lambda b: throughput(b, size=MIB, count=200, compression=None),
    "round_trip_1kb": lambda b: round_trip(b, size=1024, count=400),
    "round_trip_50kb": lambda b: round_trip(b, size=51_200, count=400),
    "transactions": lambda b: transactions(b, count=200),
    "commits": lambda b: commits(b, count=300),
}


async def measure(bootstrap: str, only: list[str]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, benchmark in BENCHMARKS.items():
        if not only or name in only:
            figures = await benchmark(bootstrap)
            results[name] = {key: round(value, 3) for key, value in figures.items()}
            print(name, results[name], file=sys.stderr)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Benchmarks of the development broker.")
    parser.add_argument("--bootstrap", help="measure the broker at this host:port")
    parser.add_argument("--only", nargs="*", default=[], choices=[*BENCHMARKS, "restart"])
    arguments = parser.parse_args()
    if arguments.bootstrap:
        print(json.dumps(asyncio.run(measure(arguments.bootstrap, arguments.only)), indent=1))
        return
    with tempfile.TemporaryDirectory() as folder, BrokerProcess(folder) as broker:
        results = asyncio.run(measure(broker.bootstrap, arguments.only))
        results["resident_mb"] = round(resident_mb(broker.pid), 1)
        if not arguments.only or "restart" in arguments.only:
            results["restart_100k_batches"] = asyncio.run(restart(broker, count=100_000))
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
