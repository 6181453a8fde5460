"""What services write about themselves."""

import json
import logging

import pytest

from turnfold.log.service import configure_logging


@pytest.fixture(autouse=True)
def _as_before() -> object:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_a_log_for_programs_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("INFO", "json")
    logging.getLogger("turnfold.gateway").warning("rollout %s\nis gone", "r1")
    [line] = capsys.readouterr().err.splitlines()
    record = json.loads(line)
    assert record["level"] == "WARNING"
    assert record["logger"] == "turnfold.gateway"
    assert record["message"] == "rollout r1\nis gone"
    assert record["at"] > 1.7e9


def test_a_log_for_people_names_time_level_and_part(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")
    logging.getLogger("turnfold.healer").info("ready")
    assert capsys.readouterr().err.endswith("INFO    turnfold.healer: ready\n")
