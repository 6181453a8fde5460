"""The catalogue of topics: creating, growing, configuring and deleting them, and finding their partitions."""

import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from turnfold.embedded.broker.errors import ErrorCode, Refused
from turnfold.embedded.broker.partition_log import PartitionLog
from turnfold.embedded.broker.store import Store, TopicRow
from turnfold.embedded.broker.topic_config import TopicConfig

DEFAULT_NUM_PARTITIONS = 1
"""Partitions of a topic that comes into being because somebody asked for it (Kafka's own default)."""

_TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")


@dataclass
class Topic:
    """One topic and its open partitions."""

    name: str
    directory: str
    config: TopicConfig
    partitions: list[PartitionLog]


class Topics:
    """All topics of a data directory. Partitions are in `topics/<name>@<id>/<number>/`.

    The id keeps the files of a deleted topic apart from those of its successor of the same name.
    """

    def __init__(self, root: Path, store: Store, *, fsync: bool, was_shut_down: bool) -> None:
        self._root = root
        self._store = store
        self._fsync = fsync
        self._topics: dict[str, Topic] = {}
        root.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        for row in store.topics():
            self._open(row, was_shut_down=was_shut_down)

    def __iter__(self) -> Iterator[Topic]:
        return iter(list(self._topics.values()))

    def names(self) -> list[str]:
        return list(self._topics)

    def get(self, name: str) -> Topic:
        """Raises Refused (UNKNOWN_TOPIC_OR_PARTITION) if there is none."""
        topic = self._topics.get(name)
        if topic is None:
            raise Refused(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"no topic {name!r}")
        return topic

    def has(self, name: str) -> bool:
        return name in self._topics

    def find_partition(self, name: str, number: int) -> PartitionLog | None:
        topic = self._topics.get(name)
        if topic is None or not 0 <= number < len(topic.partitions):
            return None
        return topic.partitions[number]

    def partition(self, name: str, number: int) -> PartitionLog:
        """Raises Refused (UNKNOWN_TOPIC_OR_PARTITION) if there is none."""
        partition = self.find_partition(name, number)
        if partition is None:
            raise Refused(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"no partition {number} of topic {name!r}"
            )
        return partition

    def check_new(self, name: str, num_partitions: int, config: Mapping[str, str]) -> None:
        """Raises Refused if `create` would: INVALID_TOPIC, TOPIC_ALREADY_EXISTS, INVALID_PARTITIONS,
        INVALID_CONFIG."""
        if name in (".", "..") or not _TOPIC_NAME.fullmatch(name or ""):
            raise Refused(
                ErrorCode.INVALID_TOPIC,
                f"topic name {name!r}: expected 1 to 249 of the characters a-z A-Z 0-9 . _ -",
            )
        if name in self._topics:
            raise Refused(ErrorCode.TOPIC_ALREADY_EXISTS, f"Topic '{name}' already exists.")
        if num_partitions < 1:
            raise Refused(
                ErrorCode.INVALID_PARTITIONS, f"expected 1 partition or more, got {num_partitions}"
            )
        TopicConfig(config)

    def create(self, name: str, num_partitions: int, config: Mapping[str, str]) -> Topic:
        self.check_new(name, num_partitions, config)
        row = TopicRow(name, f"{name}@{uuid.uuid4().hex[:8]}", num_partitions, dict(config))
        self._store.save_topic(row)
        return self._open(row, was_shut_down=False)

    def delete(self, name: str) -> None:
        topic = self.get(name)
        self._store.delete_topic(name)
        del self._topics[name]
        for partition in topic.partitions:
            partition.delete()
        shutil.rmtree(self._root / topic.directory, ignore_errors=True)

    def check_growth(self, name: str, num_partitions: int) -> None:
        """Raises Refused if `grow` would: there is no such topic, or it has that many partitions."""
        current = len(self.get(name).partitions)
        if num_partitions <= current:
            raise Refused(
                ErrorCode.INVALID_PARTITIONS,
                f"Topic '{name}' has {current} partitions, expected more than that, "
                f"got {num_partitions}",
            )

    def grow(self, name: str, num_partitions: int) -> None:
        """Add partitions until there are `num_partitions`."""
        self.check_growth(name, num_partitions)
        topic = self.get(name)
        row = TopicRow(name, topic.directory, num_partitions, topic.config.own)
        self._store.save_topic(row)
        for number in range(len(topic.partitions), num_partitions):
            topic.partitions.append(self._open_partition(row, topic.config, number))

    def configure(self, name: str, config: Mapping[str, str]) -> None:
        """Replace the topic's own settings by `config`; what it leaves out goes back to the default."""
        topic = self.get(name)
        topic.config = TopicConfig(config)
        self._store.save_topic(
            TopicRow(name, topic.directory, len(topic.partitions), topic.config.own)
        )
        for partition in topic.partitions:
            partition.segment_bytes = topic.config.number("segment.bytes")

    def close(self) -> None:
        for topic in self._topics.values():
            for partition in topic.partitions:
                partition.close()

    def _open(self, row: TopicRow, *, was_shut_down: bool) -> Topic:
        config = TopicConfig(row.config)
        partitions = [
            self._open_partition(row, config, number, was_shut_down=was_shut_down)
            for number in range(row.num_partitions)
        ]
        topic = self._topics[row.name] = Topic(row.name, row.directory, config, partitions)
        return topic

    def _open_partition(
        self, row: TopicRow, config: TopicConfig, number: int, *, was_shut_down: bool = False
    ) -> PartitionLog:
        return PartitionLog(
            self._root / row.directory / str(number),
            segment_bytes=config.number("segment.bytes"),
            fsync=self._fsync,
            was_shut_down=was_shut_down,
        )

    def _remove_leftovers(self) -> None:
        """Remove the files of topics whose deletion a crash cut short."""
        known = {row.directory for row in self._store.topics()}
        for directory in self._root.iterdir():
            if directory.name not in known:
                shutil.rmtree(directory, ignore_errors=True)
