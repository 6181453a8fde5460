"""compose.yaml and the Dockerfile name only what exists; no Docker engine is needed to see it."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from typer.core import TyperGroup

from turnfold.cli import app
from turnfold.schemas.settings import variable

ROOT = Path(__file__).parent.parent
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
OURS = {
    name: service
    for name, service in COMPOSE["services"].items()
    if service["image"].startswith("turnfold-")
}


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that these words call, and the words after its name."""
    command: Any = typer.main.get_command(app)
    while isinstance(command, TyperGroup):
        command, words = command.commands[words[0]], words[1:]
    return command, words


def test_every_part_of_the_pipeline_is_a_service() -> None:
    assert set(COMPOSE["services"]) == {
        "kafka",
        "topics",
        "model",
        "inference",
        "vllm",
        "gateway",
        "relay",
        "healer",
        "assembler",
        "dispatcher",
        "agent",
        "trainer",
    }
    assert COMPOSE["services"]["vllm"]["profiles"] == ["gpu"]


@pytest.mark.parametrize("name", OURS)
def test_a_service_runs_a_command_with_options_that_exist(name: str) -> None:
    command, arguments = command_of(OURS[name]["command"])
    options = {option for parameter in command.params for option in parameter.opts}
    for word in arguments:
        assert not word.startswith("--") or word in options, f"{name}: {command.name} has no {word}"


@pytest.mark.parametrize("name", OURS)
def test_a_service_sets_only_variables_that_some_setting_reads(
    name: str, settings_fields: set[str]
) -> None:
    known = {variable(field) for field in settings_fields}
    assert set(OURS[name]["environment"]) <= known


@pytest.mark.parametrize("name", OURS)
def test_a_service_names_only_paths_that_the_image_has(name: str) -> None:
    for word in OURS[name]["command"]:
        if word.startswith("/app/"):
            assert (ROOT / word.removeprefix("/app/").split(":")[0]).exists(), word


@pytest.mark.parametrize("name", OURS)
def test_a_service_is_built_from_a_stage_of_the_dockerfile(name: str) -> None:
    stages = re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILE, re.MULTILINE)
    assert OURS[name]["build"]["target"] in stages


def test_services_that_need_torch_run_the_image_that_has_it() -> None:
    with_torch = {name for name, s in OURS.items() if s["image"] == "turnfold-trainer"}
    assert with_torch == {"model", "inference", "trainer"}


def test_the_dockerfile_copies_only_what_exists() -> None:
    for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE):
        *sources, _ = line.split()
        for source in sources:
            assert (ROOT / source).exists(), f"COPY {source}"


def test_the_dockerfile_installs_extras_that_exist() -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for extra in re.findall(r'"\.\[(\w+)\]"', DOCKERFILE):
        assert extra in extras


def test_dependencies_of_services_exist() -> None:
    for name, service in COMPOSE["services"].items():
        for needed in service.get("depends_on", {}):
            assert needed in COMPOSE["services"], f"{name} needs {needed}"


def test_kafka_lets_the_largest_message_pass() -> None:
    from turnfold.schemas.topics import MAX_MESSAGE_BYTES

    environment = COMPOSE["services"]["kafka"]["environment"]
    assert environment["KAFKA_MESSAGE_MAX_BYTES"] == MAX_MESSAGE_BYTES
    assert environment["KAFKA_REPLICA_FETCH_MAX_BYTES"] >= MAX_MESSAGE_BYTES
    assert environment["KAFKA_LOG_DIRS"] in COMPOSE["services"]["kafka"]["volumes"][0]
