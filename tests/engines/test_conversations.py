"""The real SDKs in front of the gateway, a real engine behind it, a real broker beside it."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import anthropic
import httpx
import numpy as np
import openai
import pytest

from turnfold.embedded.broker.testing import BrokerProcess
from turnfold.gateway.relay.app import Relay
from turnfold.gateway.relay.settings import Settings as RelaySettings
from turnfold.gateway.settings import Settings
from turnfold.gateway.testing import running_gateway
from turnfold.history.sequences import TokenStore
from turnfold.log.client import Producer, create_topics, reader_from_start
from turnfold.log.service import Health
from turnfold.schemas import codec
from turnfold.schemas.events import Event, TurnCompleted, TurnFailed
from turnfold.schemas.policies import PolicyEvent, PolicyPublished, PolicyServed

CONTROL = {"authorization": "Bearer control"}
NAME, DESCRIPTION = "lookup", "d"
PARAMETERS = {"type": "object", "properties": {"door": {"type": "string"}}, "required": ["door"]}
FUNCTION = {"name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS}
HELLO = [{"role": "user", "content": "hello"}]
NUM_TURNS = 3
NUM_SLOTS = 16
CLOSE = 1e-3


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("broker")) as process:
        yield process


class Pipeline:
    """A gateway and a log of its own in front of one engine."""

    def __init__(self, settings: Settings, url: str, http: httpx.AsyncClient) -> None:
        self.settings = settings
        self.url = url
        self.http = http

    async def start_rollout(self, **sampling: Any) -> dict[str, Any]:
        body = {"group_id": "g", "sampling": sampling}
        response = await self.http.post(f"{self.url}/v1/rollouts", headers=CONTROL, json=body)
        assert response.status_code == 200, response.text
        started: dict[str, Any] = response.json()
        return started

    async def records(self, topic: str) -> list[Any]:
        found = []
        async with reader_from_start(self.settings.bootstrap, topic) as reader:
            async for record in reader.read_to_end():
                found.append(record)
        return found

    async def events(self, rollout_id: str) -> list[Event]:
        return [
            codec.decode(cast(type[Event], Event), record.value or b"")
            for record in await self.records(self.settings.topics.events)
            if record.key == rollout_id.encode()
        ]

    async def turns(self, rollout_id: str) -> list[TurnCompleted]:
        return [e for e in await self.events(rollout_id) if isinstance(e, TurnCompleted)]

    async def publish(self, policy_version: int, weights: Path) -> None:
        policy = PolicyPublished(
            run_id="r", policy_version=policy_version, weights_uri=str(weights)
        )
        async with Producer(self.settings.bootstrap) as producer:
            await producer.send(self.settings.topics.policies, key="r", message=policy)

    async def served(self) -> list[int]:
        """The versions that the log says all engines serve, in order."""
        records = await self.records(self.settings.topics.policies)
        events = [
            codec.decode(cast(type[PolicyEvent], PolicyEvent), r.value or b"") for r in records
        ]
        return [event.policy_version for event in events if isinstance(event, PolicyServed)]


@pytest.fixture
async def pipeline(
    broker: BrokerProcess, server: Any, weights: list[Path], first_weights: None
) -> AsyncIterator[Pipeline]:
    settings = Settings(
        bootstrap=broker.bootstrap,
        namespace=f"t{uuid4().hex[:10]}",
        model=str(weights[0]),
        engines=(server.url,),
        engine_kind="sglang" if server.kind == "sglang" else "vllm",
        port=0,
        control_key="control",
        key_secret="secret",
        drain_s=2.0,
    )
    topics = settings.topics
    wanted = (topics.events, topics.policies, topics.dead_letters)
    await create_topics(broker.bootstrap, [s for s in topics.specs(2) if s.name in wanted])
    async with AsyncExitStack() as closing:
        url = await closing.enter_async_context(running_gateway(settings))
        http = await closing.enter_async_context(httpx.AsyncClient(timeout=60, trust_env=False))
        yield Pipeline(settings, url, http)


@asynccontextmanager
async def relaying(pipeline: Pipeline) -> AsyncIterator[Health]:
    settings = RelaySettings(
        bootstrap=pipeline.settings.bootstrap,
        namespace=pipeline.settings.namespace,
        engines=pipeline.settings.engines,
        engine_kind=pipeline.settings.engine_kind,
        engine_poll_s=0.5,
    )
    stop, health = asyncio.Event(), Health("relay")
    task = asyncio.create_task(Relay(settings).run(health, stop))
    try:
        yield health
    finally:
        stop.set()
        await task


async def talk_in_chat(rollout: dict[str, Any], is_streamed: bool) -> int:
    """OpenAI chat completions; the number of calls of the tool."""
    asked: dict[str, Any] = {
        "model": "m",
        "max_tokens": 40,
        "tools": [{"type": "function", "function": FUNCTION}],
    }
    messages: list[Any] = [{"role": "user", "content": "open door 3"}]
    num_calls = 0
    async with openai.AsyncOpenAI(
        base_url=rollout["base_url"], api_key=rollout["api_key"], max_retries=0
    ) as client:
        for _ in range(NUM_TURNS):
            if is_streamed:
                async with client.chat.completions.stream(**asked, messages=messages) as stream:
                    message = (await stream.get_final_completion()).choices[0].message
            else:
                completion = await client.chat.completions.create(**asked, messages=messages)
                message = completion.choices[0].message
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            calls = message.tool_calls or []
            num_calls += len(calls)
            for call in calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "code 5"})
            if not calls:
                messages.append({"role": "user", "content": "again"})
    return num_calls


async def talk_in_responses(rollout: dict[str, Any], is_streamed: bool) -> int:
    """OpenAI responses; the number of calls of the tool."""
    asked: dict[str, Any] = {
        "model": "m",
        "max_output_tokens": 40,
        "tools": [{"type": "function", "strict": False, **FUNCTION}],
    }
    given: list[Any] = [{"role": "user", "content": "open door 3"}]
    num_calls = 0
    async with openai.AsyncOpenAI(
        base_url=rollout["base_url"], api_key=rollout["api_key"], max_retries=0
    ) as client:
        for _ in range(NUM_TURNS):
            if is_streamed:
                async with client.responses.stream(**asked, input=given) as stream:
                    response: Any = await stream.get_final_response()
            else:
                response = await client.responses.create(**asked, input=given)
            given += [item.model_dump(exclude={"parsed_arguments"}) for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            num_calls += len(calls)
            for call in calls:
                answer = {"type": "function_call_output", "call_id": call.call_id}
                given.append({**answer, "output": "code 5"})
            if not calls:
                given.append({"role": "user", "content": "again"})
    return num_calls


async def talk_in_messages(rollout: dict[str, Any], is_streamed: bool) -> int:
    """Anthropic messages; the number of calls of the tool."""
    tool = {"name": NAME, "description": DESCRIPTION, "input_schema": PARAMETERS}
    asked: dict[str, Any] = {"model": "m", "max_tokens": 40, "tools": [tool]}
    messages: list[Any] = [{"role": "user", "content": "open door 3"}]
    num_calls = 0
    async with anthropic.AsyncAnthropic(
        base_url=rollout["base_url"].removesuffix("/v1"), api_key=rollout["api_key"], max_retries=0
    ) as client:
        for _ in range(NUM_TURNS):
            if is_streamed:
                async with client.messages.stream(**asked, messages=messages) as stream:
                    message = await stream.get_final_message()
            else:
                message = await client.messages.create(**asked, messages=messages)
            messages.append({"role": "assistant", "content": message.content})
            calls = [block for block in message.content if block.type == "tool_use"]
            num_calls += len(calls)
            answers = [
                {"type": "tool_result", "tool_use_id": call.id, "content": "code 5"}
                for call in calls
            ]
            messages.append({"role": "user", "content": answers or "again"})
    return num_calls


@pytest.mark.parametrize("is_streamed", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize(
    "talk",
    [talk_in_chat, talk_in_responses, talk_in_messages],
    ids=["chat", "responses", "messages"],
)
async def test_a_conversation_with_a_tool_is_recorded_as_it_was_sampled(
    pipeline: Pipeline, forward: Any, talk: Any, is_streamed: bool
) -> None:
    rollout = await pipeline.start_rollout()
    num_calls = await talk(rollout, is_streamed)
    turns = await pipeline.turns(rollout["rollout_id"])
    assert len(turns) == NUM_TURNS
    assert turns[0].continuity == "first"
    assert {turn.continuity for turn in turns[1:]} <= {"extended", "healed"}
    assert num_calls == sum(len(turn.reply.tool_calls) for turn in turns if turn.reply)
    assert_one_sequence(turns)
    assert_sampled_from(forward, turns, 0, policy_version=1)


def assert_one_sequence(turns: list[TurnCompleted]) -> None:
    """Each prompt is the whole sequence before it and something more."""
    for previous, full in itertools.pairwise(full_sequences(turns)):
        assert full[: len(previous)] == previous


def full_sequences(turns: list[TurnCompleted]) -> list[list[int]]:
    store = TokenStore()
    for turn in turns:
        store.add(turn)
    return [store.full(turn.turn_id).tolist() for turn in turns]


def assert_sampled_from(
    forward: Any, turns: list[TurnCompleted], number: int, *, policy_version: int
) -> None:
    """Ids, logprobs and versions in the log are what these weights give for the whole sequence."""
    for turn, full in zip(turns, full_sequences(turns), strict=True):
        output = turn.output_ids.tolist()
        length = len(output)
        assert full[-length:] == output
        assert len(turn.logprobs) == length > 0
        expected = forward(number, full[:-length], output)
        measured = np.asarray(turn.logprobs.tolist())
        assert float(np.abs(measured - np.asarray(expected)).max()) < CLOSE
        spans = [(s.policy_version, s.start, s.end) for s in turn.policy_versions]
        assert spans == [(policy_version, 0, length)]


@pytest.mark.parametrize("is_streamed", [False, True], ids=["plain", "streamed"])
async def test_a_client_that_leaves_frees_its_place_in_the_engine(
    pipeline: Pipeline, take_places: Any, is_streamed: bool
) -> None:
    others = await take_places(NUM_SLOTS - 2)
    rollout = await pipeline.start_rollout()
    call = asyncio.create_task(ask_in_chat(rollout, is_streamed, asyncio.Event(), 4000))
    await ask_in_chat(rollout, False, asyncio.Event(), 4)  # meanwhile the other one has come as far
    others += await take_places(1)
    call.cancel()
    await asyncio.wait({call})
    await ask_in_chat(rollout, False, asyncio.Event(), 4)
    # Each of the others ends before the one that left would have: nobody else made room.
    assert not any(other.done() for other in others)
    (failed,) = await failures(pipeline, rollout, 1)
    assert failed.reason == "aborted"


async def ask_in_chat(
    rollout: dict[str, Any], is_streamed: bool, begun: asyncio.Event, max_tokens: int
) -> str:
    """The content of a reply; `begun` is set when some of a streamed one has come."""
    async with openai.AsyncOpenAI(
        base_url=rollout["base_url"], api_key=rollout["api_key"], max_retries=0
    ) as client:
        asked: Any = {"model": "m", "messages": HELLO, "max_tokens": max_tokens}
        if not is_streamed:
            completion = await client.chat.completions.create(**asked)
            return completion.choices[0].message.content or ""
        said = ""
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            delta = chunk.choices[0].delta
            said += delta.content or ""
            if delta.content or getattr(delta, "reasoning_content", ""):
                begun.set()
        return said


async def ask_in_responses(
    rollout: dict[str, Any], is_streamed: bool, begun: asyncio.Event, max_tokens: int
) -> str:
    """The same in OpenAI responses."""
    async with openai.AsyncOpenAI(
        base_url=rollout["base_url"], api_key=rollout["api_key"], max_retries=0
    ) as client:
        asked: Any = {"model": "m", "input": HELLO, "max_output_tokens": max_tokens}
        if not is_streamed:
            return str((await client.responses.create(**asked)).output_text)
        said = ""
        async for event in await client.responses.create(**asked, stream=True):
            said += event.delta if event.type == "response.output_text.delta" else ""
            if event.type.endswith(".delta"):
                begun.set()
        return said


async def ask_in_messages(
    rollout: dict[str, Any], is_streamed: bool, begun: asyncio.Event, max_tokens: int
) -> str:
    """The same in Anthropic messages."""
    async with anthropic.AsyncAnthropic(
        base_url=rollout["base_url"].removesuffix("/v1"), api_key=rollout["api_key"], max_retries=0
    ) as client:
        asked: Any = {"model": "m", "messages": HELLO, "max_tokens": max_tokens}
        if not is_streamed:
            message = await client.messages.create(**asked)
            return "".join(block.text for block in message.content if block.type == "text")
        said = ""
        async for event in await client.messages.create(**asked, stream=True):
            if event.type == "content_block_delta":
                said += event.delta.text if event.delta.type == "text_delta" else ""
                begun.set()
        return said


async def failures(
    pipeline: Pipeline, rollout: dict[str, Any], num_failures: int
) -> list[TurnFailed]:
    """The failed turns, once the log has so many."""
    async with asyncio.timeout(60):
        while True:
            events = await pipeline.events(rollout["rollout_id"])
            failed = [e for e in events if isinstance(e, TurnFailed)]
            if len(failed) >= num_failures:
                return failed
            await asyncio.sleep(0.05)


@pytest.mark.usefixtures("endless")
async def test_an_engine_killed_in_the_middle_is_a_typed_failure_and_answers_the_same_requests_when_it_is_back(
    pipeline: Pipeline,
    server: Any,
    weights: list[Path],
    forward: Any,
    eventually: Callable[[Callable[[], Awaitable[bool]]], Any],
) -> None:
    async with relaying(pipeline) as health:
        await pipeline.publish(5, weights[1])

        async def is_served() -> bool:
            return health.is_ready and await pipeline.served() == [5]

        await eventually(is_served)
        rollouts = [await pipeline.start_rollout() for _ in ASKED]
        begun = [asyncio.Event() for _ in ASKED]

        def ask_all() -> list["asyncio.Task[str]"]:
            return [
                asyncio.create_task(ask(rollout, is_streamed, event, 1200))
                for (ask, is_streamed), rollout, event in zip(ASKED, rollouts, begun, strict=True)
            ]

        calls = ask_all()
        # What is not streamed was asked first, so that it has come as far by then.
        streamed = [e for e, (_, is_streamed) in zip(begun, ASKED, strict=True) if is_streamed]
        async with asyncio.timeout(60):
            await asyncio.gather(*(event.wait() for event in streamed))
        await asyncio.to_thread(server.kill9)
        for (_, is_streamed), call in zip(ASKED, calls, strict=True):
            assert_retriable(await the_error_of(call), is_streamed)
        for rollout in rollouts:
            (failed,) = await failures(pipeline, rollout, 1)
            assert (failed.reason, await pipeline.turns(rollout["rollout_id"])) == (
                "engine_unavailable",
                [],
            )

        async def is_missed() -> bool:
            return not health.is_ready

        await eventually(is_missed)
        await asyncio.to_thread(server.start)  # with the weights of its model directory
        await eventually(is_served)
        for said, rollout in zip(await asyncio.gather(*ask_all()), rollouts, strict=True):
            (turn,) = turns = await pipeline.turns(rollout["rollout_id"])
            assert turn.reply is not None
            assert turn.reply.content == said
            assert_sampled_from(forward, turns, 1, policy_version=5)


ASKED: list[tuple[Any, bool]] = [
    (ask_in_chat, False),
    (ask_in_responses, False),
    (ask_in_messages, False),
    (ask_in_chat, True),
    (ask_in_responses, True),
    (ask_in_messages, True),
]


async def the_error_of(call: "asyncio.Task[str]") -> openai.APIError | anthropic.APIStatusError:
    try:
        said = await call
    except (openai.APIError, anthropic.APIStatusError) as error:
        return error
    raise AssertionError(f"expected an error, got {said!r}")


def assert_retriable(error: openai.APIError | anthropic.APIStatusError, is_streamed: bool) -> None:
    """What the agent sees: the protocol's own error, before or in the middle of the stream."""
    body: Any = error.body
    if isinstance(error, anthropic.APIStatusError):
        assert body["error"]["type"] == "overloaded_error"
    else:
        assert (body["type"], body["code"]) == ("server_error", "engine_unavailable")
    if not is_streamed:
        assert isinstance(error, openai.APIStatusError | anthropic.APIStatusError)
        assert error.status_code == 503
        assert error.response.headers["x-should-retry"] == "true"
