"""Reads tasks, trajectories and decisions; appends the next decision to `<ns>.batches`.

A decision takes effect when it is read back from the topic, never before: live, after a restart and
in a replay there is the same single path. The producer is transactional and fenced by the run, so
that of two assemblers alive by accident the older one cannot write any more.

A restart reads all decisions, and of tasks and trajectories what lies above the last checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import assert_never

from aiokafka.errors import KafkaError

from turnfold.assembler import metrics
from turnfold.assembler.checkpoint import Checkpoint, checkpoint_text, read_checkpoint
from turnfold.assembler.cut import Wait, decide, decide_early, is_too_early, strands_running
from turnfold.assembler.groups import GroupsState, TopicName
from turnfold.assembler.rollouts import summary
from turnfold.assembler.scoring import decide_evaluation
from turnfold.assembler.settings import Settings
from turnfold.assembler.waiting import awaited
from turnfold.log.client import (
    FENCED,
    RENEW_S,
    Producer,
    Reader,
    Record,
    Replaced,
    dead_letter,
    why_ended,
)
from turnfold.log.service import Health
from turnfold.schemas import codec
from turnfold.schemas.batches import (
    BatchCut,
    Decision,
    EvaluationCompleted,
    GroupDropped,
    GroupEvaluated,
)
from turnfold.schemas.policies import PolicyEvent, PolicyPublished
from turnfold.schemas.run import RunConfig
from turnfold.schemas.tasks import Task
from turnfold.schemas.trajectories import Trajectory

log = logging.getLogger("turnfold.assembler")

_MAX_RECORDS = 500
_CHECKPOINT_EVERY = 32
"""Decisions, or more when there are many groups in flight, all of which a checkpoint looks at."""
_GROUPS_A_DECISION = 500
_SAY_EVERY_S = 60.0


async def run(settings: Settings, config: RunConfig, health: Health, stop: asyncio.Event) -> None:
    """Decide until `stop` is set.

    Raises BrokerUnavailable, WorkEnded, MissingTopic, or Replaced when another has taken over.
    """
    name = f"{settings.namespace}-assembler-{config.run_id}"
    try:
        # Fence an older assembler before reading: then nothing of it can come after what is read.
        async with (
            Producer(settings, transactional_id=name) as producer,
            Reader(settings, group=name) as reader,
        ):
            await _Assembler(settings, config, producer, reader, name).run(health, stop)
    except FENCED as error:
        raise Replaced(f"assembler of run {config.run_id!r}", "one assembler a run") from error
    except KafkaError as error:
        raise why_ended(settings, error) from error


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
        self._held: BatchCut | None = None
        """The cut that was put off."""
        self._checkpoint = ""
        self._num_since_checkpoint = 0
        self._decided_at = self._said_at = 0.0
        self._renew_at = 0.0
        """When the checkpoint is saved although nothing was decided, by the monotonic clock."""

    async def run(self, health: Health, stop: asyncio.Event) -> None:
        await self._catch_up()
        log.info(
            "run %s: %d batches cut, %d groups running, %d complete",
            self.config.run_id,
            self.state.decisions.num_batches,
            self.state.num_running,
            self.state.num_complete,
        )
        self._decided_at = self._said_at = time.time()
        while not stop.is_set():
            # Whatever was in the log at `now` is read before a deadline is compared with `now`.
            now = time.time()
            while len(await self._poll()) == _MAX_RECORDS:
                pass
            self._show_counts()
            self._say_what_is_awaited(health, now)
            while (decision := self._next_decision(now)) is not None and not stop.is_set():
                await self._append(decision, stop)
            if time.monotonic() >= self._renew_at:
                await self._save_checkpoint()

    def _next_decision(self, now: float) -> Decision | None:
        """The next decision, or None when it is time to wait.

        When to take a decision is up to the clock anyway; what it says is not: a replay at the
        same positions and time finds the same.
        """
        decision = decide(self.state, self.config, now)
        self._held = None
        if isinstance(decision, BatchCut) and self._had_better_wait(decision, now):
            self._held = decision
        elif not isinstance(decision, Wait):
            return decision
        early = decide_early(self.state, self.config, now)
        return early or decide_evaluation(self.state, self.config, now)

    def _had_better_wait(self, cut: BatchCut, now: float) -> bool:
        if is_too_early(cut, self._published, self.max_ahead):
            return True
        return self.is_slow_awaited and strands_running(self.state, cut, now)

    async def _catch_up(self) -> None:
        """Decisions first: then most of the rest need not be read, or at least not decoded."""
        topics = self.topics
        await self.reader.assign_from_start([topics.batches, topics.policies])
        checkpoint = await self._last_checkpoint()
        num_decided = 0
        async for record in self.reader.read_to_end():
            await self._fold(record)
            if checkpoint and record.topic == topics.batches and record.offset < checkpoint.offset:
                num_decided = len(self.state.decisions.decided)
        is_known = checkpoint is not None and checkpoint.num_decided == num_decided
        await self._assign_all(checkpoint if is_known else None)
        async for record in self.reader.read_to_end():
            if not self._is_decided(record):
                await self._fold(record)

    async def _last_checkpoint(self) -> Checkpoint | None:
        found = await self.reader.committed(self.topics.batches, 0)
        if found is None:
            return None
        self._checkpoint = found[1]
        return read_checkpoint(found[1])

    async def _assign_all(self, checkpoint: Checkpoint | None) -> None:
        """Go on with decisions and policies; tasks and trajectories from where they are needed."""
        topics = self.topics
        pairs = [
            (topic, partition)
            for topic in (topics.tasks, topics.trajectories)
            for partition in await self.reader.partitions(topic)
        ]
        starts = await self.reader.start_offsets(pairs)
        ends = await self.reader.end_offsets(pairs)
        low = _low(checkpoint, topics.tasks, topics.trajectories)
        if checkpoint is not None and all(low[pair] <= ends.get(pair, -1) for pair in low):
            self.state.skip_to(checkpoint.positions)
            starts = {pair: max(start, low.get(pair, 0)) for pair, start in starts.items()}
        for topic in (topics.batches, topics.policies):
            for partition in await self.reader.partitions(topic):
                starts[topic, partition] = await self.reader.position(topic, partition)
        for topic, partition in starts:
            if (found := await self.reader.committed(topic, partition)) is not None:
                self._reported[topic, partition] = found[0]
        await self.reader.assign(starts)

    def _is_decided(self, record: Record) -> bool:
        """Whether a record is about a group that needs nothing more; its key is the group."""
        name = self._topic_names.get(record.topic)
        group_id = (record.key or b"").decode(errors="replace")
        if name is None or group_id not in self.state.decisions.decided:
            return False
        self.state.mark_read(name, record.partition, record.offset)
        return True

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
        self._decided_at = time.time()
        self._num_since_checkpoint += 1
        every = max(_CHECKPOINT_EVERY, len(self.state.open) // _GROUPS_A_DECISION)
        if self._num_since_checkpoint >= every:
            await self._save_checkpoint()

    async def _save_checkpoint(self) -> None:
        self._num_since_checkpoint = 0
        self._checkpoint = checkpoint_text(self.state, self._read_back)
        async with self.producer.transaction():
            await self.producer.commit_offset(
                self.name, self.topics.batches, 0, self._read_back, self._checkpoint
            )
            for place, offset in self._reported.items():
                if place != (self.topics.batches, 0):
                    await self.producer.commit_offset(self.name, *place, offset)
        self._renew_at = time.monotonic() + RENEW_S

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
                self._published = max(self._published, event.policy_version)
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
            # The offset of the batches topic carries the checkpoint, which is not to be lost.
            kept = self._checkpoint if record.topic == self.topics.batches else ""
            await self.producer.commit_offset(self.name, *place, record.offset + 1, kept)
        self._reported[place] = record.offset + 1

    def _show_counts(self) -> None:
        metrics.GROUPS.labels("running").set(self.state.num_running)
        metrics.GROUPS.labels("complete").set(self.state.num_complete)

    def _say_what_is_awaited(self, health: Health, now: float) -> None:
        """In the health text always, in the log once a minute when nothing is decided."""
        line = awaited(self.state, self._held, now, self._published, self.max_ahead)
        health.ready(line)
        if now - max(self._decided_at, self._said_at) >= _SAY_EVERY_S:
            log.info("no decision for %.0f s: %s", now - self._decided_at, line)
            self._said_at = now


def _low(
    checkpoint: Checkpoint | None, tasks: str, trajectories: str
) -> dict[tuple[str, int], int]:
    """Where a checkpoint says that reading is to begin."""
    if checkpoint is None:
        return {}
    low = {(tasks, part): offset for part, offset in checkpoint.positions.tasks.items()}
    for partition, offset in checkpoint.positions.trajectories.items():
        low[trajectories, partition] = offset
    return low


def _announce(decision: Decision) -> None:
    metrics.count(decision)
    match decision:
        case BatchCut():
            _announce_batch(decision)
        case GroupDropped():
            when = ", while it still ran" * decision.is_early
            log.info("group %s dropped%s: %s", decision.group_id, when, decision.reason)
        case GroupEvaluated():
            log.debug("group %s evaluated: %s", decision.group_id, decision.mean_reward)
        case EvaluationCompleted():
            mean = "none" if decision.mean_reward is None else f"{decision.mean_reward:.3f}"
            log.info(
                "evaluation of version %d: mean reward %s over %d of %d tasks, pass@k %s",
                decision.version,
                mean,
                decision.num_scored,
                decision.num_tasks,
                {k: round(chance, 3) for k, chance in decision.pass_at.items()},
            )
        case _:
            assert_never(decision)


def _announce_batch(decision: BatchCut) -> None:
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
