"""The broker as one object: its data directory, its topics, groups and transactions, and its chores."""

import asyncio
import fcntl
import logging
import time
from pathlib import Path
from typing import IO

from turnfold.embedded.broker.compaction import (
    finish_compaction,
    is_current,
    plan_compaction,
    write_compacted,
)
from turnfold.embedded.broker.groups import GroupCoordinator
from turnfold.embedded.broker.partition_log import PartitionLog
from turnfold.embedded.broker.store import Store
from turnfold.embedded.broker.topics import Topic, Topics
from turnfold.embedded.broker.transactions import TransactionCoordinator

NODE_ID = 1

logger = logging.getLogger(__name__)


class DataDirectoryInUse(Exception):
    """Another broker holds the data directory."""


class Broker:
    """An open data directory. `port` is what clients are told to connect to.

    Files: `lock` (held while open), `metadata.sqlite`, `topics/`, and `clean` after an orderly shutdown.
    """

    def __init__(self, data: Path, *, fsync: bool = False, auto_create_topics: bool = True) -> None:
        """Open or create the data directory. Raises DataDirectoryInUse, or OSError if it cannot be used.

        `auto_create_topics`: a topic that a client asks about comes into being, as with Apache Kafka's default.
        """
        data.mkdir(parents=True, exist_ok=True)
        self.port = 0
        self.auto_create_topics = auto_create_topics
        self._fsync = fsync
        self._lock = _lock(data)
        self._clean_mark = data / "clean"
        was_shut_down = self._clean_mark.exists()
        self._clean_mark.unlink(missing_ok=True)
        self.store = Store(data / "metadata.sqlite", fsync=fsync)
        self.cluster_id = self.store.cluster_id()
        self.topics = Topics(data / "topics", self.store, fsync=fsync, was_shut_down=was_shut_down)
        self.groups = GroupCoordinator(time.monotonic)
        self.transactions = TransactionCoordinator(self.store, self.topics, wall_clock_ms)

    def tick(self) -> None:
        """The frequent chores: timeouts of members, rebalances and transactions."""
        self.groups.tick()
        self.transactions.tick()

    async def clean(self) -> None:
        """The rare chores: retention, then compaction, partition by partition."""
        for topic in self.topics:
            for partition in list(topic.partitions):
                # Other work gets its turn between any two partitions, and may delete this one.
                await asyncio.sleep(0)
                if not partition.is_closed:
                    await self._clean_partition(topic, partition)

    def close(self) -> None:
        """Close all files, and note that it was done."""
        self.topics.close()
        self.store.close()
        self._clean_mark.touch()
        self._lock.close()

    async def _clean_partition(self, topic: Topic, partition: PartitionLog) -> None:
        """What goes wrong here must not keep the other partitions from being cleaned."""
        try:
            _expire(topic, partition)
            await self._compact(topic, partition)
        except Exception:
            logger.exception("cannot clean %s", partition.directory)

    async def _compact(self, topic: Topic, partition: PartitionLog) -> None:
        if not topic.config.is_compacted:
            return
        plan = plan_compaction(partition, topic.config, wall_clock_ms(), fsync=self._fsync)
        if plan is None:
            return
        try:
            batches = await asyncio.to_thread(write_compacted, plan)
        except Exception:
            # Files that were closed meanwhile, with their topic, cannot be read.
            if is_current(partition, plan):
                raise
            return
        finish_compaction(partition, plan, batches)


def wall_clock_ms() -> int:
    return int(time.time() * 1000)


def _expire(topic: Topic, partition: PartitionLog) -> None:
    if not topic.config.is_expiring:
        return
    retention_ms = topic.config.limit("retention.ms")
    oldest_ms = None if retention_ms is None else wall_clock_ms() - retention_ms
    partition.expire(oldest_ms=oldest_ms, max_size=topic.config.limit("retention.bytes"))


def _lock(data: Path) -> IO[str]:
    """Hold the directory for as long as the returned file is open; the kernel lets go when we die."""
    file = (data / "lock").open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise DataDirectoryInUse(str(data)) from error
    return file
