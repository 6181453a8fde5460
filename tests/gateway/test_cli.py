"""A gateway that cannot start says in one line what to do."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from turnfold.embedded.broker.testing import RunningBroker
from turnfold.gateway.app import gateway_settings, listen
from turnfold.gateway.settings import DEV_SECRET
from turnfold.gateway.testing import free_port
from turnfold.schemas.settings import SettingsError


def run_gateway(*options: str, **environment: str) -> tuple[int, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TURNFOLD_")}
    done = subprocess.run(
        [sys.executable, "-m", "turnfold.gateway", "--port", "0", *options],
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr


def test_a_missing_model_is_named() -> None:
    code, said = run_gateway("--dev", "--model", "/nowhere/at/all")
    assert code == 1
    assert "/nowhere/at/all" in said
    assert "TURNFOLD_MODEL" in said
    assert "Traceback" not in said


def test_a_missing_broker_is_named(model_dir: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    code, said = run_gateway("--dev", "--model", str(model_dir), "--bootstrap", address)
    assert code == 1
    assert f"no Kafka broker answers at {address}" in said.splitlines()[-1]


def test_a_missing_topic_is_named(
    model_dir: Path, broker: RunningBroker, new_namespace: Callable[[], str]
) -> None:
    options = ("--model", str(model_dir), "--bootstrap", broker.bootstrap)
    options += ("--namespace", new_namespace())
    code, said = run_gateway("--dev", *options)
    assert code == 1
    assert "turnfold topics create" in said.splitlines()[-1]


def test_keys_must_be_set_outside_of_development() -> None:
    with pytest.raises(SettingsError, match="TURNFOLD_CONTROL_KEY"):
        gateway_settings({})
    with pytest.raises(SettingsError, match="TURNFOLD_KEY_SECRET"):
        gateway_settings({"TURNFOLD_CONTROL_KEY": "a"})
    settings = gateway_settings({"TURNFOLD_CONTROL_KEY": "a"}, is_dev=True)
    assert (settings.control_key, settings.key_secret) == ("a", DEV_SECRET)


def test_settings_come_from_options_before_the_environment() -> None:
    environment = {"TURNFOLD_ENGINES": '["http://a", "http://b"]', "TURNFOLD_PORT": "7"}
    assert gateway_settings(environment, is_dev=True).engines == ("http://a", "http://b")
    assert gateway_settings(environment, is_dev=True, port=8).port == 8


def test_a_port_that_is_taken_is_named() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"127.0.0.1:{port}"):
            listen("127.0.0.1", port)


def test_a_template_with_unknown_tool_calls_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(
        '{"version":"1.0","model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"}}'
    )
    (tmp_path / "chat_template.jinja").write_text("{{ tools }}[TOOL_CALLS]")
    code, said = run_gateway("--dev", "--model", str(tmp_path))
    assert code == 1
    assert "TURNFOLD_REPLY_FORMAT" in said.splitlines()[-1]
