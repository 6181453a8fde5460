"""The log that the measurements beside it read, and their clock."""

import argparse
import asyncio
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from turnfold.log.client import Producer, create_topics
from turnfold.schemas import codec
from turnfold.schemas.events import Event, RolloutStarted, TurnCompleted, VersionSpan
from turnfold.schemas.messages import ChatMessage
from turnfold.schemas.testing import finished, started
from turnfold.schemas.topics import Topics
from turnfold.schemas.wire import Logprobs, TokenIds

NUM_PARTITIONS = 4
CONCURRENT_ROLLOUTS = 64
CONVERSATIONS = 64
DEADLINE_S = 1800.0
CONTENT_TYPE = {"content-type": codec.MSGPACK}
CHARACTERS_A_TOKEN = 4


class Seconds(NamedTuple):
    wall: float
    cpu: float
    """Of this process and of the children that have ended; a busy machine disturbs it less."""


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began = self._now()

    def read(self) -> Seconds:
        now = self._now()
        return Seconds(now.wall - self._began.wall, now.cpu - self._began.cpu)

    @staticmethod
    def _now() -> Seconds:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = time.process_time() + children.ru_utime + children.ru_stime
        return Seconds(time.perf_counter(), cpu)


def rollout(
    rollout_id: str, num_turns: int, tokens_per_turn: int, *, is_finished: bool = True
) -> Iterator[Event]:
    """A conversation as a gateway writes it, with its texts; a third of the tokens are sampled."""
    rng = np.random.default_rng(int.from_bytes(rollout_id.encode(), "big"))
    yield started(rollout_id, group_id=f"g-{rollout_id}")
    num_output = tokens_per_turn // 3
    num_tail = tokens_per_turn - num_output
    length = 0
    for index in range(num_turns):
        yield TurnCompleted(
            rollout_id=rollout_id,
            event_id=f"{rollout_id}:t{index}",
            session_id="main",
            turn_id=f"t{index}",
            parent_turn_id=f"t{index - 1}" if index else None,
            shared_len=length,
            prompt_tail=TokenIds.of(rng.integers(0, 150_000, num_tail)),
            output_ids=TokenIds.of(rng.integers(0, 150_000, num_output)),
            logprobs=Logprobs.of(-rng.random(num_output)),
            num_prompt_tokens=length + num_tail,
            policy_versions=(VersionSpan(policy_version=0, start=0, end=num_output),),
            new_messages=(ChatMessage(role="user", content=text(rng, num_tail)),),
            reply=ChatMessage(role="assistant", content=text(rng, num_output)),
            continuity="extended" if index else "first",
        )
        length += tokens_per_turn
    if is_finished:
        yield finished(rollout_id)


def text(rng: np.random.Generator, num_tokens: int) -> str:
    """Text that compresses about as well as text does."""
    words = rng.integers(0, 1000, num_tokens * CHARACTERS_A_TOKEN // 5)
    return " ".join(f"{word:04d}" for word in words)


async def fill(
    bootstrap: str, topics: Topics, sizes: argparse.Namespace, *, hours: float = 0.0
) -> int:
    """Publish `sizes.rollouts` rollouts of `turns` of `tokens_per_turn`; bytes of their records.

    The log looks as if it had been written in the last so many hours. Some conversations are made,
    and published under other names until there are enough: to make them takes longer than to write
    them.
    """
    await create_topics(bootstrap, topics.specs(NUM_PARTITIONS))
    conversations = [
        list(rollout(f"r{n}", sizes.turns, sizes.tokens_per_turn))
        for n in range(min(sizes.rollouts, CONVERSATIONS))
    ]

    async def publish(producer: Producer, number: int) -> int:
        size, name = 0, f"r{number:06d}"
        at = time.time() - 3600 * hours * (1 - number / sizes.rollouts)
        for event in conversations[number % len(conversations)]:
            named = msgspec.structs.replace(
                event, rollout_id=name, event_id=f"{name}:{event.event_id}"
            )
            if isinstance(named, RolloutStarted):
                named = msgspec.structs.replace(named, deadline_at=at + DEADLINE_S)
            value = codec.encode(named)
            await producer.send_raw(
                topics.events,
                key=name.encode(),
                value=value,
                headers=CONTENT_TYPE,
                timestamp=at,
            )
            size += len(value)
        return size

    num_bytes = 0
    async with Producer(bootstrap) as producer:
        for first in range(0, sizes.rollouts, CONCURRENT_ROLLOUTS):
            numbers = range(first, min(first + CONCURRENT_ROLLOUTS, sizes.rollouts))
            num_bytes += sum(await asyncio.gather(*(publish(producer, n) for n in numbers)))
    return num_bytes


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
