"""The examples, run as a reader would run them."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Imported here, so that no deadline below counts it.
import anthropic  # noqa: F401
import msgspec
import openai  # noqa: F401
import pytest
from tokenizers import Tokenizer

from turnfold.agents import GatewayClient
from turnfold.agents.worker.client import load_agent
from turnfold.embedded.inference.testing import inference_server
from turnfold.embedded.tiny.task import tasks
from turnfold.gateway.testing import Reply, free_port, running_gateway, text_ids
from turnfold.healer.fold import fold_all
from turnfold.healer.rows import trajectory
from turnfold.schemas.events import RolloutFinished, TurnCompleted
from turnfold.schemas.trajectories import Trajectory

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


CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'


@pytest.fixture
def says(bench: Any, model_dir: Path) -> Callable[..., None]:
    """Makes the engine say these texts, one a turn."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))

    def script(*texts: str) -> None:
        bench.engine.script(
            *(Reply(ids=text_ids(tokenizer, f"{text}<|im_end|>")) for text in texts)
        )

    return script


async def trajectory_of(bench: Any, rollout_id: str = "g0-00") -> Trajectory:
    """What the healer makes of a rollout."""
    events = (await bench.events())[rollout_id]
    return trajectory(fold_all(enumerate(events)), topic="events", partition=0)


@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
async def test_the_calculator_agent_uses_its_tool_and_is_scored_in_parts(
    bench: Any, says: Callable[..., None], sdk: str
) -> None:
    says(CALL % ("calculate", '{"expression": "12 * 7"}'), "That is 84.")
    async with bench.worker(f"{EXAMPLES}/calculator_{sdk}.py:run"):
        await bench.dispatch(n=1, payload={"question": "What is 12 * 7?", "answer": 84})
        (end,) = (await bench.wait_for_ends(1)).values()
    assert isinstance(end, RolloutFinished), end
    assert (end.reward, end.rewards) == (1.0, {"tool": 0.2, "answer": 0.8})
    _, first, second, _ = (await bench.events())["g0-00"]
    assert second.new_messages[-1].content == "84"
    assert second.continuity in ("extended", "healed")
    assert second.parent_turn_id == first.turn_id


@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
def test_the_calculator_reads_no_more_than_arithmetic(sdk: str) -> None:
    module = load_agent(f"{EXAMPLES}/calculator_{sdk}.py:run").__globals__

    def calculate(expression: Any) -> str:
        arguments = {"expression": expression}
        return str(module["calculate"](json.dumps(arguments) if sdk == "openai" else arguments))

    assert calculate("-(2 + 3) * 4 / 8") == "-2.5"
    assert calculate("1000000 * 3") == "3000000"
    assert "division by zero" in calculate("1 / 0")
    for wrong in ("__import__('os')", "2 ** 99", "1 +", None):
        assert calculate(wrong).startswith("error: ")
    assert module["calculate"]("[]").startswith("error: ")


async def test_the_shell_agent_works_in_a_process_of_its_own(
    bench: Any, says: Callable[..., None]
) -> None:
    says(CALL % ("shell", '{"command": "wc -l < notes.txt; env"}'), "It has 3 lines.")
    program = shlex.join([sys.executable, str(EXAMPLES / "shell_agent.py")])
    payload = json.loads((EXAMPLES / "files.jsonl").read_text().splitlines()[0])
    async with bench.worker("", command=program):
        await bench.dispatch(n=1, payload=payload)
        (end,) = (await bench.wait_for_ends(1)).values()
    assert isinstance(end, RolloutFinished), end
    assert end.reward == 1.0
    _, _, second, _ = (await bench.events())["g0-00"]
    output = str(second.new_messages[-1].content)
    assert output.split()[0] == "3"
    assert "tf-" not in output  # the model's commands see no key


async def test_two_agents_have_a_conversation_each_and_one_trajectory(
    bench: Any, says: Callable[..., None]
) -> None:
    says("It is 83.", "Wrong: 84.", "It is 84.", "right")
    async with bench.worker(f"{EXAMPLES}/two_agents.py:run"):
        await bench.dispatch(n=1, payload={"question": "What is 12 * 7?", "answer": 84})
        (end,) = (await bench.wait_for_ends(1)).values()
    assert end.reward == 1.0
    turns = [e for e in (await bench.events())["g0-00"] if isinstance(e, TurnCompleted)]
    assert [turn.session_id for turn in turns] == ["main", "critic", "main", "critic"]
    assert [turn.continuity for turn in turns][:3:2] == ["first", "extended"]
    made = await trajectory_of(bench)
    # The author's two turns are one row; the critic begins anew each time.
    assert len(made.rows) == 3
    assert sum(row.num_trained for row in made.rows) == sum(len(t.output_ids) for t in turns)


@pytest.mark.parametrize("name", ["sums", "files", "doors"])
def test_every_row_of_the_data_sets_is_one_object(name: str) -> None:
    lines = (EXAMPLES / f"{name}.jsonl").read_text().splitlines()
    assert all(isinstance(json.loads(line), dict) for line in lines)


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
