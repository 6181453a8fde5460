"""A real broker, a scripted engine behind real HTTP, and gateways between them and the real SDK."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import openai
import pytest
from tokenizers import Tokenizer

from turnfold.embedded.broker.testing import RunningBroker
from turnfold.embedded.tiny.tokenizer import build_tokenizer
from turnfold.gateway.settings import Settings
from turnfold.gateway.testing import Reply, ScriptedEngine, running_gateway, text_ids
from turnfold.history.sequences import TokenStore
from turnfold.log.client import create_topics, reader_from_start
from turnfold.schemas import codec
from turnfold.schemas.events import Event, TurnCompleted

CONTROL = {"authorization": "Bearer control"}
STOP = "<|im_end|>"


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model without weights: a real tokenizer and a real template with tools."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    build_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine() as scripted:
        yield scripted


@dataclass
class Rollout:
    """A started rollout, as an agent sees it."""

    base_url: str
    rollout_id: str
    api_key: str
    client: openai.AsyncOpenAI

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"}


@dataclass
class Stack:
    """One log and one engine, with as many gateways as a test starts."""

    bootstrap: str
    engine: ScriptedEngine
    tokenizer: Tokenizer
    settings: Settings
    http: httpx.AsyncClient
    closing: AsyncExitStack
    urls: list[str] = field(default_factory=list)

    async def start_gateway(self, **changes: Any) -> str:
        settings = msgspec.structs.replace(self.settings, **changes)
        url = await self.closing.enter_async_context(running_gateway(settings))
        self.urls.append(url)
        return url

    async def start_rollout(self, base_url: str | None = None, **body: Any) -> Rollout:
        base_url = base_url or self.urls[0]
        response = await self.http.post(
            f"{base_url}/v1/rollouts", headers=CONTROL, json={"group_id": "g", **body}
        )
        assert response.status_code == 200, response.text
        started = response.json()
        return self.rollout(started["base_url"], started["rollout_id"], started["api_key"])

    def rollout(self, base_url: str, rollout_id: str, api_key: str) -> Rollout:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        self.closing.push_async_callback(client.close)
        return Rollout(base_url, rollout_id, api_key, client)

    def says(self, text: str, *, is_stopped: bool = True) -> Reply:
        """What the engine answers when the model writes this text."""
        ids = text_ids(self.tokenizer, text + (STOP if is_stopped else ""))
        return Reply(ids=ids, finish_reason="stop" if is_stopped else "length")

    async def events(self, rollout_id: str) -> list[Event]:
        """The rollout's events as they lie in the log now."""
        topic, found = self.settings.topics.events, []
        async with reader_from_start(self.bootstrap, topic) as reader:
            async for record in reader.read_to_end():
                if record.key == rollout_id.encode():
                    event = codec.decode(cast(type[Event], Event), record.value or b"")
                    found.append(event)
        return found

    async def turns(self, rollout_id: str) -> list[TurnCompleted]:
        return [e for e in await self.events(rollout_id) if isinstance(e, TurnCompleted)]

    def full_sequences(self, turns: list[TurnCompleted]) -> list[list[int]]:
        """Prompt and output of each turn, rebuilt from the delta-encoded events."""
        store = TokenStore()
        for turn in turns:
            store.add(turn)
        return [store.full(turn.turn_id).tolist() for turn in turns]


@pytest.fixture
async def stack(
    broker: RunningBroker,
    engine: ScriptedEngine,
    model_dir: Path,
    tokenizer: Tokenizer,
    new_namespace: Callable[[], str],
) -> AsyncIterator[Stack]:
    settings = Settings(
        bootstrap=broker.bootstrap,
        namespace=new_namespace(),
        model=str(model_dir),
        engines=(engine.url,),
        port=0,
        control_key="control",
        key_secret="secret",
        engine_timeout_s=10.0,
        drain_s=2.0,
    )
    specs = [s for s in settings.topics.specs(2) if s.name == settings.topics.events]
    await create_topics(broker.bootstrap, specs)
    async with AsyncExitStack() as closing:
        http = await closing.enter_async_context(httpx.AsyncClient(timeout=20, trust_env=False))
        yield Stack(broker.bootstrap, engine, tokenizer, settings, http, closing)


@pytest.fixture
async def gateway(stack: Stack) -> Stack:
    """The stack with one gateway running."""
    await stack.start_gateway()
    return stack


@pytest.fixture
def eventually() -> Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]:
    """Wait for a condition, at most 10 seconds."""
    import asyncio

    async def wait(condition: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(10):
            while not await condition():  # noqa: ASYNC110 (what is waited for is elsewhere)
                await asyncio.sleep(0.01)

    return wait
