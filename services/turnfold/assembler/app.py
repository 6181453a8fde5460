"""Reads tasks, trajectories and decisions; appends the next decision to `<ns>.batches`.

A decision takes effect when it is read back from the topic, never before: live, after a restart and
in a replay there is the same single path. The producer is transactional and fenced by the run, so
that of two assemblers alive by accident the older one cannot write any more.
"""

from __future__ import annotations

import asyncio
import logging
import time

from aiokafka.errors import KafkaError

from turnfold.assembler import metrics
from turnfold.assembler.cut import Wait, decide, is_too_early, strands_running
from turnfold.assembler.groups import GroupsState, TopicName, summary
from turnfold.assembler.settings import Settings
from turnfold.log.client import (
    FENCED,
    BrokerUnavailable,
    Producer,
    Reader,
    Record,
    Replaced,
    dead_letter,
)
from turnfold.log.service import Health
from turnfold.schemas import codec
from turnfold.schemas.batches import BatchCut, Decision
from turnfold.schemas.policies import PolicyEvent, PolicyPublished
from turnfold.schemas.run import RunConfig
from turnfold.schemas.tasks import Task
from turnfold.schemas.trajectories import Trajectory

log = logging.getLogger("turnfold.assembler")

_MAX_RECORDS = 500


async def run(settings: Settings, config: RunConfig, health: Health, stop: asyncio.Event) -> None:
    """Decide until `stop` is set.

    Raises BrokerUnavailable, MissingTopic, or Replaced when another assembler has taken over.
    """
    name = f"{settings.namespace}-assembler-{config.run_id}"
    try:
        # Fence an older assembler before reading: then nothing of it can come after what is read.
        async with (
            Producer(settings.bootstrap, transactional_id=name) as producer,
            Reader(settings.bootstrap, group=name) as reader,
        ):
            await _Assembler(settings, config, producer, reader, name).run(health, stop)
    except FENCED as error:
        raise Replaced(
            f"another assembler of run {config.run_id!r} has taken over, so this one ends; "
            "run one assembler a run"
        ) from error
    except KafkaError as error:
        raise BrokerUnavailable(settings.bootstrap, repr(error)) from error


class _Assembler:
    def __init__(
        self, settings: Settings, config: RunConfig, producer: Producer, reader: Reader, name: str
    ) -> None:
        self.topics = topics = settings.topics
        self.max_ahead = settings.max_ahead
        self.is_slow_awaited = settings.is_slow_awaited and config.on_stale == "drop"
        self.config = config
        self.state = GroupsState(config)
        self.producer = producer
        self.reader = reader
        self.name = name
        self._topic_names: dict[str, TopicName] = {
            topics.tasks: "tasks",
            topics.trajectories: "trajectories",
        }
        self._reported: dict[tuple[str, int], int] = {}
        """Offset below which damaged records are in the dead letters already."""
        self._read_back = 0
        """Next offset of the batches topic."""
        self._published = 0
        """Version that the trainer published last."""

    async def run(self, health: Health, stop: asyncio.Event) -> None:
        await self._catch_up()
        log.info(
            "run %s: %d batches cut, %d groups running, %d complete",
            self.config.run_id,
            self.state.decisions.num_batches,
            self.state.num_running,
            self.state.num_complete,
        )
        health.ready()
        while not stop.is_set():
            # Whatever was in the log at `now` is read before a deadline is compared with `now`.
            now = time.time()
            while len(await self._poll()) == _MAX_RECORDS:
                pass
            self._show_counts()
            while (decision := self._next_decision(now)) is not None and not stop.is_set():
                await self._append(decision, stop)

    def _next_decision(self, now: float) -> Decision | None:
        """The next decision, or None when it is time to wait."""
        decision = decide(self.state, self.config, now)
        if isinstance(decision, Wait):
            return None
        # When to take a decision is up to the clock anyway; what it says is not: a replay at the
        # same positions and time finds the same.
        if isinstance(decision, BatchCut) and self._had_better_wait(decision, now):
            return None
        return decision

    def _had_better_wait(self, cut: BatchCut, now: float) -> bool:
        if is_too_early(cut, self._published, self.max_ahead):
            return True
        return self.is_slow_awaited and strands_running(self.state, cut, now)

    async def _catch_up(self) -> None:
        topics = [
            self.topics.batches,
            self.topics.tasks,
            self.topics.trajectories,
            self.topics.policies,
        ]
        await self.reader.assign_from_start(topics)
        for topic in topics:
            for partition in await self.reader.partitions(topic):
                if (found := await self.reader.committed(topic, partition)) is not None:
                    self._reported[topic, partition] = found[0]
        async for record in self.reader.read_to_end():
            await self._fold(record)

    async def _poll(self) -> list[Record]:
        records = await self.reader.poll(max_records=_MAX_RECORDS)
        for record in records:
            if (decision := await self._fold(record)) is not None:
                _announce(decision)
        return records

    async def _append(self, decision: Decision, stop: asyncio.Event) -> None:
        """Write a decision and read on until it has come back."""
        async with self.producer.transaction():
            ack = await self.producer.send(
                self.topics.batches, key=self.config.run_id, message=decision, partition=0
            )
        while self._read_back <= ack.offset and not stop.is_set():
            await self._poll()

    async def _fold(self, record: Record) -> Decision | None:
        """Take in one record; the decision, if it is one that counts."""
        if record.topic == self.topics.batches:
            self._read_back = record.offset + 1
        try:
            return self._take(record)
        except codec.CodecError as error:
            if (name := self._topic_names.get(record.topic)) is not None:
                self.state.mark_read(name, record.partition, record.offset)
            # Damaged policies are the relay's to report.
            if record.topic != self.topics.policies:
                await self._report(record, str(error))
        return None

    def _take(self, record: Record) -> Decision | None:
        """Raises CodecError for a record that is no message of its topic."""
        value, content_type = record.value or b"", record.content_type
        if record.topic == self.topics.batches:
            decision: Decision = codec.decode(Decision, value, content_type)
            return decision if self.state.add_decision(decision) else None
        if record.topic == self.topics.policies:
            event = codec.decode(PolicyEvent, value, content_type)
            if isinstance(event, PolicyPublished) and event.run_id == self.config.run_id:
                self._published = event.policy_version
        elif record.topic == self.topics.tasks:
            task = codec.decode(Task, value, content_type)
            self.state.add_task(task, record.partition, record.offset)
        else:
            trajectory = codec.decode(Trajectory, value, content_type)
            # Made here and not taken from the header: a wrong one would stop the trainer for good.
            digest = codec.digest(trajectory)
            self.state.add_rollout(summary(trajectory, record.partition, record.offset, digest))
        return None

    async def _report(self, record: Record, reason: str) -> None:
        """Keep a damaged record in the dead letters, once however often the log is read again."""
        place = (record.topic, record.partition)
        if record.offset < self._reported.get(place, 0):
            return
        log.warning("%s goes to %s: %s", record, self.topics.dead_letters, reason)
        metrics.DEAD_LETTERS.inc()
        async with self.producer.transaction():
            await dead_letter(self.producer, self.topics.dead_letters, record, reason)
            await self.producer.commit_offset(self.name, *place, record.offset + 1)
        self._reported[place] = record.offset + 1

    def _show_counts(self) -> None:
        metrics.GROUPS.labels("running").set(self.state.num_running)
        metrics.GROUPS.labels("complete").set(self.state.num_complete)


def _announce(decision: Decision) -> None:
    metrics.count(decision)
    if not isinstance(decision, BatchCut):
        log.info("group %s dropped: %s", decision.group_id, decision.reason)
        return
    refs = [ref for group in decision.groups for ref in group.rollouts]
    log.info(
        "batch %d: %d groups, %d rollouts, %d rows, mean reward %.3f, staleness up to %d",
        decision.index,
        len(decision.groups),
        len(refs),
        decision.num_rows,
        sum(ref.reward for ref in refs) / len(refs),
        decision.policy_version - min(ref.min_policy_version for ref in refs),
    )
