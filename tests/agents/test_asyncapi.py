"""The AsyncAPI document of the topics."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from turnfold.agents.asyncapi.app import document, specification
from turnfold.agents.cli import asyncapi
from turnfold.schemas.topics import Topics


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return specification(Topics(), "kafka:9092")


def test_every_topic_is_described(made: dict[str, Any]) -> None:
    addresses = {channel["address"] for channel in made["channels"].values()}
    assert addresses == {spec.name for spec in Topics().specs()}
    assert made["servers"]["development"]["host"] == "kafka:9092"


def test_every_message_of_a_union_is_there_with_all_its_fields(made: dict[str, Any]) -> None:
    payload = made["components"]["schemas"]["turnfold.events:Message:Payload"]
    titles = {member["title"] for member in payload["anyOf"]}
    assert {"RolloutStarted", "TurnCompleted", "RolloutFinished", "RewardRevised"} <= titles
    (turn,) = [member for member in payload["anyOf"] if member["title"] == "TurnCompleted"]
    assert turn["properties"]["output_ids"]["items"] == {"type": "integer"}
    assert turn["properties"]["logprobs"]["items"] == {"type": "number"}


def test_no_reference_leads_nowhere(made: dict[str, Any]) -> None:
    def references(node: Any) -> list[str]:
        if isinstance(node, list):
            return [ref for part in node for ref in references(part)]
        if not isinstance(node, dict):
            return []
        own = [node["$ref"]] if "$ref" in node else []
        return own + [ref for part in node.values() for ref in references(part)]

    assert references(made)
    for reference in references(made):
        target: Any = made
        for step in reference.removeprefix("#/").split("/"):
            target = target[step.replace("~1", "/")]


def test_the_document_is_the_same_each_time_in_yaml_and_in_json() -> None:
    as_yaml = document(Topics(namespace="x"), "kafka:9092", "yaml")
    assert as_yaml == document(Topics(namespace="x"), "kafka:9092", "yaml")
    as_json = document(Topics(namespace="x"), "kafka:9092", "json")
    assert yaml.safe_load(as_yaml) == json.loads(as_json)


def test_the_command_prints_it() -> None:
    app = typer.Typer()
    app.command()(asyncapi)
    result = CliRunner().invoke(app, ["--json", "--namespace", "mine"])
    assert result.exit_code == 0, result.output
    assert "mine.events" in json.loads(result.stdout)["channels"]
