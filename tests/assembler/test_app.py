"""The assembler against a real broker: restarts, kills, a second one, damaged records."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import turnfold
from turnfold.assembler.app import Replaced, run
from turnfold.assembler.app import _Assembler as AppAssembler
from turnfold.assembler.checkpoint import read_checkpoint
from turnfold.assembler.cut import decide
from turnfold.assembler.groups import GroupsState, summary
from turnfold.assembler.settings import Settings
from turnfold.embedded.broker.testing import RunningBroker
from turnfold.log.client import (
    BrokerUnavailable,
    Producer,
    Reader,
    Record,
    create_topics,
    reader_from_start,
)
from turnfold.log.service import Health
from turnfold.schemas import codec
from turnfold.schemas.batches import (
    BatchCut,
    Decision,
    EvaluationCompleted,
    GroupDropped,
    GroupEvaluated,
    Positions,
)
from turnfold.schemas.dead_letters import DeadLetter
from turnfold.schemas.policies import PolicyPublished
from turnfold.schemas.run import RunConfig
from turnfold.schemas.tasks import Evaluation, Task
from turnfold.schemas.testing import task, trajectory
from turnfold.schemas.topics import Topics
from turnfold.schemas.trajectories import Trajectory

CONFIG = RunConfig(group_size=2, groups_per_batch=2, max_staleness=100)
DEADLINE_S = 30.0


class Bench:
    """Topics of their own, a producer, and assemblers started on demand."""

    def __init__(self, bootstrap: str, namespace: str, producer: Producer) -> None:
        self.settings = Settings(bootstrap=bootstrap, namespace=namespace, max_batches_ahead=-1)
        self.producer = producer
        self.num_groups = 0

    @property
    def topics(self) -> Topics:
        return self.settings.topics

    async def groups(self, count: int) -> None:
        """Dispatch and finish this many groups."""
        for _ in range(count):
            name = f"g{self.num_groups:03d}"
            sent = task(name, dispatch_index=self.num_groups, dispatched_at=1e12)
            await self.producer.send(self.topics.tasks, key=name, message=sent)
            for index in range(2):
                ended = trajectory(f"{name}-{index:02d}", group_id=name, index=index)
                await self.producer.send(self.topics.trajectories, key=name, message=ended)
            self.num_groups += 1

    async def evaluation(self, cursor: int, *rewards: float) -> None:
        """One task of a round of two at version 0, and the ends of its rollouts."""
        name = f"eval-{cursor}"
        fields: dict[str, Any] = {"split": "eval", "dispatch_index": cursor}
        sent = task(
            name,
            n=len(rewards),
            cursor=cursor,
            dispatched_at=1e12,
            evaluation=Evaluation(version=0, num_tasks=2),
            **fields,
        )
        await self.producer.send(self.topics.tasks, key=name, message=sent)
        for index, reward in enumerate(rewards):
            ended = trajectory(
                f"{name}-{index:02d}", group_id=name, index=index, reward=reward, **fields
            )
            await self.producer.send(self.topics.trajectories, key=name, message=ended)

    def start(self, config: RunConfig = CONFIG, **options: Any) -> Assembler:
        return Assembler(msgspec.structs.replace(self.settings, **options), config)

    async def publish(self, version: int) -> None:
        """The trainer has trained batch `version`."""
        event = PolicyPublished(run_id="default", policy_version=version, weights_uri="w")
        await self.producer.send(self.topics.policies, key="default", message=event)

    async def records(self, topic: str) -> list[Record]:
        async with reader_from_start(self.settings.bootstrap, topic) as reader:
            return [record async for record in reader.read_to_end()]

    async def decisions(self) -> list[Decision]:
        return [
            codec.decode(Decision, record.value)
            for record in await self.records(self.topics.batches)
        ]

    async def wait_for_batches(self, count: int) -> list[Decision]:
        async def enough() -> bool:
            return len(await self.decisions()) >= count

        await eventually(enough)
        return await self.decisions()


class Assembler:
    """An assembler as a task of this process."""

    def __init__(self, settings: Settings, config: RunConfig) -> None:
        self.health, self.stopping = Health("assembler"), asyncio.Event()
        self.task = asyncio.create_task(run(settings, config, self.health, self.stopping))

    async def ready(self) -> None:
        async def is_ready() -> bool:
            if self.task.done():
                self.task.result()
            return self.health.is_ready

        await eventually(is_ready)

    async def stop(self) -> None:
        self.stopping.set()
        await self.task

    async def kill(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.05)


@pytest.fixture
async def bench(broker: RunningBroker, new_namespace: Callable[[], str]) -> AsyncIterator[Bench]:
    async with Producer(broker.bootstrap) as producer:
        made = Bench(broker.bootstrap, new_namespace(), producer)
        await create_topics(broker.bootstrap, made.topics.specs(num_partitions=3))
        yield made


def indexes(decisions: list[Decision]) -> list[int]:
    return [cut.index for cut in decisions if isinstance(cut, BatchCut)]


async def test_complete_groups_are_cut_into_batches_in_order(bench: Bench) -> None:
    assembler = bench.start()
    await bench.groups(4)
    decisions = await bench.wait_for_batches(2)
    await assembler.stop()
    assert indexes(decisions) == [1, 2]
    groups = [g.group_id for cut in decisions for g in cut.groups]
    assert sorted(groups) == ["g000", "g001", "g002", "g003"]


async def test_a_restarted_assembler_goes_on_where_the_log_ends(bench: Bench) -> None:
    first = bench.start()
    await bench.groups(3)
    await bench.wait_for_batches(1)
    await first.kill()
    await bench.groups(1)
    second = bench.start()
    decisions = await bench.wait_for_batches(2)
    await second.stop()
    assert indexes(decisions) == [1, 2]
    assert sorted(g.group_id for cut in decisions for g in cut.groups) == [
        "g000",
        "g001",
        "g002",
        "g003",
    ]


async def test_every_decision_in_the_log_can_be_taken_again_with_the_same_bytes(
    bench: Bench,
) -> None:
    assembler = bench.start()
    for _ in range(3):
        await bench.groups(2)
    await bench.wait_for_batches(3)
    await assembler.stop()

    tasks = await bench.records(bench.topics.tasks)
    trajectories = await bench.records(bench.topics.trajectories)
    written = await bench.records(bench.topics.batches)
    state = GroupsState(CONFIG)
    for record in written:
        decision = codec.decode(Decision, record.value)
        advance(state, decision.positions, tasks, trajectories)
        assert codec.encode(decide(state, CONFIG, decision.at)) == record.value
        assert state.add_decision(decision)
    assert len(written) == 3


def advance(
    state: GroupsState, to: Positions, tasks: list[Record], trajectories: list[Record]
) -> None:
    for record in tasks:
        if record.offset < to.tasks.get(record.partition, 0):
            state.add_task(codec.decode(Task, record.value), record.partition, record.offset)
    for record in trajectories:
        if record.offset < to.trajectories.get(record.partition, 0):
            ended = codec.decode(Trajectory, record.value)
            digest = codec.digest(ended)
            state.add_rollout(summary(ended, record.partition, record.offset, digest))


async def test_evaluations_are_scored_beside_the_batches_and_over_a_restart(bench: Bench) -> None:
    """The cut of g000 and g001 is held back: nobody needs a second batch yet."""
    assembler = bench.start(max_batches_ahead=0)
    await bench.groups(4)
    await bench.evaluation(0, 1.0, 0.0)
    first = await bench.wait_for_batches(2)
    assert sorted(type(decision).__name__ for decision in first) == ["BatchCut", "GroupEvaluated"]
    await assembler.kill()
    await bench.evaluation(1, 1.0)
    assembler = bench.start(max_batches_ahead=0)
    *_, scored, completed = await bench.wait_for_batches(4)
    await assembler.stop()
    assert isinstance(scored, GroupEvaluated)
    assert isinstance(completed, EvaluationCompleted)
    assert (completed.num_tasks, completed.num_rollouts) == (2, 3)
    assert (completed.mean_reward, completed.pass_at) == (0.75, {1: 0.75})
    assert len(await bench.decisions()) == 4


async def test_a_group_that_cannot_survive_is_dropped_while_it_still_runs(bench: Bench) -> None:
    assembler = bench.start()
    sent = task("doomed", n=2, dispatched_at=1e12)
    await bench.producer.send(bench.topics.tasks, key="doomed", message=sent)
    failed = trajectory("doomed-00", group_id="doomed", rows=(), reward=None, reason="agent_error")
    await bench.producer.send(bench.topics.trajectories, key="doomed", message=failed)
    (dropped,) = await bench.wait_for_batches(1)
    await assembler.stop()
    assert isinstance(dropped, GroupDropped)
    assert (dropped.reason, dropped.is_early) == ("too_few_survivors", True)


async def test_a_restart_reads_no_trajectory_below_its_checkpoint(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnfold.assembler.app._CHECKPOINT_EVERY", 1)
    assembler = bench.start()
    await bench.groups(4)
    await bench.wait_for_batches(2)
    await assembler.stop()
    name = f"{bench.settings.namespace}-assembler-default"
    async with Reader(bench.settings.bootstrap, group=name) as reader:
        found = await reader.committed(bench.topics.batches, 0)
    assert found is not None
    checkpoint = read_checkpoint(found[1])
    assert checkpoint is not None
    assert (checkpoint.num_decided, sum(checkpoint.positions.tasks.values())) == (4, 4)

    folded: list[str] = []
    taken = AppAssembler._take

    def noted(self: Any, record: Record) -> Any:
        folded.append(record.topic)
        return taken(self, record)

    monkeypatch.setattr(AppAssembler, "_take", noted)
    assembler = bench.start()
    await assembler.ready()
    assert bench.topics.trajectories not in folded
    assert bench.topics.tasks not in folded
    await bench.groups(2)
    cuts = await bench.wait_for_batches(3)
    await assembler.stop()
    assert [group.group_id for group in cuts[-1].groups] == ["g004", "g005"]
    totals = [sum(cut.positions.trajectories.values()) for cut in cuts]
    assert totals[-1] == totals[-2] + 4


async def test_who_is_waited_for_is_said_on_the_health_endpoint(bench: Bench) -> None:
    assembler = bench.start()
    sent = task("slow", n=2, dispatched_at=time.time() - 312.0)
    await bench.producer.send(bench.topics.tasks, key="slow", message=sent)

    async def is_named() -> bool:
        return "waiting for group slow, dispatched 31" in assembler.health.detail

    await eventually(is_named)
    await assembler.stop()


async def test_of_two_assemblers_the_newer_one_goes_on_and_the_older_one_ends(
    bench: Bench,
) -> None:
    older = bench.start()
    await older.ready()
    newer = bench.start()
    await newer.ready()
    await bench.groups(6)
    decisions = await bench.wait_for_batches(3)
    with pytest.raises(Replaced, match="taken over"):
        await asyncio.wait_for(older.task, DEADLINE_S)
    await newer.stop()
    assert indexes(decisions) == [1, 2, 3]
    groups = [g.group_id for cut in decisions for g in cut.groups]
    assert len(groups) == len(set(groups)) == 6


async def test_batches_are_cut_when_the_trainer_will_need_them(bench: Bench) -> None:
    assembler = bench.start(max_batches_ahead=1)
    await bench.groups(7)
    assert indexes(await bench.wait_for_batches(2)) == [1, 2]
    await bench.publish(1)
    decisions = await bench.wait_for_batches(3)
    await assembler.stop()
    assert indexes(decisions) == [1, 2, 3]


async def test_a_second_manifest_of_an_index_in_the_log_is_ignored(bench: Bench) -> None:
    assembler = bench.start()
    await bench.groups(2)
    (cut,) = await bench.wait_for_batches(1)
    await bench.producer.send(bench.topics.batches, key="default", message=cut)
    await bench.groups(2)
    decisions = await bench.wait_for_batches(3)
    await assembler.stop()
    assert indexes(decisions) == [1, 1, 2]


async def test_a_damaged_record_goes_to_the_dead_letters_once(bench: Bench) -> None:
    await bench.producer.send_raw(bench.topics.trajectories, key=b"x", value=b"\xff not msgpack")
    for _ in range(2):  # the log is read from its start each time
        assembler = bench.start()
        await assembler.ready()
        await bench.groups(2)
        await bench.wait_for_batches(bench.num_groups // 2)
        await assembler.stop()
    (letter,) = await bench.records(bench.topics.dead_letters)
    dead = codec.decode(DeadLetter, letter.value)
    assert (dead.topic, dead.offset, dead.value) == (
        bench.topics.trajectories,
        0,
        b"\xff not msgpack",
    )
    assert "not Trajectory in msgpack" in dead.reason


async def test_trajectories_written_as_json_count_too(bench: Bench) -> None:
    assembler = bench.start()
    await bench.groups(1)
    for index in range(2):
        ended = trajectory(f"json-{index}", group_id="json", index=index)
        await bench.producer.send_raw(
            bench.topics.trajectories,
            key=b"json",
            value=codec.encode_json(ended),
            headers={"content-type": codec.JSON, "digest": "not what it says"},
        )
    (cut,) = await bench.wait_for_batches(1)
    await assembler.stop()
    (_, foreign) = cut.groups
    assert foreign.group_id == "json"
    assert foreign.rollouts[0].digest == codec.digest(trajectory("json-0", group_id="json"))


async def test_a_group_past_its_deadline_is_dropped_on_its_own(bench: Bench) -> None:
    assembler = bench.start(RunConfig(group_size=2, groups_per_batch=2, group_timeout_s=0.5))
    sent = task("late", dispatched_at=1000.0)
    await bench.producer.send(bench.topics.tasks, key="late", message=sent)
    (drop,) = await bench.wait_for_batches(1)
    await assembler.stop()
    assert (drop.group_id, drop.reason) == ("late", "group_timeout")


async def test_without_a_broker_the_error_says_what_to_do() -> None:
    settings = Settings(bootstrap="127.0.0.1:1", namespace="nobody")
    with pytest.raises(BrokerUnavailable, match=r"no Kafka broker answers at 127\.0\.0\.1:1"):
        await run(settings, CONFIG, Health("assembler"), asyncio.Event())


async def test_an_assembler_killed_with_signal_9_again_and_again_cuts_each_group_once(
    bench: Bench, tmp_path: Path
) -> None:
    with (tmp_path / "assembler.log").open("wb") as output:

        async def start() -> asyncio.subprocess.Process:
            env = environment(bench.settings)
            return await asyncio.create_subprocess_exec(
                *COMMAND, env=env, stdout=output, stderr=output
            )

        for round_number in range(1, 4):
            process = await start()
            try:
                await bench.groups(2)
                await bench.wait_for_batches(round_number)
                await bench.groups(1)  # in flight, perhaps in a transaction, when it dies
            finally:
                process.kill()
                await process.wait()
            await bench.groups(1)
        process = await start()
        try:
            decisions = await bench.wait_for_batches(6)
        finally:
            process.terminate()
            assert await process.wait() == 0
    assert indexes(decisions) == [1, 2, 3, 4, 5, 6]
    groups = [g.group_id for cut in decisions for g in cut.groups]
    assert len(set(groups)) == len(groups) == 12


COMMAND = [
    sys.executable,
    "-c",
    "import typer; from turnfold.assembler.cli import assembler; typer.run(assembler)",
]


def environment(settings: Settings) -> dict[str, Any]:
    roots = [str(Path(path).parent) for path in turnfold.__path__]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(roots),
        "TURNFOLD_BOOTSTRAP": settings.bootstrap,
        "TURNFOLD_NAMESPACE": settings.namespace,
        "TURNFOLD_MAX_BATCHES_AHEAD": "-1",
        "TURNFOLD_GROUP_SIZE": str(CONFIG.group_size),
        "TURNFOLD_GROUPS_PER_BATCH": str(CONFIG.groups_per_batch),
        "TURNFOLD_MAX_STALENESS": str(CONFIG.max_staleness),
    }
