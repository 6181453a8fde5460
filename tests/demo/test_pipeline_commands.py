"""The processes of the demo: commands and options that exist."""

import sys
from pathlib import Path

import msgspec
import pytest
import typer.main
from typer.core import TyperGroup
from typer.testing import CliRunner

from turnfold.cli import app
from turnfold.embedded.demo.app import Own
from turnfold.embedded.demo.cli import newest_run, next_run
from turnfold.embedded.demo.pipeline import Layout, Ports, broker_spec, environment, service_specs
from turnfold.embedded.demo.recipe import CONFIG, training
from turnfold.schemas.errors import UserError
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


def test_an_agent_of_the_user_is_run_on_the_tasks_of_the_user(tmp_path: Path) -> None:
    own = msgspec.structs.replace(
        layout(tmp_path), agent="", command="python mine.py", own_dataset=tmp_path / "mine.parquet"
    )
    words = {spec.name: spec.argv for spec in service_specs(own)}
    worker, dispatcher = words["worker"], words["dispatcher"]
    assert worker[worker.index("--command") + 1] == "python mine.py"
    assert "--agent" not in worker
    assert dispatcher[dispatcher.index("--dataset") + 1] == str(tmp_path / "mine.parquet")


@pytest.mark.parametrize("arguments", [["--agent", "mine.py:run"], ["--tasks", "mine.jsonl"]])
def test_an_agent_without_tasks_or_tasks_without_an_agent_is_refused(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == 2
    assert "an agent of yours needs tasks" in result.output


def test_a_mistake_in_the_users_agent_is_said_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"door": 3}\n')
    with pytest.raises(UserError, match="there is no program 'no-such-program' here"):
        Own(command="no-such-program", dataset=tmp_path / "tasks.jsonl").check()
    with pytest.raises(UserError, match=r"none\.jsonl"):
        Own(command="true", dataset=tmp_path / "none.jsonl").check()
