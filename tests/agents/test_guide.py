"""docs/agents.md, word for word."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
from tokenizers import Tokenizer
from typer.core import TyperGroup

from turnfold.agents.results import Outcome, Reason
from turnfold.cli import app
from turnfold.gateway.testing import Reply, text_ids
from turnfold.schemas.events import RolloutFinished

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "agents.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        ({"door": "3"}, {"call": 0.2, "door": 0.8}),
        ({"door": "4"}, {"call": 0.2, "door": 0.0}),
    ],
)
async def test_the_first_agent_of_the_page_runs_as_it_is_written(
    bench: Any, model_dir: Path, tmp_path: Path, call: dict[str, str], parts: dict[str, float]
) -> None:
    (tmp_path / "my_agent.py").write_text(blocks("python")[0])
    payload = json.loads(blocks("jsonl")[0].splitlines()[0])
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    said = json.dumps({"name": "lookup", "arguments": call})
    ids = text_ids(tokenizer, f"<tool_call>\n{said}\n</tool_call><|im_end|>")
    bench.engine.script(Reply(ids=ids))
    async with bench.worker(f"{tmp_path}/my_agent.py:run"):
        await bench.dispatch(n=1, payload=payload)
        (end,) = (await bench.wait_for_ends(1)).values()
    assert isinstance(end, RolloutFinished), end
    assert end.rewards == parts


def test_every_python_block_is_python() -> None:
    for block in blocks("python"):
        # Some are the inside of an async function.
        indented = "".join(f"    {line}" for line in block.splitlines(keepends=True))
        compile(f"async def example():\n{indented}", "docs/agents.md", "exec")


def test_every_command_and_option_of_the_page_exists() -> None:
    root = typer.main.get_command(app)
    assert isinstance(root, TyperGroup)
    text = PAGE.replace("\\\n", " ")
    lines = re.findall(r"^turnfold ([a-z-]+)(.*)$", text, re.MULTILINE)
    assert {name for name, _ in lines} >= {"try", "demo", "worker"}
    for name, rest in lines:
        options = {option for p in root.commands[name].params for option in p.opts}
        outside_quotes = re.sub(r'"[^"]*"', "", rest)
        for option in re.findall(r"(--[a-z-]+)", outside_quotes):
            assert option in options, f"turnfold {name} {option}"


def test_every_reason_and_outcome_is_explained() -> None:
    for word in (*Reason.__args__, *Outcome.__args__):
        assert f"`{word}`" in PAGE, word


def test_every_setting_of_the_page_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    told = {"TURNFOLD_TASK", "TURNFOLD_TASK_FILE", "TURNFOLD_RESULT_FILE", "TURNFOLD_ROLLOUT_ID"}
    for name in set(re.findall(r"TURNFOLD_[A-Z_]+[A-Z]", PAGE)) - told - {"TURNFOLD_TIMEOUT_S"}:
        assert f"| `{name}` |" in readme, name
