"""The gateway's side of the log: append events, read a rollout back, follow what others append."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager, suppress
from typing import Self, cast

from aiokafka.errors import KafkaError, MessageSizeTooLargeError
from aiokafka.partitioner import murmur2

from turnfold.log.client import Ack, Producer, Reader, Record
from turnfold.log.connection import settings_of
from turnfold.log.settings import Kafka
from turnfold.schemas import codec
from turnfold.schemas.events import Event, RolloutEvent, RolloutStarted

log = logging.getLogger(__name__)

_REST_S = 0.2
"""Between two looks at what was appended: a look costs a millisecond of CPU, for one event or many."""


class LogUnavailable(Exception):
    """Kafka did not acknowledge in time; the event may or may not be in the log."""


class EventTooLarge(Exception):
    """The event is larger than the topic takes."""


class UnknownRollout(LookupError):
    """The log holds no such rollout where it was looked for."""


OnEvent = Callable[[int, Event], None]
"""(partition, event): called in log order within a partition."""


class EventLog:
    """Events of all rollouts on one topic.

    async with EventLog("127.0.0.1:9092", "turnfold.events", on_event) as events:
        ack = await events.append(started)
        history = [event async for event in events.read_rollout("r1", ack.partition, ack.offset)]

    From entering to leaving, `on_event` is called for every event that somebody else appends, by the
    task `following`, which ends only when `on_event` raises. It may come half a second late; who
    needs all that is there now calls `catch_up` first.
    """

    def __init__(self, kafka: Kafka, topic: str, on_event: OnEvent) -> None:
        self._kafka = settings_of(kafka)
        self.topic = topic
        self._on_event = on_event
        self._positions: dict[int, int] = {}
        self._own: set[tuple[int, int]] = set()
        """Our own events ahead of the tail: (partition, offset)."""
        self._moved = asyncio.Condition()
        self._num_waiting = 0
        """Callers of `catch_up`; while there are any, the tail takes no rest."""
        self._is_waited_for = asyncio.Event()
        self._read_backs = asyncio.Semaphore(4)
        self._closing = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opened:
            self._producer = await opened.enter_async_context(Producer(self._kafka))
            self._tail = await opened.enter_async_context(Reader(self._kafka))
            # A question on the tail's connection would wait behind its fetch, which waits for news.
            self._ends = await opened.enter_async_context(Reader(self._kafka))
            pairs = [(self.topic, part) for part in await self._tail.partitions(self.topic)]
            ends = await self._tail.end_offsets(pairs)
            await self._tail.assign(ends)
            self._positions = {part: offset for (_, part), offset in ends.items()}
            self.following = asyncio.create_task(self._follow())
            opened.push_async_callback(_cancelled, self.following)
            self._closing = opened.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._closing.aclose()

    async def append(self, event: RolloutEvent) -> Ack:
        """Return when Kafka has the event. Raises LogUnavailable or EventTooLarge."""
        try:
            ack = await self._producer.send(self.topic, key=event.rollout_id, message=event)
        except MessageSizeTooLargeError as error:
            raise EventTooLarge(f"an event of rollout {event.rollout_id} is too large") from error
        except (KafkaError, OSError) as error:
            raise LogUnavailable(f"Kafka at {self._kafka.bootstrap} did not acknowledge") from error
        if ack.offset >= self._positions.get(ack.partition, 0):
            self._own.add((ack.partition, ack.offset))
        return ack

    async def read_rollout(
        self, rollout_id: str, partition: int, offset: int
    ) -> AsyncGenerator[tuple[int, Event], None]:
        """(offset, event) of the rollout, from its RolloutStarted to the end the log has now.

        Raises UnknownRollout when that offset holds something else, and LogUnavailable.
        """
        has_begun = False
        async with aclosing(self._read(partition, offset)) as records:
            async for record in records:
                is_ours = record.key == rollout_id.encode()
                event = _decode(record) if is_ours else None
                if not has_begun and not isinstance(event, RolloutStarted):
                    break
                has_begun = True
                if event is not None:
                    yield record.offset, event
        if not has_begun:
            raise UnknownRollout(f"rollout {rollout_id} does not begin at {partition}@{offset}")

    async def find_rollout(self, rollout_id: str) -> tuple[int, int]:
        """(partition, offset) of its RolloutStarted, from a scan of its partition.

        Raises UnknownRollout, and LogUnavailable.
        """
        partition = murmur2(rollout_id.encode()) & 0x7FFFFFFF
        partition %= len(self._positions)
        async with aclosing(self._read(partition, None)) as records:
            async for record in records:
                is_ours = record.key == rollout_id.encode()
                if is_ours and isinstance(_decode(record), RolloutStarted):
                    return partition, record.offset
        raise UnknownRollout(f"rollout {rollout_id} is not in the log")

    async def _read(self, partition: int, offset: int | None) -> AsyncGenerator[Record, None]:
        """Records of a partition up to its end now; from its start when `offset` is None."""
        pair = (self.topic, partition)
        if partition not in self._positions:
            raise UnknownRollout(f"{self.topic} has no partition {partition}")
        async with self._read_backs:
            try:
                async with Reader(self._kafka) as reader:
                    first = (await reader.start_offsets([pair]))[pair]
                    if offset is not None and offset < first:
                        raise UnknownRollout(f"{partition}@{offset} is no longer in the log")
                    await reader.assign({pair: first if offset is None else offset})
                    async for record in reader.read_to_end():
                        yield record
            except (KafkaError, OSError) as error:
                raise LogUnavailable(
                    f"cannot read {self.topic} at {self._kafka.bootstrap}"
                ) from error

    async def catch_up(self, partition: int) -> None:
        """Return when `on_event` has seen all that the partition holds now. Raises LogUnavailable."""
        pair = (self.topic, partition)
        try:
            async with asyncio.timeout(10):
                end = (await self._ends.end_offsets([pair]))[pair]
                with self._haste():
                    async with self._moved:
                        await self._moved.wait_for(lambda: self._positions[partition] >= end)
        except (KafkaError, OSError, TimeoutError) as error:
            raise LogUnavailable(f"cannot read {self.topic} at {self._kafka.bootstrap}") from error

    @contextmanager
    def _haste(self) -> Iterator[None]:
        self._num_waiting += 1
        self._is_waited_for.set()
        try:
            yield
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:
                self._is_waited_for.clear()

    async def _rest(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_REST_S):
                await self._is_waited_for.wait()

    async def _follow(self) -> None:
        while True:
            try:
                records = await self._tail.poll()
            except (KafkaError, OSError) as error:
                log.warning("cannot follow %s: %s", self.topic, type(error).__name__)
                await asyncio.sleep(0.5)
                continue
            for record in records:
                if (record.partition, record.offset) in self._own:
                    self._own.discard((record.partition, record.offset))
                    continue
                event = _decode(record)
                if event is not None:
                    self._on_event(record.partition, event)
            await self._note_positions()
            await self._rest()

    async def _note_positions(self) -> None:
        for partition in self._positions:
            self._positions[partition] = await self._tail.position(self.topic, partition)
        async with self._moved:
            self._moved.notify_all()


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _decode(record: Record) -> Event | None:
    """The event, or None: a damaged record is the healer's to report."""
    try:
        return codec.decode(cast(type[Event], Event), record.value or b"", record.content_type)
    except codec.CodecError as error:
        log.warning("skipped %s: %s", record, error)
        return None
