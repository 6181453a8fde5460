"""Reads what a run has left in the log and beside it."""

from __future__ import annotations

import asyncio

from aiokafka.errors import KafkaError

from turnfold.embedded.chaos import trainer
from turnfold.embedded.chaos.findings import AGAIN_HEADER, Left
from turnfold.embedded.chaos.site import NUM_TASKS, Site
from turnfold.log.client import Record, reader_from_start
from turnfold.log.settings import Kafka
from turnfold.schemas import codec
from turnfold.schemas.batches import Decision
from turnfold.schemas.dead_letters import DeadLetter
from turnfold.schemas.errors import UserError
from turnfold.schemas.events import Event
from turnfold.schemas.tasks import Task
from turnfold.schemas.trajectories import Trajectory


async def records_of(kafka: Kafka, topic: str) -> list[Record]:
    """All records of a topic; waits for a broker that is down."""
    while True:
        try:
            async with reader_from_start(kafka, topic) as reader:
                return [record async for record in reader.read_to_end()]
        except (TimeoutError, UserError, OSError, KafkaError):
            await asyncio.sleep(0.2)


async def trajectories_of(site: Site) -> list[Trajectory]:
    """In the order in which they were written, as far as partitions let one say."""
    records = await _first(site, site.topics.trajectories)
    records.sort(key=lambda record: record.timestamp)
    return [codec.decode(Trajectory, record.value or b"") for record in records]


async def decisions_of(site: Site) -> list[Decision]:
    records = await _first(site, site.topics.batches)
    return [codec.decode(Decision, record.value or b"") for record in records]


async def tasks_of(site: Site) -> list[Task]:
    records = await _first(site, site.topics.tasks)
    return [codec.decode(Task, record.value or b"") for record in records]


async def events_of(site: Site) -> list[Event]:
    records = await records_of(site.kafka, site.topics.events)
    return [codec.decode(Event, record.value or b"") for record in records]


async def dead_letters_of(site: Site) -> list[DeadLetter]:
    records = await records_of(site.kafka, site.topics.dead_letters)
    return [codec.decode(DeadLetter, record.value or b"") for record in records]


async def redelivered_rollouts(site: Site) -> set[str]:
    """Rollouts whose trajectory was appended a second time on purpose."""
    records = await records_of(site.kafka, site.topics.trajectories)
    return {
        codec.decode(Trajectory, record.value or b"").rollout_id
        for record in records
        if _is_again(record)
    }


def num_acknowledged(site: Site) -> int:
    """Turns and rewards, so far."""
    with site.record_file.open("rb") as file:
        return sum(1 for _ in file)


async def left_by(site: Site, undisturbed: frozenset[str]) -> Left:
    checkpoint = trainer.read_checkpoint(site.run_dir) or trainer.Checkpoint()
    lines = [line.split() for line in site.record_file.read_text().splitlines()]
    return Left(
        acknowledged_turns=tuple((words[1], words[2]) for words in lines if words[0] == "turn"),
        acknowledged_rewards=tuple(
            (words[1], float(words[2])) for words in lines if words[0] == "reward"
        ),
        events=tuple(await events_of(site)),
        trajectories=tuple(await trajectories_of(site)),
        decisions=tuple(await decisions_of(site)),
        tasks=tuple(await tasks_of(site)),
        num_rows=NUM_TASKS,
        dead_letters=tuple(await dead_letters_of(site)),
        undisturbed=undisturbed,
        max_staleness=site.config.max_staleness,
        num_batches_trained=checkpoint.batch,
        num_steps=checkpoint.num_steps,
        num_steps_a_batch=trainer.schedule_of(site.config).num_steps,
    )


async def _first(site: Site, topic: str) -> list[Record]:
    """The records of a topic without those that we appended again."""
    records = await records_of(site.kafka, topic)
    return [record for record in records if not _is_again(record)]


def _is_again(record: Record) -> bool:
    return any(name == AGAIN_HEADER for name, _ in record.headers)
