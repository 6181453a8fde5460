"""A real broker, a real gateway, and an engine that answers what it is told."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import pytest
from tokenizers import Tokenizer

from turnfold.agents import GatewayClient
from turnfold.agents.worker.app import run as run_worker
from turnfold.agents.worker.settings import Settings as WorkerSettings
from turnfold.embedded.broker.testing import RunningBroker
from turnfold.embedded.tiny.build import build
from turnfold.embedded.tiny.recipe import Recipe
from turnfold.gateway.settings import Settings as GatewaySettings
from turnfold.gateway.testing import Reply, ScriptedEngine, free_port, running_gateway, text_ids
from turnfold.log.client import Producer, Reader, Record, create_topics, reader_from_start
from turnfold.log.service import Health
from turnfold.schemas import codec
from turnfold.schemas.batches import BatchCut, GroupDropped
from turnfold.schemas.events import Event, RolloutAborted, RolloutFinished
from turnfold.schemas.run import RunConfig
from turnfold.schemas.tasks import Task
from turnfold.schemas.testing import task
from turnfold.schemas.topics import Topics

DEADLINE_S = 40.0


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model without any training: a real tokenizer and a real template with tools."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    build(directory, Recipe(seed=0, num_learn_steps=0, max_weaken_steps=0))
    return directory


class Bench:
    """Topics of their own, one gateway, workers on demand."""

    def __init__(
        self, gateway: GatewaySettings, engine: ScriptedEngine, producer: Producer
    ) -> None:
        self.gateway_settings = gateway
        self.engine = engine
        self.producer = producer
        self.num_groups = 0

    @property
    def topics(self) -> Topics:
        return self.gateway_settings.topics

    @property
    def gateway_url(self) -> str:
        return f"http://127.0.0.1:{self.gateway_settings.port}"

    def worker_settings(self, agent: str, **fields: Any) -> WorkerSettings:
        return WorkerSettings(
            bootstrap=self.gateway_settings.bootstrap,
            namespace=self.gateway_settings.namespace,
            gateway_url=self.gateway_url,
            control_key=self.gateway_settings.control_key,
            agent=agent,
            **fields,
        )

    @asynccontextmanager
    async def worker(self, agent: str, **fields: Any) -> AsyncIterator[asyncio.Event]:
        """A worker in this process; yields the event that stops it."""
        health, stop = Health("worker"), asyncio.Event()
        running = asyncio.create_task(
            run_worker(self.worker_settings(agent, **fields), RunConfig(), health, stop)
        )
        try:
            yield stop
        finally:
            stop.set()
            await asyncio.wait_for(running, DEADLINE_S)

    async def dispatch(self, *, n: int = 2, **fields: Any) -> Task:
        sent = task(f"g{self.num_groups}", n=n, dispatch_index=self.num_groups, **fields)
        self.num_groups += 1
        await self.producer.send(self.topics.tasks, key=sent.group_id, message=sent)
        return sent

    async def decide(self, decision: BatchCut | GroupDropped) -> None:
        """What an assembler would say."""
        await self.producer.send(self.topics.batches, key=decision.run_id, message=decision)

    async def records(self, topic: str) -> list[Record]:
        async with reader_from_start(self.gateway_settings.bootstrap, topic) as reader:
            return [record async for record in reader.read_to_end()]

    async def events(self) -> dict[str, list[Event]]:
        """All events by rollout, in order."""
        found: defaultdict[str, list[Event]] = defaultdict(list)
        for record in await self.records(self.topics.events):
            event = codec.decode(cast(type[Event], Event), record.value or b"")
            found[event.rollout_id].append(event)
        return dict(found)

    async def ends(self) -> dict[str, RolloutFinished | RolloutAborted]:
        """The end of each rollout that has ended."""
        return {
            rollout_id: events[-1]
            for rollout_id, events in (await self.events()).items()
            if isinstance(events[-1], RolloutFinished | RolloutAborted)
        }

    async def wait_for_ends(self, count: int) -> dict[str, RolloutFinished | RolloutAborted]:
        async def enough() -> bool:
            return len(await self.ends()) >= count

        await eventually(enough)
        return await self.ends()

    async def committed(self) -> int:
        """Tasks that the workers' group has committed, over all partitions."""
        group = f"{self.gateway_settings.namespace}-agents"
        async with Reader(self.gateway_settings.bootstrap, group=group) as reader:
            places = [
                await reader.committed(self.topics.tasks, partition)
                for partition in await reader.partitions(self.topics.tasks)
            ]
        return sum(max(0, place[0]) for place in places if place is not None)


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.05)


@pytest.fixture(name="eventually")
def eventually_fixture() -> Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]:
    return eventually


@pytest.fixture
async def bench(
    broker: RunningBroker, model_dir: Path, new_namespace: Callable[[], str]
) -> AsyncIterator[Bench]:
    """Everything but workers; the engine always says "the code is 5"."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    async with AsyncExitStack() as closing:
        engine = closing.enter_context(ScriptedEngine())
        engine.default = Reply(ids=text_ids(tokenizer, "the code is 5<|im_end|>"))
        settings = GatewaySettings(
            bootstrap=broker.bootstrap,
            namespace=new_namespace(),
            model=str(model_dir),
            engines=(engine.url,),
            port=free_port(),
            control_key="control",
            key_secret="secret",
            drain_s=2.0,
        )
        await create_topics(broker.bootstrap, settings.topics.specs(num_partitions=2))
        producer = await closing.enter_async_context(Producer(broker.bootstrap))
        await closing.enter_async_context(running_gateway(settings))
        yield Bench(settings, engine, producer)


@pytest.fixture
async def client(bench: Bench) -> AsyncIterator[GatewayClient]:
    url, key = bench.gateway_url, bench.gateway_settings.control_key
    async with GatewayClient(url, key, patience_s=20.0) as connected:
        yield connected


@pytest.fixture
def agent_file(tmp_path: Path) -> Callable[[str], str]:
    """Writes an agent and gives the name to load it by."""

    def write(body: str) -> str:
        path = tmp_path / f"agent_{uuid4().hex[:6]}.py"
        lines = "\n".join(f"    {line}" for line in body.strip("\n").split("\n"))
        path.write_text(
            "import asyncio, os\n"
            "from pathlib import Path\n"
            "from turnfold.agents import EnvironmentFailed, Result\n\n"
            "STARTS = Path(__file__).with_suffix('.starts')\n\n"
            "async def run(task, rollout):\n"
            "    with STARTS.open('a') as file:\n"
            "        file.write(rollout.rollout_id + '\\n')\n"
            f"{lines}\n"
        )
        return f"{path}:run"

    return write


@pytest.fixture
def starts() -> Callable[[str], list[str]]:
    """Rollouts that an agent was started for, in order."""

    def read(agent: str) -> list[str]:
        path = Path(agent.removesuffix(":run")).with_suffix(".starts")
        return path.read_text().split() if path.exists() else []

    return read
