"""`turnfold topics check` on a real broker with records that were written a while ago."""

import asyncio
import time
from collections.abc import Callable

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.records_to_delete import RecordsToDelete
from typer import Typer
from typer.testing import CliRunner, Result

from turnfold.embedded.broker.testing import RunningBroker
from turnfold.healer.records import trajectory_record
from turnfold.log.client import Producer, create_topics
from turnfold.replay.topics.cli import topics_check
from turnfold.schemas import codec
from turnfold.schemas.batches import BatchCut, GroupRef, Positions, RolloutRef
from turnfold.schemas.testing import trajectory
from turnfold.schemas.topics import Topics

HALF_AN_HOUR_MS = 1_800_000


def cut(rollout_id: str, partition: int, offset: int) -> BatchCut:
    ref = RolloutRef(
        rollout_id=rollout_id,
        index=0,
        partition=partition,
        offset=offset,
        digest="",
        reward=1.0,
        num_rows=1,
        num_tokens=4,
        num_trained=2,
        max_row_tokens=4,
        min_policy_version=0,
        max_policy_version=0,
    )
    return BatchCut(
        run_id="default",
        index=1,
        groups=(GroupRef(group_id="g1", dispatch_index=0, rollouts=(ref,)),),
        positions=Positions(tasks={}, trajectories={}),
        at=0.0,
        config_digest="",
    )


async def publish_an_old_batch(broker: RunningBroker, topics: Topics) -> TopicPartition:
    """A batch that nobody has trained, of a rollout that was written 20 minutes ago, and where."""
    await create_topics(broker.bootstrap, topics.specs(2, retention_ms=HALF_AN_HOUR_MS))
    record = trajectory_record(trajectory("r1"))
    async with Producer(broker.bootstrap) as producer:
        ack = await producer.send_raw(
            topics.trajectories,
            key=record.key,
            value=record.value,
            headers=record.headers,
            timestamp=time.time() - 1200,
        )
        manifest = codec.encode(cut("r1", ack.partition, ack.offset))
        await producer.send_raw(topics.batches, key=b"default", value=manifest)
    return TopicPartition(topics.trajectories, ack.partition)


async def expire(broker: RunningBroker, place: TopicPartition) -> None:
    """What retention does to the first record of a partition, without the wait."""
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap)
    await admin.start()
    await admin.delete_records({place: RecordsToDelete(before_offset=1)})
    await admin.close()


def checked(broker: RunningBroker, namespace: str) -> Result:
    app = Typer()
    app.command()(topics_check)
    options = ["--partitions", "2", "--retention-hours", "0.5", "--namespace", namespace]
    return CliRunner().invoke(app, [*options, "--bootstrap", broker.bootstrap])


def test_rows_of_an_untrained_batch_that_expire_soon_are_warned_of(
    broker: RunningBroker, new_namespace: Callable[..., str]
) -> None:
    expiring = new_namespace("expiring")
    asyncio.run(publish_an_old_batch(broker, Topics(namespace=expiring)))
    result = checked(broker, expiring)
    assert "warning: batch 1 of run default, not trained yet, names rollout r1" in result.output
    assert "keeps it 0.5 h, so it may go in" in result.output
    assert result.exit_code == 0


def test_rows_of_an_untrained_batch_that_have_expired_are_named_and_fail_the_check(
    broker: RunningBroker, new_namespace: Callable[..., str]
) -> None:
    expired = new_namespace("expired")
    place = asyncio.run(publish_an_old_batch(broker, Topics(namespace=expired)))
    asyncio.run(expire(broker, place))
    result = checked(broker, expired)
    assert (
        "LOST: batch 1 of run default, not trained yet, names rollout r1 at "
        f"{expired}.trajectories/{place.partition}@0, which has expired"
    ) in result.output
    assert result.exit_code == 1
