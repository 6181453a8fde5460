"""What a healer holds in memory while many rollouts are open, and how long it takes to start again.

    python benchmarks/log/healer.py
    python benchmarks/log/healer.py --megabytes 1000

Prints one JSON object. `open_rollouts`: resident memory that 10,000 open rollouts add to a process,
all in memory and with `max_open_mb` of them. `restart`: a log of so many megabytes, written in ten
hours, on an embedded broker, healed (`first_pass`, which writes the trajectories); then how long a
healer that is started again takes until it is ready: when every rollout has ended (`settled`), and
when one has been open in each partition since the first record, so that all of the log has to be
folded again (`worst`).
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable

import workload
from workload import Clock, Seconds

from turnfold.embedded.broker.testing import BrokerProcess
from turnfold.healer.app import run
from turnfold.healer.client import TemporaryStore
from turnfold.healer.opened import NO_LIMIT, OpenRollouts
from turnfold.healer.partition import PartitionFold
from turnfold.healer.settings import Settings
from turnfold.log.client import Producer, create_topics
from turnfold.log.records import Record
from turnfold.log.service import Health
from turnfold.schemas import codec
from turnfold.schemas.testing import started

TURN_BYTES = 9700
"""Of a turn of 1,000 tokens."""

HOURS = 10.0


def open_rollouts(number: int, num_turns: int, tokens: int, max_mb: float) -> dict[str, float]:
    """Turn about, one turn of each rollout after the other: no rollout is idle for long."""
    before = workload.resident_bytes()
    limit = int(max_mb * 1e6) if max_mb else NO_LIMIT
    opened = OpenRollouts(TemporaryStore(), limit)
    fold, clock = PartitionFold("bench.events", 0, opened=opened), Clock()
    num_bytes = offset = 0
    makers = [
        workload.rollout(f"r{n}", num_turns, tokens, is_finished=False) for n in range(number)
    ]
    for _ in range(num_turns + 1):
        for maker in makers:
            event = next(maker)
            record = Record(
                topic="bench.events",
                partition=0,
                offset=offset,
                key=event.rollout_id.encode(),
                value=codec.encode(event),
                timestamp=0.0,
            )
            num_bytes, offset = num_bytes + len(record.value or b""), offset + 1
            fold.feed(record)
    used = workload.resident_bytes() - before
    return {
        "number": number,
        "turns_each": num_turns,
        "max_open_mb": max_mb,
        "megabytes_of_events": round(num_bytes / 1e6, 1),
        "megabytes_resident": round(used / 1e6, 1),
        "kilobytes_a_rollout": round(used / 1e3 / number, 2),
        "idle_on_disk": opened.num_idle,
        "cpu_us_per_event": round(1e6 * clock.read().cpu / offset, 1),
    }


async def restart(megabytes: int) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder, BrokerProcess(folder) as broker:
        return {
            "settled": await healed(broker.bootstrap, "settled", megabytes),
            "worst": await healed(broker.bootstrap, "worst", megabytes, is_one_open=True),
        }


async def healed(
    bootstrap: str, namespace: str, megabytes: int, *, is_one_open: bool = False
) -> dict[str, float]:
    """Fill topics, heal them, and heal them again."""
    settings = Settings(bootstrap=bootstrap, namespace=namespace, commit_every_s=0.5)
    topics = settings.topics
    await create_topics(bootstrap, topics.specs(workload.NUM_PARTITIONS))
    if is_one_open:
        async with Producer(bootstrap) as producer:
            for partition in range(workload.NUM_PARTITIONS):
                event = started(f"open-{partition}")
                await producer.send(
                    topics.events, key=event.rollout_id, message=event, partition=partition
                )
    turns, tokens = 20, 1000
    rollouts = round(1e6 * megabytes / (turns * TURN_BYTES))
    sizes = argparse.Namespace(rollouts=rollouts, turns=turns, tokens_per_turn=tokens)
    num_bytes = await workload.fill(bootstrap, topics, sizes, hours=HOURS)
    first, again = await until_ready(settings), await until_ready(settings)
    return {
        "megabytes": round(num_bytes / 1e6, 1),
        "turns": rollouts * turns,
        "first_pass_s": round(first.wall, 2),
        "first_pass_cpu_s": round(first.cpu, 2),
        "restart_s": round(again.wall, 2),
        "restart_cpu_s": round(again.cpu, 2),
    }


async def until_ready(settings: Settings) -> Seconds:
    """Time from the start of a healer until it has caught up; then it is stopped."""
    health, stop, clock = Health("bench"), asyncio.Event(), Clock()
    running = asyncio.create_task(run(settings, health, stop))
    await until(lambda: health.is_ready or running.done())
    taken = clock.read()
    await asyncio.sleep(2 * settings.commit_every_s)
    stop.set()
    await running
    return taken


async def until(is_done: Callable[[], bool], deadline_s: float = 600.0) -> None:
    end = time.monotonic() + deadline_s
    while not is_done():
        assert time.monotonic() < end, f"not done after {deadline_s} s"
        await asyncio.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--open", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tokens-per-turn", type=int, default=300)
    parser.add_argument("--max-open-mb", type=float, default=50.0)
    parser.add_argument("--megabytes", type=int, default=200, help="of log to start again with")
    options = parser.parse_args()
    sizes = (options.open, options.turns, options.tokens_per_turn)
    # The bounded one first: what the other one takes is not given back.
    bounded = open_rollouts(*sizes, max_mb=options.max_open_mb)
    unbounded = open_rollouts(*sizes, max_mb=0.0)
    found = {
        "open_rollouts": [bounded, unbounded],
        "restart": asyncio.run(restart(options.megabytes)),
    }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
