"""Finds the oldest records that a run still needs, and whether retention leaves them."""

from __future__ import annotations

import time
from collections.abc import Iterable

from turnfold.log.client import Reader, topic_configs
from turnfold.log.settings import Kafka
from turnfold.replay.accounts.app import assignments
from turnfold.replay.assignments import Assignments
from turnfold.replay.client import KafkaLog
from turnfold.replay.topics.retention import Finding, Need, findings
from turnfold.schemas.batches import BatchCut

Place = tuple[str, int]


async def retention_findings(kafka: Kafka, namespace: str) -> list[Finding]:
    """What is lost or in danger; empty when the topics do not exist.

    Needed are the trajectories of batches that are not trained yet, and the events from the start of
    the oldest rollout that is open or was so lately.
    """
    log = KafkaLog(kafka, namespace)
    topics = log.topics
    kept = {
        name: int(config.get("retention.ms") or -1)
        for name, config in (
            await topic_configs(kafka, (topics.events, topics.trajectories))
        ).items()
    }
    if len(kept) < 2:
        return []
    async with Reader(kafka, group=f"{namespace}-healer") as reader:
        needed = _needed_by_batches(await assignments(log), topics.trajectories)
        for partition in await reader.partitions(topics.events):
            committed = await reader.committed(topics.events, partition)
            if committed is not None:
                place = (topics.events, partition)
                needed[place] = (committed[0], "a healer that is started again reads from here on,")
        needs = [await _need(reader, place, *what) for place, what in sorted(needed.items())]
    return findings([need for need in needs if need is not None], kept, time.time())


def _needed_by_batches(decided: Assignments, topic: str) -> dict[Place, tuple[int, str]]:
    """The lowest offset of each partition that a batch which is not trained yet names, and why."""
    needed: dict[Place, tuple[int, str]] = {}
    for (run_id, index), cut in sorted(decided.batches.items()):
        if decided.is_trained(run_id, index):
            continue
        for rollout_id, partition, offset in _refs(cut):
            known = needed.get((topic, partition))
            if known is None or offset < known[0]:
                why = f"batch {index} of run {run_id}, not trained yet, names rollout {rollout_id}"
                needed[topic, partition] = (offset, why)
    return needed


def _refs(cut: BatchCut) -> Iterable[tuple[str, int, int]]:
    return (
        (ref.rollout_id, ref.partition, ref.offset)
        for group in cut.groups
        for ref in group.rollouts
    )


async def _need(reader: Reader, place: Place, offset: int, why: str) -> Need | None:
    """None when there is no such record yet: nothing is open there."""
    topic, partition = place
    start = (await reader.start_offsets([place]))[place]
    end = (await reader.end_offsets([place]))[place]
    if offset >= end:
        return None
    written_at = None
    if offset >= start:
        await reader.assign({place: offset})
        records = await reader.poll(timeout_s=5.0, max_records=1)
        if not records:
            return None  # transaction markers only
        written_at = records[0].timestamp
    return Need(why=why, topic=topic, partition=partition, offset=offset, written_at=written_at)
