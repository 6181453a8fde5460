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
@pytest.mark.field_case("sglang#26555")
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


PATHS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", {"messages": [{"role": "user", "content": "open"}]}),
    "responses": ("responses", {"input": "open"}),
    "anthropic": ("messages", {"messages": [{"role": "user", "content": "open"}]}),
}


def greedy(name: str, *, is_streamed: bool, num_tokens: int) -> tuple[str, dict[str, Any]]:
    """Path and body of a call to which there is one answer."""
    path, body = PATHS[name]
    limit = "max_output_tokens" if name == "responses" else "max_tokens"
    return path, {
        "model": "m",
        "temperature": 0,
        limit: num_tokens,
        "stream": is_streamed,
        **body,
    }


async def test_a_stream_broken_off_by_an_update_samples_what_a_plain_call_samples(
    stack: Any, untrained: Path, inference: ServerProcess
) -> None:
    import msgspec

    settings = msgspec.structs.replace(
        stack.settings, model=str(untrained), engines=(inference.base_url,), engine_timeout_s=60.0
    )
    async with running_gateway(settings) as url:
        for name in PATHS:
            samples, contents = [], []
            for is_streamed in (False, True):
                rollout = await stack.start_rollout(url)
                path, body = greedy(name, is_streamed=is_streamed, num_tokens=150)
                async with stack.http.stream(
                    "POST", f"{rollout.base_url}/{path}", headers=rollout.headers, json=body
                ) as response:
                    assert response.status_code == 200
                    is_broken = False
                    async for _ in response.aiter_bytes():
                        if is_streamed and not is_broken:
                            is_broken = True
                            for step in ("pause?mode=abort", "resume"):
                                await stack.http.post(f"{inference.base_url}/{step}")
                (turn,) = await stack.turns(rollout.rollout_id)
                samples.append(turn.output_ids.tolist())
                contents.append(turn.reply.content)
                assert len(turn.logprobs) == len(turn.output_ids)
                assert [(s.start, s.end) for s in turn.policy_versions] == [(0, len(samples[-1]))]
            assert samples[0] == samples[1]
            assert contents[0] == contents[1]
    metrics = (await stack.http.get(f"{inference.base_url}/metrics")).text
    (aborted,) = (line for line in metrics.splitlines() if 'finished_reason="abort"' in line)
    assert float(aborted.split()[-1]) >= 1
