"""The healer as a process against a real broker: killed, doubled, late, and given bad input."""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from turnfold.embedded.broker.testing import BrokerProcess, RunningBroker
from turnfold.healer.app import deadline_passed
from turnfold.healer.partition import PartitionFold, Released, Revisions
from turnfold.healer.recorded import decode_event
from turnfold.log.client import Producer, Reader, Record, create_topics, reader_from_start
from turnfold.schemas import codec
from turnfold.schemas.dead_letters import DeadLetter
from turnfold.schemas.events import Event, RolloutAborted
from turnfold.schemas.testing import RolloutScript, finished, revised, started, turn
from turnfold.schemas.topics import Topics
from turnfold.schemas.trajectories import Trajectory

M = TypeVar("M")

DEADLINE_S = 60.0
NUM_PARTITIONS = 2


@pytest.fixture
async def topics(broker: RunningBroker, new_namespace: Callable[[], str]) -> Topics:
    """Fresh topics."""
    found = Topics(namespace=new_namespace())
    await create_topics(broker.bootstrap, found.specs(num_partitions=NUM_PARTITIONS))
    return found


@pytest.fixture
async def producer(broker: RunningBroker) -> AsyncIterator[Producer]:
    async with Producer(broker.bootstrap) as found:
        yield found


class Healer:
    """A healer process of a test's namespace; its output is in a file."""

    def __init__(self, broker: RunningBroker, topics: Topics, folder: Path) -> None:
        self.output = folder / "healer.log"
        self.environment = {
            **os.environ,
            "TURNFOLD_BOOTSTRAP": broker.bootstrap,
            "TURNFOLD_NAMESPACE": topics.namespace,
            "TURNFOLD_DEADLINE_CHECK_S": "0.1",
            "TURNFOLD_COMMIT_EVERY_S": "0.5",
            "TURNFOLD_MAX_POLL_RECORDS": "20",
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, **environment: str) -> subprocess.Popen[bytes]:
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from turnfold.healer.cli import healer; healer()"],
                env={**self.environment, **environment},
                stdout=output,
                stderr=output,
            )
        return self.process

    def kill9(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def said(self) -> str:
        return self.output.read_text()


@contextmanager
def healer_process(broker: RunningBroker, topics: Topics, folder: Path) -> Iterator[Healer]:
    healer = Healer(broker, topics, folder)
    try:
        yield healer
    finally:
        if healer.process is not None:
            healer.kill9()


@pytest.fixture
def healer(broker: RunningBroker, topics: Topics, tmp_path: Path) -> Iterator[Healer]:
    with healer_process(broker, topics, tmp_path) as found:
        yield found


async def publish(producer: Producer, topics: Topics, events: Iterable[Event]) -> None:
    for event in events:
        await producer.send(topics.events, key=event.rollout_id, message=event)


async def read(broker: RunningBroker, topic: str) -> list[Record]:
    async with reader_from_start(broker.bootstrap, topic) as reader:
        return [record async for record in reader.read_to_end()]


async def decoded(broker: RunningBroker, topic: str, kind: type[M]) -> list[M]:
    return [codec.decode(kind, record.value or b"") for record in await read(broker, topic)]


async def until(
    broker: RunningBroker, topic: str, kind: type[M], is_enough: Callable[[list[M]], bool]
) -> list[M]:
    """The messages of a topic as soon as there are enough of them."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        found = await decoded(broker, topic, kind)
        if is_enough(found):
            return found
        await asyncio.sleep(0.1)
    raise AssertionError(f"{topic}: not enough after {DEADLINE_S} s: {found}")


async def replayed(broker: RunningBroker, topics: Topics) -> list[Trajectory]:
    """The trajectories that the log gives when it is folded from its start, without revisions."""
    folds = {p: PartitionFold(topics.events, p) for p in range(NUM_PARTITIONS)}
    return [
        outcome.trajectory
        for record in await read(broker, topics.events)
        for outcome in folds[record.partition].feed(record)
        if isinstance(outcome, Released)
    ]


def digests(trajectories: Iterable[Trajectory]) -> dict[tuple[str, int], str]:
    return {(t.rollout_id, t.revision): codec.digest(t) for t in trajectories}


def rollout(rollout_id: str, num_turns: int = 3) -> list[Event]:
    script = RolloutScript(rollout_id, group_id=f"g-{rollout_id}")
    for index in range(num_turns):
        parent = f"t{index - 1}" if index else None
        prompt = [*script.sequence(parent), 50 + index] if parent else [1, 2]
        script.turn(f"t{index}", prompt, [10 + index], parent=parent)
    script.finish()
    return script.events


@pytest.mark.field_case("verl#7579")
async def test_a_healer_killed_again_and_again_writes_each_trajectory_once(
    broker: RunningBroker, topics: Topics, producer: Producer, healer: Healer
) -> None:
    num_rollouts = 120
    events = interleaved([rollout(f"r{n:03d}", 1 + n % 5) for n in range(num_rollouts)])
    num_written = num_kills = 0
    healer.start()
    while events:
        part, events = events[:100], events[100:]
        await publish(producer, topics, part)
        is_more = partial(has_more_than, num_written)
        num_written = len(await until(broker, topics.trajectories, Trajectory, is_more))
        healer.kill9()  # it has written some of what it just read, and not yet the rest
        healer.start()
        num_kills += 1
    found = await until(
        broker, topics.trajectories, Trajectory, lambda t: len(digests(t)) == num_rollouts
    )
    assert num_kills >= 5
    assert len(found) == num_rollouts
    assert digests(found) == digests(await replayed(broker, topics))
    assert await read(broker, topics.dead_letters) == []


def interleaved(rollouts: list[list[Event]], num_open: int = 12) -> list[Event]:
    """All events, those of `num_open` rollouts at a time in random order."""
    order, merged = random.Random(7), list[Event]()
    running, waiting = rollouts[:num_open], rollouts[num_open:]
    while running:
        events = order.choice(running)
        merged.append(events.pop(0))
        if not events:
            running.remove(events)
            running += [waiting.pop(0)] if waiting else []
    return merged


def has_more_than(number: int, found: list[Trajectory]) -> bool:
    return len(found) > number


async def test_a_restart_writes_nothing_again_and_reads_from_the_oldest_open_rollout(
    broker: RunningBroker, topics: Topics, producer: Producer, healer: Healer
) -> None:
    healer.start()
    await publish(producer, topics, [*rollout("a"), *rollout("b")[:-1]])
    await until(broker, topics.trajectories, Trajectory, lambda t: len(t) == 1)
    healer.kill9()
    await publish(producer, topics, [finished("b"), *rollout("c")])
    healer.start()
    found = await until(broker, topics.trajectories, Trajectory, lambda t: len(t) >= 3)
    assert sorted(t.rollout_id for t in found) == ["a", "b", "c"]
    assert digests(found) == digests(await replayed(broker, topics))


async def test_a_rollout_that_is_delivered_again_after_a_restart_writes_nothing(
    broker: RunningBroker, topics: Topics, producer: Producer, healer: Healer
) -> None:
    events = [started("a", group_id="g-a", deadline_at=time.time() + 60), *rollout("a")[1:]]
    healer.start()
    await publish(producer, topics, events)
    await until(broker, topics.trajectories, Trajectory, lambda t: len(t) == 1)
    healer.kill9()
    healer.start()
    await publish(producer, topics, [*events, *rollout("b")])
    found = await until(broker, topics.trajectories, Trajectory, lambda t: len(t) >= 2)
    assert sorted(t.rollout_id for t in found) == ["a", "b"]
    assert digests(found) == digests(await replayed(broker, topics))


async def test_a_healer_whose_position_kafka_forgot_writes_nothing_again(
    broker: RunningBroker, topics: Topics, producer: Producer, healer: Healer
) -> None:
    await publish(producer, topics, rollout("a"))
    for trajectory in await replayed(broker, topics):
        await producer.send(
            topics.trajectories,
            key=trajectory.group_id,
            message=trajectory,
            headers={"rollout_id": trajectory.rollout_id, "revision": "0"},
        )
    healer.start()
    await publish(producer, topics, rollout("b"))
    found = await until(broker, topics.trajectories, Trajectory, lambda t: len(t) >= 2)
    assert sorted(t.rollout_id for t in found) == ["a", "b"]


@pytest.mark.field_case("rllm#586")
async def test_a_passed_deadline_becomes_an_event_and_closes_the_rollout(
    broker: RunningBroker, topics: Topics, producer: Producer, healer: Healer
) -> None:
    events = rollout("gone")
    begun = started("gone", group_id="g-gone", deadline_at=time.time() - 1)
    await publish(producer, topics, [begun, *events[1:-1]])
    healer.start()
    (trajectory,) = await until(broker, topics.trajectories, Trajectory, lambda t: len(t) >= 1)
    assert (trajectory.status, trajectory.reason) == ("aborted", "deadline")
    assert trajectory.ledger.dropped == {"rollout_aborted:deadline": 3}
    events = [decode_event(record) for record in await read(broker, topics.events)]
    aborts = [event for event in events if isinstance(event, RolloutAborted)]
    assert [abort.event_id for abort in aborts] == ["gone:deadline"]
    assert digests([trajectory]) == digests(await replayed(broker, topics))
    # A transaction would leave a marker, and hide from readers what comes behind it while it is open.
    assert sum((await ends(broker, topics)).values()) == len(events)


async def test_the_end_of_a_transaction_that_somebody_else_wrote_counts_as_read(
    broker: RunningBroker, topics: Topics, healer: Healer
) -> None:
    async with (
        Producer(broker.bootstrap, transactional_id=topics.namespace) as producer,
        producer.transaction(),
    ):
        await publish(producer, topics, rollout("a"))
    healer.start()
    await wait_for_progress(broker, topics, await ends(broker, topics))


async def ends(broker: RunningBroker, topics: Topics) -> dict[int, int]:
    """The next offset of each partition of the events that holds any."""
    async with reader_from_start(broker.bootstrap, topics.events) as reader:
        found = await reader.end_offsets((topics.events, p) for p in range(NUM_PARTITIONS))
    return {partition: end for (_, partition), end in found.items() if end}


async def test_a_rollout_that_ended_in_the_log_is_not_aborted_however_late_it_is_read(
    broker: RunningBroker, topics: Topics, producer: Producer, healer: Healer
) -> None:
    events = rollout("slow")
    begun = started("slow", group_id="g-slow", deadline_at=time.time() - 100)
    await publish(producer, topics, [begun, *events[1:]])
    healer.start()
    (trajectory,) = await until(broker, topics.trajectories, Trajectory, lambda t: len(t) >= 1)
    assert trajectory.status == "completed"


async def test_what_is_no_event_goes_to_the_dead_letters_and_the_healer_goes_on(
    broker: RunningBroker, topics: Topics, producer: Producer, healer: Healer
) -> None:
    healer.start()
    ack = await producer.send_raw(topics.events, key=b"r1", value=b"\xc1 no event")
    await publish(producer, topics, rollout("r1"))
    (letter,) = await until(broker, topics.dead_letters, DeadLetter, lambda d: len(d) >= 1)
    assert (letter.topic, letter.partition, letter.offset) == (
        topics.events,
        ack.partition,
        ack.offset,
    )
    assert (letter.key, letter.value) == (b"r1", b"\xc1 no event")
    assert "malformed" in letter.reason
    await until(broker, topics.trajectories, Trajectory, lambda t: len(t) == 1)


async def test_json_events_from_another_language_make_the_same_rows(
    broker: RunningBroker, topics: Topics, producer: Producer, healer: Healer
) -> None:
    healer.start()
    lines = [
        b'{"type":"rollout_started","rollout_id":"js","event_id":"1","group_id":"g"}',
        b'{"type":"turn_completed","rollout_id":"js","event_id":"2","session_id":"s",'
        b'"turn_id":"t0","prompt_tail":[1,2],"output_ids":[3,4],"logprobs":[-0.5,-0.25],'
        b'"num_prompt_tokens":2}',
        b'{"type":"turn_completed","rollout_id":"js","event_id":"3","session_id":"s",'
        b'"turn_id":"t1","prompt_tail":[1,2,3,4,5],"output_ids":[6],"logprobs":[-1],'
        b'"num_prompt_tokens":5,"field_of_a_newer_version":{"a":1}}',
        b'{"type":"rollout_finished","rollout_id":"js","event_id":"4","reward":1}',
    ]
    for line in lines:
        await producer.send_raw(
            topics.events, key=b"js", value=line, headers={"content-type": "application/json"}
        )
    (trajectory,) = await until(broker, topics.trajectories, Trajectory, lambda t: len(t) >= 1)
    (row,) = trajectory.rows
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.loss_mask.tolist() == [0, 0, 1, 1, 0, 1]


async def test_a_revised_reward_supersedes_a_trajectory_that_was_released(
    broker: RunningBroker, topics: Topics, producer: Producer, healer: Healer
) -> None:
    healer.start()
    await publish(producer, topics, rollout("r1"))
    await until(broker, topics.trajectories, Trajectory, lambda t: len(t) == 1)
    healer.kill9()
    await publish(producer, topics, [revised("r1", reward=0.25), revised("lost", reward=1.0)])
    healer.start()
    found = await until(broker, topics.trajectories, Trajectory, lambda t: len(t) >= 2)
    assert [(t.revision, t.reward) for t in found] == [(0, 1.0), (1, 0.25)]
    assert found[1].rows == found[0].rows
    (letter,) = await until(broker, topics.dead_letters, DeadLetter, lambda d: len(d) >= 1)
    assert "its start is not in the log" in letter.reason
    revisions = Revisions(["r1"])
    again = [t for r in await read(broker, topics.events) if (t := revisions.feed(r))]
    assert digests(again) == digests(found[1:])


async def test_a_second_healer_takes_over_and_the_first_ends_with_one_clear_line(
    broker: RunningBroker, topics: Topics, producer: Producer, healer: Healer, tmp_path: Path
) -> None:
    older = healer.start()
    await publish(producer, topics, rollout("a"))
    await until(broker, topics.trajectories, Trajectory, lambda t: len(t) == 1)
    (tmp_path / "newer").mkdir()
    with healer_process(broker, topics, tmp_path / "newer") as newer:
        newer.start()
        deadline = time.monotonic() + DEADLINE_S
        number = 0
        while older.poll() is None and time.monotonic() < deadline:
            number += 1
            await publish(producer, topics, rollout(f"b{number:03d}"))
            await asyncio.sleep(0.05)
        assert older.poll() == 1
        assert "another healer of" in healer.said()
        assert "Traceback" not in healer.said()
        found = await until(
            broker, topics.trajectories, Trajectory, lambda t: len(digests(t)) == number + 1
        )
    assert len(found) == number + 1


async def test_a_broker_that_was_killed_is_waited_for(
    killable_broker: BrokerProcess, topics: Topics, healer: Healer
) -> None:
    broker = killable_broker
    healer.start()
    async with Producer(broker.bootstrap) as producer:
        await publish(producer, topics, [*rollout("a"), *rollout("b")[:-1]])
    await until(broker, topics.trajectories, Trajectory, lambda t: len(t) == 1)
    broker.kill9()
    broker.start()
    async with Producer(broker.bootstrap) as producer:
        await publish(producer, topics, [finished("b"), *rollout("c")])
    found = await until(broker, topics.trajectories, Trajectory, lambda t: len(t) >= 3)
    assert sorted(t.rollout_id for t in found) == ["a", "b", "c"]
    assert digests(found) == digests(await replayed(broker, topics))


async def test_a_healer_that_is_asked_to_stop_ends_well_and_has_committed_its_place(
    broker: RunningBroker, topics: Topics, producer: Producer, healer: Healer
) -> None:
    process = healer.start()
    await publish(producer, topics, [*rollout("a"), started("b"), *rollout("c")[:2]])
    await until(broker, topics.trajectories, Trajectory, lambda t: len(t) == 1)
    ends = dict.fromkeys(range(NUM_PARTITIONS), 0)
    for record in await read(broker, topics.events):
        ends[record.partition] = record.offset + 1
    await wait_for_progress(broker, topics, ends)
    process.terminate()
    assert process.wait(DEADLINE_S) == 0
    assert "Traceback" not in healer.said()


async def wait_for_progress(broker: RunningBroker, topics: Topics, ends: dict[int, int]) -> None:
    """Wait until the healer has committed that it went through all of the log."""
    deadline = time.monotonic() + DEADLINE_S
    async with Reader(broker.bootstrap, group=f"{topics.namespace}-healer") as reader:
        while time.monotonic() < deadline:
            found = {p: await reader.committed(topics.events, p) for p in ends}
            through = {p: json.loads(c[1])["through"] if c else 0 for p, c in found.items()}
            if through == ends:
                return
            await asyncio.sleep(0.1)
    raise AssertionError(f"expected {ends}, the healer committed {through}")


async def test_without_a_broker_the_healer_ends_with_one_line_that_says_what_to_do(
    topics: Topics, healer: Healer
) -> None:
    process = healer.start(TURNFOLD_BOOTSTRAP="127.0.0.1:1")
    assert process.wait(DEADLINE_S) == 1
    assert "no Kafka broker answers at 127.0.0.1:1" in healer.said()
    assert "Traceback" not in healer.said()


async def test_without_topics_the_healer_says_how_to_create_them(healer: Healer) -> None:
    process = healer.start(TURNFOLD_NAMESPACE="nobody-made-it")
    assert process.wait(DEADLINE_S) == 1
    assert "run `turnfold topics create` first" in healer.said()


async def test_a_partition_that_does_not_exist_is_refused(healer: Healer) -> None:
    process = healer.start(TURNFOLD_PARTITIONS="7")
    assert process.wait(DEADLINE_S) == 1
    assert "TURNFOLD_PARTITIONS='7': the events topic has partitions 0 to 1" in healer.said()


def test_a_deadline_has_one_event_id_however_often_it_is_noticed() -> None:
    assert deadline_passed("r1", 1.0).event_id == deadline_passed("r1", 2.0).event_id


@pytest.mark.field_case("prime-rl#2786")
async def test_a_turn_with_unusable_counts_goes_to_the_dead_letters_and_marks_its_rollout(
    broker: RunningBroker, topics: Topics, producer: Producer, healer: Healer
) -> None:
    healer.start()
    good = rollout("r1", 1)
    bad = turn("r1", "t9", prompt=[1, 2], output=[3], num_prompt_tokens=9)
    await publish(producer, topics, [*good[:-1], bad, good[-1]])
    (letter,) = await until(broker, topics.dead_letters, DeadLetter, lambda d: len(d) >= 1)
    assert "turn t9" in letter.reason
    assert letter.value == codec.encode(bad)
    (trajectory,) = await until(broker, topics.trajectories, Trajectory, lambda t: len(t) >= 1)
    assert trajectory.marks == ("counts_differ:t9",)
    assert trajectory.ledger.num_trained == 1


async def test_each_healer_of_a_partition_leaves_the_others_alone(
    broker: RunningBroker, topics: Topics, producer: Producer, healer: Healer
) -> None:
    healer.start(TURNFOLD_PARTITIONS="1")
    async with Reader(broker.bootstrap) as reader:
        assert await reader.partitions(topics.events) == [0, 1]
    events = [(p, e) for p in (0, 1) for e in rollout(f"in-{p}")]
    for partition, event in events:
        await producer.send(topics.events, key=event.rollout_id, message=event, partition=partition)
    found = await until(broker, topics.trajectories, Trajectory, lambda t: len(t) >= 1)
    assert [t.rollout_id for t in found] == ["in-1"]
