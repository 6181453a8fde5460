"""Reads events, writes each trajectory exactly once, and appends an abort when a deadline passes.

A partition has one owner, whose transactional producer fences an older one. One transaction holds
the trajectories and dead letters of a poll together with two positions:

    low watermark   start of the oldest rollout that is open, or ended so lately that it may be
                    delivered again: where a restart begins to read
    through         next event to process: a restart folds what lies before it, silently

so a healer that is killed anywhere goes on as if nothing had happened, and needs no state but the
log. Time enters through the log as well: a deadline that has passed becomes a RolloutAborted event,
which is folded when it is read back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import closing
from typing import Any

import msgspec
from aiokafka.errors import KafkaError

from turnfold.healer import metrics
from turnfold.healer.client import TemporaryStore
from turnfold.healer.deadlines import Deadlines
from turnfold.healer.opened import NO_LIMIT, OpenRollouts
from turnfold.healer.partition import (
    Ended,
    Ignored,
    Opened,
    Outcome,
    PartitionFold,
    Rejected,
    Released,
    Revisions,
    RevisionWanted,
)
from turnfold.healer.records import trajectory_record
from turnfold.healer.settings import Settings
from turnfold.log.client import (
    FENCED,
    RENEW_S,
    BrokerUnavailable,
    MissingTopic,
    Producer,
    Reader,
    Record,
    Replaced,
    dead_letter,
)
from turnfold.log.memory import keep_freed_memory
from turnfold.log.service import Health
from turnfold.schemas.events import RolloutAborted
from turnfold.schemas.trajectories import Trajectory

log = logging.getLogger("turnfold.healer")

_RETRY_S = 2.0
_REPORT_EVERY_S = 0.2


class Position(msgspec.Struct, frozen=True):
    """What is committed for a partition besides the low watermark."""

    through: int
    """Next offset to process."""
    log_time: float = 0.0
    """Latest time of a record before the low watermark, Unix seconds."""


async def run(settings: Settings, health: Health, stop: asyncio.Event) -> None:
    """Heal the partitions that the settings name until `stop` is set.

    Raises BrokerUnavailable when no broker answers at the start, MissingTopic, SettingsError, or
    Replaced when another healer has taken over. A broker that goes away later is waited for.
    """
    keep_freed_memory()
    partitions = await _owned_partitions(settings)
    share = int(settings.max_open_mb * 1e6 / len(partitions))
    healers = [PartitionHealer(settings, partition, share) for partition in partitions]
    tasks = [asyncio.create_task(healer.run(stop)) for healer in healers]
    tasks.append(asyncio.create_task(_report(settings, healers, health, stop)))
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _owned_partitions(settings: Settings) -> list[int]:
    topics = settings.topics
    async with Reader(settings) as reader:
        for topic in (topics.trajectories, topics.dead_letters):
            await reader.partitions(topic)  # MissingTopic now, and not at the first result
        return settings.owned(await reader.partitions(topics.events))


async def _report(
    settings: Settings, healers: Sequence[PartitionHealer], health: Health, stop: asyncio.Event
) -> None:
    """Say whether all partitions are in hand, and now and then how far they are."""
    next_line = 0.0
    while not stop.is_set():
        waiting = [healer.partition for healer in healers if not healer.is_caught_up]
        if waiting:
            health.not_ready(f"reading the log of partitions {waiting}")
        else:
            health.ready()
        if time.monotonic() >= next_line:
            next_line = time.monotonic() + settings.report_every_s
            for healer in healers:
                log.info("%s", healer)
        await _pause(stop, _REPORT_EVERY_S)


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return


class PartitionHealer:
    """The owner of one partition of the events topic."""

    def __init__(self, settings: Settings, partition: int, max_open_bytes: int = NO_LIMIT) -> None:
        self.settings, self.topics = settings, settings.topics
        self.topic, self.partition = settings.topics.events, partition
        self.group = f"{settings.namespace}-healer"
        self.is_caught_up = False
        self.num_trajectories = 0
        self.num_dead_letters = 0
        self._max_open_bytes = max_open_bytes
        self._idle = TemporaryStore()
        self._reset()

    def _reset(self) -> None:
        self.fold = self._new_fold(log_time=0.0)
        self.position = 0
        """Next offset to read."""
        self.end = 0
        """Next offset that the log will give, when last asked."""
        self.through = 0
        """Outcomes of earlier records are written already."""
        self._committed = -1
        """`through` as it was last committed."""
        self._renew_at = 0.0
        """When it is committed again although it is the same, by the monotonic clock."""
        self._written: frozenset[tuple[str, int]] = frozenset()
        """Trajectories (rollout_id, revision) found although no position was committed."""
        self._deadlines = Deadlines(self.settings.max_open_s)

    def _new_fold(self, log_time: float) -> PartitionFold:
        self._idle.clear()
        opened = OpenRollouts(self._idle, self._max_open_bytes)
        return PartitionFold(self.topic, self.partition, log_time=log_time, opened=opened)

    def __str__(self) -> str:
        return (
            f"partition {self.partition}: at {self.position} of {self.end}, "
            f"{len(self.fold.open)} rollouts open ({self.fold.open.num_idle} idle on disk), "
            f"{self.num_trajectories} trajectories written, "
            f"{self.num_dead_letters} dead letters"
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Heal until `stop` is set; start over from the log when the broker went away."""
        with closing(self._idle):
            await self._heal_again_and_again(stop)

    async def _heal_again_and_again(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            self._reset()
            self.is_caught_up = False
            try:
                await self._heal(stop)
            except FENCED as error:
                raise Replaced(
                    f"healer of {self.topic}/{self.partition}",
                    "one healer for a partition (TURNFOLD_PARTITIONS)",
                ) from error
            except (KafkaError, BrokerUnavailable, MissingTopic) as error:
                log.warning("partition %d: starting over: %r", self.partition, error)
                await _pause(stop, _RETRY_S)

    async def _heal(self, stop: asyncio.Event) -> None:
        # The producer first: it ends a transaction that an older owner left open, so that the
        # position read after it is final.
        name = f"{self.group}-{self.partition}"
        async with (
            Producer(self.settings, transactional_id=name) as producer,
            Reader(self.settings, group=self.group) as reader,
        ):
            await self._restore(reader)
            next_look = next_commit = 0.0
            while not stop.is_set():
                records = await reader.poll(max_records=self.settings.max_poll_records)
                if records:
                    await self._process(producer, records)
                now = time.monotonic()
                seems_caught_up = not records and not self.is_caught_up
                if now >= next_look or seems_caught_up:
                    next_look = now + self.settings.deadline_check_s
                    await self._look_at_deadlines(reader)
                if now >= next_commit:
                    next_commit = now + self.settings.commit_every_s
                    await self._commit_progress(producer)
            await self._commit_progress(producer)

    async def _restore(self, reader: Reader) -> None:
        """Go to the low watermark; what lies between it and `through` was processed before."""
        place = (self.topic, self.partition)
        start = (await reader.start_offsets([place]))[place]
        committed = await reader.committed(*place)
        if committed is None:
            self.position = self.through = start
            self._written = await self._already_written()
        else:
            offset, metadata = committed
            self.position = max(offset, start)
            reached = msgspec.json.decode(metadata, type=Position)
            self.through = self._committed = reached.through
            self.fold = self._new_fold(reached.log_time)
            if offset < start:
                log.warning(
                    "partition %d: rollouts that began before offset %d have left the log; "
                    "what remains of them goes to the dead letters",
                    self.partition,
                    start,
                )
        await reader.assign({place: self.position})
        log.info(
            "partition %d: reading from %d, writing from %d",
            self.partition,
            self.position,
            self.through,
        )

    async def _already_written(self) -> frozenset[tuple[str, int]]:
        """Trajectories of this partition in the log.

        Kafka forgets the position of a healer that was stopped for a week; they are the memory then.
        """
        found = set()
        async with Reader(self.settings) as reader:
            await reader.assign_from_start([self.topics.trajectories])
            async for record in reader.read_to_end():
                headers = {name: value.decode() for name, value in record.headers}
                if "rollout_id" in headers:
                    found.add((headers["rollout_id"], int(headers.get("revision", 0))))
        return frozenset(found)

    async def _process(self, producer: Producer, records: Sequence[Record]) -> None:
        """Fold the records of one poll and write what came of them, in one transaction."""
        with metrics.FOLD_SECONDS.time():
            outcomes = [outcome for record in records for outcome in self._fold(record)]
        self.position = records[-1].offset + 1
        outcomes = await self._with_revisions(outcomes)
        results = [o for o in outcomes if isinstance(o, Released | Rejected)]
        if results:
            await self._write(producer, results)
        self.through = max(self.through, self.position)
        metrics.OPEN_ROLLOUTS.labels(self.partition).set(len(self.fold.open))
        metrics.IDLE_ROLLOUTS.labels(self.partition).set(self.fold.open.num_idle)

    def _fold(self, record: Record) -> list[Outcome]:
        """What came of a record, or nothing if that was written before a restart."""
        is_new = record.offset >= self.through
        outcomes = self.fold.feed(record) if is_new else self.fold.warm_up(record)
        for outcome in outcomes:
            match outcome:
                case Opened(started):
                    self._deadlines.opened(started, record.timestamp)
                case Released(trajectory):
                    self._deadlines.closed(trajectory.rollout_id)
                case Ended(rollout_id):
                    self._deadlines.closed(rollout_id)
        if not is_new:
            return []
        return [outcome for outcome in outcomes if not self._is_written(outcome)]

    def _is_written(self, outcome: Outcome) -> bool:
        match outcome:
            case Released(trajectory):
                return (trajectory.rollout_id, trajectory.revision) in self._written
            case _:
                return False

    async def _with_revisions(self, outcomes: list[Outcome]) -> list[Outcome]:
        """The outcomes, with what became of revised rewards of released rollouts.

        Their events are read again from the start of the partition: slow, rare, and always right.
        """
        wanted = {o.record.offset: o for o in outcomes if isinstance(o, RevisionWanted)}
        for outcome in outcomes:
            if isinstance(outcome, Ignored):
                metrics.IGNORED.labels(outcome.kind).inc()
        if not wanted:
            return outcomes
        revisions = Revisions(o.rollout_id for o in wanted.values())
        place, revised = (self.topic, self.partition), list[Outcome]()
        async with Reader(self.settings) as reader:
            await reader.assign(await reader.start_offsets([place]))
            async for record in reader.read_to_end():
                trajectory = revisions.feed(record)
                if record.offset in wanted:
                    revised += _revision(revisions, record, trajectory)
                if record.offset >= max(wanted):
                    break
        return [*outcomes, *(o for o in revised if not self._is_written(o))]

    async def _write(self, producer: Producer, results: Sequence[Released | Rejected]) -> None:
        """Write results and positions: all of them, or after a crash none."""
        restart = self.fold.restart_point(self.position)
        position = msgspec.json.encode(Position(self.position, restart.log_time)).decode()
        async with producer.transaction():
            await _all(self._send(producer, result) for result in results)
            await producer.commit_offset(
                self.group,
                self.topic,
                self.partition,
                restart.offset,
                position,
            )
        self._committed = self.position
        self._renew_at = time.monotonic() + RENEW_S
        for result in results:
            self._count(result)

    async def _commit_progress(self, producer: Producer) -> None:
        """Commit the position although no result asks for it, so that a restart reads less."""
        is_due = self._committed < self.through or time.monotonic() >= self._renew_at
        if is_due and self.through == self.position:
            await self._write(producer, [])

    async def _send(self, producer: Producer, result: Released | Rejected) -> None:
        if isinstance(result, Rejected):
            log.warning("dead letter %s: %s", result.record, result.reason)
            await dead_letter(producer, self.topics.dead_letters, result.record, result.reason)
            return
        record = trajectory_record(result.trajectory)
        await producer.send_raw(
            self.topics.trajectories, key=record.key, value=record.value, headers=record.headers
        )

    def _count(self, result: Released | Rejected) -> None:
        if isinstance(result, Rejected):
            self.num_dead_letters += 1
            metrics.DEAD_LETTERS.inc()
            return
        self.num_trajectories += 1
        metrics.count(result.trajectory)

    async def _look_at_deadlines(self, reader: Reader) -> None:
        """Append an abort for each rollout whose deadline passed without an end in the log."""
        place = (self.topic, self.partition)
        self.end = (await reader.end_offsets([place]))[place]
        # Transaction markers take offsets too: ask where the reader is, not what it last gave.
        position = await reader.position(*place)
        metrics.LAG.labels(self.partition).set(self.end - position)
        self.is_caught_up = self.is_caught_up or position >= self.end
        # All records were processed as they came, so what it moved past since were only markers.
        self.position, self.through = position, max(self.through, position)
        due = self._deadlines.due(time.time(), position, self.end)
        if due:
            await self._append_aborts(due)

    async def _append_aborts(self, rollout_ids: Sequence[str]) -> None:
        # In no transaction: while one is open, no reader sees what others append behind it, and a
        # gateway that reads a rollout back would miss turns. An abort that is sent twice counts once.
        async with Producer(self.settings) as producer:
            await _all(
                producer.send(
                    self.topic,
                    key=rollout_id,
                    message=deadline_passed(rollout_id, time.time()),
                    partition=self.partition,
                )
                for rollout_id in rollout_ids
            )
        self._deadlines.asked(rollout_ids)
        metrics.DEADLINES.inc(len(rollout_ids))
        log.info(
            "partition %d: %d rollouts passed their deadline", self.partition, len(rollout_ids)
        )


async def _all(sends: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Wait for every send, then raise the first failure: none is left behind unheard."""
    for outcome in await asyncio.gather(*sends, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


def deadline_passed(rollout_id: str, now: float) -> RolloutAborted:
    """The event that a passed deadline is; its id lets it count once, however often it is sent."""
    return RolloutAborted(
        rollout_id=rollout_id, event_id=f"{rollout_id}:deadline", at=now, reason="deadline"
    )


def _revision(revisions: Revisions, record: Record, trajectory: Trajectory | None) -> list[Outcome]:
    if trajectory is not None:
        return [Released(trajectory)]
    reason = revisions.reason_against(record)
    return [Rejected(record, reason)] if reason else []
