"""Broker, gateway and inference server as real processes, the SDK before them: nothing scripted."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from turnfold.embedded.inference.testing import ServerProcess, inference_server
from turnfold.embedded.tiny.build import build
from turnfold.embedded.tiny.recipe import Recipe
from turnfold.embedded.tiny.task import TOOLS
from turnfold.gateway.testing import running_gateway


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "untrained"
    build(directory, Recipe(seed=0, num_learn_steps=0, max_weaken_steps=0))
    return directory


@pytest.fixture(scope="module")
def inference(untrained: Path) -> Iterator[ServerProcess]:
    with inference_server(untrained, "--slots", "4", "--max-len", "600") as server:
        yield server


async def converse(rollout: Any, *, is_streamed: bool, num_turns: int) -> None:
    """A client that strips what it got, as many do: without healing each turn would drift."""
    messages: list[Any] = [{"role": "user", "content": "open door 3"}]
    for i in range(num_turns):
        if is_streamed:
            stream = await rollout.client.chat.completions.create(
                model="m", messages=messages, tools=TOOLS, max_tokens=24, stream=True
            )
            content = "".join(
                [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
            )
        else:
            response = await rollout.client.chat.completions.create(
                model="m", messages=messages, tools=TOOLS, max_tokens=24
            )
            content = response.choices[0].message.content or ""
        messages += [
            {"role": "assistant", "content": content.strip()},
            {"role": "user", "content": f"again {i}"},
        ]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_random_text_is_healed_into_one_sequence(
    stack: Any, untrained: Path, inference: ServerProcess, is_streamed: bool
) -> None:
    import msgspec

    settings = msgspec.structs.replace(
        stack.settings, model=str(untrained), engines=(inference.base_url,)
    )
    async with running_gateway(settings) as url:
        rollout = await stack.start_rollout(url)
        await converse(rollout, is_streamed=is_streamed, num_turns=4)
        turns = await stack.turns(rollout.rollout_id)
    assert turns[0].continuity == "first"
    # The text of random tokens never encodes to the same tokens again.
    assert [t.continuity for t in turns[1:]] == ["healed"] * 3
    fulls = stack.full_sequences(turns)
    for previous, full in itertools.pairwise(fulls):
        assert full[: len(previous)] == previous
    for turn in turns:
        assert len(turn.logprobs) == len(turn.output_ids) > 0
        assert max(turn.logprobs.tolist()) <= 0
        assert [s.policy_version for s in turn.policy_versions] == [0]
