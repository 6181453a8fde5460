"""The examples, run as a reader would run them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from turnfold.agents import GatewayClient
from turnfold.agents.worker.client import load_agent
from turnfold.embedded.inference.testing import inference_server
from turnfold.embedded.tiny.task import tasks
from turnfold.gateway.testing import free_port, running_gateway
from turnfold.schemas.events import RolloutFinished, TurnCompleted

EXAMPLES = Path(__file__).parents[2] / "examples"


async def output_of(*command: str, **env: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, **env}, stdout=asyncio.subprocess.PIPE
    )
    stdout, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, stdout.decode()
    return stdout.decode()


async def test_the_door_agent_plays_its_rollouts_on_a_real_engine(
    bench: Any, model_dir: Path
) -> None:
    with inference_server(model_dir, "--slots", "4") as server:
        settings = msgspec.structs.replace(
            bench.gateway_settings, engines=(server.base_url,), port=free_port()
        )
        bench.gateway_settings = settings
        async with (
            running_gateway(settings),
            bench.worker(f"{EXAMPLES}/door_agent.py:run", concurrency=4),
        ):
            for payload in tasks(2):
                await bench.dispatch(n=2, payload=payload, rollout_timeout_s=60.0)
            ends = await bench.wait_for_ends(4)
    assert all(isinstance(end, RolloutFinished) for end in ends.values())
    for events in (await bench.events()).values():
        turns = [event for event in events if isinstance(event, TurnCompleted)]
        assert 1 <= len(turns) <= 3
        assert all(len(turn.logprobs) == len(turn.output_ids) > 0 for turn in turns)
        assert all(turn.policy_versions for turn in turns)


def test_the_door_agent_scores_as_its_documentation_says() -> None:
    module = load_agent(f"{EXAMPLES}/door_agent.py:run").__globals__
    score = module["score"]
    task = {"door": 3, "code": 5}
    assert score(task, None, "the code is 5") == 0.0
    assert score(task, "4", "the code is 5") == 0.1
    assert score(task, "3", "no idea") == 0.5
    assert score(task, "3", "the code is 5") == 1.0
    assert score(task, "3", "the code is 4 or 5") == 0.5


def test_the_data_set_of_the_door_agent_has_doors_and_codes() -> None:
    lines = (EXAMPLES / "doors.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == tasks(len(lines))


async def test_a_whole_rollout_with_curl_alone(bench: Any) -> None:
    output = await output_of(
        str(EXAMPLES / "curl" / "rollout.sh"), bench.gateway_url, TURNFOLD_CONTROL_KEY="control"
    )
    outcome = json.loads(output.splitlines()[-1])
    assert outcome["reward"] == 1.0
    (end,) = (await bench.ends()).values()
    assert end.reward == 1.0


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
async def test_an_agent_in_javascript_without_any_sdk(bench: Any, client: GatewayClient) -> None:
    rollout = client.rollout(group_id="g", rollout_id="js")
    await rollout.start()
    output = await output_of(
        "node",
        str(EXAMPLES / "curl" / "agent.mjs"),
        BASE_URL=rollout.base_url,
        API_KEY=rollout.api_key,
    )
    assert json.loads(output) == {"rollout_id": "js", "status": "finished", "reward": 1.0}
