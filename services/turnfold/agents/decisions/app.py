"""Follows the assembler's decisions: a group that is decided on needs nothing more of its rollouts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiokafka.errors import KafkaError

from turnfold.log.client import BrokerUnavailable, Reader, Record
from turnfold.log.settings import Kafka
from turnfold.schemas import codec
from turnfold.schemas.batches import Decision
from turnfold.schemas.decisions import group_ids

log = logging.getLogger("turnfold.worker")

_RECONNECT_S = 1.0

OnGroup = Callable[[str], None]


@asynccontextmanager
async def following_decisions(kafka: Kafka, topic: str, on_group: OnGroup) -> AsyncIterator[None]:
    """Meanwhile, call `on_group` with each group that is put into a batch or dropped.

    From the end of the topic on: a group that is taken later cannot have been decided on before,
    unless it is past its deadline, and then it is not run.
    """
    positions = await _ends(kafka, topic)
    following = asyncio.create_task(_follow(kafka, positions, on_group))
    try:
        yield
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _ends(kafka: Kafka, topic: str) -> dict[tuple[str, int], int]:
    async with Reader(kafka) as reader:
        pairs = [(topic, partition) for partition in await reader.partitions(topic)]
        return await reader.end_offsets(pairs)


async def _follow(kafka: Kafka, positions: dict[tuple[str, int], int], on_group: OnGroup) -> None:
    while True:
        try:
            async with Reader(kafka, positions) as reader:
                while True:
                    for record in await reader.poll():
                        for group_id in _groups_of(record):
                            on_group(group_id)
                        positions[record.topic, record.partition] = record.offset + 1
        except (KafkaError, OSError, LookupError, BrokerUnavailable) as error:
            log.warning("decisions cannot be followed for now: %s", error)
        await asyncio.sleep(_RECONNECT_S)


def _groups_of(record: Record) -> list[str]:
    try:
        decision = codec.decode(Decision, record.value or b"", record.content_type)
    except codec.CodecError as error:
        log.warning("%s skipped: %s", record, error)  # the assembler keeps it
        return []
    return group_ids(decision)
