"""Replay of a log against a raw read of the same topic with aiokafka.

    python benchmarks/log/replay.py
    python benchmarks/log/replay.py --tokens-per-turn 1000 --megabytes 1000 --processes 4
    python benchmarks/log/replay.py --bootstrap 127.0.0.1:9092

Prints one JSON object, with one entry in `sizes` for each length of a turn (tokens that it adds):

    raw          aiokafka with its own settings hands out bytes, and nobody looks
    read         the same records through our reader
    decode       read, and decoded: what one process cannot be faster than
    replay       decoded, folded into trajectories, digested
    replay_in_N_processes, with the start of the processes (`start`: what that takes alone)

each from the connection on, as the best of `--repeats`, in seconds of wall time and of CPU (all
processes but the broker), MB/s of the records before compression, and turns/s. `over_raw` divides
the times of `raw` by theirs. `growth` replays logs of 1, 4 and 16 times the rollouts, and
`longer_rollouts` folds rollouts of 1, 4 and 16 times the turns from memory: the time of a turn
should stay the same. Without --bootstrap it starts an embedded broker; the topics of a broker that
runs are deleted in the end.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import ExitStack, aclosing, asynccontextmanager
from typing import Any

import workload
from aiokafka import AIOKafkaConsumer, TopicPartition
from workload import Clock, Seconds

from turnfold.embedded.broker.testing import BrokerProcess
from turnfold.healer.recorded import decode_for_fold
from turnfold.log.client import delete_topics
from turnfold.log.memory import keep_freed_memory
from turnfold.log.records import Record
from turnfold.replay import app
from turnfold.replay.client import KafkaLog
from turnfold.replay.rebuild import Rebuild
from turnfold.schemas import codec

Measured = Callable[[], Awaitable[Seconds]]


async def raw_read(bootstrap: str, topic: str, num_records: int) -> Seconds:
    """Time to fetch every record."""
    clock, num_read = Clock(), 0
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap, enable_auto_commit=False, isolation_level="read_committed"
    )
    await consumer.start()
    places = [TopicPartition(topic, partition) for partition in range(workload.NUM_PARTITIONS)]
    consumer.assign(places)
    await consumer.seek_to_beginning(*places)
    while num_read < num_records:
        found = await consumer.getmany(timeout_ms=200)
        num_read += sum(len(records) for records in found.values())
    seconds = clock.read()
    await consumer.stop()
    return seconds


async def read(source: KafkaLog, look: Callable[[Record], object] = lambda _: None) -> Seconds:
    clock = Clock()
    async with aclosing(source.batches(source.topics.events)) as batches:
        async for records in batches:
            for record in records:
                look(record)
    return clock.read()


async def replay(source: KafkaLog, num_processes: int = 1) -> Seconds:
    clock = Clock()
    await app.replay(source, is_compared=False, num_processes=num_processes)
    return clock.read()


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        bootstrap = options.bootstrap or stack.enter_context(BrokerProcess(folder)).bootstrap
        sizes = [await of_size(bootstrap, options, tokens) for tokens in options.tokens_per_turn]
        growth = [await growing(bootstrap, options, factor) for factor in (1, 4, 16)]
        load = [round(value, 1) for value in os.getloadavg()]
    return {
        "sizes": sizes,
        "growth": growth,
        "longer_rollouts": [in_memory(25 * factor) for factor in (1, 4, 16)],
        "load_average": load,
    }


@asynccontextmanager
async def filled(bootstrap: str, sizes: argparse.Namespace) -> AsyncIterator[tuple[KafkaLog, int]]:
    """A log with so many rollouts, and the bytes of its records."""
    source = KafkaLog(bootstrap, f"bench-{uuid.uuid4().hex[:8]}")
    try:
        yield source, await workload.fill(bootstrap, source.topics, sizes)
    finally:
        specs = source.topics.specs(workload.NUM_PARTITIONS)
        await delete_topics(bootstrap, [spec.name for spec in specs])


def sized(turns: int, tokens_per_turn: int, megabytes: float) -> argparse.Namespace:
    """A log of about so many megabytes."""
    rollout_bytes = turns * (300 + 9.4 * tokens_per_turn)
    rollouts = max(1, round(1e6 * megabytes / rollout_bytes))
    return argparse.Namespace(rollouts=rollouts, turns=turns, tokens_per_turn=tokens_per_turn)


async def of_size(
    bootstrap: str, options: argparse.Namespace, tokens_per_turn: int
) -> dict[str, Any]:
    """All readings of one log."""
    sizes = sized(options.turns, tokens_per_turn, options.megabytes)
    num_turns = sizes.rollouts * sizes.turns
    num_records = num_turns + 2 * sizes.rollouts
    nothing = sized(options.turns, tokens_per_turn, 0)
    async with (
        filled(bootstrap, sizes) as (source, num_bytes),
        filled(bootstrap, nothing) as (
            empty,
            _,
        ),
    ):
        ways: dict[str, Measured] = {
            "raw": lambda: raw_read(bootstrap, source.topics.events, num_records),
            "read": lambda: read(source),
            "decode": lambda: read(source, decode_for_fold),
            "replay": lambda: replay(source),
            f"replay_in_{options.processes}_processes": lambda: replay(source, options.processes),
            "start": lambda: replay(empty, options.processes),
        }
        # Turn about, so that whatever else the machine does hits all of them.
        rounds = [{name: await way() for name, way in ways.items()} for _ in range(options.repeats)]
    best = {name: fastest(taken[name] for taken in rounds) for name in ways}
    start = best.pop("start")
    return {
        "tokens_per_turn": tokens_per_turn,
        "bytes_per_turn": round(num_bytes / num_turns),
        "megabytes": round(num_bytes / 1e6, 1),
        "start_s": round(start.wall, 2),
        **{name: rates(taken, best["raw"], num_bytes, num_turns) for name, taken in best.items()},
    }


def fastest(taken: Iterable[Seconds]) -> Seconds:
    found = list(taken)
    return Seconds(min(s.wall for s in found), min(s.cpu for s in found))


def rates(taken: Seconds, raw: Seconds, num_bytes: int, num_turns: int) -> dict[str, float]:
    return {
        "wall_s": round(taken.wall, 3),
        "cpu_s": round(taken.cpu, 3),
        "megabytes_per_s": round(num_bytes / 1e6 / taken.wall, 1),
        "turns_per_s": round(num_turns / taken.wall),
        "us_per_turn": round(1e6 * taken.wall / num_turns, 1),
        "cpu_us_per_turn": round(1e6 * taken.cpu / num_turns, 1),
        "over_raw": round(raw.wall / taken.wall, 3),
        "over_raw_cpu": round(raw.cpu / taken.cpu, 3),
    }


async def growing(bootstrap: str, options: argparse.Namespace, factor: int) -> dict[str, float]:
    """Replay of a log with so many times the rollouts."""
    sizes = sized(options.turns, 300, options.megabytes / 16 * factor)
    async with filled(bootstrap, sizes) as (source, num_bytes):
        taken = fastest([await replay(source) for _ in range(options.repeats)])
    return {
        "rollouts": sizes.rollouts,
        "megabytes": round(num_bytes / 1e6, 1),
        "cpu_us_per_turn": round(1e6 * taken.cpu / (sizes.rollouts * sizes.turns), 1),
    }


def in_memory(num_turns: int, tokens_per_turn: int = 1000) -> dict[str, float]:
    """CPU of decoding and folding without a broker, by turn and by token."""
    keep_freed_memory()
    num_rollouts = 4
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
            for n in range(num_rollouts)
            for event in workload.rollout(f"r{n}", num_turns, tokens_per_turn)
        )
    ]

    def fold() -> None:
        rebuild = Rebuild()
        for record in log:
            for made in rebuild.feed(record):
                codec.digest(made)

    decode_s = min(cpu_s(lambda: [decode_for_fold(record) for record in log]) for _ in range(5))
    fold_s = min(cpu_s(fold) for _ in range(5))
    turns = num_rollouts * num_turns
    return {
        "turns_per_rollout": num_turns,
        "decode_us_per_turn": round(1e6 * decode_s / turns, 1),
        "cpu_us_per_turn": round(1e6 * fold_s / turns, 1),
        "cpu_ns_per_token": round(1e9 * fold_s / turns / tokens_per_turn, 1),
    }


def cpu_s(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--bootstrap", help="measure a broker that runs")
    parser.add_argument("--megabytes", type=float, default=100, help="of records in each log")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens-per-turn", type=int, nargs="+", default=[100, 1000, 4000])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="the best of so many counts")
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()
