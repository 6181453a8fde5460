from __future__ import annotations

import subprocess
import sys

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


def test_the_command_is_light_until_it_trains() -> None:
    code = (
        "import sys, turnfold.trainer.cli; "
        "print([m for m in ('torch', 'verl', 'transformers', 'aiokafka') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
