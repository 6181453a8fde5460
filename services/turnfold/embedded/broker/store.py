"""What the broker remembers besides the batches: topics, committed offsets, transactions; in sqlite.

Every method that writes has committed when it returns, so that killing the process loses nothing of it.
"""

import json
import sqlite3
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_TABLES = """
create table if not exists properties(name text primary key, value text);
create table if not exists topics(
    name text primary key, directory text, num_partitions int, config text);
create table if not exists offsets(
    group_id text, topic text, partition int, committed int, metadata text, committed_at real,
    primary key(group_id, topic, partition));
create table if not exists transactions(
    transactional_id text primary key, producer_id int, state text);
"""


class TopicRow(NamedTuple):
    """A topic as it is stored; `directory` is its folder under `topics/`."""

    name: str
    directory: str
    num_partitions: int
    config: dict[str, str]


class CommittedOffset(NamedTuple):
    """The next offset a group wants of one partition, and the text it left there."""

    group_id: str
    topic: str
    partition: int
    committed: int
    metadata: str


class Store:
    """The open database."""

    def __init__(self, path: Path, *, fsync: bool) -> None:
        self._database = sqlite3.connect(path, isolation_level=None)
        self._database.execute("pragma journal_mode = wal")
        # "normal" survives the death of the process, "full" a power cut too.
        self._database.execute(f"pragma synchronous = {'full' if fsync else 'normal'}")
        self._database.executescript(_TABLES)

    def close(self) -> None:
        self._database.close()

    def cluster_id(self) -> str:
        """The id of this broker's data, made up once."""
        stored = self._property("cluster_id")
        if stored is None:
            stored = uuid.uuid4().hex
            self._set_property("cluster_id", stored)
        return stored

    def next_producer_id(self) -> int:
        """A number that no producer had before."""
        number = int(self._property("next_producer_id") or 1000)
        self._set_property("next_producer_id", str(number + 1))
        return number

    def topics(self) -> list[TopicRow]:
        rows = self._database.execute(
            "select name, directory, num_partitions, config from topics order by name"
        )
        return [TopicRow(row[0], row[1], row[2], json.loads(row[3])) for row in rows]

    def save_topic(self, topic: TopicRow) -> None:
        """Add the topic, or replace what is stored of it."""
        self._database.execute(
            "insert or replace into topics values (?, ?, ?, ?)",
            (topic.name, topic.directory, topic.num_partitions, json.dumps(topic.config)),
        )

    def delete_topic(self, name: str) -> None:
        """Forget the topic and the offsets committed on it."""
        with self._database:
            self._database.execute("begin")
            self._database.execute("delete from topics where name = ?", (name,))
            self._database.execute("delete from offsets where topic = ?", (name,))

    def commit_offsets(self, offsets: Iterable[CommittedOffset]) -> None:
        """Store all of them, or none."""
        now = time.time()
        with self._database:
            self._database.execute("begin")
            self._database.executemany(
                "insert or replace into offsets values (?, ?, ?, ?, ?, ?)",
                [(*offset, now) for offset in offsets],
            )

    def committed_offsets(self, group_id: str) -> list[CommittedOffset]:
        rows = self._database.execute(
            "select group_id, topic, partition, committed, metadata from offsets"
            " where group_id = ? order by topic, partition",
            (group_id,),
        )
        return [CommittedOffset(*row) for row in rows]

    def groups_with_offsets(self) -> list[str]:
        rows = self._database.execute("select distinct group_id from offsets order by group_id")
        return [row[0] for row in rows]

    def delete_group_offsets(self, group_id: str) -> None:
        self._database.execute("delete from offsets where group_id = ?", (group_id,))

    def transactions(self) -> list[str]:
        """The stored state of every transactional id, as it was given to `save_transaction`."""
        return [row[0] for row in self._database.execute("select state from transactions")]

    def save_transaction(self, transactional_id: str, producer_id: int, state: str) -> None:
        self._database.execute(
            "insert or replace into transactions values (?, ?, ?)",
            (transactional_id, producer_id, state),
        )

    def _property(self, name: str) -> str | None:
        row = self._database.execute(
            "select value from properties where name = ?", (name,)
        ).fetchone()
        return row[0] if row else None

    def _set_property(self, name: str, value: str) -> None:
        self._database.execute("insert or replace into properties values (?, ?)", (name, value))
