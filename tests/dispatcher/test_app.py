"""The dispatcher against a real broker: pace, restarts, kills, another data set."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import turnfold
from turnfold.dispatcher.app import Replaced, run
from turnfold.dispatcher.client import DatasetError
from turnfold.dispatcher.settings import Settings
from turnfold.embedded.broker.testing import RunningBroker
from turnfold.log.client import Producer, create_topics, reader_from_start
from turnfold.log.service import Health
from turnfold.schemas import codec
from turnfold.schemas import testing as builders
from turnfold.schemas.batches import Decision
from turnfold.schemas.run import RunConfig
from turnfold.schemas.tasks import Task
from turnfold.schemas.topics import Topics

CONFIG = RunConfig(run_id="r", group_size=2, groups_per_batch=2, max_staleness=0)
DEADLINE_S = 30.0
NUM_ROWS = 5


class Bench:
    """Topics of their own; the test plays assembler and relay."""

    def __init__(self, bootstrap: str, namespace: str, producer: Producer, folder: Path) -> None:
        path = folder / "tasks.jsonl"
        path.write_text("".join(json.dumps({"id": f"t{i}"}) + "\n" for i in range(NUM_ROWS)))
        self.settings = Settings(
            bootstrap=bootstrap,
            namespace=namespace,
            dataset=str(path),
            is_shuffled=False,
        )
        self.producer = producer
        self.num_cut = 0

    @property
    def topics(self) -> Topics:
        return self.settings.topics

    def start(self, **options: Any) -> Dispatcher:
        return Dispatcher(msgspec.structs.replace(self.settings, **options))

    async def serve(self, version: int) -> None:
        served = builders.served(version, "r")
        await self.producer.send(self.topics.policies, key="r/served", message=served)

    async def cut(self, index: int, *group_ids: str) -> None:
        await self._decide(builders.cut(index, *group_ids, run_id="r"))

    async def drop(self, group_id: str, reason: str) -> None:
        await self._decide(builders.dropped(group_id, reason, "r"))

    async def evaluated(self, sent: Task, *, is_retried: bool = False) -> None:
        """The assembler has scored an evaluation task; the round is complete with its last one."""
        await self._decide(builders.evaluated(sent, is_retried=is_retried, run_id="r"))

    async def completed(self, version: int) -> None:
        await self._decide(builders.completed(version, run_id="r"))

    async def _decide(self, decision: Decision) -> None:
        await self.producer.send(self.topics.batches, key="r", message=decision)

    async def evaluations(self, count: int) -> list[Task]:
        """The evaluation tasks, as soon as there are so many."""
        tasks: list[Task] = []

        async def enough() -> bool:
            tasks[:] = [task for task in await self.tasks() if task.split == "eval"]
            return len(tasks) >= count

        await eventually(enough)
        return tasks

    async def tasks(self) -> list[Task]:
        """Everything dispatched, in order of dispatch."""
        async with reader_from_start(self.settings.bootstrap, self.topics.tasks) as reader:
            records = [record async for record in reader.read_to_end()]
        found = [codec.decode(Task, record.value) for record in records if record.key != b"x"]
        return sorted(found, key=lambda task: (task.split, task.dispatch_index))

    async def wait_for_tasks(self, count: int) -> list[Task]:
        async def enough() -> bool:
            return len(await self.tasks()) >= count

        await eventually(enough)
        return await self.tasks()


class Dispatcher:
    """A dispatcher as a task of this process."""

    def __init__(self, settings: Settings) -> None:
        self.health, self.stopping = Health("dispatcher"), asyncio.Event()
        self.task = asyncio.create_task(run(settings, CONFIG, self.health, self.stopping))

    async def ready(self) -> None:
        async def is_ready() -> bool:
            return self.health.is_ready

        await eventually(is_ready)

    async def end(self) -> None:
        """Wait for it to end by itself."""
        await asyncio.wait_for(self.task, DEADLINE_S)

    async def stop(self) -> None:
        self.stopping.set()
        await self.end()

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
async def bench(
    broker: RunningBroker, tmp_path: Path, new_namespace: Callable[[], str]
) -> AsyncIterator[Bench]:
    async with Producer(broker.bootstrap) as producer:
        made = Bench(broker.bootstrap, new_namespace(), producer, tmp_path)
        await create_topics(broker.bootstrap, made.topics.specs(num_partitions=3))
        yield made


async def test_tasks_come_at_the_pace_of_what_is_served(bench: Bench) -> None:
    running = bench.start()
    await bench.serve(0)
    first = await bench.wait_for_tasks(2)
    await bench.cut(1, *(task.group_id for task in first))
    await bench.serve(1)
    tasks = await bench.wait_for_tasks(4)
    await running.stop()
    assert [task.group_id for task in tasks] == ["r-000000", "r-000001", "r-000002", "r-000003"]
    assert [task.task_id for task in tasks] == ["t0", "t1", "t2", "t3"]
    assert [task.policy_version for task in tasks] == [0, 0, 1, 1]
    assert [task.payload for task in tasks] == [{"id": f"t{i}"} for i in range(4)]
    assert all(task.n == 2 and task.dispatched_at > 0 for task in tasks)


async def test_a_restarted_dispatcher_skips_no_task_and_doubles_none(bench: Bench) -> None:
    await bench.serve(0)
    for version in range(4):
        running = bench.start()
        tasks = await bench.wait_for_tasks(2 * (version + 1))
        await bench.cut(version + 1, *(task.group_id for task in tasks[-2:]))
        await running.kill()
        await bench.serve(version + 1)
    tasks = await bench.tasks()
    assert [(task.epoch, task.cursor) for task in tasks] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (0, 3),
        (0, 4),
        (1, 0),
        (1, 1),
        (1, 2),
    ]


@pytest.mark.field_case("verl#7155")
async def test_a_lost_group_is_dispatched_again_once_even_over_a_restart(bench: Bench) -> None:
    await bench.serve(0)
    running = bench.start()
    await bench.wait_for_tasks(2)
    await running.stop()
    await bench.drop("r-000000", "group_timeout")
    running = bench.start()
    await bench.wait_for_tasks(3)
    await running.stop()
    await bench.cut(1, "r-000001", "r-000002")
    await bench.serve(1)
    running = bench.start()
    tasks = await bench.wait_for_tasks(5)
    await running.stop()
    assert [(task.task_id, task.attempt) for task in tasks] == [
        ("t0", 0),
        ("t1", 0),
        ("t0", 1),
        ("t2", 0),
        ("t3", 0),
    ]


async def test_it_ends_by_itself_when_the_batches_asked_for_are_cut(bench: Bench) -> None:
    await bench.serve(5)
    running = bench.start(num_batches=1)
    sent = await bench.wait_for_tasks(2)
    assert not running.task.done()
    await bench.cut(1, *(task.group_id for task in sent))
    await running.end()
    assert len(await bench.tasks()) == 2


async def test_another_data_set_or_order_is_refused_on_resume(bench: Bench) -> None:
    await bench.serve(0)
    running = bench.start()
    await bench.wait_for_tasks(2)
    await running.stop()
    other = bench.start(is_shuffled=True, seed=1)
    with pytest.raises(DatasetError, match="epoch 0, place 1 was task 't1' and is now 't"):
        await other.end()


async def test_of_two_dispatchers_the_older_one_ends(bench: Bench) -> None:
    older = bench.start()
    await bench.serve(0)
    first = await bench.wait_for_tasks(2)
    newer = bench.start()
    await newer.ready()
    await bench.cut(1, *(task.group_id for task in first))
    await bench.serve(1)
    tasks = await bench.wait_for_tasks(4)
    with pytest.raises(Replaced, match="taken over"):
        await older.end()
    await newer.stop()
    assert [task.cursor for task in tasks] == [0, 1, 2, 3]


async def test_damaged_records_are_skipped(bench: Bench) -> None:
    for topic in (bench.topics.policies, bench.topics.tasks, bench.topics.batches):
        await bench.producer.send_raw(topic, key=b"x", value=b"\xff")
    await bench.serve(0)
    running = bench.start()
    assert len(await bench.wait_for_tasks(2)) == 2
    await running.stop()


async def test_a_dispatcher_killed_with_signal_9_again_and_again_skips_and_doubles_nothing(
    bench: Bench, tmp_path: Path
) -> None:
    command = "import typer; from turnfold.dispatcher.cli import dispatcher; typer.run(dispatcher)"
    roots = [str(Path(path).parent) for path in turnfold.__path__]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(roots),
        "TURNFOLD_BOOTSTRAP": bench.settings.bootstrap,
        "TURNFOLD_NAMESPACE": bench.settings.namespace,
        "TURNFOLD_DATASET": bench.settings.dataset,
        "TURNFOLD_RUN_ID": "r",
        "TURNFOLD_GROUP_SIZE": "2",
        "TURNFOLD_GROUPS_PER_BATCH": "2",
        "TURNFOLD_MAX_STALENESS": "0",
    }
    await bench.serve(0)
    with (tmp_path / "dispatcher.log").open("wb") as output:
        for version in range(3):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", command, env=env, stdout=output, stderr=output
            )
            try:
                tasks = await bench.wait_for_tasks(2 * (version + 1))
                await bench.cut(version + 1, *(task.group_id for task in tasks[-2:]))
                await bench.serve(version + 1)  # it may die in the middle of the next transaction
            finally:
                process.kill()
                await process.wait()
    running = bench.start(is_shuffled=True)
    tasks = await bench.wait_for_tasks(8)
    await running.stop()
    assert [(task.epoch, task.cursor) for task in tasks] == [(i // 5, i % 5) for i in range(8)]
    assert {task.task_id for task in tasks[:5]} == {"t0", "t1", "t2", "t3", "t4"}


def held_out_tasks(beside: str) -> str:
    """Three evaluation tasks in a file beside the training tasks."""
    path = Path(beside).with_name("held_out.jsonl")
    path.write_text("".join(json.dumps({"id": f"e{i}"}) + "\n" for i in range(3)))
    return str(path)


async def test_evaluation_tasks_are_sent_when_their_version_is_served_and_training_goes_on(
    bench: Bench,
) -> None:
    options: dict[str, Any] = {
        "eval_dataset": held_out_tasks(bench.settings.dataset),
        "eval_every": 2,
        "eval_group_size": 4,
        "eval_temperature": 0.0,
        "num_batches": 1,
    }
    running = bench.start(**options)
    await bench.serve(0)
    sent = await bench.evaluations(3)
    trained = [task for task in await bench.tasks() if task.split == "train"]
    assert [task.group_id for task in trained] == ["r-000000", "r-000001"]
    assert [task.group_id for task in sent] == [f"r-eval-000000-0000{i}" for i in range(3)]
    assert [(task.task_id, task.n, task.sampling.temperature) for task in sent] == [
        ("e0", 4, 0.0),
        ("e1", 4, 0.0),
        ("e2", 4, 0.0),
    ]
    await running.kill()
    await bench.evaluated(sent[0])
    await bench.evaluated(sent[1], is_retried=True)
    running = bench.start(**options)
    retried = (await bench.evaluations(4))[-1]
    assert (retried.group_id, retried.attempt) == ("r-eval-000000-00001-1", 1)
    await bench.evaluated(retried)
    await bench.evaluated(sent[2])
    await bench.completed(0)
    await bench.cut(1, "r-000000", "r-000001")
    await bench.serve(1)  # the last version, though not an even one
    final = (await bench.evaluations(7))[4:]
    assert [task.evaluation.version for task in final if task.evaluation] == [1, 1, 1]
    assert not running.task.done()
    for task in final:
        await bench.evaluated(task)
    await bench.completed(1)
    await running.end()
    assert len(await bench.tasks()) == 9


async def test_another_evaluation_data_set_is_refused_on_resume(bench: Bench) -> None:
    await bench.serve(0)
    running = bench.start(eval_dataset=bench.settings.dataset)
    await bench.evaluations(5)
    await running.stop()
    other = held_out_tasks(bench.settings.dataset)
    with pytest.raises(DatasetError, match=r"held_out\.jsonl is not the one that run 'r'"):
        await bench.start(eval_dataset=other).end()
