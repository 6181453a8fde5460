"""What waiting for the log adds to a turn: from a finished answer to its acknowledged event.

    python benchmarks/log/durability.py
    python benchmarks/log/durability.py --bootstrap 127.0.0.1:9092

Prints one JSON object: milliseconds from handing an event to the producer until Kafka has
acknowledged it (median and 99th percentile), and the CPU of the producing process, with one turn at
a time and with many at once. Without --bootstrap it starts an embedded broker, first as it is, then
with --fsync; all of it shares this machine.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
import uuid
from typing import Any

import workload

from turnfold.embedded.broker.testing import BrokerProcess
from turnfold.log.client import Producer, create_topics
from turnfold.schemas.events import Event
from turnfold.schemas.topics import Topics


async def measure(bootstrap: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    topics = Topics(namespace=f"bench-{uuid.uuid4().hex[:8]}")
    await create_topics(bootstrap, topics.specs(workload.NUM_PARTITIONS))
    async with Producer(bootstrap) as producer:
        return [
            await acknowledged(producer, topics.events, tokens, concurrent, options.turns)
            for tokens in options.tokens_per_turn
            for concurrent in options.concurrent
        ]


async def acknowledged(
    producer: Producer, topic: str, tokens_per_turn: int, concurrent: int, num_turns: int
) -> dict[str, Any]:
    """`concurrent` rollouts side by side, each waiting for one turn before it sends the next."""
    per_rollout = max(1, num_turns // concurrent)
    scripts: list[list[Event]] = [
        list(workload.rollout(f"r{number}", per_rollout, tokens_per_turn))
        for number in range(concurrent)
    ]
    waits: list[float] = []

    async def one(events: list[Event]) -> None:
        for event in events:
            began = time.perf_counter()
            await producer.send(topic, key=event.rollout_id, message=event)
            waits.append(1e3 * (time.perf_counter() - began))

    await one(scripts[0])  # connections, partitions, first batches
    waits.clear()
    cpu = time.process_time()
    await asyncio.gather(*map(one, scripts))
    cpu = time.process_time() - cpu
    return {
        "tokens_per_turn": tokens_per_turn,
        "at_once": concurrent,
        "median_ms": round(statistics.median(waits), 2),
        "p99_ms": round(statistics.quantiles(waits, n=100)[98], 2),
        "cpu_ms": round(1e3 * cpu / len(waits), 3),
    }


async def everything(options: argparse.Namespace) -> dict[str, Any]:
    if options.bootstrap:
        return {"broker": await measure(options.bootstrap, options)}
    found = {}
    for name, fsync in (("embedded", False), ("embedded_fsync", True)):
        with (
            tempfile.TemporaryDirectory() as folder,
            BrokerProcess(folder, fsync=fsync) as broker,
        ):
            found[name] = await measure(broker.bootstrap, options)
    return found | {"load_average": [round(value, 1) for value in os.getloadavg()]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--bootstrap", help="measure a broker that runs")
    parser.add_argument("--tokens-per-turn", type=int, nargs="+", default=[300, 1500])
    parser.add_argument("--concurrent", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--turns", type=int, default=2000)
    print(json.dumps(asyncio.run(everything(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()
