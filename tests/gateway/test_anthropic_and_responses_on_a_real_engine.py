"""Broker, gateway and inference server as real processes, both SDKs before them: nothing scripted."""

import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import pytest

from turnfold.embedded.inference.testing import ServerProcess, inference_server
from turnfold.embedded.tiny.build import build
from turnfold.embedded.tiny.recipe import Recipe
from turnfold.gateway.testing import running_gateway

SCHEMA = {"type": "object", "properties": {"door": {"type": "string"}}}
ANTHROPIC_TOOLS: list[Any] = [{"name": "lookup", "description": "d", "input_schema": SCHEMA}]
OPENAI_TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "lookup",
        "description": "d",
        "parameters": SCHEMA,
        "strict": False,
    }
]
NUM_TURNS = 4


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "untrained"
    build(directory, Recipe(seed=0, num_learn_steps=0, max_weaken_steps=0))
    return directory


@pytest.fixture(scope="module")
def inference(untrained: Path) -> Iterator[ServerProcess]:
    with inference_server(untrained, "--slots", "4", "--max-len", "600") as server:
        yield server


@pytest.fixture
async def rollout(stack: Any, untrained: Path, inference: ServerProcess) -> AsyncIterator[Any]:
    settings = msgspec.structs.replace(
        stack.settings, model=str(untrained), engines=(inference.base_url,)
    )
    async with running_gateway(settings) as url:
        yield await stack.start_rollout(url)


async def assert_one_sequence(stack: Any, rollout: Any) -> list[Any]:
    turns: list[Any] = await stack.turns(rollout.rollout_id)
    assert len(turns) == NUM_TURNS
    assert turns[0].continuity == "first"
    # The text of random tokens never encodes to the same tokens again.
    assert [t.continuity for t in turns[1:]] == ["healed"] * (NUM_TURNS - 1)
    for previous, full in itertools.pairwise(stack.full_sequences(turns)):
        assert full[: len(previous)] == previous
    return turns


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_anthropic_conversation_is_one_sequence(
    stack: Any, rollout: Any, is_streamed: bool
) -> None:
    messages: list[Any] = [{"role": "user", "content": "open door 3"}]
    counts = []
    async with anthropic.AsyncAnthropic(
        base_url=rollout.base_url, api_key=rollout.api_key, max_retries=0
    ) as client:
        for i in range(NUM_TURNS):
            prompt: dict[str, Any] = {"model": "m", "messages": messages, "tools": ANTHROPIC_TOOLS}
            counts.append((await client.messages.count_tokens(**prompt)).input_tokens)
            if is_streamed:
                async with client.messages.stream(**prompt, max_tokens=24) as stream:
                    message = await stream.get_final_message()
            else:
                message = await client.messages.create(**prompt, max_tokens=24)
            messages += [
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": f"again {i}"},
            ]
    turns = await assert_one_sequence(stack, rollout)
    assert counts == [t.num_prompt_tokens for t in turns]


@pytest.mark.parametrize("is_named", [False, True])
async def test_a_conversation_of_responses_is_one_sequence(
    stack: Any, rollout: Any, is_named: bool
) -> None:
    """The history is sent again, or named by the id of the response before."""
    given: list[Any] = [{"role": "user", "content": "open door 3"}]
    previous = None
    for i in range(NUM_TURNS):
        response = await rollout.client.responses.create(
            model="m",
            input=given,
            tools=OPENAI_TOOLS,
            max_output_tokens=24,
            previous_response_id=previous,
        )
        again = {"role": "user", "content": f"again {i}"}
        if is_named:
            previous, given = response.id, [again]
        else:
            given += [*(item.model_dump() for item in response.output), again]
    await assert_one_sequence(stack, rollout)
