"""Settings from variables and options."""

from typing import Literal

import pytest

from turnfold.schemas.run import RunConfig
from turnfold.schemas.settings import SettingsError, load
from turnfold.schemas.wire import Wire


class Example(Wire, frozen=True, kw_only=True):
    bootstrap: str = "127.0.0.1:9092"
    port: int | None = None
    ratio: float = 0.5
    is_fast: bool = False
    names: tuple[str, ...] = ()


class Choosing(Wire, frozen=True, kw_only=True):
    engine_kind: Literal["vllm", "sglang"] = "vllm"


class Strict(Wire, frozen=True, kw_only=True):
    secret: str


def test_an_option_wins_over_the_environment_and_that_over_the_default() -> None:
    environment = {"TURNFOLD_BOOTSTRAP": "kafka:9092", "TURNFOLD_PORT": "8080"}
    assert load(Example, {}) == Example()
    assert load(Example, environment).bootstrap == "kafka:9092"
    assert load(Example, environment, bootstrap="other:1", port=None) == Example(
        bootstrap="other:1", port=8080
    )


def test_text_is_converted_to_the_type_of_the_field() -> None:
    environment = {
        "TURNFOLD_RATIO": "0.25",
        "TURNFOLD_IS_FAST": "true",
        "TURNFOLD_NAMES": '["a", "b"]',
    }
    assert load(Example, environment) == Example(ratio=0.25, is_fast=True, names=("a", "b"))


def test_an_empty_variable_is_not_set() -> None:
    assert load(Example, {"TURNFOLD_PORT": ""}) == Example()


def test_text_that_makes_no_sense_names_the_variable() -> None:
    with pytest.raises(SettingsError, match="TURNFOLD_PORT='eighty'"):
        load(Example, {"TURNFOLD_PORT": "eighty"})


def test_an_option_that_is_none_of_the_words_names_them() -> None:
    assert load(Choosing, {}, engine_kind="sglang").engine_kind == "sglang"
    with pytest.raises(SettingsError, match="--engine-kind 'tgi': expected one of vllm, sglang"):
        load(Choosing, {}, engine_kind="tgi")


def test_a_missing_setting_without_default_names_the_variable() -> None:
    with pytest.raises(SettingsError, match="TURNFOLD_SECRET is not set"):
        load(Strict, {})


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("GROUP_SIZE", "0", "group_size: expected at least 1, got 0"),
        ("MIN_GROUP_SIZE", "9", "min_group_size: expected at most group_size 8, got 9"),
        ("MAX_STALENESS", "-1", "max_staleness: expected 0 or more, got -1"),
    ],
)
def test_sizes_of_a_run_that_make_no_sense_are_refused(
    variable: str, value: str, said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        load(RunConfig, {f"TURNFOLD_{variable}": value})


def test_the_digest_of_a_run_depends_on_every_field() -> None:
    assert RunConfig().digest == RunConfig().digest
    changed = [RunConfig(run_id="b"), RunConfig(group_size=9), RunConfig(on_stale="train")]
    assert len({config.digest for config in [RunConfig(), *changed]}) == 4
