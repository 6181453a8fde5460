"""The processes of the demo: commands and options that exist."""

import sys
from pathlib import Path

import pytest
import typer.main
from typer.core import TyperGroup

from turnfold.cli import app
from turnfold.embedded.demo.cli import newest_run, next_run
from turnfold.embedded.demo.pipeline import Layout, Ports, broker_spec, environment, service_specs
from turnfold.embedded.demo.recipe import CONFIG, training
from turnfold.schemas.run import RunConfig
from turnfold.schemas.settings import load, variable


def layout(tmp_path: Path) -> Layout:
    return Layout(
        run_dir=tmp_path,
        model_dir=tmp_path / "model",
        ports=Ports(broker=1, inference=2, gateway=3),
        config=CONFIG,
        training=training(20),
        control_key="c",
        key_secret="s",
        python=sys.executable,
        agent="turnfold.embedded.tiny.agent:run",
    )


def test_every_service_runs_a_command_with_options_that_exist(tmp_path: Path) -> None:
    root = typer.main.get_command(app)
    assert isinstance(root, TyperGroup)
    for spec in (broker_spec(layout(tmp_path)), *service_specs(layout(tmp_path))):
        python, module_flag, module, name, *arguments = spec.argv
        assert (python, module_flag, module) == (sys.executable, "-m", "turnfold.cli")
        parameters = root.commands[name].params
        options = {o for p in parameters for o in (*p.opts, *p.secondary_opts)}
        assert {word for word in arguments if word.startswith("--")} <= options


def test_the_environment_names_only_settings_that_exist(
    tmp_path: Path, settings_fields: set[str]
) -> None:
    ours = {name for name in environment(layout(tmp_path)) if name.startswith("TURNFOLD_")}
    assert ours <= {variable(field) for field in settings_fields}


def test_the_environment_carries_the_run_configuration_whole(tmp_path: Path) -> None:
    assert load(RunConfig, environment(layout(tmp_path))) == CONFIG


def test_the_demo_divides_its_batch_into_whole_mini_batches() -> None:
    assert CONFIG.groups_per_batch % training(1).num_mini_batches == 0


def test_runs_are_numbered_and_the_newest_is_resumed(tmp_path: Path) -> None:
    assert next_run(tmp_path).name == "demo-0001"
    (tmp_path / "demo-0001").mkdir()
    (tmp_path / "demo-0002").mkdir()
    assert next_run(tmp_path).name == "demo-0003"
    assert newest_run(tmp_path).name == "demo-0002"


def test_resuming_without_a_run_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="no run to resume"):
        newest_run(tmp_path)
