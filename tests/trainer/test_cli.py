from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from turnfold.schemas.settings import SettingsError
from turnfold.trainer.cli import train

app = typer.Typer()
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(train)


def test_a_dry_run_prints_the_schedule_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TURNFOLD_GROUPS_PER_BATCH", "6")
    arguments = ["--dry-run", "--ranks", "2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert "6 groups x 8 rollouts a batch, 3 mini-batches x 1 epochs on 2 rank(s)" in result.output
    assert "3 optimizer steps, whatever the number of rows" in result.output


def test_a_dry_run_refuses_what_a_run_would_refuse() -> None:
    result = CliRunner().invoke(app, ["--dry-run", "algorithm.adv_estimator=gae"])
    assert isinstance(result.exception, SettingsError)
    assert "needs a critic" in str(result.exception)


def test_a_dry_run_estimates_memory_where_it_knows_the_model(tiny_model: Path) -> None:
    result = CliRunner().invoke(app, ["--dry-run", "--model", str(tiny_model)])
    assert result.exit_code == 0
    assert "GiB for 21,696 parameters: parameters 0.00, gradients" in result.output


async def test_explain_says_which_row_is_trained_in_which_step(
    new_log: Callable[[], Awaitable[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await new_log()
    await log.add_batch(1)
    await log.add_batch(2)
    for name, value in log.variables.items():
        monkeypatch.setenv(name, value)
    arguments = ["--bootstrap", log.bootstrap, "--ranks", "2", "explain"]
    overrides = ["actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    overrides += ["actor_rollout_ref.actor.ppo_epochs=2"]

    async def explained(index: str) -> Any:
        return await asyncio.to_thread(CliRunner().invoke, app, [*arguments, index, *overrides])

    result = await explained("2")
    assert result.exit_code == 0
    assert "batch 2: 12 rows and 0 of padding, 4 optimizer steps" in result.output
    words = [line.split() for line in result.output.splitlines()]
    assert ["0", "1", "3", "2", "4", "6", "0"] in [line[:7] for line in words]
    assert ["1", "2", "4", "2", "4", "6", "0"] in [line[:7] for line in words]
    placed = [line for line in words if len(line) == 6 and line[3].startswith("b2g")]
    assert len(placed) == 12
    for g in range(4):
        assert len({line[0] for line in placed if line[2] == f"b2g{g}"}) == 1
    missing = await explained("9")
    assert "has no batch 9" in str(missing.exception)
    assert "cut: 1, 2" in str(missing.exception)


def test_the_command_is_light_until_it_trains() -> None:
    code = (
        "import sys, turnfold.trainer.cli; "
        "print([m for m in ('torch', 'verl', 'transformers', 'aiokafka') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
