"""A replay of a log that grows while it is read, as that of a run which is under way."""

from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing

import pytest

from turnfold.embedded.broker.testing import RunningBroker
from turnfold.healer.records import trajectory_record
from turnfold.log.client import Producer, Record, create_topics
from turnfold.replay import app
from turnfold.replay.client import KafkaLog
from turnfold.replay.rebuild import Rebuild, Selection
from turnfold.schemas.testing import RolloutScript, trajectory
from turnfold.schemas.trajectories import Source


async def run_and_heal(source: KafkaLog, rollout_id: str) -> None:
    """A whole rollout in the log, with the trajectory that a healer writes of it."""
    script = RolloutScript(rollout_id)
    script.turn("t0", [1, 2], [3])
    script.finish(1.0)
    async with Producer(source.kafka) as producer:
        for event in script.events:
            await producer.send(source.topics.events, key=rollout_id, message=event)
    rebuilt = app.rebuilt(source, Rebuild(), Selection([rollout_id]), lambda _: None)
    (made,) = [trajectory async for trajectory in rebuilt]
    record = trajectory_record(made)
    async with Producer(source.kafka) as producer:
        await producer.send_raw(
            source.topics.trajectories, key=record.key, value=record.value, headers=record.headers
        )


class GrowingLog(KafkaLog):
    """One more rollout ends, and is healed, after each read."""

    num_grown = 0

    async def batches(
        self,
        *topics: str,
        partitions: Collection[int] | None = None,
        starts: Mapping[int, int] = {},
    ) -> AsyncGenerator[list[Record]]:
        read = super().batches(*topics, partitions=partitions, starts=starts)
        async with aclosing(read) as batches:
            async for records in batches:
                yield records
        self.num_grown += 1
        await run_and_heal(KafkaLog(self.kafka, self.topics.namespace), f"late-{self.num_grown}")


@pytest.fixture
async def source(broker: RunningBroker, new_namespace: Callable[[], str]) -> GrowingLog:
    found = GrowingLog(broker.bootstrap, new_namespace())
    await create_topics(broker.bootstrap, found.topics.specs(num_partitions=2))
    await run_and_heal(KafkaLog(found.kafka, found.topics.namespace), "first")
    return found


async def test_what_came_while_it_was_read_is_no_difference(source: GrowingLog) -> None:
    report = await app.replay(source)
    assert source.num_grown >= 3, "the decisions, the events, the trajectories"
    assert report.all_differences == []
    assert report.num_trajectories == 2, (
        "the first, and the one that came before the events were read"
    )


async def test_a_trajectory_whose_events_are_lost_is_a_difference(source: GrowingLog) -> None:
    lost = trajectory_record(
        trajectory("lost", source=Source(topic="t", partition=0, first_offset=900, last_offset=905))
    )
    async with Producer(source.kafka) as producer:
        await producer.send_raw(source.topics.trajectories, key=lost.key, value=lost.value)
    report = await app.replay(source)
    assert [str(difference) for difference in report.all_differences] == [
        "rollout lost: was written, but its events are not in the log"
    ]
