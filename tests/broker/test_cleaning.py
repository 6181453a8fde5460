"""Housekeeping of a whole broker: retention and compaction side by side with everything else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turnfold.embedded.broker import broker as broker_module
from turnfold.embedded.broker.broker import Broker
from turnfold.embedded.broker.compaction import write_compacted

MakeBatch = Callable[..., bytes]
MAX = 1 << 20
COMPACTED = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.1"}


def fill(broker: Broker, topic: str, make_batch: MakeBatch) -> None:
    """Three records with the same key, in the year 1970."""
    for value in (b"1", b"2", b"3"):
        broker.topics.partition(topic, 0).append(make_batch(value, key=b"key"), max_bytes=MAX)


def num_batches(broker: Broker, topic: str) -> int:
    log = broker.topics.partition(topic, 0)
    return sum(len(log.entries_of(segment)) for segment in log.segments)


async def test_each_topic_is_cleaned_by_its_own_policy(
    tmp_path: Path, make_batch: MakeBatch
) -> None:
    broker = Broker(tmp_path)
    policies = {"kept": {"retention.ms": "-1"}, "expiring": {}, "compacted": COMPACTED}
    for topic, config in policies.items():
        broker.topics.create(topic, 1, config)
        fill(broker, topic, make_batch)

    await broker.clean()

    assert {topic: num_batches(broker, topic) for topic in policies} == {
        "kept": 3,
        "expiring": 0,
        "compacted": 1,
    }
    broker.close()


async def test_a_topic_may_be_deleted_while_it_is_compacted(
    tmp_path: Path,
    make_batch: MakeBatch,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker = Broker(tmp_path)
    broker.topics.create("t", 1, COMPACTED)
    fill(broker, "t", make_batch)

    def delete_then_write(plan: Any) -> Any:
        broker.topics.delete("t")
        return write_compacted(plan)

    # The real one runs in a thread; this one deletes the topic just before it would read.
    monkeypatch.setattr(broker_module, "write_compacted", delete_then_write)
    monkeypatch.setattr("asyncio.to_thread", run_here)
    await broker.clean()

    assert caplog.records == []
    assert list((tmp_path / "topics").iterdir()) == []
    broker.close()


async def test_trouble_with_one_partition_leaves_the_others_cleaned(
    tmp_path: Path,
    make_batch: MakeBatch,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker = Broker(tmp_path)
    for topic in ("bad", "good"):
        broker.topics.create(topic, 1, COMPACTED)
        fill(broker, topic, make_batch)

    def fail_for_bad(plan: Any) -> Any:
        if "bad@" in str(plan.target):
            raise OSError(28, "No space left on device")
        return write_compacted(plan)

    monkeypatch.setattr(broker_module, "write_compacted", fail_for_bad)
    await broker.clean()

    assert (num_batches(broker, "bad"), num_batches(broker, "good")) == (3, 1)
    assert [record.message.startswith("cannot clean") for record in caplog.records] == [True]
    broker.close()


async def run_here(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)
