"""Replay of a log against a raw read of the same topic with the same client.

    python benchmarks/replay.py
    python benchmarks/replay.py --rollouts 400 --turns 40 --tokens-per-turn 500

Prints one JSON object: MB/s and turns/s of `raw` (aiokafka hands out bytes and nobody looks), of
`read` (the same records through our reader), and of `replay` (decoded, folded into trajectories,
digested) in one process and in several, and their ratios. Sizes are those of the records before
compression. `growth` folds records that are in memory with 1, 4 and 16 times the turns of a
rollout: the time of a turn should stay the same; `decode` is the part of it that msgpack takes.
`open_rollouts` is what a healer holds while that many rollouts are open.
"""

import argparse
import asyncio
import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from aiokafka import AIOKafkaConsumer, TopicPartition

from turnfold.embedded.broker.testing import BrokerProcess
from turnfold.healer.partition import PartitionFold, decode_event
from turnfold.log.client import Producer, create_topics
from turnfold.log.records import Record
from turnfold.replay import app
from turnfold.replay.client import KafkaLog
from turnfold.replay.rebuild import Rebuild
from turnfold.schemas import codec
from turnfold.schemas.events import Event, TurnCompleted
from turnfold.schemas.testing import finished, started
from turnfold.schemas.topics import Topics
from turnfold.schemas.wire import Logprobs, TokenIds

NUM_PARTITIONS = 4


class Seconds(NamedTuple):
    wall: float
    cpu: float
    """Of this process alone, which a busy machine disturbs less."""


class Clock:
    def __init__(self) -> None:
        self._began = Seconds(time.perf_counter(), time.process_time())

    def read(self) -> Seconds:
        return Seconds(
            time.perf_counter() - self._began.wall, time.process_time() - self._began.cpu
        )


def rollout(rollout_id: str, num_turns: int, tokens_per_turn: int) -> Iterator[Event]:
    """A conversation in which a third of the tokens are sampled."""
    rng = np.random.default_rng(len(rollout_id))
    yield started(rollout_id, group_id=f"g-{rollout_id}")
    num_output = tokens_per_turn // 3
    length = 0
    for index in range(num_turns):
        tail = rng.integers(0, 150_000, tokens_per_turn - num_output)
        yield TurnCompleted(
            rollout_id=rollout_id,
            event_id=f"{rollout_id}:t{index}",
            session_id="main",
            turn_id=f"t{index}",
            parent_turn_id=f"t{index - 1}" if index else None,
            shared_len=length,
            prompt_tail=TokenIds.of(tail),
            output_ids=TokenIds.of(rng.integers(0, 150_000, num_output)),
            logprobs=Logprobs.of(-rng.random(num_output)),
            num_prompt_tokens=length + len(tail),
        )
        length += tokens_per_turn
    yield finished(rollout_id)


async def fill(bootstrap: str, topics: Topics, options: argparse.Namespace) -> int:
    """Publish the rollouts and return the bytes of their records."""
    await create_topics(bootstrap, topics.specs(NUM_PARTITIONS))
    num_bytes = 0

    async def publish(producer: Producer, rollout_id: str) -> int:
        size = 0
        for event in rollout(rollout_id, options.turns, options.tokens_per_turn):
            await producer.send(topics.events, key=rollout_id, message=event)
            size += len(codec.encode(event))
        return size

    async with Producer(bootstrap) as producer:
        for first in range(0, options.rollouts, 16):
            names = [f"r{n:05d}" for n in range(first, min(first + 16, options.rollouts))]
            num_bytes += sum(await asyncio.gather(*(publish(producer, name) for name in names)))
    return num_bytes


async def raw_read(bootstrap: str, topic: str) -> tuple[Seconds, int]:
    """Time to fetch every record, and how many there were."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap,
        enable_auto_commit=False,
        isolation_level="read_committed",
        max_partition_fetch_bytes=32 * 1024 * 1024,
    )
    await consumer.start()
    places = [TopicPartition(topic, partition) for partition in range(NUM_PARTITIONS)]
    consumer.assign(places)
    await consumer.seek_to_beginning(*places)
    ends = await consumer.end_offsets(places)
    num_records, began = 0, Clock()
    while num_records < sum(ends.values()):
        found = await consumer.getmany(timeout_ms=200, max_records=500)
        num_records += sum(len(records) for records in found.values())
    seconds = began.read()
    await consumer.stop()
    return seconds, num_records


async def measure(options: argparse.Namespace) -> dict[str, object]:
    with (
        tempfile.TemporaryDirectory() as folder,
        BrokerProcess(folder) as broker,
    ):
        source = KafkaLog(broker.bootstrap, "bench")
        num_bytes = await fill(broker.bootstrap, source.topics, options)
        num_turns = options.rollouts * options.turns
        raw_s, num_records = min(
            [await raw_read(broker.bootstrap, source.topics.events) for _ in range(options.repeats)]
        )
        read_s = min([await timed_read(source, num_records) for _ in range(options.repeats)])
        replay_s = min([await timed_replay(source, num_records) for _ in range(options.repeats)])
        parallel_s = min(
            [
                await timed_replay(source, num_records, options.processes)
                for _ in range(options.repeats)
            ]
        )
    return {
        "num_records": num_records,
        "megabytes": round(num_bytes / 1e6, 1),
        "raw": rates(raw_s, num_bytes, num_turns),
        "read": rates(read_s, num_bytes, num_turns),
        "replay": rates(replay_s, num_bytes, num_turns),
        f"replay_in_{options.processes}_processes": rates(parallel_s, num_bytes, num_turns),
        "replay_over_raw": round(raw_s.wall / replay_s.wall, 3),
        "replay_over_raw_cpu": round(raw_s.cpu / replay_s.cpu, 3),
        "parallel_over_raw": round(raw_s.wall / parallel_s.wall, 3),
        "growth": [fold_in_memory(options, factor) for factor in (1, 4, 16)],
        "open_rollouts": open_rollouts(10_000),
    }


async def timed_read(source: KafkaLog, num_records: int) -> Seconds:
    began = Clock()
    found = [record.offset async for record in source.read(source.topics.events)]
    assert len(found) == num_records, len(found)
    return began.read()


async def timed_replay(source: KafkaLog, num_records: int, num_processes: int = 1) -> Seconds:
    began = Clock()
    report = await app.replay(source, is_compared=False, num_processes=num_processes)
    assert report.num_events == num_records, report
    return began.read()


def rates(seconds: Seconds, num_bytes: int, num_turns: int) -> dict[str, float]:
    return {
        "seconds": round(seconds.wall, 3),
        "cpu_seconds": round(seconds.cpu, 3),
        "megabytes_per_s": round(num_bytes / 1e6 / seconds.wall, 1),
        "turns_per_s": round(num_turns / seconds.wall),
    }


def fold_in_memory(options: argparse.Namespace, factor: int) -> dict[str, float]:
    """Decode and fold without a broker: the limit of one process."""
    num_turns = 25 * factor
    log = [
        Record(
            topic="bench.events",
            partition=0,
            offset=offset,
            key=event.rollout_id.encode(),
            value=codec.encode(event),
            timestamp=0.0,
        )
        for offset, event in enumerate(
            event
            for n in range(8)
            for event in rollout(f"r{n}", num_turns, min(options.tokens_per_turn, 1000))
        )
    ]
    decode_s = min(_cpu_seconds(lambda: [decode_event(record) for record in log]) for _ in range(3))

    def fold() -> int:
        rebuild = Rebuild()
        return sum(made.num_tokens for record in log for made in rebuild.feed(record))

    fold_s = min(_cpu_seconds(fold) for _ in range(3))
    return {
        "turns_per_rollout": num_turns,
        "decode_us_per_turn": round(1e6 * decode_s / (8 * num_turns), 1),
        "cpu_us_per_turn": round(1e6 * fold_s / (8 * num_turns), 1),
        "cpu_ns_per_token": round(1e9 * fold_s / fold(), 1),
    }


def _cpu_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def open_rollouts(number: int, num_turns: int = 10, tokens_per_turn: int = 300) -> dict[str, float]:
    """Resident memory that open rollouts of a partition add to a healer."""
    before = _resident_bytes()
    fold = PartitionFold("bench.events", 0)
    num_bytes = offset = 0
    for n in range(number):
        for event in islice(rollout(f"r{n}", num_turns, tokens_per_turn), num_turns + 1):
            value = codec.encode(event)
            num_bytes += len(value)
            offset += 1
            fold.feed(
                Record(
                    topic="bench.events",
                    partition=0,
                    offset=offset,
                    key=event.rollout_id.encode(),
                    value=value,
                    timestamp=0.0,
                )
            )
    used = _resident_bytes() - before
    return {
        "number": number,
        "turns_each": num_turns,
        "megabytes_of_events": round(num_bytes / 1e6, 1),
        "megabytes_resident": round(used / 1e6, 1),
        "kilobytes_a_rollout": round(used / 1e3 / number, 2),
    }


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens-per-turn", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2, help="the best of so many counts")
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()
