"""`turnfold try`: an agent on a few tasks, and what its author is told."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path

import psutil
import pytest
from tokenizers import Tokenizer

from turnfold.embedded.tiny.tokenizer import build_tokenizer
from turnfold.embedded.tryout.report import rollout_lines, summary, told
from turnfold.gateway.testing import Reply, ScriptedEngine, text_ids
from turnfold.schemas.events import Divergence
from turnfold.schemas.messages import ChatMessage, ToolCall
from turnfold.schemas.testing import aborted, finished, started, turn

AGENT = """
import httpx

async def run(task, rollout):
    print("about to ask", task["question"])
    if task["question"] == "fail":
        raise KeyError("no such thing")
    async with rollout.http() as client:
        body = {"model": "m", "messages": [{"role": "user", "content": task["question"]}]}
        answer = (await client.post("chat/completions", json=body)).json()
    return {"length": 0.5, "answer": 0.5 * ("5" in answer["choices"][0]["message"]["content"])}
"""


async def output_of(*arguments: str, cwd: Path) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "turnfold.cli", "try", *arguments),
        cwd=cwd,
        env=dict(os.environ),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 200)
    return process.returncode or 0, output.decode()


@pytest.mark.pipeline
async def test_an_agent_is_run_on_its_tasks_and_every_turn_is_shown(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "my_agent.py").write_text(AGENT)
    rows = [{"question": "open door 3"}, {"question": "fail"}]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with ScriptedEngine() as engine:
        engine.default = Reply(ids=text_ids(tokenizer, "the code is 5<|im_end|>"))
        code, output = await output_of(
            *("--agent", "my_agent.py:run", "--tasks", "tasks.jsonl"),
            *("--engine", engine.url, "--model", "model"),
            cwd=tmp_path,
        )
    assert code == 1, output  # a rollout without a reward
    assert output.count("about to ask open door 3") == 2
    assert re.search(
        r"try-000000-00   reward 1 \(length 0\.5, answer 0\.5\)   1 turn, 1 row, 6 of \d+ tokens "
        r"to train on\n    main  \d+ → 6 tokens +first +the code is 5\n",
        output,
    ), output
    assert "try-000001-01   no reward: agent_error\n      KeyError: 'no such thing'" in output
    assert "2 of 4 rollouts have a reward; 2 turns, 0 healed" in output


HANGING_AGENT = """
import asyncio

async def run(task, rollout):
    print("playing", flush=True)
    await asyncio.Event().wait()
"""


@pytest.mark.pipeline
async def test_a_stop_ends_all_that_was_started(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "my_agent.py").write_text(HANGING_AGENT)
    with ScriptedEngine() as engine:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "turnfold.cli", "try", "--agent", "my_agent.py:run"),
            *("--engine", engine.url, "--model", "model"),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        assert process.stdout is not None
        async with asyncio.timeout(200):
            while b"playing" not in await process.stdout.readline():
                assert not process.stdout.at_eof()
            started_processes = psutil.Process(process.pid).children(recursive=True)
            assert len(started_processes) >= 2  # broker and gateway
            process.terminate()
            output, _ = await process.communicate()
    assert output.decode().endswith("turnfold try: stopped\n")
    assert not any(child.is_running() for child in started_processes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected an agent or a command: --agent my_agent.py:run"),
        (["--agent", "nowhere.py:run"], "agent file nowhere.py does not exist"),
        (["--command", "no-such-program"], "there is no program 'no-such-program' here"),
        (["--command", "true", "--tasks", "none.jsonl"], "none.jsonl"),
        (["--command", "true", "--engine", "http://x"], "--engine needs --model DIR"),
    ],
)
async def test_a_mistake_is_one_line_before_anything_is_started(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    code, output = await output_of(*arguments, cwd=tmp_path)
    assert code == 1
    assert message in output
    assert output.count("\n") == 1


def test_a_report_shows_turns_with_calls_and_why_a_row_began() -> None:
    call = ToolCall(name="lookup", arguments={"door": "3"})
    one = told(
        [
            started("g-00", group_id="g"),
            turn("g-00", "t0", prompt=[1, 2], output=[3, 4], reply=reply("", call)),
            turn(
                "g-00",
                "t1",
                prompt=[9],
                output=[5],
                reply=reply("a\nb"),
                continuity="reset",
                divergence=Divergence(cause="system_changed"),
            ),
            finished("g-00", reward=0.5),
        ]
    )
    assert rollout_lines(one) == [
        "  g-00   reward 0.5   2 turns, 2 rows, 3 of 6 tokens to train on",
        '    main  2 → 2 tokens       first       lookup({"door":"3"})',
        "    main  1 → 1 tokens       reset       a b  [system_changed]",
    ]
    assert summary({"g": [one]}) == [
        "1 of 1 rollouts have a reward; 2 turns, 0 healed",
        "1 turn began a new row: the agent changed its history (1 system_changed); see "
        "docs/healing.md",
    ]


def test_an_agent_that_never_calls_the_model_is_told_so() -> None:
    pair = [told([started(name, group_id="g"), finished(name, reward=1.0)]) for name in ("a", "b")]
    assert summary({"g": pair})[1:] == [
        "the agent made no model call: does it use rollout.base_url?",
        "all rewards of a group are equal everywhere: such groups teach nothing; with this model "
        "that may be its fault and not the reward's",
    ]


def test_a_rollout_that_was_aborted_shows_the_whole_message() -> None:
    one = told(
        [
            started("a", group_id="g"),
            aborted("a", reason="agent_error", message="exit code 1; stderr:\nTraceback"),
        ]
    )
    assert rollout_lines(one) == [
        "  a   no reward: agent_error\n      exit code 1; stderr:\n      Traceback"
    ]
    assert not one.has_reward


def reply(content: str, *calls: ToolCall) -> ChatMessage:
    return ChatMessage(role="assistant", content=content, tool_calls=calls)
